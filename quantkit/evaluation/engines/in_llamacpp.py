"""Runs a GGUF file in llama.cpp, by the server of the xllamacpp wheel; see wire.py. Options are settings of
`xllamacpp.CommonParams`.

The server says the probabilities of the next token alone. This program asks for each position, and the server
keeps what it computed of the positions before. So llama.cpp's kernels for single tokens run, as in a chat.
"""

from __future__ import annotations

from typing import Any

ASK = {"n_predict": 1, "n_probs": (1 << 31) - 1, "cache_prompt": True}  # probabilities of all tokens
LEAST = -1e4  # of a log probability: the server writes -3e38 for log(0), which overflows in sums


def load(request: dict) -> tuple[Any, Any]:
    """Return a function from ids to logits, and one that returns facts; see wire.py."""
    import numpy as np
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    params.n_ctx, params.n_parallel = max(map(len, request["windows"])), 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    params.n_gpu_layers = 0 if request["device"] == "cpu" else -1
    params.chat_template = "chatml"  # llama.cpp would run the file's own
    params.ui, params.fit_params, params.endpoint_metrics = False, False, True
    params.hostnames, params.port = ["127.0.0.1"], 0
    for name, value in request["options"].items():
        setattr(params, name, value)
    server = xllamacpp.Server(params)
    server.handle_metrics()  # waits until the server runs

    def answer(ids: list[int], token: int) -> list[dict] | None:
        """Return the log probabilities after `ids`; `token` is generated, whatever they are. Return None if
        the token has no text of its own: a part of a letter, or the end."""
        answered = server.handle_completions({"prompt": ids, "logit_bias": [[token, 1e9]], **ASK})
        if "error" in answered:
            raise RuntimeError(answered["error"]["message"])
        said = answered["choices"][0]["logprobs"]
        return said and said["content"][0]["top_logprobs"]

    first = request["windows"][0][:1]
    token = next(token for token in range(1000) if answer(first, token))

    def compute(ids: list[int]) -> Any:
        rows = []
        for end in range(1, len(ids)):
            pairs = {each["id"]: max(each["logprob"], LEAST) for each in answer(ids[:end], token)}
            rows.append([pairs[number] for number in range(len(pairs))])
        return np.array(rows, np.float32)

    def facts() -> dict:
        return {"version": xllamacpp.__version__, "kernels": None, "dtype": None}  # it does not say

    return compute, facts
