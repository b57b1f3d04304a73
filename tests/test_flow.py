"""What passes from block to block beside hidden states, packed into one tensor and taken out of it again."""

import pytest
import torch

from quantkit.models.skeleton.flow import Flow, Part, digits, whole_numbers


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ids_survive_every_precision(dtype):
    ids = torch.tensor([[0, 1, 255, 256, 257, 65_535, 65_536, 262_143, 2**24 - 1]])
    assert torch.equal(whole_numbers(digits(ids).to(dtype)), ids)
    assert digits(ids).max() < 1


@pytest.mark.parametrize(
    ("shapes", "part"),
    [
        (((1, 4, 8), (2, 4, 8), (1, 5, 8)), Part(0, 1, (8,))),
        (((4, 1, 4, 8), (4, 2, 4, 8), (4, 1, 5, 8)), Part(1, 2, (4, 8))),
        (((1, 4, 4, 8), (2, 4, 4, 8), (1, 5, 4, 8)), Part(0, 1, (4, 8))),
        (((4, 8), (8, 8), (5, 8)), None),  # rows and tokens on one axis
        (((1, 4, 8), (1, 4, 8), (1, 5, 8)), None),
    ],
)
def test_axes_are_found_by_what_changes(shapes, part):
    assert Part.between(*shapes) == part


def test_streams_ids_and_what_was_left_come_back():
    flow = Flow(Part(1, 2, (3, 8)), by_ids=True)
    hidden, ids = randn(3, 2, 5, 8), torch.arange(10).view(2, 5) * 30_000
    left = [{"full": (randn(2, 5, 5, 4), randn(2, 1, 5, 4))}], {0: torch.arange(20).view(2, 5, 2) % 5}
    packed = flow.pack(1, hidden, ids, left)
    assert packed.shape == (2, 5, 3 * 8 + 3 + 5 * 4 + 4 + 2 * 3)
    found, found_ids, (stores, passed) = flow.unpack(1, packed)
    assert torch.equal(found, hidden) and torch.equal(found_ids, ids)
    for name in (0, 1):
        assert torch.equal(stores[0]["full"][name], left[0][0]["full"][name])
    assert torch.equal(passed[0], left[1][0])


def test_a_part_of_the_tokens_is_cut_from_all():
    flow = Flow(Part(0, 1, (8,)))
    hidden, keys, places = randn(2, 6, 8), randn(2, 1, 6, 4), torch.full((2, 6, 2), 5)
    packed = flow.pack(1, hidden, None, (keys, places))
    found, ids, (found_keys, found_places) = flow.unpack(1, packed[:1, :3])
    assert torch.equal(found, hidden[:1, :3]) and ids is None
    assert torch.equal(found_keys, keys[:1, :, :3])
    assert found_places.max() == 2  # the last token that is there


def test_hidden_states_alone_are_the_flow():
    flow = Flow(Part(0, 1, (8,)))
    hidden = randn(2, 6, 8)
    assert flow.pack(1, hidden, None, ()).data_ptr() == hidden.data_ptr()
    assert torch.equal(flow.unpack(1, hidden)[0], hidden)


def test_what_is_not_by_token_is_no_part():
    with pytest.raises(ValueError, match=r"\[2, 7\] of 2 rows and 6 tokens"):
        Flow(Part(0, 1, (8,))).pack(1, randn(2, 6, 8), None, (randn(2, 7),))
