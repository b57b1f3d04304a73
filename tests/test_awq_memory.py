"""AWQ of a mixture whose experts are away: the same bytes as with the block in memory as a whole."""

import families
import jobs
import pytest
from nights import nightly
from test_experts_fused import MIXTURES

from quantkit.models.machine import expert_share
from quantkit.models.skeleton.streaming import Keeper
from quantkit.quantize.transforms import awq
from quantkit.quantize.transforms.scaling import Losses

EXCLUDED = r"experts\.1\.|experts\.2\.(w1|w3|gate_proj|up_proj)$|experts\.3\.(w2|down_proj)$|linear\.1$"


@pytest.fixture
def scaled(monkeypatch):
    """Folds are scaled whether that pays or not, by much."""
    monkeypatch.setattr(families, "FAMILIES", families.FAMILIES | MIXTURES)
    monkeypatch.setattr(Losses, "of", lambda self, scale, limit: 0.0)
    monkeypatch.setattr(awq, "search", lambda losses, magnitude, n_grid: awq.candidate(magnitude, 0.6))


@pytest.mark.parametrize(
    ("family", "dtype", "moved"),
    [
        ("qwen2_moe", "float32", 4),
        *nightly(("mixtral", "bfloat16", 4), ("llama4", "float32", 4), ("gpt_oss", "bfloat16", 4)),
    ],
)
def test_experts_that_are_away_are_scaled_as_those_in_memory(
    scaled, tiny_model, tmp_path, monkeypatch, family, dtype, moved
):
    """moved: parameters of experts that stay in 16 bit and are not the source's any more, in a block."""
    folder = tiny_model(family, tokenizer=True, dtype=dtype, num_hidden_layers=1)
    arguments = {"calibration": jobs.calibration(tmp_path), "exclude": (EXCLUDED,), "batch_size": 2}
    changed, keep_changed = [], Keeper.keep_changed

    def listen(self, name, again):
        changed.append(name)
        keep_changed(self, name, again)

    monkeypatch.setattr(Keeper, "keep_changed", listen)
    jobs.quantize("awq", folder, tmp_path / "streamed" / "out", {"group_size": 32}, **arguments)
    with monkeypatch.context() as patch:
        patch.setattr(expert_share, "streams", lambda nbytes, free: False)
        jobs.quantize("awq", folder, tmp_path / "resident" / "out", {"group_size": 32}, **arguments)
    one, other = (jobs.contents(tmp_path / place / "out") for place in ("streamed", "resident"))
    assert one.keys() == other.keys()
    assert [file for file in one if one[file] != other[file]] == []
    assert len(changed) == moved
