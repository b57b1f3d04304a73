"""torch and transformers, imported without what no command does: compile, train, spread over processes.

`import torch, transformers` is half of what a data-free job of a small model takes, and importing the class
of a model after them was the other half: it brings torch's compiler with sympy, its distributed tensors and
scipy.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.cli.stand_ins import deferred, standing_in


def _unmarked(function: Callable | None = None, *_: Any, **__: Any) -> Callable:
    """In place of a decorator that tells torch's compiler how to treat a function."""
    return _unmarked if function is None else function


MASKS = "torch._dynamo._trace_wrapped_higher_order_op"
UNUSED = {
    # Every operation on the meta device asks the compiler, too, not to follow it: this one stays.
    "torch._dynamo": {name: _unmarked for name in ("allow_in_graph", "assume_constant_result", "disable")},
    MASKS: deferred(MASKS, "TransformGetItemToIndex"),
    "scipy.optimize": deferred("scipy.optimize", "linear_sum_assignment"),  # losses of object detection
}


@contextmanager
def lean() -> Iterator[None]:
    """Import what all models have in common that way; for the other imports of a command inside of it.

    Nothing of that is garbage: it is collected neither meanwhile nor later. No effect in a process that has
    imported transformers' models before.
    """
    if "transformers.modeling_utils" in sys.modules:
        yield
        return
    enabled = gc.isenabled()
    gc.disable()
    try:
        _import_libraries()
        with standing_in(UNUSED, staying=("torch._dynamo",)):
            from transformers import GenerationMixin, PreTrainedModel  # noqa: F401

            yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def _import_libraries() -> None:
    """torch, and transformers on a torch that seems built without its distributed package.

    transformers asks for it when its modules are imported. Only its `from_pretrained` and its trainer would
    use it, and neither is called here: blocks are read one by one.
    """
    import torch  # noqa: F401
    import transformers.utils
    from transformers.utils import import_utils

    for module in (import_utils, transformers.utils):
        module.is_torch_distributed_available = _no
    _list_models_once(transformers, import_utils)


def _list_models_once(transformers: Any, import_utils: Any) -> None:
    """Import `transformers.models` from the list of its 1,600 files that `import transformers` has just made.

    Its own cache of such lists forgets, as it holds fewer than there are models.
    """
    scan = import_utils.create_import_structure_from_path
    place = Path(transformers.__file__).parent / "models"
    known = {str(place), str(place / "__init__.py")}
    import_utils.create_import_structure_from_path = lambda path: scan(place if str(path) in known else path)
    try:
        importlib.import_module("transformers.models")
    finally:
        import_utils.create_import_structure_from_path = scan


def _no() -> bool:
    return False
