from quantkit.api import Evaluation as Evaluation
from quantkit.api import Progress as Progress
from quantkit.api import QuantkitError as QuantkitError
from quantkit.api import Result as Result
from quantkit.api import auto as auto
from quantkit.api import evaluate as evaluate
from quantkit.api import inspect as inspect
from quantkit.api import plan as plan
from quantkit.api import quantize as quantize
from quantkit.api import verify as verify

__version__: str
