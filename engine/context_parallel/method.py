"""Chooses a run's mixer, by which attention reaches keys and values on other ranks."""

from collections.abc import Callable
from functools import partial

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.config.quantities.context_parallel import gathers_keys
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.attention import ContextParallelRegion, GatheredKeys
from triaxis.engine.context_parallel.gathered_rows import GatheredRows
from triaxis.engine.context_parallel.mixer import Mixer
from triaxis.engine.context_parallel.ulysses import ExchangedHeads


def mixing_of(config: Config, kernel: str, axis: Axis) -> Callable[..., Mixer]:
    """Choose the constructor for a run's mixers, which takes the fields that all mixers share.

    Args:
        config: the run's configuration; `auto` in `recompute` is already resolved.
        kernel: attention kernel's name.
        axis: ranks that share rows.
    """
    if axis.size == 1:
        return Mixer
    if not gathers_keys(config):
        return partial(ExchangedHeads, axis=axis)
    gathered = GatheredRows if kernel == "explicit" or config.model.mla is not None else GatheredKeys
    return partial(gathered, region=ContextParallelRegion.of(config.parallel, config.recompute, axis))
