"""Choose the layers that a smaller model of the same kind keeps.

    stages of 6 layers    [local local global local local global]   [local local global local local global]
    kept, at 0, 2, 3      [local global local]                      [local global local]

Every stage keeps the layers at the same places. So stages that were alike remain alike. Two layers are alike if their kinds are
equal and their parameters belong to the same optimizer groups.
"""

from collections.abc import Hashable, Sequence, Set
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

from triaxis.engine.config.quantities.plan import stages_of
from triaxis.engine.config.quantities.update_settings import group_of
from triaxis.engine.config.schema.groups import GroupFields
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.tree import Config
from triaxis.models.specs import layer_specs, model_specs

Labels = tuple[int, ...]
"""Labels of a stage's layers; layers that are alike share a label, numbered in order of first appearance in the model."""


def stage_labels(config: Config) -> list[Labels]:
    """Number each stage's layers; layers that are alike (see the module) share a number.

    Stages are in order, without the layers for multi-token prediction.
    """
    model, groups = config.model, config.optimizer.groups
    kinds = model.kinds
    # A layer's parameter names, without the layer number, depend on its kind alone.
    names = {
        kind: [spec.name.split(".", 2)[2] for spec in layer_specs(model, kinds.index(kind))] for kind in set(kinds)
    }
    seen: dict[Hashable, int] = {}

    def label(layer: int) -> int:
        """Return a layer's number, shared by layers of the same kind and optimizer groups."""
        rules = [group_of(f"layers.{layer}.{name}", groups) for name in names[kinds[layer]]] if groups else []
        fields = [None if number is None else _fields(groups[number]) for number in rules]
        return seen.setdefault((kinds[layer], tuple(fields)), len(seen))

    return [tuple(map(label, stage.layers[: stage.num_own])) for stage in stages_of(config)]


def relations_of_stages(config: Config) -> tuple[object, ...]:
    """Relate the layers of all stages to each other.

    Layers that are alike share a label (`stage_labels`). The result has each stage's first label, and which labels come after which
    others. It also says which stages are alike, and the label of the layers for multi-token prediction.
    """
    stages = stage_labels(config)
    return (
        # the first layer; which layers come after which others
        [(labels[:1], {(one, other) for one, other in combinations(labels, 2) if one != other}) for labels in stages],
        # stages that are alike as far as both extend
        [[_first_difference(one, other) is None for other in stages] for one in stages],
        # the kind of the layers for multi-token prediction
        [labels for labels in stages if labels][-1][-1] if config.model.num_mtp_layers else None,
    )


def needed_places(config: Config) -> set[int]:
    """Find the positions in a stage, from 0, whose layers a smaller model must keep.

    Then `relations_of_stages` is unchanged: the layers' order, and which stages are alike.
    """
    stages = list(dict.fromkeys(stage_labels(config)))
    needed = {0}
    for labels in filter(None, stages):
        for one in dict.fromkeys(labels):
            first = labels.index(one)
            behind = labels[first + 1 :]
            others = [first + 1 + behind.index(other) for other in dict.fromkeys(behind) if other != one]
            needed |= {first, *others}
    for stage, another in combinations(stages, 2):
        apart = _first_difference(stage, another)
        if apart is not None and all(stage[at] == another[at] for at in needed if at < min(len(stage), len(another))):
            needed.add(apart)
    if config.model.num_mtp_layers:
        needed.add(len([labels for labels in stage_labels(config) if labels][-1]) - 1)
    return needed


def kept_layers(config: Config, needed: Set[int], sizes: Sequence[int], small_sizes: Sequence[int]) -> list[list[int]]:
    """Choose the layer numbers that each stage keeps.

    Numbers repeat if small sizes differ by more than the original sizes.

    Args:
        needed: positions in a stage whose layers must stay, from `needed_places`.
        sizes: distinct numbers of layers per stage, without 0, ascending.
        small_sizes: number of layers to keep for each entry of `sizes`.
    """
    places: list[list[int]] = []
    before = (0, 0)
    for size, small in zip(sizes, small_sizes, strict=True):
        between = sorted(range(before[0], size), key=lambda place: (place not in needed, place))
        count = small - before[1]
        places.append([*(places[-1] if places else []), *sorted((between * -(-count // len(between)))[:count])])
        before = (size, small)
    of_size = dict(zip(sizes, places, strict=True))
    return [
        [stage.layers[place] for place in of_size[stage.num_own]] if stage.num_own else []
        for stage in stages_of(config)
    ]


def kinds_of(config: Config, layers: Sequence[int]) -> dict[str, Any]:
    """Build `model.layers` for a model with these layers. The result is empty if the config lists no kinds of layers."""
    model = config.model
    if model.layers is None:
        return {}
    kinds = model.kinds
    names = [kinds[layer].name for layer in layers]
    # Kinds that no layer has keep their names.
    return {"layers": [*names, *(name for name in model.layer_kinds if name not in names)]}


def groups_of(config: Config, small: ModelConfig, layers: Sequence[int]) -> list[GroupFields]:
    """Write `optimizer.groups` for a small model whose parameters keep their groups.

    Args:
        small: small model, not yet with these groups.
        layers: original layer number for each small layer, including those for multi-token prediction.
    """
    groups = config.optimizer.groups
    had = {}
    for spec in model_specs(small):
        head, *rest = spec.name.split(".", 2)
        was = ".".join([head, str(layers[int(rest[0])]), rest[1]]) if head == "layers" else spec.name
        had[spec.name] = group_of(was, groups)
    if all(group_of(name, groups) == number for name, number in had.items()):
        return [group for number, group in enumerate(groups) if number in had.values()]
    found = []
    for number, group in enumerate(groups):
        names = [name for name, mine in had.items() if mine == number]
        whole = [
            pattern
            for pattern in (f"layers.{layer}.*" for layer in range(len(layers)))
            if all((name in names) == fnmatchcase(name, pattern) for name in had if fnmatchcase(name, pattern))
        ]
        alone = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in whole)]
        found += [GroupFields(**{**group, "match": pattern}) for pattern in (*whole, *alone)]
    return found


def _first_difference(one: Labels, other: Labels) -> int | None:
    return next((at for at, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs), None)


def _fields(group: GroupFields) -> tuple[tuple[str, object], ...]:
    return tuple(sorted((name, value) for name, value in group.items() if name != "match"))
