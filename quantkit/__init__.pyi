# ruff: noqa
# fmt: off
from quantkit.api import Evaluation as Evaluation, Progress as Progress, QuantkitError as QuantkitError
from quantkit.api import auto as auto, evaluate as evaluate, inspect as inspect, plan as plan
from quantkit.api import quantize as quantize, verify as verify

__version__: str
