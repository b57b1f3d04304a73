"""Continuous batching: requests join and leave at every step; the KV cache consists of blocks of tokens.

Sources: Orca (Yu et al. 2022) and PagedAttention (Kwon et al. 2023). transformers runs it, by default in a
background thread (`generate_batch`). This file makes the three calls of that thread's loop itself, because
requests arrive on a virtual clock, which has to advance between the calls.
"""

import gc
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn

from quantkit.serving.bench.batching.trace import BatchStep, Prompts, Replay, Served, TraceRequest
from quantkit.serving.engines.transformers import device_time

MOST_TOKENS = 2048  # per step; longer prompts are processed in pieces
PAGE = 16  # tokens of a cache block


@torch.no_grad()
def serve(model: nn.Module, requests: Sequence[TraceRequest], prompts: Prompts, size: int) -> Replay:
    """Serve every request greedily, at most `size` at once. The cache has room for `size` requests as long as
    the longest. Requests share no blocks, so that every prompt is computed as in the other strategies.

    Raises transformers' own errors for models without a paged cache, and AttributeError if the installed
    transformers has a different loop.
    """
    longest = max(request.prompt + request.output for request in requests)
    prefill = sum(sorted((request.prompt for request in requests), reverse=True)[:size])
    settings = transformers.ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=size * -(-longest // PAGE),
        max_batch_tokens=min(MOST_TOKENS, size + prefill),
        max_requests_per_batch=size,
        allow_block_sharing=False,
        use_async_batching=False,  # overlapping steps could not be timed
        safety_margin=0.0,
        auto_switch_to_flash=False,  # the same attention for every strategy
    )
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager, before = None, model.config._attn_implementation
    try:
        manager = model.init_continuous_batching(greedy, settings)
        return _loop(manager, requests, prompts, model.device)
    finally:
        if manager is not None:
            manager.batch_processor = None  # its destructor empties the device's caches
            manager.destroy()
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)
        gc.collect()


def _loop(manager: Any, requests: Sequence[TraceRequest], prompts: Prompts, device: torch.device) -> Replay:
    processor = manager.batch_processor = manager._create_batch_processor()
    now, arrived, steps = 0.0, 0, []
    first: dict[int, float] = {}
    served: dict[int, Served] = {}
    while len(served) < len(requests):
        if arrived < len(requests) and not processor.has_pending_requests():
            now = max(now, requests[arrived].arrival)  # nothing to do until the next arrival
        while arrived < len(requests) and requests[arrived].arrival <= now:
            output = requests[arrived].output
            manager.add_request(prompts[arrived], request_id=str(arrived), max_new_tokens=output)
            arrived += 1
        began = device_time(device)
        if not processor.prepare_next_batch():
            raise RuntimeError("transformers' scheduler has requests, and schedules none")
        manager._generation_step()
        batch = list(processor.inputs_and_outputs.requests_in_batch)
        counts = _count(processor, batch)
        begun = [int(entry.state.request_id) for entry in batch if entry.has_new_token]
        processor.update_batch()
        seconds = device_time(device) - began
        now += seconds
        steps.append(BatchStep(seconds, *counts))
        for index in begun:
            first.setdefault(index, now)
        while not manager.output_router.output_queue.empty():
            answer = manager.output_router.output_queue.get()
            if answer.error:
                raise RuntimeError(answer.error)
            index, tokens = int(answer.request_id), tuple(answer.generated_tokens)
            served[index] = Served(requests[index].arrival, first[index], now, tokens)
    return Replay([served[index] for index in range(len(requests))], steps)


def _count(processor: Any, batch: Sequence[Any]) -> tuple[int, ...]:
    """Return the counts of a computed step, in the order of `BatchStep`. Call it before finished requests
    leave. used and reserved, which count token slots, are averaged over the layers."""
    prompt = sum(entry.query_length for entry in batch if not entry.state.generated_tokens)
    decoding = sum(1 for entry in batch if entry.state.generated_tokens)
    padding = max(0, processor.inputs_and_outputs.num_q_tokens - prompt - decoding)
    layers = used = reserved = 0
    for allocator in processor.cache.cache_allocators.values():
        share = len(allocator.layer_indices)
        layers += share
        for name, blocks in allocator.block_table.items():
            slots = len(blocks) * allocator.tokens_per_page
            used += share * min(slots, processor.scheduler.active_requests[name].current_len())
            reserved += share * slots
    used, reserved = round(used / layers), round(reserved / layers)
    if prompt:
        return prompt + padding, prompt, decoding, 0, used, reserved
    return 0, 0, decoding + padding, padding, used, reserved
