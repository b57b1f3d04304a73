"""The shapes that decide the peak memory of a job. torch is not imported."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from quantkit.models.machine import expert_share

FLOAT32 = 4
Linear = tuple[str, int, int]  # (name in the block, out_features, in_features)


class Site(NamedTuple):
    """Linears that read the same input, of `width`. outs: their out_features. routed: an expert's."""

    width: int
    outs: list[int]
    routed: bool

    @property
    def weights(self) -> int:
        return sum(self.outs) * self.width

    @property
    def hessian(self) -> int:
        """Bytes of its Hessian."""
        return FLOAT32 * self.width**2

    @property
    def drift(self) -> int:
        """Bytes of its `Drift`: the Hessian of the tokens that are compared, and two halves."""
        rows = min(self.outs[0], self.width) if len(self.outs) == 1 else self.width
        return self.hessian + 2 * FLOAT32 * rows * self.width


@dataclass(frozen=True)
class Shapes:
    """The shapes that decide peak memory.

    linears: of one block. rest: parameters outside the blocks; largest: stored bytes of the largest of these;
    by_rows: how many of them are fetched by rows: embedding and head (models/skeleton/rows.py).
    element: bytes per value in a forward pass. tokens: of the calibration text; batch_tokens: per forward
    pass. width: of hidden states; None: the smallest in_features. experts: names of the linears that are an
    expert's. streamed: experts are read when called. active: experts per token. predicted: bytes of
    the logits by which the loss of the output is measured.
    """

    linears: Sequence[Linear]
    rest: int
    largest: int
    element: int
    tokens: int
    batch_tokens: int
    width: int | None = None
    experts: frozenset[str] = frozenset()
    streamed: bool = False
    active: int = 1
    predicted: int = 0
    by_rows: int = 0

    @cached_property
    def weights(self) -> int:
        """Number of weights in one block's linears."""
        return sum(out_features * in_features for _, out_features, in_features in self.linears)

    @cached_property
    def block(self) -> int:
        """Number of one block's weights that are in memory at a time."""
        routed = [linear for linear in self.linears if linear[0] in self.experts]
        if not self.streamed:
            return self.weights
        kept = expert_share.IN_MEMORY * expert_share.largest_expert(routed)
        return self.weights - sum(o * i for _, o, i in routed) + kept

    @property
    def hidden(self) -> int:
        return self.width or min(in_features for *_, in_features in self.linears)

    @property
    def narrow(self) -> bool:
        """Whether float32 values take more memory than the model's."""
        return self.element < FLOAT32

    @property
    def hessians(self) -> int:
        """Bytes of the Hessians of all sites."""
        return sum(site.hessian for site in self.sites)

    @cached_property
    def widest(self) -> int:
        return max(in_features for *_, in_features in self.linears)

    @cached_property
    def largest_linear(self) -> int:
        return max(out_features * in_features for _, out_features, in_features in self.linears)

    @cached_property
    def sites(self) -> list[Site]:
        """The sites in the usual order, the widest last. Equally wide linears of one module count as one
        site, and all streamed experts of a layer as one expert."""
        sites: dict[tuple[str, int], Site] = {}
        first: dict[str, str] = {}
        for name, out_features, width in self.linears:
            module = name.rpartition(".")[0]
            layer = re.sub(r"\.\d+", "", module) if self.streamed else module
            if module == first.setdefault(layer, module):
                site = sites.setdefault((layer, width), Site(width, [], name in self.experts))
                site.outs.append(out_features)
        return sorted(sites.values(), key=lambda site: (site.width, sum(site.outs)))

    @property
    def moments(self) -> int:
        """Bytes of the second moments of an expert's site; 0 without experts."""
        widths = [in_features for name, _, in_features in self.linears if name in self.experts]
        return FLOAT32 * max(widths, default=0) ** 2

    def expert_site(self, accelerated: bool) -> int:
        """Bytes of one more site of experts at a time: its second moments; on an accelerator, which solves it
        together with the others, also copies of these, and of two linears with errors and codes."""
        largest = max((out * width for name, out, width in self.linears if name in self.experts), default=0)
        return 13 * self.moments // 4 + 44 * largest if accelerated else self.moments

    @property
    def states(self) -> int:
        """Bytes of the hidden states of all tokens."""
        return self.tokens * self.hidden * self.element

    @property
    def moving(self) -> int:
        """Bytes in memory if hidden states are on host or disk: current, next and copied batch."""
        return 3 * self.batch_tokens * self.hidden * self.element

    @cached_property
    def spread(self) -> int:
        """Largest number of values per token: in the widest linear, or in all of the token's experts."""
        inner = [width for name, out, width in self.linears if name in self.experts and out == self.hidden]
        return max(self.widest, self.active * max(inner, default=0))

    @property
    def suspended(self) -> int:
        """Bytes per token of a batch that waits inside the block."""
        return (2 * self.hidden + self.spread) * self.element

    @property
    def waiting(self) -> int:
        """Bytes of batches that wait while another runs, so that experts are read once for all."""
        batches = min(expert_share.IN_STEP, -(-self.tokens // self.batch_tokens)) - 1 if self.streamed else 0
        return batches * self.batch_tokens * self.suspended

    @property
    def batch(self) -> int:
        """Bytes of running a batch: residual, normed and projected states, four tensors as wide as the
        widest, one of them in float32, and batches that wait."""
        values = (3 * self.hidden + 4 * self.spread) * self.element
        values += FLOAT32 * self.spread * self.narrow
        return self.batch_tokens * values + self.waiting


def of_largest_block(
    blocks: Iterable[tuple[int, Linear]], experts: Callable[[int], Collection[str]], **others: Any
) -> Shapes:
    """Return the shapes of the block with the most weights. blocks: (index of the block, linear) of every
    linear. experts: returns the names of a block's linears that are an expert's. others: fields of Shapes."""
    linears: defaultdict[int, list[Linear]] = defaultdict(list)
    for index, linear in blocks:
        linears[index].append(linear)
    largest = max(sorted(linears), key=lambda index: sum(o * i for _, o, i in linears[index]), default=0)
    return Shapes(linears[largest], experts=frozenset(experts(largest)), **others)
