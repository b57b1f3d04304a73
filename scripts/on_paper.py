"""Estimate how long `quantkit gptq` takes on H100 GPUs, from counted kernel launches and from arithmetic.

    python scripts/on_paper.py [--microseconds 5 --write]

Nothing is measured on a GPU. Launches are counted on the tests' double of an accelerator (bench_launches.py),
each at so many microseconds. Arithmetic runs at TENSOR (16-bit products), PLAIN (float32) and FACTOR
(factorizations) operations per second. Left out: reading and writing files, attention, and the verification.
--write puts the table into docs/gpu.md.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import bench_launches
import far_device
import torch
from common import ROOT, table, write_section

from quantkit.quantize.calibrate import original_every

TENSOR, PLAIN, FACTOR = 400e12, 40e12, 20e12
TOKENS = 128 * 2048
LOWER = 9 / 16  # of a matrix of second moments that is computed
REFINED = 5  # products with H, of sweep and refinement, in units of out * in²
AT_ONCE = 40  # experts that an H100 solves together, in 64 of its 80 GB


@dataclass(frozen=True)
class Model:
    """blocks; sites of a block, (outputs of each linear, inputs); experts: number, and how many a token has;
    its sites, which have one linear or two."""

    name: str
    blocks: int
    sites: tuple[tuple[tuple[int, ...], int], ...]
    experts: int = 0
    active: int = 0
    inside: tuple[tuple[tuple[int, ...], int], ...] = ()


def attention(hidden: int, key_values: int, width: int) -> tuple:
    """Sites of q, k and v, and of o. width: of all heads."""
    return ((width, key_values, key_values), hidden), ((hidden,), width)


def gated(hidden: int, inner: int) -> tuple:
    """Sites of gate and up, and of down."""
    return ((inner, inner), hidden), ((hidden,), inner)


MODELS = (
    Model("Llama-3-8B", 32, (*attention(4096, 1024, 4096), *gated(4096, 14336))),
    Model("Llama-3-70B", 80, (*attention(8192, 1024, 8192), *gated(8192, 28672))),
    Model("Qwen3-235B-A22B", 94, attention(4096, 512, 8192), 128, 8, gated(4096, 1536)),
)


def launches() -> tuple[float, float]:
    """Kernels a column: of a site with the search for a scale, and of experts together."""
    with far_device.present(), torch.inference_mode():
        scaled = bench_launches.count(bench_launches.METHODS["gptq"][0], 256, 1024)[0] / 1024
        together = bench_launches.count(bench_launches.solved_together(8), 256, 1024)[0] / 1024
    return scaled, together


def seconds(
    model: Model, gpus: int, kernels: tuple[float, float], launch: float, now: bool = True
) -> list[float]:
    """Seconds of a whole model: launches, second moments, drift from the original model, forward passes,
    factorizations, products. now: second moments by tensor cores, and experts together."""
    rate, rounds = (TENSOR, -(-model.experts // AT_ONCE)) if now else (PLAIN, model.experts / gpus)
    every = original_every(TOKENS, max(width for _, width in model.sites))
    columns = kernels[0] * sum(width for _, width in model.sites)
    columns += kernels[1] * rounds * sum(width for _, width in model.inside)
    plain = sum(width**2 for _, width in model.sites)
    routed = sum(width**2 for _, width in model.inside)
    moments = 2 * LOWER * TOKENS * (plain + routed * (model.active + 1)) / rate
    # linears that are alone at their site: what their outputs miss, then its products with inputs
    alone = (width**2 if outs[1:] else 2 * outs[0] * width for outs, width in model.sites)
    drift = 2 * TOKENS / every * sum(alone) * (2 / TENSOR if now else 1 / PLAIN)  # two terms
    weights = sum(sum(outs) * width for outs, width in model.sites)
    inner = sum(sum(outs) * width for outs, width in model.inside)
    passes = 1 + 1 / every + 1 / 8  # the original model's, and the sample of the search
    forward = 2 * TOKENS * passes * (weights + model.active * inner) / TENSOR
    if (
        model.experts
    ):  # passes are repeated: up to each of five sites, the fifth with two thirds of the experts
        forward += 2 * TOKENS * (4 * weights + model.active * inner * 2 / 3) / TENSOR
    factors = 2 * sum(width**3 for _, width in model.sites) / 3 / FACTOR
    factors += model.experts / gpus * sum(width**3 for _, width in model.inside) / 3 / FACTOR
    shared = ((sum(outs) if gpus == 1 else max(outs)) * width**2 for outs, width in model.sites)
    own = model.experts / gpus * sum(sum(outs) * width**2 for outs, width in model.inside)
    products = REFINED * (sum(shared) + own) / PLAIN
    parts = columns * launch, moments / gpus, drift / gpus, forward / gpus, factors, products
    return [model.blocks * part for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microseconds", type=float, default=5.0)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kernels = launches()
    header = "model, GPUs, launches, second moments, drift, forward, factorizations, products, all, before"
    rows = []
    for model in MODELS:
        for gpus in (1, 8):
            parts = seconds(model, gpus, kernels, args.microseconds / 1e6)
            before = seconds(model, gpus, kernels, args.microseconds / 1e6, now=False)
            found = (*parts, sum(parts), sum(before))
            rows.append([model.name, str(gpus), *(f"{part:.0f}" for part in found)])
    text = table(header.split(", "), rows, left=1)
    print(f"{kernels[0]:.2f} launches a column, {kernels[1]:.2f} of experts together\n{text}")
    if args.write:
        write_section("on-paper", text, ROOT / "docs" / "gpu.md")


if __name__ == "__main__":
    main()
