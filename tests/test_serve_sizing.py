"""What fits: context, sequences at once and their cache, on figures that are worked out by hand."""

import pytest

from quantkit.capacity import source as sources
from quantkit.errors import RESOURCES, QuantkitError
from quantkit.serving.server import sizing
from quantkit.serving.server.settings import ServeSettings
from quantkit.serving.server.sizing import fit

WEIGHTS = 11_000_000
TOKEN = (
    6 * 2 * 2 * 64 * 2
)  # bytes of the demo model's cache: 6 layers, keys and values, 2 heads of 64, 16 bit


@pytest.fixture(scope="module")
def demo(demo_model):
    return sources.read(str(demo_model))


def room(demo, usable: int, on_cpu=True, usual=4, reserves=True, **settings):
    """The room, and what a user should know of it."""
    notes = []
    return fit(demo, WEIGHTS, ServeSettings(**settings), usable, on_cpu, usual, reserves, notes), tuple(notes)


def test_a_token_of_the_demo_model(demo):
    """By config.json: what the other tests count with."""
    told = demo.settings
    assert TOKEN == told.layers * 2 * told.kv_heads * told.head_dim * 2 and told.context == 512


def test_all_that_is_usual_where_there_is_room(demo):
    found, notes = room(demo, 10**9)
    assert (found.ctx, found.parallel, found.cache_bytes, notes) == (512, 4, 4 * 512 * TOKEN, ())


FITS = [  # tokens for which there is memory -> (ctx, parallel), with 128 as what is short and 32 the shortest
    (2048, (512, 4)), (2047, (256, 4)), (1024, (256, 4)), (1023, (128, 4)), (512, (128, 4)),
    (511, (128, 2)), (256, (128, 2)), (255, (128, 1)), (128, (128, 1)), (127, (64, 1)), (32, (32, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "expected"), FITS)
def test_lengths_to_what_is_short_then_sequences_then_lengths_again(demo, monkeypatch, tokens, expected):
    monkeypatch.setattr(sizing, "SHORT", 128)
    monkeypatch.setattr(sizing, "SHORTEST", 32)
    found, notes = room(demo, WEIGHTS + tokens * TOKEN)
    assert (found.ctx, found.parallel) == expected
    assert found.cache_bytes == found.ctx * found.parallel * TOKEN <= tokens * TOKEN
    assert len(notes) == (expected != (512, 4))


def test_weights_alone_are_too_large_where_the_cache_is_unknown():
    """As in a job without a model's settings."""
    assert room(None, WEIGHTS)[0].cache_bytes is None
    with pytest.raises(QuantkitError, match="weights of 11.00 MB do not fit the 11.00 MB") as refused:
        room(None, WEIGHTS - 1)
    assert refused.value.exit_code == RESOURCES


def test_what_was_asked_for_stays(demo):
    found, notes = room(demo, WEIGHTS + 512 * TOKEN, ctx=256)
    assert (found.ctx, found.parallel) == (256, 2)
    found, notes = room(demo, WEIGHTS + 2048 * TOKEN, ctx=256, parallel=8)
    assert (found.ctx, found.parallel, notes) == (256, 8, ())
    with pytest.raises(QuantkitError) as refused:
        room(demo, WEIGHTS + 2047 * TOKEN, ctx=256, parallel=8)
    assert refused.value.exit_code == RESOURCES and "a cache of 6.29 MB do not fit" in refused.value.message


def test_weights_that_leave_nothing(demo):
    with pytest.raises(QuantkitError) as refused:
        room(demo, WEIGHTS)
    assert refused.value.exit_code == RESOURCES


def test_pages_are_shared(demo):
    """One full sequence must fit; all together have what is left, or on a CPU what they need at most."""
    for on_cpu, free, taken in ((True, 600, 600), (True, 6000, 4096), (False, 6000, 6000)):
        found, notes = room(demo, WEIGHTS + free * TOKEN, on_cpu, usual=8, reserves=False)
        assert (found.ctx, found.parallel, found.cache_bytes) == (512, 8, taken * TOKEN)
        assert found.cache_tokens == taken


def test_the_cache_in_another_precision(demo):
    assert room(demo, 10**9, kv_dtype="q8_0")[0].cache_bytes == 4 * 512 * TOKEN * 34 // 64
    assert room(demo, 10**9, dtype="float32")[0].cache_bytes == 4 * 512 * TOKEN * 2


def test_a_model_of_which_nothing_is_known():
    found, _ = room(None, 10**9, ctx=1024, parallel=2)
    assert (found.ctx, found.parallel, found.cache_bytes, found.cache_tokens) == (1024, 2, None, 2048)


def test_more_than_the_model_was_made_for_is_noted(demo):
    found, notes = room(demo, 10**9, ctx=1024, parallel=2)
    assert notes == ("1,024 tokens are more than the 512 that the model was made for",)
