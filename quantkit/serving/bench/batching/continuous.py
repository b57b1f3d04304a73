"""Continuous batching: requests join and leave at every step, their keys and values lie in blocks.

transformers runs it (`generate_batch` is its front door; Orca, Yu et al. 2022, and PagedAttention, Kwon et
al. 2023, are where it comes from). Here its loop's own three calls are made one by one: between them stands
a virtual clock, on which requests arrive; its background thread has no place for that.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.serving.bench.batching.accounting import Replay, Served, Step
from quantkit.serving.bench.batching.trace import Request
from quantkit.serving.bench.machine import Clock

MOST_TOKENS = 2048  # in one step: prompts beyond it are cut into pieces
MANAGER = ("add_request", "_create_batch_processor", "_generation_step", "output_router")
PROCESSOR = ("prepare_next_batch", "update_batch", "inputs_and_outputs", "cache")


def serve(
    model: nn.Module,
    requests: Sequence[Request],
    prompts: Sequence[Sequence[int]],
    size: int,
    page: int,
    clock: Clock,
) -> Replay:
    """Every request greedily, at most `size` of them at once, in cache blocks of `page` tokens.

    clock: seconds, when all the work on the device is done. Raises QuantkitError (exit code 4) when this
    transformers has another loop; what it says of models that it cannot serve so is let through.
    """
    manager, before = None, model.config._attn_implementation
    try:
        with torch.no_grad():
            manager = _manager(model, requests, size, page)
            processor = manager.batch_processor = manager._create_batch_processor()
            _check(processor, PROCESSOR)
            return _loop(manager, processor, requests, prompts, clock)
    finally:
        if manager is not None:
            manager.batch_processor = processor = None  # its end empties the device's caches
            manager.destroy()
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)
        gc.collect()


def _manager(model: nn.Module, requests: Sequence[Request], size: int, page: int) -> Any:
    """With a block for every token that `size` of the longest requests can have, and nothing shared between
    requests: each strategy computes every prompt."""
    longest = max(request.prompt + request.output for request in requests)
    prefill = sum(sorted((request.prompt for request in requests), reverse=True)[:size])
    settings = transformers.ContinuousBatchingConfig(
        page_size=page,
        num_blocks=size * -(-longest // page),
        max_batch_tokens=min(MOST_TOKENS, size + prefill),
        max_requests_per_batch=size,
        allow_block_sharing=False,
        use_async_batching=False,  # steps that overlap have no time of their own
        safety_margin=0.0,
        auto_switch_to_flash=False,  # the same attention for every strategy
    )
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(greedy, settings)
    _check(manager, MANAGER)
    return manager


def _check(found: Any, wanted: Sequence[str]) -> None:
    missing = [name for name in wanted if not hasattr(found, name)]
    if missing:
        raise QuantkitError(
            f"transformers {transformers.__version__} batches in another way: no {missing[0]}",
            "transformers 5.23 is known to work",
            UNSUPPORTED,
        )


def _loop(
    manager: Any, processor: Any, requests: Sequence[Request], prompts: Sequence[Sequence[int]], clock: Clock
) -> Replay:
    now, come, steps = 0.0, 0, []
    first: dict[int, float] = {}
    served: dict[int, Served] = {}
    while len(served) < len(requests):
        if come < len(requests) and not processor.has_pending_requests():
            now = max(now, requests[come].arrival)  # nothing to do until somebody comes
        while come < len(requests) and requests[come].arrival <= now:
            manager.add_request(prompts[come], request_id=str(come), max_new_tokens=requests[come].output)
            come += 1
        began = clock()
        if not processor.prepare_next_batch():
            raise RuntimeError("transformers' scheduler has requests, and schedules none")
        manager._generation_step()
        batch = list(processor.inputs_and_outputs.requests_in_batch)
        counted = _count(processor, batch)
        begun = [int(part.state.request_id) for part in batch if part.has_new_token]
        processor.update_batch()
        took = clock() - began
        now += took
        steps.append(Step(end=now, seconds=took, **counted))
        for index in begun:
            first.setdefault(index, now)
        while not manager.output_router.output_queue.empty():
            answer = manager.output_router.output_queue.get()
            if answer.error:
                raise RuntimeError(answer.error)
            index = int(answer.request_id)
            tokens = tuple(answer.generated_tokens)
            served[index] = Served(requests[index].arrival, first[index], now, tokens)
    return Replay(tuple(served[index] for index in range(len(requests))), tuple(steps))


def _count(processor: Any, batch: Sequence[Any]) -> dict[str, int]:
    """What a step that was computed, but whose finished requests are not yet gone, has in it."""
    prompt = sum(part.query_length for part in batch if not part.state.generated_tokens)
    decoding = sum(1 for part in batch if part.state.generated_tokens)
    padding = max(0, processor.inputs_and_outputs.num_q_tokens - prompt - decoding)
    used, held = _cache(processor)
    return {
        "prompt_slots": prompt + padding if prompt else 0,
        "prompt_tokens": prompt,
        "sequences": decoding + (0 if prompt else padding),
        "finished": 0 if prompt else padding,
        "used": used,
        "held": held,
        "reserved": held,
    }


def _cache(processor: Any) -> tuple[int, int]:
    """Token slots with a token in them, and those of the blocks that requests hold, averaged over layers."""
    allocators = processor.cache.cache_allocators.values()
    layers = sum(len(allocator.layer_indices) for allocator in allocators)
    used = held = 0
    for allocator in allocators:
        share = len(allocator.layer_indices)
        for name, blocks in allocator.block_table.items():
            slots = len(blocks) * allocator.tokens_per_page
            used += share * min(slots, processor.scheduler.active_requests[name].current_len())
            held += share * slots
    return round(used / layers), round(held / layers)
