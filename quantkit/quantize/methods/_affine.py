"""What the methods of affine grids share: bits, group size and zero points of linears, head and embedding."""

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, require
from quantkit.layouts import Layout, Width, spec_of_shape
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout
from quantkit.layouts.compressed_tensors.integers import PackQuantized
from quantkit.layouts.mlx import MlxLayout
from quantkit.quantize.methods import Method
from quantkit.quantize.methods._override import Override

USUAL = 4096  # width of a linear that every layout can hold


def check_grid(bits: int, group_size: int | None, where: str = "") -> None:
    """Raise QuantkitError for bits or group sizes that no layout has. where: the flag that set them, if not
    --bits or --group-size. group_size: None if it is still open."""
    require(2 <= bits <= 8, f"{where or f'--bits {bits}'}: no such width", "choose 2 to 8 bits", USAGE)
    what = f"{where or f'--group-size {group_size}'} is invalid"
    fits = group_size in (None, -1) or group_size >= 8
    require(fits, what, "choose groups of -1, 16, 32, 64 or 128", USAGE)


class AffineMethod(Method):
    """A method with the options `bits`, `group_size`, `sym`, `head`, `embedding` and `layout`."""

    unused = ()

    def check(self) -> None:
        """Raise QuantkitError also for bits and groups that the layout cannot hold in any linear, and for
        bits of head or embedding that no client of the layout reads."""
        method = self.with_groups(()) if self.options.group_size is None else self
        options, layout = method.options, method.layout
        outside = {"head": options.head, "embedding": options.embedding}
        outside = {name: bits for name, bits in outside.items() if bits}
        for name, bits in {"bits": options.bits, **outside}.items():
            check_grid(bits, options.group_size, "" if name == "bits" else f"--{name} {bits}")
            reason = layout.check(spec_of_shape(USUAL, USUAL, method._width(bits, options.group_size, USUAL)))
            flag = f"--layout {options.layout}" if name == "bits" else f"--{name} {bits}"
            what, _, advice = (reason or "").partition(": ")
            hint = advice or "choose bits and groups that it has"
            require(not reason, f"{flag}: {what}", hint, UNSUPPORTED)
        for name in sorted(outside.keys() - layout.outside):
            what = f"--{name} {outside[name]}: clients of --layout {options.layout} read no packed {name}"
            hint = f"leave out --{name}, or use --layout mlx or quantkit gguf"
            raise QuantkitError(what, hint, UNSUPPORTED)
        super().check()

    def _other_layout(self, inputs: str = "") -> Layout:
        """Return the layout for `--layout mlx` or `compressed-tensors`. inputs: type of linears' inputs."""
        bits, group_size = self.options.bits, self.options.group_size
        if self.options.layout == "mlx":
            return MlxLayout(bits, group_size)
        return CompressedTensorsLayout(PackQuantized(bits, group_size, self.options.sym, inputs))

    def width(self, in_features: int) -> Width:
        return self._width(self.options.bits, self.options.group_size, in_features)

    def overridden(self, in_features: int, override: Override) -> Width:
        """Return the override's bits and group size; QuantkitError if no layout has them."""
        size = self.options.group_size if override.group_size is None else override.group_size
        check_grid(override.bits, size, override.flag)
        return self._width(override.bits, size, in_features)

    def _width(self, bits: int, group_size: int, in_features: int) -> Width:
        return Width(bits, in_features if group_size == -1 else group_size, self.options.sym)

    @property
    def _bits_and_groups(self) -> str:
        """The part of derived names for bits and group size, such as `w4g128`."""
        size = self.options.group_size
        return f"w{self.options.bits}" + ("channel" if size == -1 else f"g{size}")

    @property
    def _outside(self) -> str:
        """The part of derived names for matrices outside the blocks, such as `-head8-embedding8`."""
        bits = {"head": self.options.head, "embedding": self.options.embedding}
        return "".join(f"-{name}{number}" for name, number in bits.items() if number)
