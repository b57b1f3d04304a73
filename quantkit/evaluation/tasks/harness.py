"""A streamed model for lm-evaluation-harness: log-likelihoods only.

Tokenizing and cutting of long texts follow the harness's own class for transformers models, so that the
figures can be compared.
"""

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from quantkit.evaluation.sampling import beginning
from quantkit.evaluation.stream import Listener, StreamedModel
from quantkit.evaluation.tasks.score import score

DEFAULT_CONTEXT = 2048  # the harness's value for models without a limit


class HarnessModel(TemplateLM):
    """Implements lm_eval.api.model.LM with `score`."""

    def __init__(self, model: StreamedModel, listen: Listener):
        super().__init__()
        self.model = model
        self.listen = listen
        self.tokenizer = model.skeleton.checkpoint.tokenizer
        self.max_length = model.skeleton.checkpoint.context or DEFAULT_CONTEXT

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Return the token id to use as an empty context. Raises QuantkitError if there is none."""
        return beginning(self.model.skeleton.checkpoint, "this task needs one: choose another task")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Return the token ids of a text; by default with special tokens, unless it begins with BOS."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        ids = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        self.model.skeleton.checkpoint.check_ids(ids)
        return ids

    def _loglikelihood_tokens(self, requests, **kwargs) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether greedy) per request: (texts, context ids, continuation ids)."""
        pairs = [(context, continuation) for _, context, continuation in requests]
        return score(self.model, pairs, self.max_length, self.listen)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts, cut into windows that do not overlap."""
        pairs, counts = [], []
        for (text,) in (request.args for request in requests):
            windows = list(
                get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            )
            pairs += map(make_disjoint_window, windows)
            counts.append(len(windows))
        scores = iter(score(self.model, pairs, self.max_length, self.listen))
        return [sum(next(scores).log_prob for _ in range(count)) for count in counts]

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Raise NotImplementedError; `Tasks.prepare` rejects tasks that generate text."""
        raise NotImplementedError
