"""Seconds of a quantization job on the CPU: amounts of work, times what the benchmark measured (speed.py).

`Work` of a method says what differs between methods; the constants below are the same for all. Both were
fitted to jobs on SmolLM2-135M and on the bundled model, with one thread.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from quantkit.capacity.source import Source
from quantkit.capacity.speed import Speed
from quantkit.models.machine.expert_share import EXPERTS, ROUTED
from quantkit.quantize.calibrate import head_every, original_every
from quantkit.quantize.methods import Work
from quantkit.quantize.prepare.memory import BATCH_TOKENS, LOSS_TOKENS

FACTOR = 2  # the time is between the predicted one divided by this, and multiplied by this
START, TOKEN = 6.5, 4e-5  # seconds: imports and calibration text; tokenizer, for each of its tokens
VALUES = 2.5  # operations of transformers' blocks besides products / those of the benchmark's block
REPEATED = 3.0  # passes of a token through a block, with --sequential repeat
COUNTERPART = 1.5  # products of a token that also runs through the original model / those of second moments
SWEEP, RETARGET, CHOLESKY = 3.0, 3.5, 1.5  # products of error feedback: in out · in², twice, and in in³
PIVOTS, SAMPLED_ROWS = 1.2, 1024  # products of a transform in in³; rows of a site that it looks at
NEAREST = 0.25  # time of rounding a weight to nearest / by error feedback
PARAMETER = 10.0  # values: reading, hashing, writing and reading back a parameter
LOGIT = 10.0  # values: softmax and divergence of a token in the vocabulary


@dataclass(frozen=True)
class Site:
    """Linears with the same inputs. rows: of all of them. share: of the tokens that reach them."""

    rows: int
    columns: int
    share: float = 1.0

    @property
    def weights(self) -> int:
        """Return the number of weights."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Model:
    """The sites of all blocks, the number of parameters of the whole model, and its head."""

    sites: list[Site]
    parameters: int
    head: Site
    speed: Speed

    @cached_property
    def forward(self) -> float:
        """Return the seconds of a token in all blocks."""
        product, value = self.speed.product, VALUES * self.speed.value
        return sum(
            site.share * (site.weights * product + (site.rows + site.columns) * value) for site in self.sites
        )

    @cached_property
    def logits(self) -> float:
        """Return the seconds of a token in the head, and of its divergence."""
        return self.head.weights * self.speed.product + LOGIT * self.head.rows * self.speed.value

    def solve(self, work: Work, sites: Iterable[Site]) -> float:
        """Return the seconds of choosing the codes of these sites, with the transform."""
        speed, seconds = self.speed, 0.0
        for site in sites:
            rows, products = site.rows, work.products * site.rows
            seconds += work.weight * site.weights * speed.weight
            if work.feeds_back:
                rows = min(rows, SAMPLED_ROWS)
                seconds += work.weight * site.columns * speed.column
                products += (SWEEP + RETARGET) * site.rows + (CHOLESKY + PIVOTS) * site.columns
            seconds += work.search * rows * site.columns * speed.weight
            seconds += products * site.columns**2 * speed.float32
        return seconds

    def job(self, work: Work, tokens: int, suspend: bool) -> float:
        """Return the seconds of a job with this number of calibration tokens."""
        calibrated, sites = work.sample > 0, self.sites
        passes = float(calibrated) if suspend or work.sample == 1 else REPEATED * calibrated
        passes, moments = passes + work.sample, 1 + work.sample * work.feeds_back
        if work.feeds_back:
            widest = max((site.columns for site in sites), default=1)
            counterparts = 1 / original_every(tokens, widest)
            passes, moments = passes + counterparts, moments + COUNTERPART * counterparts
        if work.outside:
            sites, passes = [*sites, self.head], passes + 1 / head_every(tokens, self.head.columns)
        rounded = self.solve(work, sites)
        compared = LOSS_TOKENS[calibrated] * (3 if calibrated else 2)
        if work.feeds_back:  # also compared with round to nearest
            rounded += NEAREST * self.speed.weight * sum(site.weights for site in self.sites)
        run = passes * tokens + compared + min(tokens, BATCH_TOKENS) * calibrated
        moments *= self.speed.moment * sum(site.share * site.columns**2 for site in self.sites)  # of a token
        run = self.forward * run + moments * tokens * calibrated + self.logits * compared
        start = START + TOKEN * self.head.rows
        return start + run + rounded + PARAMETER * self.speed.value * self.parameters


def model_of(source: Source, speed: Speed) -> Model:
    """Return the amounts of a model, on a machine of this speed."""
    settings, linears = source.settings, source.parameters.linears
    routed = 1.0
    if any(linear.is_expert for linear in linears):
        active, experts = settings.filled(*ROUTED), settings.filled(*EXPERTS)
        routed = active / experts if active and experts else 1.0
    rows: dict[tuple, int] = defaultdict(int)
    for linear in linears:
        module = linear.local.removesuffix(".weight").rpartition(".")[0]
        rows[linear.block, module, linear.in_features, linear.is_expert] += linear.out_features
    sites = [Site(out, columns, routed if expert else 1.0) for (*_, columns, expert), out in rows.items()]
    head = Site(settings.filled("vocab_size") or 0, settings.hidden)
    return Model(sites, source.parameters.count, head, speed)
