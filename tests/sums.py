"""Comparison of sums of floats: losses, errors, logits, Hessians.

Processors add in other orders, so two sums of the same terms differ by the rounding of the terms. Codes,
bytes and counts are compared exactly instead.
"""

import math
from typing import Any

import torch


def assert_sums(found: Any, wanted: Any, rel: float = 1e-6) -> None:
    """Assert that numbers, tensors or containers of them are equal to `rel` of the size of their terms.

    The size is that of the number itself, in a tensor the largest of the last dimension.
    """
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        found, wanted = list(found.values()), [*map(wanted.get, found)]
    elif hasattr(wanted, "__dataclass_fields__"):
        found, wanted = list(vars(found).values()), list(vars(wanted).values())
    if isinstance(wanted, list | tuple):
        for one, other in zip(found, wanted, strict=True):
            assert_sums(one, other, rel)
    elif isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        size = wanted.double().abs().amax(-1, keepdim=True)
        assert ((found.double() - wanted.double()).abs() <= rel * size).all()
    elif isinstance(wanted, float):
        assert math.isclose(found, wanted, rel_tol=rel), (found, wanted)
    else:
        assert found == wanted
