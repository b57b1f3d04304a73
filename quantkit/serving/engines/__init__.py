"""Programs that run checkpoints, one file each; an engine is imported only when it is used."""

from dataclasses import dataclass

from quantkit.errors import RESOURCES, QuantkitError


@dataclass(frozen=True)
class EngineFacts:
    """How an engine holds a model. weight_bytes: in memory. kernels: name of the kernels that multiply by the
    weights, such as `bitsandbytes Linear4bit`. packed: whether weights stay quantized in memory; note: why
    they were decoded. device: torch's. attention: transformers' name of the attention implementation."""

    version: str
    weight_bytes: int
    kernels: str
    packed: bool
    dtype: str
    device: str = ""
    note: str = ""
    attention: str | None = None

    @property
    def weights(self) -> str:
        """The kernels, and why weights were decoded."""
        return self.kernels + (f"; {self.note}" if self.note else "")


def context_full(tokens: int, context: int) -> QuantkitError:
    """Return the error for a prompt of `tokens` tokens that leaves no room for an answer."""
    message = f"{tokens:,} tokens of conversation leave no room for an answer in a context of {context:,}"
    return QuantkitError(message, "/reset starts again; --ctx sets a larger context", RESOURCES)
