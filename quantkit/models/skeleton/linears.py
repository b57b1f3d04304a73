"""Linears of a model's blocks, and their other parameters."""

from torch import nn

from quantkit.errors import UNSUPPORTED, require
from quantkit.layouts import LinearSpec
from quantkit.models.skeleton import Head, Skeleton
from quantkit.models.skeleton.experts import Experts

ROUTER = "router"


def linears(skeleton: Skeleton) -> list[LinearSpec]:
    """Return every linear of every block; its grid is None."""
    specs = []
    for index, block in enumerate(skeleton.blocks):
        routers = _routers(block)
        for local, module in block.named_modules():
            if isinstance(module, nn.Linear):
                name = skeleton.names.of_block(index, f"{local}.weight")
                stored = skeleton.names.stored[name].removesuffix(".weight")
                shape = module.out_features, module.in_features
                conv1d = name in skeleton.names.transposed
                kept = ROUTER if local in routers else None
                path = name.removesuffix(".weight") if skeleton.names.language else None
                head = isinstance(module, Head)
                specs.append(LinearSpec(stored, index, local, *shape, None, kept, conv1d, path, head))
    return specs


def embedding(skeleton: Skeleton) -> LinearSpec:
    """Return the model's input embedding; its grid is None. Raises QuantkitError if none is stored."""
    module = skeleton.model.get_input_embeddings()
    name = next(name for name, other in skeleton.model.named_modules() if other is module)
    stored = skeleton.names.stored.get(f"{name}.weight")
    why = f"{skeleton.checkpoint.source} stores no {name}.weight"
    require(stored, why, "leave out --embedding", UNSUPPORTED)
    path = name if skeleton.names.language else None
    shape, index = module.weight.shape, len(skeleton.blocks)
    return LinearSpec(stored.removesuffix(".weight"), index, name, *shape, None, module=path, embedding=True)


def _routers(block: nn.Module) -> set[str]:
    """Return the linears of routers: one output per expert, or one output for a shared expert's gate."""
    routers = set()
    for path, layer in block.named_modules():
        if isinstance(layer, Experts):
            owner, _, leaf = path.rpartition(".")
            for name, module in block.get_submodule(owner).named_modules():
                inside = name.startswith(f"{leaf}.")
                if isinstance(module, nn.Linear) and module.out_features in (1, layer.count) and not inside:
                    routers.add(f"{owner}.{name}" if owner else name)
    return routers


def kept_parameters(skeleton: Skeleton) -> list[dict]:
    """Return name, shape and bytes of matrices in blocks that are not linears, such as routers and
    convolutions. These are not quantized."""
    kept = {}
    for index, block in enumerate(skeleton.blocks):
        linears = {f"{n}.weight" for n, module in block.named_modules() if isinstance(module, nn.Linear)}
        for local, parameter in block.named_parameters():
            name, names = skeleton.names.of_block(index, local), skeleton.names
            if parameter.ndim < 2 or local in linears:
                continue
            for stored in names.joined.get(name) or [names.stored[name]] * (name in names.stored):
                info = skeleton.checkpoint.infos[stored]
                kept[stored] = {"name": stored, "shape": list(info.shape), "bytes": info.nbytes}
    return list(kept.values())
