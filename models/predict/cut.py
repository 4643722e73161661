"""The stages of a layout by what is in them: predictions count equal ones once."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from triaxis.engine.config.fp8 import fp8_layers
from triaxis.engine.config.plan import placement_of, stages_of
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.partition import StageLayers
from triaxis.models.predict.layer_terms import LayerSort

Memo = dict[object, Any]
"""What predictions of one model share, whatever the layout."""


def layer_sorts(config: Config) -> list[LayerSort]:
    """Return the sort of each layer."""
    in_fp8 = fp8_layers(config)
    return [LayerSort(kind, layer in in_fp8) for layer, kind in enumerate(config.model.kinds)]


class Contents(NamedTuple):
    """Contents of a stage as far as bytes and seconds depend on them: stages that are equal in this hold and take the same.

    Attributes:
        layers: numbers of their sorts, in the order in which the model has them first.
        num_mtp: of the layers, how many predict tokens further ahead; the last ones.
    """

    layers: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    num_mtp: int

    def as_stage(self) -> StageLayers:
        """Return a stage with as many layers and the same ends."""
        return StageLayers(range(len(self.layers)), self.has_embedding, self.has_head, self.num_mtp)


@dataclass(frozen=True, slots=True)
class StageCut:
    """The stages of a layout.

    Attributes:
        contents: of each stage.
        ranks: numbers of the stages of each pipeline rank, and their contents.
    """

    stages: tuple[StageLayers, ...]
    contents: tuple[Contents, ...]
    ranks: tuple[tuple[tuple[int, ...], tuple[Contents, ...]], ...]

    @classmethod
    def of(cls, config: Config, memo: Memo) -> "StageCut":
        """Return the cut of a layout, from those of other layouts of the run where it is there."""
        placement, given = placement_of(config), config.parallel.layers_per_stage
        key = "cut", placement, tuple(given) if isinstance(given, list) else given
        if key not in memo:
            if "sorts" not in memo:
                memo["sorts"] = layer_sorts(config)
            sorts = memo["sorts"]
            # Records of kinds take long to hash.
            numbers = {sort: number for number, sort in enumerate(dict.fromkeys(sorts))}
            numbered = tuple(numbers[sort] for sort in sorts)
            stages = stages_of(config, memo)
            contents = tuple(
                Contents(numbered[one.layers.start : one.layers.stop], one.has_embedding, one.has_head, one.num_mtp)
                for one in stages
            )
            mine = [placement.stages_on(rank) for rank in range(placement.pp)]
            ranks = tuple((each, tuple(contents[stage] for stage in each)) for each in mine)
            memo[key] = cls(stages, contents, ranks)
        cut: StageCut = memo[key]
        return cut
