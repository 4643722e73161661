"""Cut a model's layers into pipeline stages.

    10 layers, pp 2, vpp 2        stage 0        stage 1     stage 2     stage 3
                                  embedding 0 1  2 3 4       5 6 7       8 9 head

Stages are numbered along the model; `triaxis.engine.layout.placement.Placement` maps them to ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from triaxis.engine.layout.balance import even_counts


@dataclass(frozen=True, slots=True)
class StageLayers:
    """One stage's contents.

    Attributes:
        layers: consecutive global layer numbers; on the last stage, layers for multi-token prediction come last.
        has_embedding: true on the first stage.
        has_head: true on the last stage (final norm, output head, loss).
        num_mtp: number of layers, the last in `layers`, that predict tokens further ahead.
    """

    layers: range
    has_embedding: bool
    has_head: bool
    num_mtp: int = 0

    @property
    def num_own(self) -> int:
        """Number of the model's layers, not counting those for multi-token prediction."""
        return len(self.layers) - self.num_mtp


def partition(
    num_layers: int, pp: int, vpp: int, layers_per_stage: Sequence[int] | None = None, num_mtp: int = 0
) -> tuple[StageLayers, ...]:
    """Cut the layers into pp x vpp stages; every layer is in exactly one.

    If `layers_per_stage` is not given, the cut is as even as possible. If it is not exactly even, the last stage (with the head)
    gets one layer less, then also the first stage (with the embedding), then the others from the end.

    Args:
        num_layers: number of layers in the model.
        pp, vpp: pipeline ranks, and chunks per rank.
        layers_per_stage: layer counts in stage order, which may be 0; None for the even cut.
        num_mtp: layers for multi-token prediction, which the last stage holds in addition.

    Returns:
        One entry per stage, in stage order.
    """
    counts = even_counts(num_layers, pp * vpp) if layers_per_stage is None else tuple(layers_per_stage)
    fewest = 1 if layers_per_stage is None else 0
    assert len(counts) == pp * vpp and sum(counts) == num_layers and min(counts) >= fewest, counts
    stages = []
    first = 0
    for stage, count in enumerate(counts):
        is_last = stage == len(counts) - 1
        more = num_mtp if is_last else 0
        stages.append(StageLayers(range(first, first + count + more), stage == 0, is_last, more))
        first += count
    return tuple(stages)
