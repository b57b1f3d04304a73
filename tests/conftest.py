"""Fixtures of all tests. Everything is tiny, seeded, made here or in the repository, and offline."""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from pathlib import Path

import families
import pytest
import torch
from stand_in_hub import StandInHub

REPOSITORY = Path(__file__).parents[1]
torch.set_num_threads(1)


@pytest.fixture
def tiny_model(tmp_path):
    """`tiny_model("llama", num_hidden_layers=2)` -> folder of a new random checkpoint (see families.py).

    `tokenizer=True` adds the tiny tokenizer, `tokenizer="bos"` the one that begins texts with BOS.
    """

    def make(family: str, *, tokenizer: bool | str = False, name: str | None = None, **arguments) -> Path:
        folder = families.save_model(tmp_path / (name or family), family, **arguments)
        if tokenizer:
            families.save_tokenizer(folder, bos=tokenizer == "bos")
        return folder

    return make


@pytest.fixture
def hub_server():
    """An empty stand-in for the hub, running (see stand_in_hub.py)."""
    with StandInHub() as server:
        yield server


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The trained demo model that the repository ships, read-only: copy it before changing it."""
    return REPOSITORY / "tests" / "data" / "demo-llama-6m"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Oracles, models and texts beside the repository; tests that need them are skipped without."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent: oracles and larger models lie only there")
    return folder
