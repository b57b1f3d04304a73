"""What fits: context, sequences at once and their cache, on figures that are worked out by hand."""

import pytest

from quantkit.capacity import source as sources
from quantkit.errors import RESOURCES, QuantkitError
from quantkit.serving.server import sizing
from quantkit.serving.server.settings import Settings
from quantkit.serving.server.sizing import Memory, fit

WEIGHTS = 11_000_000
TOKEN = (
    6 * 2 * 2 * 64 * 2
)  # bytes of the demo model's cache: 6 layers, keys and values, 2 heads of 64, 16 bit


@pytest.fixture(scope="module")
def demo(demo_model):
    return sources.read(str(demo_model))


def room(demo, usable: int | None, kind="cpu", usual=4, reserves=True, **settings) -> sizing.Room:
    return fit(demo, WEIGHTS, Settings(**settings), Memory(kind, usable), usual, reserves)


def test_a_token_of_the_demo_model(demo):
    """By config.json: what the other tests count with."""
    told = demo.settings
    assert TOKEN == told.layers * 2 * told.kv_heads * told.head_dim * 2 and told.context == 512


def test_all_that_is_usual_where_there_is_room(demo):
    found = room(demo, 10**9)
    assert (found.ctx, found.parallel, found.cache_bytes, found.notes) == (512, 4, 4 * 512 * TOKEN, ())


FITS = [  # tokens for which there is memory -> (ctx, parallel), with 128 as what is short and 32 the shortest
    (2048, (512, 4)), (2047, (256, 4)), (1024, (256, 4)), (1023, (128, 4)), (512, (128, 4)),
    (511, (128, 2)), (256, (128, 2)), (255, (128, 1)), (128, (128, 1)), (127, (64, 1)), (32, (32, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "expected"), FITS)
def test_lengths_to_what_is_short_then_sequences_then_lengths_again(demo, monkeypatch, tokens, expected):
    monkeypatch.setattr(sizing, "SHORT", 128)
    monkeypatch.setattr(sizing, "SHORTEST", 32)
    found = room(demo, WEIGHTS + tokens * TOKEN)
    assert (found.ctx, found.parallel) == expected
    assert found.cache_bytes == found.ctx * found.parallel * TOKEN <= tokens * TOKEN
    assert len(found.notes) == (expected != (512, 4))


def test_what_was_asked_for_stays(demo):
    found = room(demo, WEIGHTS + 512 * TOKEN, ctx="256")
    assert (found.ctx, found.parallel) == (256, 2)
    found = room(demo, WEIGHTS + 2048 * TOKEN, ctx="256", parallel=8)
    assert (found.ctx, found.parallel, found.notes) == (256, 8, ())
    with pytest.raises(QuantkitError) as refused:
        room(demo, WEIGHTS + 2047 * TOKEN, ctx="256", parallel=8)
    assert refused.value.exit_code == RESOURCES and "a cache of 6.29 MB do not fit" in refused.value.message


def test_weights_that_leave_nothing(demo):
    with pytest.raises(QuantkitError) as refused:
        room(demo, WEIGHTS)
    assert refused.value.exit_code == RESOURCES


def test_pages_are_shared(demo):
    """One full sequence must fit; all together have what is left, or on a CPU what they need at most."""
    for kind, free, taken in (("cpu", 600, 600), ("cpu", 6000, 4096), ("cuda", 6000, 6000)):
        found = room(demo, WEIGHTS + free * TOKEN, kind, usual=8, reserves=False)
        assert (found.ctx, found.parallel, found.cache_bytes) == (512, 8, taken * TOKEN)
        assert found.cache_tokens == taken


def test_the_cache_in_another_precision(demo):
    assert room(demo, 10**9, kv_dtype="q8_0").cache_bytes == 4 * 512 * TOKEN * 34 // 64
    assert room(demo, 10**9, dtype="float32").cache_bytes == 4 * 512 * TOKEN * 2


def test_memory_that_is_not_known(demo):
    found = room(demo, None, ctx="1024", parallel=2)
    assert (found.ctx, found.parallel, found.cache_bytes) == (1024, 2, None)
    assert found.cache_tokens == 2048
    assert found.notes == ("1,024 tokens are more than the 512 that the model was made for",)
