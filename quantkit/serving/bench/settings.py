"""The flags of `quantkit bench` and of its subcommands attention and batching."""

from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any, ClassVar

from quantkit.errors import USAGE, require
from quantkit.options import option
from quantkit.serving.settings import Known, LocalOptions

KEYS = {"prompt_tokens": "prompt", "implementations": "attn", "policies": "batching"}  # names in the JSON
LISTS = ("batch", "prompt_tokens")
STRATEGIES = ("static", "dynamic", "continuous")


@dataclass(frozen=True, order=True)
class Workload:
    """`batch` sequences at once, each of `prompt` tokens."""

    batch: int
    prompt: int


@dataclass(frozen=True)
class CommonSettings(LocalOptions):
    """Flags of all three commands."""

    least: ClassVar[dict[str, float]] = dict.fromkeys((*LISTS, "tokens", "repeats", "rounds", "requests"), 1)
    tokens: int = option(64, "New tokens of each sequence.", short="-n")
    seed: int = option(0, "Seed of the prompts.")
    repeats: int = option(3, "Number of measured runs.")

    def record(self) -> dict[str, Any]:
        """Return the settings as values that JSON can store."""
        names = [field.name for field in fields(self) if field.metadata and field.name != "quality"]
        lists = [name for name in LISTS if getattr(self, name) is not None]
        values = {name: getattr(self, name) for name in names} | {"threads": self.cores}
        values |= {name: self.numbers(name) for name in lists}
        return {KEYS.get(name, name): value for name, value in values.items()}


@dataclass(frozen=True)
class BenchSettings(CommonSettings):
    """Flags of `quantkit bench`.

    Every workload is run `warmup` times unmeasured and `repeats` times measured, in each of `rounds`.
    """

    # the prefill makes the first token; latency needs another
    least: ClassVar[dict[str, float]] = CommonSettings.least | {"tokens": 2, "warmup": 0}
    known: ClassVar[Known] = {"engine": ("no engine", ("auto", "transformers", "llama.cpp"))}
    batch: str = option("1", "Sequences at once: a number, or several separated by commas, such as 1,4,16.")
    prompt_tokens: str = option(
        "128", "Tokens of each prompt: a number, or several separated by commas, such as 128,512."
    )
    repeats: int = option(3, "Measured runs in each round.")
    rounds: int = option(2, "Rounds: in each, every model runs once, in a new process.")
    warmup: int = option(1, "Unmeasured runs before the measured runs of a round.")
    engine: str = option(
        "auto",
        "transformers or llama.cpp, or both separated by a comma. auto: llama.cpp for GGUF files if "
        "installed, else transformers.",
    )
    decoded: bool = option(
        False, "In transformers, compute with decoded weights instead of the layout's own kernels."
    )
    quality: tuple[str, ...] = option(
        (),
        "Result of quantkit eval --json, whose KL divergence and perplexity are shown next to the speed. "
        "Repeatable.",
    )
    trust_remote_code: bool = False

    @property
    def workloads(self) -> list[Workload]:
        """Return every pair of batch size and prompt length; short prompts first."""
        prompts, batches = self.numbers("prompt_tokens"), self.numbers("batch")
        return [Workload(batch, prompt) for prompt in prompts for batch in batches]

    def check(self) -> None:
        """Raise QuantkitError for invalid values."""
        hint = "quantkit serve ./model --engine vllm, then vllm bench serve"
        require("vllm" not in self.names("engine"), "bench does not run vLLM", hint, USAGE)
        super().check()


@dataclass(frozen=True)
class AttentionSettings(CommonSettings):
    """Flags of `quantkit bench attention`."""

    implementations: str = option(
        "eager,sdpa" + ",flash_attention_2" * bool(find_spec("flash_attn")),
        "Attention implementations by their names in transformers, separated by commas.",
    )
    prompt_tokens: str | None = option(
        None, "Prompt lengths, such as 256,1024. (default: 256,512,1024,2048,4096 within the model's context)"
    )
    batch: int = option(1, "Prompts at once.")
    tokens: int = option(8, "New tokens after each prompt.", short="-n")


@dataclass(frozen=True)
class BatchingSettings(CommonSettings):
    """Flags of `quantkit bench batching`."""

    least: ClassVar[dict[str, float]] = CommonSettings.least | {"rate": 1e-6}
    known: ClassVar[Known] = {"policies": ("unknown policy", STRATEGIES)}
    policies: str = option(
        ",".join(STRATEGIES),
        "Ways of batching, separated by commas. static: wait for a full batch. dynamic: wait 0.25 seconds at "
        "most. continuous: requests join and leave at every step.",
    )
    requests: int = option(32, "Number of requests.")
    rate: float = option(8.0, "Requests a second, on average; they arrive at random.")
    batch: int = option(8, "Sequences at once, at most.")
    prompt_tokens: int = option(64, "Tokens of a prompt, on average.")
    tokens: int = option(32, "Tokens of an answer, on average.", short="-n")
    repeats: int = option(3, "Number of measured rounds.")
