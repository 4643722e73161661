"""A layout's stages by their contents, so that predictions count equal stages once."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from triaxis.engine.config.quantities.fp8_layers import fp8_layers
from triaxis.engine.config.quantities.plan import placement_of, stages_of
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.partition import StageLayers
from triaxis.models.predict.layer_terms import LayerSort

Memo = dict[object, Any]
"""Cache that one model's predictions share across layouts."""


def layer_sorts(config: Config) -> list[LayerSort]:
    """List each layer's `LayerSort`, the properties on which its bytes and seconds depend."""
    in_fp8 = fp8_layers(config)
    return [LayerSort(kind, layer in in_fp8) for layer, kind in enumerate(config.model.kinds)]


class Contents(NamedTuple):
    """A stage's contents as far as bytes and seconds depend on them: stages with equal contents have equal bytes and seconds.

    Attributes:
        layers: each layer's sort number; sorts are numbered by their first appearance in the model.
        num_mtp: number of multi-token-prediction layers, which come last.
    """

    layers: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    num_mtp: int

    def as_stage(self) -> StageLayers:
        """Build a stage with as many layers, numbered from 0, and the same embedding, head and MTP layers."""
        return StageLayers(range(len(self.layers)), self.has_embedding, self.has_head, self.num_mtp)


@dataclass(frozen=True, slots=True)
class StageCut:
    """The stages of a layout.

    Attributes:
        stages: layers of each stage, in pipeline order.
        contents: contents of each stage, in the same order.
        ranks: a pair per pipeline rank: the indices of its stages, and their contents.
    """

    stages: tuple[StageLayers, ...]
    contents: tuple[Contents, ...]
    ranks: tuple[tuple[tuple[int, ...], tuple[Contents, ...]], ...]

    @classmethod
    def of(cls, config: Config, memo: Memo) -> "StageCut":
        """Cut a layout into stages. Layouts of one run with the same placement and layer counts share the result in `memo`."""
        placement, given = placement_of(config), config.parallel.layers_per_stage
        key = "cut", placement, tuple(given) if isinstance(given, list) else given
        if key not in memo:
            if "sorts" not in memo:
                memo["sorts"] = layer_sorts(config)
            sorts = memo["sorts"]
            # Layer kinds are slow to hash, so contents use sort numbers.
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
