"""What an extension's parts cost in a layout: the function that measures it, and its result in a configuration."""

from collections.abc import Callable

from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.schema.extension_parts import NO_COSTS, OwnCosts
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes

Measure = Callable[[Config, ParallelSizes], OwnCosts]
"""Function that measures what an extension's parts cost in a layout."""


def as_ours(config: Config, sizes: ParallelSizes) -> OwnCosts:
    """Return zero extra costs, as if an extension's parts cost as much as the built-in ones."""
    return NO_COSTS


def with_costs(config: Config, costs: OwnCosts) -> Config:
    """Attach measured costs to the configuration."""
    own = config.model.extension
    return config if own is None else with_value(config, "model.extension", own.with_costs(costs))
