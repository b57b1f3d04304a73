"""A loaded block and its sites: linears that share an input."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial

from torch import Tensor, nn

from quantkit.layouts import FUSIONS, LinearSpec
from quantkit.models.skeleton.experts import Experts

MATES = (*FUSIONS.values(), ("w1", "w3"))  # linears that engines fuse; the last is Mixtral's
PROBE_TOKENS = 8  # a sequence long enough to show which linears share their input


@dataclass(frozen=True)
class Site:
    """Linears of a block that read the same input tensor, by their names in the block, in the order of calls.

    pool: for experts, the module that sees the inputs of all experts of the layer; a site without linears is
    that module's own and comes before the experts' sites. in_features: width of the inputs. calls: how often
    a forward pass calls the linears; inputs of several calls are added up; without a call, linears are
    rounded to nearest. whole: a forward pass must not stop at this site, because more calls follow or the
    block changed the linear for the call.
    """

    linears: tuple[str, ...]
    pool: str | None = None
    in_features: int = field(default=0, compare=False)
    calls: int = 1
    whole: bool = False

    @property
    def module(self) -> str:
        """Return the name of the module that has the site's inputs."""
        return self.linears[0] if self.linears else self.pool


@dataclass(frozen=True)
class Block:
    """A loaded block. specs: of its linears, by name in the block. sites: in the order of a forward pass.
    probe: hidden states of a few tokens that enter the block, equal on all ranks; None if data-free."""

    index: int
    module: nn.Module
    specs: dict[str, LinearSpec]
    sites: list[Site]
    probe: Tensor | None = None

    @cached_property
    def chosen(self) -> list[Site]:
        """Return sites with linears to quantize, and the layer-wide sites of their experts."""
        chosen = {site for site in self.sites if any(self.specs[name].grid for name in site.linears)}
        pools = {site.pool for site in chosen}
        return [site for site in self.sites if site in chosen or (not site.linears and site.pool in pools)]

    @property
    def around(self) -> list[Site]:
        """Return the chosen sites outside layers of experts."""
        return [site for site in self.chosen if site.linears and not site.pool]

    def quantized(self, site: Site) -> list[LinearSpec]:
        """Return the specs of a site's linears that are quantized."""
        return [self.specs[name] for name in site.linears if self.specs[name].grid]

    def reader(self, site: Site) -> LinearSpec:
        """Return one of the linears that read the site's inputs."""
        readers = (name for each in self.sites if each.pool == site.pool for name in each.linears)
        return self.specs[site.linears[0] if site.linears else next(readers)]


def fused_sites(specs: Mapping[str, LinearSpec]) -> list[Site]:
    """Return the sites of a block for jobs without calibration. specs: linears by name in the block. Linears
    that engines fuse share a site if their grids share parameters; all others are alone."""
    joint = {name for name, spec in specs.items() if spec.grid and spec.grid.joint}
    sites: dict[tuple[str, ...], None] = {}
    for name in specs:
        owner, dot, leaf = name.rpartition(".")
        mates = next((mates for mates in MATES if leaf in mates), ()) if name in joint else ()
        names = (f"{owner}{dot}{mate}" for mate in mates)
        sites[tuple(mate for mate in names if mate in joint) or (name,)] = None
    return [Site(names) for names in sites]


def find_sites(block: nn.Module, run: Callable[[], Tensor]) -> list[Site]:
    """Return the block's sites in the order of a forward pass, from one call of `run`.

    Linears whose input is the same unchanged memory form a site. Linears that are never called come first,
    because the block may still use their weights.
    """
    linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    pools = pools_of(block)
    widths: dict[str, int] = {name: module.in_features for name, module in linears.items()}
    calls: dict[str, list[tuple]] = {}
    at_rest = {name: _memory(module) for name, module in linears.items()}
    whole = set()  # Jamba takes the bias of a linear away while it calls it
    alive = []  # freed inputs could hand their address to another site's

    def record(name: str, module: nn.Module, args: tuple) -> None:
        (hidden,) = args
        alive.append(hidden)
        widths[name] = hidden.shape[-1]
        memory = hidden.data_ptr() if hidden.numel() else id(hidden)  # no tokens reached this expert
        key = (memory, hidden._version, hidden.shape, hidden.stride())
        calls.setdefault(name, []).append((name,) if name in pooling else key)
        if name in linears and (len(calls[name]) > 1 or _memory(module) != at_rest[name]):
            whole.add(name)

    pooling = set(pools.values())
    watched = linears | {name: block.get_submodule(name) for name in pooling}
    with ExitStack() as hooks:
        for name, module in watched.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(record, name)))
        run()
    groups: dict[tuple, list[str]] = {}
    for name, keys in calls.items():
        groups.setdefault(tuple(keys), []).append(name)
    never = [Site((name,), in_features=widths[name], calls=0) for name in linears if name not in calls]
    return never + [
        Site((), names[0], widths[names[0]])
        if names[0] in pooling
        else Site(tuple(names), pools.get(names[0]), widths[names[0]], len(keys), not whole.isdisjoint(names))
        for keys, names in groups.items()
    ]


def _memory(linear: nn.Module) -> list[int]:
    """Return the memory addresses of a linear's parameters."""
    return [parameter.data_ptr() for parameter in linear.parameters(recurse=False)]


def pools_of(block: nn.Module) -> dict[str, str]:
    """Return {linear of an expert: name of the module that sees the inputs of all experts of its layer}."""
    pools = {}
    for path, layer in block.named_modules():
        if isinstance(layer, Experts):
            for name, module in layer.named_modules():
                if isinstance(module, nn.Linear) and name.partition(".")[0].isdigit():
                    last = name.rpartition(".")[2] == layer.down
                    pools[f"{path}.{name}"] = f"{path}.{'between' if last else 'entering'}"
    return pools
