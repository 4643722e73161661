"""Choose how many layers each pipeline stage gets, so that the ranks' work is balanced.

    8 layers of work 1, a head of 2, pp 4        even      2 2 2 2 + head    the busiest rank has 4.
                                                 balanced  2 3 2 1 + head    the busiest rank has 3.

A pipeline step takes as long as its busiest rank. So cuts are compared by the busiest rank's work, then by the largest stage's. Of
equal cuts, the one with the most even loads is taken. Ties that remain take a layer from the last stage first, then the
first, then the others from the end: 10 equal layers on 4 stages become 2 3 3 2.
"""

from collections.abc import Sequence
from itertools import accumulate


def balance(layers: Sequence[int], head: int, rank_of_stage: Sequence[int]) -> tuple[int, ...]:
    """Choose each stage's layer count to give the busiest rank as little work as possible.

    The choice is optimal with one stage per rank, and for layers with equal work. Otherwise every layer's work is taken to be the
    mean. The even cut (counts at most one apart) is returned if its busiest rank has less work.

    Args:
        layers: work per layer, at least as many layers as stages.
        head: the last stage's work besides its layers. Only that stage may get no layer, if the busiest rank then has less work.
        rank_of_stage: each stage's pipeline rank.
    """
    num_stages = len(rank_of_stage)
    assert len(layers) >= num_stages, (len(layers), num_stages)
    cut = _one_stage_per_rank if len(set(rank_of_stage)) == num_stages else _several_stages_per_rank
    cuts = (
        cut(layers, head, rank_of_stage, 1),
        cut(layers, head, rank_of_stage, 0),
        even_counts(len(layers), num_stages),
    )
    return min(cuts, key=lambda counts: largest_work(layers, head, counts, rank_of_stage))


def largest_work(
    layers: Sequence[int], head: int, counts: Sequence[int], rank_of_stage: Sequence[int]
) -> tuple[int, int]:
    """Compute (the busiest rank's work, the largest stage's work) for a cut into `counts` layers per stage."""
    ends = list(accumulate(counts))
    stages = [sum(layers[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    stages[-1] += head
    loads = [0] * (max(rank_of_stage) + 1)
    for work, rank in zip(stages, rank_of_stage, strict=True):
        loads[rank] += work
    return max(loads), max(stages)


def even_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Compute layers per stage that are at most one apart."""
    most = -(-num_layers // num_stages)
    counts = [most] * num_stages
    for stage in _first_to_lose(num_stages)[: most * num_stages - num_layers]:
        counts[stage] -= 1
    return tuple(counts)


def _first_to_lose(num_stages: int) -> list[int]:
    """List the stages: last, first, then the others from the end. Stages early in the list get fewer layers."""
    return list(dict.fromkeys([num_stages - 1, 0, *range(num_stages - 2, 0, -1)]))


def _reluctance(num_stages: int) -> list[int]:
    """Compute each stage's tie-breaking number. Among equally loaded stages, the one with the smallest number gets the layer."""
    order = _first_to_lose(num_stages)
    return [num_stages - order.index(stage) for stage in range(num_stages)]


def _one_stage_per_rank(
    layers: Sequence[int], head: int, rank_of_stage: Sequence[int], least_at_head: int
) -> tuple[int, ...]:
    """Find the most even cut among those whose busiest rank has the least work.

    The last stage also has work `head`, and gets at least `least_at_head` layers.
    """
    sums = [0, *accumulate(layers)]
    num_layers, num_stages = len(layers), len(rank_of_stage)
    low, high = 0, sums[-1] + head
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(layers, head, num_stages, least_at_head, middle) else (middle + 1, high)
    reluctance = _reluctance(num_stages)
    # For each number of layers in the stages so far: (sum of squared loads, reluctance), and the counts that reach it.
    best: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = {0: ((0, 0), ())}
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        found: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = {}
        for first, ((squares, order), counts) in best.items():
            for end in [num_layers] if is_last else range(first + 1, num_layers + 1 - least_at_head):
                work = sums[end] - sums[first] + head * is_last
                if work > low:
                    break
                count = end - first
                cost = (squares + work * work, order + count * reluctance[stage])
                if end not in found or cost < found[end][0]:
                    found[end] = (cost, (*counts, count))
        best = found
    return best[num_layers][1]


def _fits(layers: Sequence[int], head: int, num_stages: int, least_at_head: int, most: int) -> bool:
    """Test whether some cut gives each stage at most `most` work (in the unit of `layers`).

    The last stage also has work `head`. It gets `least_at_head` layers or more, other stages one or more.
    """
    at = 0
    for stage in range(num_stages - 1):
        # Each stage between this one and the last needs a layer.
        free = len(layers) - (num_stages - 2 - stage) - least_at_head
        first, work = at, 0
        while at < free and work + layers[at] <= most:
            work += layers[at]
            at += 1
        if at == first:
            return False
    return sum(layers[at:]) + head <= most


def _several_stages_per_rank(
    layers: Sequence[int], head: int, rank_of_stage: Sequence[int], least_at_head: int
) -> tuple[int, ...]:
    """Give each stage one layer, then each further layer to the least loaded rank's smallest stage.

    The last stage starts with `least_at_head` layers and its extra work `head`. Every layer's work is taken to be the mean of
    `layers`.
    """
    # Counted in layers x work, so that the mean is a whole number.
    num_layers, num_stages, unit = len(layers), len(rank_of_stage), sum(layers)
    counts = [1] * (num_stages - 1) + [least_at_head]
    stages = [unit * count for count in counts]
    stages[-1] += head * num_layers
    loads = [0] * (max(rank_of_stage) + 1)
    for work, rank in zip(stages, rank_of_stage, strict=True):
        loads[rank] += work
    reluctance = _reluctance(num_stages)
    for _ in range(num_layers - sum(counts)):
        stage = min(range(num_stages), key=lambda each: (loads[rank_of_stage[each]], stages[each], reluctance[each]))
        counts[stage] += 1
        stages[stage] += unit
        loads[rank_of_stage[stage]] += unit
    return tuple(counts)
