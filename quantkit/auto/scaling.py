"""The job's transform of a block, applied to one unit at a time.

A transform divides the inputs of a site by s, multiplies the site's columns by s, and divides the rows of the
linear that produces these inputs. So the job quantizes `diag(f) W diag(s)`, and so does this file. Divided by
both scales, the quantized values have the same effect in the original block as in the transformed block. So
units can be replaced in the original block, and only the scales are stored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from quantkit.quantize.calibrate.measure import Measuring
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.calibrate.statistics import SiteStatistics
from quantkit.quantize.transforms.scaling import ColumnScaling


@dataclass(frozen=True)
class Scales:
    """A block's scales. columns: {site: s `[in]`}. rows: {linear: f `[out]`}."""

    columns: Mapping[Site, Tensor] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)

    def scaled(self, site: Site, name: str, weight: Tensor) -> Tensor:
        """Return the transformed weight `[out, in]`, which the job quantizes."""
        weight = weight if site not in self.columns else weight * self.columns[site]
        return weight if name not in self.rows else weight * self.rows[name][:, None]

    def undone(self, site: Site, name: str, values: Tensor) -> Tensor:
        """Return a transformed weight's values `[out, in]` for use in the original block."""
        values = values if site not in self.columns else values / self.columns[site]
        return self.rows_undone(name, values)

    def rows_undone(self, name: str, values: Tensor) -> Tensor:
        """Return values divided by the row scales only: errors on the scale of the original outputs."""
        return values if name not in self.rows else values / self.rows[name][:, None]

    def entering(self, site: Site, statistics: SiteStatistics) -> SiteStatistics:
        """Return a site's statistics after the transform. `statistics` is changed in place."""
        return statistics if site not in self.columns else statistics.divided(self.columns[site])


def of_block(measuring: Measuring, transform: ColumnScaling | None) -> Scales:
    """Apply the transform to a block, except experts; return the scales and restore the block."""
    block = measuring.block
    if transform is None or not block.around:
        return Scales()
    statistics = measuring.at_once(block.around, transform.sample)
    original = block.module.state_dict()  # the transform replaces parameters
    transformed = transform.apply(measuring.view(statistics))
    block.module.load_state_dict(original, assign=True)
    linears = {name for site in block.around for name in site.linears}
    rows = {name: factor for name, factor in transformed.row_factors.items() if name in linears}
    return Scales(transformed.divided_by, rows)
