"""Runs a checkpoint in transformers: quantized weights with a client's kernels, or decoded weights."""

import copy
import io
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from quantkit.errors import RESOURCES, first_line, require
from quantkit.evaluation.engines import in_transformers
from quantkit.evaluation.generate import shared_dtype
from quantkit.evaluation.sampling import load_model
from quantkit.inspection import record
from quantkit.models.files import headers
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.machine.device import choose_device, free_memory, synchronize
from quantkit.serving.engines import EngineFacts
from quantkit.serving.engines.choose import installed
from quantkit.serving.settings import LocalOptions
from quantkit.tables import megabytes

CHATTY = "bitsandbytes"  # logger that warns about input types at every product
REFUSED = "transformers does not load it packed"


def load(
    checkpoint: Checkpoint, options: LocalOptions, tokens: int, decoded: bool = False
) -> tuple[nn.Module, EngineFacts]:
    """Load the model for `tokens` tokens of context. Weights stay quantized if their client is installed.

    decoded: decode the weights anyway. Raises QuantkitError (exit code 5) if the model does not fit the
    memory.
    """
    torch.set_num_threads(options.cores)
    device = choose_device(options.device)
    dtype = shared_dtype(options.dtype, checkpoint, device)
    model, note = None, ""
    if checkpoint.quantized and not decoded:
        model, note = _packed(checkpoint, dtype, device)
    if model is None:
        model = load_model(checkpoint, dtype, device, tokens)
    kernels, packed = in_transformers.kernels(model)
    if checkpoint.quantized and not packed and (decoded or not note):
        note = "as requested" if decoded else "transformers decodes the weights when they are first used"
    return model.eval(), EngineFacts(
        version=transformers.__version__,
        weight_bytes=model.get_memory_footprint(),
        kernels=kernels,
        packed=packed,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        note=note,
        attention=model.config.get_text_config()._attn_implementation,
    )


def _packed(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module | None, str]:
    """Return the model as transformers loads it, and ""; or None and why it loads no packed weights."""
    if not checkpoint.folder.is_dir():
        return None, "transformers decodes GGUF files"
    client = client_of(checkpoint)
    if client["loads"] is False:  # the client may load the model and compute nonsense
        return None, f"{REFUSED}: {client['note']}"
    if missing := [package for package in client["needs"] if not installed(package)]:
        return None, f"{REFUSED}: it needs {' and '.join(missing)} (pip install {' '.join(missing)})"
    need, free = checkpoint.stored_bytes, free_memory(device)
    what = f"{checkpoint.source} takes {megabytes(need)}, {megabytes(free)} of memory are free"
    require(need <= free, what, "choose another --device, or fewer bits", RESOURCES)
    logging.getLogger(CHATTY).setLevel(logging.ERROR)
    # the checked configuration: config.json may name an attention that is a kernel on the hub, which
    # transformers would download and run
    config = copy.deepcopy(checkpoint.config)
    if "quantization_config" in checkpoint.raw_config:
        config.quantization_config = copy.deepcopy(checkpoint.raw_config["quantization_config"])
    try:
        with _silenced():
            transformers.logging.disable_progress_bar()
            model = transformers.AutoModelForCausalLM.from_pretrained(
                checkpoint.folder,
                config=config,
                dtype=dtype,
                device_map={"": device},
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=checkpoint.trust_remote_code,
            ).eval()
            with torch.no_grad():  # some clients decode, compile or fail when they are first used
                model(torch.zeros(1, 1, dtype=torch.long, device=device))
    except (ImportError, ValueError, RuntimeError, NotImplementedError) as error:
        return None, f"{REFUSED}: {first_line(error)}"
    return model, ""


@contextmanager
def _silenced() -> Iterator[None]:
    """Drop the output, logs and warnings of clients while they load: stdout is for answers and JSON."""
    nothing = io.StringIO()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(nothing), redirect_stderr(nothing), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def client_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return transformers' entry among the checkpoint's clients in `inspect`: loads, note, needs
    (packages)."""
    clients = record.describe(headers.open_contents(str(checkpoint.folder)))["clients"]
    return next(client for client in clients if client["client"] == "transformers")


def device_time(device: torch.device) -> float:
    """Wait for all work on the device; return the time in seconds."""
    synchronize(device)
    return time.perf_counter()


class Ticks(transformers.StoppingCriteria):
    """Records the time at creation and after each token; ends the text once `stopped()` is True."""

    def __init__(self, device: torch.device, stopped: Callable[[], bool] = lambda: False):
        self.times, self._stopped = [device_time(device)], stopped

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.times.append(device_time(input_ids.device))
        return torch.full((len(input_ids),), self._stopped(), dtype=torch.bool, device=input_ids.device)


@torch.no_grad()
def continue_batch(
    model: nn.Module, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[list[list[int]], list[float], Any]:
    """Continue prompts greedily, padded on the left; return continuations `[prompts, tokens]`, the seconds of
    each step (the first is the prefill), and the cache. An end of text does not end a continuation."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ids, mask = ids.to(model.device), mask.to(model.device)
    model.generation_config = transformers.GenerationConfig()  # not the checkpoint's own end of text
    settings = transformers.GenerationConfig(
        max_new_tokens=tokens, do_sample=False, use_cache=True, pad_token_id=0, return_dict_in_generate=True
    )
    ticks = Ticks(model.device)
    out = model.generate(ids, attention_mask=mask, generation_config=settings, stopping_criteria=[ticks])
    seconds = [after - before for before, after in itertools.pairwise(ticks.times)]
    return out.sequences[:, width:].tolist(), seconds, out.past_key_values


def cache_bytes(cache: Any) -> int | None:
    """Return the bytes of all tensors in a KV cache of any class; None if `cache` is None."""
    tensors = {id(tensor): tensor for tensor in _tensors(cache, 0)}
    return sum(tensor.nbytes for tensor in tensors.values()) if cache is not None else None


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth < 5:
        inner = value if isinstance(value, (list, tuple)) else getattr(value, "__dict__", {}).values()
        for item in value.values() if isinstance(value, dict) else inner:
            yield from _tensors(item, depth + 1)
