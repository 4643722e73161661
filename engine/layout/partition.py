"""Which layers each pipeline stage holds (no torch here).

    10 layers, pp 2, vpp 2        stage 0        stage 1     stage 2     stage 3
                                  embedding 0 1  2 3 4       5 6 7       8 9 head

Stages are numbered along the model; `engine.pipeline.actions.Placement` says which rank holds which.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class StageLayers:
    """What one stage holds.

    Attributes:
        layers: global layer numbers, consecutive.
        has_embedding: true of the first stage.
        has_head: true of the last stage (final norm, output head, loss).
    """

    layers: range
    has_embedding: bool
    has_head: bool


def partition(
    num_layers: int, pp: int, vpp: int, layers_per_stage: Sequence[int] | None = None
) -> tuple[StageLayers, ...]:
    """Cut the layers into pp x vpp stages; every layer is in exactly one.

    Without `layers_per_stage` the cut is as even as possible. When the layers do not divide, the larger stages are in the
    middle, since the first stage carries the embedding too and the last one the head, the heaviest part beside the layers:
    the last stage is the first to get one layer less, then the first, then the stages from the end.

    Args:
        num_layers: layers of the model.
        pp, vpp: pipeline ranks, chunks per rank.
        layers_per_stage: layers of each stage in stage order; 0 is allowed here, and only here.

    Returns:
        One entry per stage, in stage order.

    Raises:
        ScheduleError: `problems` found some; all are in the message.
    """
    found = problems(num_layers, pp, vpp, layers_per_stage)
    if found:
        raise ScheduleError("\n".join(found))
    counts = _even(num_layers, pp * vpp) if layers_per_stage is None else tuple(layers_per_stage)
    stages = []
    first = 0
    for stage, count in enumerate(counts):
        stages.append(StageLayers(range(first, first + count), stage == 0, stage == len(counts) - 1))
        first += count
    return tuple(stages)


def problems(num_layers: int, pp: int, vpp: int, layers_per_stage: Sequence[int] | None = None) -> list[str]:
    """What is wrong with a partition, one readable sentence or two each; empty: nothing. Sizes are at least 1."""
    num_stages = pp * vpp
    if layers_per_stage is None:
        if num_layers >= num_stages:
            return []
        return [
            f"model.num_layers={num_layers} with parallel.pp={pp} x parallel.vpp={vpp} = {num_stages} stages: a stage needs "
            "a layer, or its rank would only pass activations on. Nearest: "
            + ", ".join(_nearest_sizes(num_layers, pp, vpp))
            + ", or list parallel.layers_per_stage, where 0 is allowed."
        ]
    found = []
    if len(layers_per_stage) != num_stages:
        found.append(
            f"parallel.layers_per_stage={list(layers_per_stage)} has {len(layers_per_stage)} entries for parallel.pp={pp} x "
            f"parallel.vpp={vpp} = {num_stages} stages: a stage without an entry would hold nothing. Give one entry per stage, "
            "in the order of the model."
        )
    if any(count < 0 for count in layers_per_stage):
        found.append(
            f"parallel.layers_per_stage={list(layers_per_stage)} has a negative entry: no stage can hold fewer than 0 layers, "
            "and others would hold layers twice. Use 0 for a stage without layers."
        )
    total = sum(layers_per_stage)
    if total != num_layers:
        consequence = f"{num_layers - total} layers would be dropped" if total < num_layers else "there are not so many"
        found.append(
            f"parallel.layers_per_stage={list(layers_per_stage)} adds up to {total} and model.num_layers is {num_layers}: "
            f"{consequence}. Change the entries, or set model.num_layers={total}."
        )
    return found


def _even(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage, at most one apart; who gets less is told in `partition`."""
    most = -(-num_layers // num_stages)
    counts = [most] * num_stages
    first_to_lose = [num_stages - 1, 0, *range(num_stages - 2, 0, -1)]
    for stage in first_to_lose[: most * num_stages - num_layers]:
        counts[stage] -= 1
    return tuple(counts)


def _nearest_sizes(num_layers: int, pp: int, vpp: int) -> list[str]:
    """The largest change-one-number ways to give each stage a layer."""
    ways = []
    if num_layers >= pp:
        ways.append(f"parallel.vpp={num_layers // pp}")
    if num_layers >= vpp:
        ways.append(f"parallel.pp={num_layers // vpp}")
    ways.append(f"model.num_layers={pp * vpp}")
    return ways
