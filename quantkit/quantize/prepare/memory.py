"""Peak memory of a quantization job, estimated from shapes, for jobs and for `quantkit plan`.

The peak is the bytes of everything outside the blocks, plus the bytes of all stages of quantizing a block
(`Stages`). Every stage computes its own bytes and names the code that allocates them. Stages do not all reach
their peaks together, so the sum is an upper limit, less than twice the true peak. torch is not imported.
"""

from collections.abc import Collection
from dataclasses import dataclass

from quantkit.layouts import Statistic
from quantkit.models.machine import expert_share
from quantkit.quantize.calibrate import LOGITS_BYTES, LOGITS_TOKENS, original_every
from quantkit.quantize.prepare.shapes import FLOAT32, Shapes, Site

MIB = 1 << 20
COMFORT = 0.8  # share of the free memory that the faster of two ways may take
BATCH_TOKENS = 2048  # tokens of a forward pass: matrix products run at full rate, activations stay small
ACCELERATED_BATCH_TOKENS = 8192  # on an accelerator, where launches count, most of all those of experts
WIDE_BATCH_TOKENS = 4096  # there, of hidden states of as many values: such products need no more tokens
LOADED_LATER_BYTES = 80 * MIB  # growth of Python, torch (CPU build) and transformers in a job; measured
PREDICTED_BYTES = 1 << 28  # limit for log-probabilities of the original model
LOSS_TOKENS = {True: 512, False: 256}  # default of --loss-tokens, with and without calibration
KEPT_BYTES = 192 * MIB  # freed pages that a data-free job keeps for its next linears; measured
SEARCH_VALUES = 1 << 26  # limit for temporaries of a range search on an accelerator (grids/parallel.py)
SEARCH = 11  # temporaries of a range search per weight
ROUNDED = 18  # bytes per weight of the linear being solved: float32 values, candidates and codes
MARGIN = 1.1  # an accelerator's allocator rounds up and leaves holes
HEAP = 1.15  # the heap has holes between tensors that live longer; measured 1.08 on Qwen2.5-Coder-1.5B
LOGITS = 5  # copies of the logits at a time: computed, float32, softmax, its sums, gradients
TRACED = 2  # copies of a linear's inputs and outputs that autograd keeps, with activations and products
SAMPLED = 1024  # solvers.MEASURED_ROWS, whose module imports torch
GROUP = 128  # columns that are solved together
GRAPHED = 1 << 23  # weights that are solved together without a graph if they are more


@dataclass(frozen=True)
class Peak:
    """Peak bytes. device: on an accelerator, 0 for a job on the CPU. host: in host memory, without Python."""

    device: int
    host: int

    @property
    def computing(self) -> int:
        """Peak bytes on the device that computes."""
        return self.device or self.host


@dataclass(frozen=True)
class Stages:
    """The stages of quantizing a block. A property is the bytes that the code named in its docstring
    allocates.

    needs: statistics of calibration text; empty if data-free. sample: share of the tokens on which a
    transform measures all sites at once; 0 without a transform; below 1, the solver measures again on all.
    outside: embedding and head are encoded before the first block. suspend: every batch waits at a site until
    the site is solved, unless a transform sees all tokens. states: where hidden states are kept: `device`,
    `host` or `disk`. at_once: how many sites of experts one repeated forward pass measures. feeds_back: the
    solver is error feedback. whole_rows: a group of the grid is a row.
    """

    shapes: Shapes
    needs: Collection[Statistic]
    sample: float = 0.0
    outside: bool = False
    suspend: bool = False
    states: str = "device"
    accelerated: bool = False
    at_once: int = 1
    feeds_back: bool = True
    whole_rows: bool = False

    def computing(self) -> dict[str, int]:
        """Return the bytes of each stage on the device that computes. A batch runs (calibrate/forwards.py)
        or a site is solved, while suspended batches wait. A job without calibration needs the stored and the
        decoded block, batches that wait for experts, a linear that is rounded, and freed pages that a CPU
        keeps for the next linears (machine/memory.py)."""
        shapes = self.shapes
        if not self.needs:
            return {
                "block": shapes.block * shapes.element * (2 if shapes.narrow else 1),
                "batches": shapes.waiting,
                "solver": self.rounding,
                "freed pages": 0 if self.accelerated else min(KEPT_BYTES, FLOAT32 * shapes.weights),
            }
        stages = {
            "block": self.block,
            "hidden states": self.hidden_states,
            "waiting batches": shapes.tokens * shapes.suspended * self.suspends,
            "graphs": self.graphs,
            "sites": self.sites,
        }
        return stages if self.offloads else stages | {"experts": self.experts}

    def waiting(self) -> int:
        """Return the bytes that the host keeps for an accelerator: hidden states, activations of the
        original model and inputs of streamed experts. States count twice, because the allocator of pinned
        memory rounds up to powers of two."""
        states = 2 * self.shapes.states if self.states == "host" else 0
        return states + self.original + self.experts if self.needs and self.offloads else 0

    @property
    def block(self) -> int:
        """skeleton/loading.py: the loaded block, in float32 if a transform sees all tokens."""
        return self.shapes.block * (FLOAT32 if self.sees_all else self.shapes.element)

    @property
    def hidden_states(self) -> int:
        """calibrate/states.py: the block's inputs; suspended batches keep theirs, even with --states disk."""
        away = self.states != "device"
        return self.shapes.states * (self.suspends or not away) + self.shapes.moving * away

    @property
    def sites(self) -> int:
        """calibrate/, solvers/: the largest peak of measuring and solving sites. A transform by a sample
        first measures all sites together. Then one site after another is measured and solved; the inputs of
        the original model are freed when their site is measured, and float32 copies of transformed weights
        when it is solved. A transform that sees all tokens keeps the Hessians of all sites until the end."""
        shapes, kept = self.shapes, 0 if self.offloads else self.original
        several = (self.at_once - 1) * shapes.expert_site(self.accelerated) + 2 * shapes.moments
        if self.sees_all:
            own = Statistic.HESSIAN in self.needs  # counted with the others
            solved = max(self.solve(site) - own * site.hessian for site in shapes.sites)
            return shapes.hessians + several + kept + max(shapes.batch, solved, shapes.hessians)
        exact = shapes.block * FLOAT32 * (self.sample > 0 and shapes.narrow)
        peaks = [shapes.hessians + kept + max(shapes.batch, exact + self.rounding)] if self.sample else []
        for site in shapes.sites:
            others = several * site.routed
            peaks.append(self.measured(site) + others + shapes.batch + kept + exact)
            if kept and not site.routed:
                kept -= site.width * self.sampled
            exact = max(0, exact - FLOAT32 * site.weights)
            peaks.append(self.solve(site) + others + kept + exact)
        return max(peaks)

    @property
    def graphs(self) -> int:
        """solvers/replay.py: an accelerator keeps buffers for each shape until the end: weights, errors and
        codes of two groups, the columns of a run (columns.py), and two parts of the Hessian."""
        kept, shapes = 0, {site.weights: site for site in self.shapes.sites}
        if self.accelerated and self.feeds_back and Statistic.HESSIAN in self.needs:
            for site in shapes.values():
                columns = site.width if self.whole_rows else min(site.width, 2 * GROUP)
                if columns * sum(site.outs) <= GRAPHED:
                    kept += (24 * columns + 8 * GROUP) * sum(site.outs) + 8 * columns**2
        return kept

    def measured(self, site: Site) -> int:
        """calibrate/capture.py: Hessian and drift of a site. Experts have no counterpart in the original."""
        drift = site.drift * (Statistic.DRIFT in self.needs and not site.routed)
        return site.hessian * (Statistic.HESSIAN in self.needs) + drift

    @property
    def sampled(self) -> int:
        """Bytes of one value of each token on which the original model runs: a sample of the batches."""
        shapes = self.shapes
        batches = -(-shapes.tokens // shapes.batch_tokens)
        sampled = -(-batches // original_every(shapes.tokens, shapes.widest)) * shapes.batch_tokens
        return sampled * shapes.element

    @property
    def original(self) -> int:
        """calibrate/original.py: inputs of the original's sites, its hidden states, outputs of writers."""
        widths = sum(site.width for site in self.shapes.sites if not site.routed)
        return (4 * self.shapes.hidden + widths) * self.sampled * (Statistic.DRIFT in self.needs)

    @property
    def experts(self) -> int:
        """transforms/expert_by_expert.py: the inputs of each layer of streamed experts."""
        layers = {expert_share.expert_of(name).rpartition(".")[0] for name in self.shapes.experts}
        return self.shapes.states * len(layers) if self.sample and self.shapes.streamed else 0

    def solve(self, site: Site) -> int:
        """solvers/: a site while it is solved, with its Hessian; curvatures."""
        solving, needs = self.rounding, self.needs
        if Statistic.HESSIAN in needs:
            solving += site.hessian
            if self.feeds_back:
                retarget = self.retarget(site) if Statistic.DRIFT in needs and not site.routed else 0
                solving = max(solving, self.error_feedback(site), retarget)
        return solving + (self.curvatures if Statistic.CURVATURE in needs else 0)

    @property
    def rounding(self) -> int:
        """solvers/rtn.py: the largest linear in float32 with its candidates and codes. A CPU searches ranges
        a cacheful at a time, an accelerator SEARCH_VALUES at a time."""
        largest = self.shapes.largest_linear
        searched = FLOAT32 * (min(SEARCH * largest, SEARCH_VALUES) + 3 * largest) * self.accelerated
        return max(ROUNDED * largest, searched)

    def error_feedback(self, site: Site) -> int:
        """solvers/gptq.py: H and its factor or a permuted copy, for yaqa both, a quarter more while a factor
        is turned; weights, errors and codes in float32. Refinement has copies of a group."""
        hessians = site.hessian * (9 + 4 * (Statistic.CURVATURE in self.needs)) // 4
        each = 42 if self.whole_rows else 18 + 4 * self.shapes.narrow
        return hessians + each * site.weights

    def retarget(self, site: Site) -> int:
        """calibrate/statistics.py: `--target original` computes weights. H, the halves and float32 copies of
        16-bit weights are there all the time; with them H of the compared tokens and its factor, a quarter
        more while it is turned; or the factor, the solved sum of the halves, and either its right side, or
        the moved weights and the move or four samples of one linear."""
        halves, largest = site.drift - site.hessian, FLOAT32 * max(site.outs) * site.width
        samples = 4 * FLOAT32 * min(max(site.outs), SAMPLED) * site.width
        copies, moved = FLOAT32 * site.weights * self.shapes.narrow, FLOAT32 * site.weights
        moves = 2 * site.hessian + max(halves, halves // 2 + moved + max(largest, samples))
        return copies + halves + max(site.hessian * 13 // 4, moves)

    @property
    def curvatures(self) -> int:
        """calibrate/curvature.py: output curvatures of a block's linears, the largest factorization, and
        autograd's copies of a batch or the logits of some tokens."""
        shapes = self.shapes
        outs = [out for _, out, _ in shapes.linears]
        routed = sum(out + width for name, out, width in shapes.linears if name in shapes.experts)
        experts = len({expert_share.expert_of(name) for name in shapes.experts}) or 1
        values = sum(out + width for _, out, width in shapes.linears)
        values += shapes.active * routed // experts - routed
        traced = shapes.batch_tokens * (TRACED * values * shapes.element + 8 * shapes.hidden * FLOAT32)
        vocabulary = shapes.rest // shapes.hidden  # upper limit
        logits = LOGITS * min(LOGITS_BYTES, FLOAT32 * LOGITS_TOKENS * vocabulary)
        return FLOAT32 * (sum(out**2 for out in outs) + 5 * max(outs) ** 2) + max(traced, logits)

    @property
    def offloads(self) -> bool:
        return self.accelerated and self.states != "device"

    @property
    def sees_all(self) -> bool:
        return self.sample == 1

    @property
    def suspends(self) -> bool:
        return self.suspend and not self.sees_all


def peak_memory(stages: Stages) -> Peak:
    """Return the peak bytes of a job: everything outside the blocks, plus the largest of the stages' sum, the
    largest tensor, and measuring the loss. An embedding that is encoded is there twice, stored and encoded,
    before the first block. An accelerator's embedding and head are on the host (models/skeleton/rows.py)."""
    shapes, accelerated = stages.shapes, stages.accelerated
    largest = 0 if shapes.by_rows else shapes.largest
    if stages.outside:
        largest = 2 * shapes.largest + stages.rounding
    later = max(largest, loss_memory(shapes, accelerated))
    rest = (shapes.rest - shapes.by_rows) * shapes.element
    holes = HEAP if stages.needs and not accelerated else 1
    computing = rest + max(int(holes * sum(stages.computing().values())), later)
    if not accelerated:
        return Peak(0, LOADED_LATER_BYTES + computing)
    reading = max((1 + stages.outside) * shapes.largest, shapes.block * shapes.element)
    reading += 3 * shapes.largest_linear
    host = shapes.by_rows * shapes.element + max(reading + stages.waiting(), shapes.predicted)
    return Peak(int(MARGIN * computing), LOADED_LATER_BYTES + host)


def tokens_at_once(accelerated: bool, width: int, experts: bool) -> int:
    """Return the most tokens of a forward pass. width: of the hidden states. experts: there are some."""
    if not accelerated:
        return BATCH_TOKENS
    return ACCELERATED_BATCH_TOKENS if experts or width < WIDE_BATCH_TOKENS else WIDE_BATCH_TOKENS


def forward_memory(shapes: Shapes, spilled: bool = False) -> int:
    """Return the peak bytes of running blocks while the next is read. spilled: states are in a file."""
    states = shapes.moving if spilled else shapes.states
    return (shapes.rest + 2 * shapes.block) * shapes.element + states + shapes.batch


def loss_tokens(wanted: int | None, calibrates: bool, vocabulary: int) -> int:
    """Return the number of tokens on which the loss of an output is measured: `wanted`, or the default for
    None, at most as many as PREDICTED_BYTES allow."""
    return min(LOSS_TOKENS[calibrates] if wanted is None else wanted, PREDICTED_BYTES // (4 * vocabulary))


def loss_memory(shapes: Shapes, away: bool = False) -> int:
    """Return the peak bytes of measuring the loss of an output, without the tensors outside the blocks: a
    block, the rounding of one of its linears, and logits of both models. away: these are on the host."""
    block = shapes.block * shapes.element + ROUNDED * shapes.largest_linear
    return block + (1 if away else 2) * shapes.predicted if shapes.predicted else 0


def scratch_bytes(depth: int, shapes: Shapes) -> int:
    """Return the bytes of temporary files of a job with gradients: the inputs of each block, which the
    backward pass replaces by the block's curvatures and squared gradients."""
    curvatures = sum(2 * out**2 + FLOAT32 * shapes.tokens for _, out, _ in shapes.linears)
    return depth * max(shapes.states, curvatures)


def sites_at_once(shapes: Shapes, free: int, need: Peak) -> int:
    """Return how many sites, of a layer and its experts, fit in memory at once. need: peak of a job that
    measures one site at a time."""
    experts = len(set(map(expert_share.expert_of, shapes.experts)))
    spare = max(0, int(COMFORT * free) - need.computing)
    return 1 + min(experts, spare // shapes.expert_site(need.device > 0)) if experts else 1
