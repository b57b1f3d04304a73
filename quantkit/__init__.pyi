# ruff: noqa
# fmt: off
from quantkit.api import Evaluation as Evaluation, Progress as Progress, QuantkitError as QuantkitError
from quantkit.api import auto as auto, convert as convert, evaluate as evaluate, inspect as inspect
from quantkit.api import plan as plan, push as push, quantize as quantize, verify as verify

__version__: str
