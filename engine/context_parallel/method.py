"""The one place that asks how attention reaches the tokens of a row; what it returns is built into the model."""

from collections.abc import Callable
from functools import partial

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.config.context_parallel import gathers_keys
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.attention import ContextParallelRegion, GatheredKeys
from triaxis.engine.context_parallel.gathered_rows import GatheredRows
from triaxis.engine.context_parallel.mixer import Mixer
from triaxis.engine.context_parallel.ulysses import ExchangedHeads


def mixing_of(config: Config, kernel: str, axis: Axis) -> Callable[..., Mixer]:
    """Return what builds the mixers of a run from the fields that all mixers have.

    Args:
        config: of the run; `auto` of `recompute` is already resolved.
        kernel: that computes attention.
        axis: the ranks that share rows.
    """
    if axis.size == 1:
        return Mixer
    if not gathers_keys(config):
        return partial(ExchangedHeads, axis=axis)
    gathered = GatheredRows if kernel == "explicit" or config.model.mla is not None else GatheredKeys
    return partial(gathered, region=ContextParallelRegion.of(config.parallel, config.recompute, axis))
