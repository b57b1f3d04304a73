"""Runs a GGUF file in llama.cpp, by the binding llama-cpp-python; see wire.py. Options are those of
`llama_cpp.Llama`."""

from __future__ import annotations

from typing import Any


def load(request: dict) -> tuple[Any, Any]:
    """Return a function from ids to logits, and one that returns facts; see wire.py."""
    import llama_cpp

    length = max(map(len, request["windows"]))
    layers = 0 if request["device"] == "cpu" else -1
    threads = dict.fromkeys(("n_threads", "n_threads_batch"), request["threads"])
    options = {"n_gpu_layers": layers, **threads, **request["options"]}
    model = llama_cpp.Llama(request["model"], n_ctx=length, logits_all=True, verbose=False, **options)

    def compute(ids: list[int]) -> Any:
        model.reset()
        model.eval(ids)
        return model.scores[: len(ids)]

    def facts() -> dict:
        return {"version": llama_cpp.__version__, "kernels": None, "dtype": None}  # it does not say

    return compute, facts
