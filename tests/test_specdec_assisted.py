"""What transformers drafts and keeps, against a literal decoder; and that proofs can fail."""

import copy

import pytest
import torch
import transformers
from nights import nightly

from quantkit.evaluation.sampling import Sampling
from quantkit.serving.specdec import acceptance_rate
from quantkit.serving.specdec import transformers as assisted
from quantkit.serving.specdec.acceptance_rate import DraftStep
from quantkit.serving.specdec.transformers import DraftedText

VOCABULARY, TEMPERATURE = 8, 1.5
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


def model(seed: int, vocabulary: int = 64, blend=None, markov: bool = False) -> transformers.LlamaForCausalLM:
    """Random, most of it another's with `blend`. markov: what comes next depends on the last token alone."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1 if markov else 2,
        num_attention_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.25,
    )
    made = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for mine, other in zip(made.parameters(), blend.parameters() if blend else (), strict=False):
            mine.copy_(0.85 * other + 0.15 * mine)
        if markov:
            for block in made.model.layers:
                block.self_attn.o_proj.weight.zero_()
    return made


@pytest.fixture(scope="module")
def target():
    return model(0)


@pytest.fixture(scope="module")
def draft(target):
    return model(1, blend=target)


@torch.no_grad()
def likeliest(made, ids: list[int]) -> int:
    return made(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item()


def literal(
    target, draft, prompt: list[int], tokens: int, k: int, end: int | None
) -> tuple[list[int], list[DraftStep]]:
    """Greedy speculative decoding word for word, without a cache: every step checked token by token."""
    text, steps = list(prompt), []
    while len(text) < len(prompt) + tokens and (end is None or end not in text[len(prompt) :]):
        left = len(prompt) + tokens - len(text)
        guess: list[int] = []
        while len(guess) < min(k, left - 1) and (not guess or guess[-1] != end):
            guess.append(likeliest(draft, text + guess))
        kept: list[int] = []
        for token in [*guess, None]:
            kept.append(likeliest(target, text + kept))
            if kept[-1] != token or kept[-1] == end:
                break
        agreed = sum(a == b for a, b in zip(guess, kept, strict=False))
        steps.append(DraftStep(len(guess), agreed, len(kept)))
        text += kept
    return text[len(prompt) :], steps


@pytest.mark.parametrize("k", [3, *nightly(1, 6)])
def test_steps_are_those_of_a_literal_decoder(target, draft, k):
    run = assisted.generate(target, PROMPT, Sampling(40), [], k, draft)
    ids, steps = literal(target, draft, PROMPT[0].tolist(), 40, k, None)
    assert (run.ids, run.steps) == (ids, steps)
    assert run.steps[0].drafted == k  # and not as many as transformers thinks fit
    accepted, drafted = (sum(getattr(step, name) for step in steps) for name in ("accepted", "drafted"))
    assert 0 < accepted < drafted


def test_a_text_ends_where_it_does_without_a_draft(target, draft):
    """Inside what is accepted, too."""
    alone = assisted.generate(target, PROMPT, Sampling(40), [])
    assert alone.steps == [DraftStep(0, 0, 1)] * 40
    for end in sorted(set(alone.ids))[:3]:
        run = assisted.generate(target, PROMPT, Sampling(40), [end], 6, draft)
        assert run.ids == alone.ids[: alone.ids.index(end) + 1]
        assert (run.ids, run.steps) == literal(target, draft, PROMPT[0].tolist(), 40, 6, end)


def test_a_draft_like_the_target_is_always_right(target):
    run = assisted.generate(target, PROMPT, Sampling(36), [], 5, copy.deepcopy(target))
    assert run.steps == [DraftStep(5, 5, 6)] * 6


def test_prompt_lookup_repeats_what_the_text_says(target):
    alone = assisted.generate(target, PROMPT, Sampling(60), [])
    run = assisted.generate(target, PROMPT, Sampling(60), [], 4)
    assert run.ids == alone.ids
    assert sum(step.accepted for step in run.steps) and len(run.steps) < 60
    assert sum(step.tokens for step in run.steps) == 60


def test_times_add_up(target, draft):
    run = assisted.generate(target, PROMPT, Sampling(20), [], 3, draft)
    assert run.drafting + run.checking == pytest.approx(run.decode_seconds)
    assert run.decode_seconds < run.seconds


def test_what_a_checkpoint_recommends_is_not_asked_for(target, draft):
    plain = assisted.generate(target, PROMPT, Sampling(24), [], 3, draft).ids
    target.generation_config = transformers.GenerationConfig(repetition_penalty=5.0)
    assert assisted.generate(target, PROMPT, Sampling(24), [], 3, draft).ids == plain


def test_another_text_is_no_tie(target):
    own = assisted.generate(target, PROMPT, Sampling(12), []).ids
    assert assisted.parting(target, PROMPT, own, own) is None
    other = [*own[:5], (own[5] + 1) % 64, *own[6:]]
    found = assisted.parting(target, PROMPT, own, other)
    assert (found["index"], found["token"], found["expected"]) == (5, other[5], own[5])
    with torch.no_grad():
        logits = target(input_ids=torch.cat([PROMPT, torch.tensor([own[:5]])], 1)).logits[0, -1]
    assert found["margin"] == pytest.approx((logits[own[5]] - logits[other[5]]).item(), abs=1e-4)
    assert not found["tie"]
    assert not assisted.parting(target, PROMPT, own, own[:6])["tie"]  # one that ends too early


def test_two_tokens_of_one_row_are_a_tie(target):
    """What rounding may turn."""
    own = assisted.generate(target, PROMPT, Sampling(4), []).ids
    twin = (own[2] + 1) % 64
    with torch.no_grad():
        kept = target.lm_head.weight[twin].clone()
        target.lm_head.weight[twin] = target.lm_head.weight[own[2]]
        found = assisted.parting(target, PROMPT, own, [*own[:2], twin, own[3]])
        target.lm_head.weight[twin] = kept
    assert found["index"] == 2 and found["margin"] == 0 and found["tie"]


def sampled(target, draft, seeds: range) -> list[DraftedText]:
    asked = [Sampling(200, TEMPERATURE, seed) for seed in seeds]
    return [assisted.generate(target, PROMPT, how, [], 3, draft) for how in asked]


def transitions(runs: list[DraftedText], target) -> float:
    """p of χ²: counts of pairs of tokens against their probabilities by softmax; the last of eight tokens."""
    with torch.no_grad():
        logits = torch.stack([target(input_ids=torch.tensor([[t]])).logits[0, -1] for t in range(VOCABULARY)])
    counts = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for run in runs:
        for before, token in zip([PROMPT[0, -1].item(), *run.ids], run.ids, strict=False):
            counts[before, token] += 1
    expected = counts.sum(1, keepdim=True) * (logits.double() / TEMPERATURE).softmax(-1)
    statistic, freedom = 0.0, 0
    for seen, hoped in zip(counts.tolist(), expected.tolist(), strict=True):
        rare = [h < 5 for h in hoped]  # of which χ² knows nothing: together they are one cell
        cells = [(c, h) for c, h, few in zip(seen, hoped, rare, strict=True) if not few]
        rest = sum(h for h, few in zip(hoped, rare, strict=True) if few)
        if rest >= 5:
            cells.append((sum(c for c, few in zip(seen, rare, strict=True) if few), rest))
        statistic += sum((c - h) ** 2 / h for c, h in cells)
        freedom += max(0, len(cells) - (rest >= 5 or not any(rare)))
    return torch.special.gammaincc(
        *torch.tensor([[freedom / 2], [statistic / 2]], dtype=torch.float64)
    ).item()


@pytest.fixture(scope="module")
def pair():
    return model(2, VOCABULARY, markov=True), model(3, VOCABULARY, markov=True)


@pytest.fixture(scope="module")
def drawn(pair):
    return sampled(*pair, range(4))


@pytest.mark.nightly
def test_sampled_text_follows_the_targets_distribution(pair, drawn):
    """By counts of pairs against exact probabilities."""
    assert transitions(drawn, pair[0]) > 0.001


@pytest.mark.nightly
def test_alpha_is_the_overlap_of_the_distributions(pair, drawn):
    """Theorem 3.5: a token that is looked at is accepted with probability Σ min(p, q), of its own p and q."""
    with torch.no_grad():
        every = torch.arange(VOCABULARY)[:, None]
        p, q = ((made(input_ids=every).logits[:, -1] / TEMPERATURE).softmax(-1) for made in pair)
    overlap, looked_at = torch.minimum(p, q).sum(-1), []
    for run in drawn:
        before, place = [PROMPT[0, -1].item(), *run.ids], 0
        for step in run.steps:
            looked_at += before[place : place + step.judged]
            place += step.tokens
    rate, judged = acceptance_rate.acceptance(step for run in drawn for step in run.steps)
    assert judged == len(looked_at)
    assert abs(overlap[looked_at].mean().item() - rate) < 4 * acceptance_rate.standard_error(rate, judged)
