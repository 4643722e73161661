"""Assume which experts tokens choose, since a footprint's tensors have no values.

Experts take turns, as with `model.moe.force_balanced`. With k choices per token, the token at position p of its sample chooses
experts p k .. p k + k - 1, modulo E. All E experts get equally many tokens if a rank's tokens per sample, times k, are a multiple
of E.
"""

from collections import Counter
from collections.abc import Sequence
from typing import cast

from triaxis.engine.config.schema.moe import MoEConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.cut import ContextCut
from triaxis.engine.expert_parallel.dispatch import KnownRows
from triaxis.engine.expert_parallel.exchange_dispatch import ExchangeDispatch
from triaxis.engine.expert_parallel.gather_dispatch import GatherDispatch
from triaxis.engine.layout.rank_grid import RankGrid
from triaxis.engine.step import Engine
from triaxis.models.gpt.chunk import GPTChunk
from triaxis.models.predict.experts.traffic import Choices

Counts = Sequence[Sequence[int]]
"""For each rank that shares the experts, how often its tokens in a microbatch chose each of the E experts."""


def counts_in_turn(config: Config, grid: RankGrid, rank: int, rows: Sequence[Sequence[int]]) -> Counts:
    """Count a microbatch's choices of each expert, for each rank that shares experts with `rank`.

    `rows` has the document lengths of each sample in the microbatch.
    """
    moe, sizes = config.model.moe, grid.sizes
    assert moe is not None, "a model with experts says which"
    first = rank - rank % sizes.expert_ranks
    return [_of_rank(config, grid, moe, member, rows) for member in range(first, first + sizes.expert_ranks)]


def _of_rank(config: Config, grid: RankGrid, moe: MoEConfig, rank: int, rows: Sequence[Sequence[int]]) -> list[int]:
    at, sizes = grid.coordinates(rank), grid.sizes
    part = ContextCut.of(config, sizes, at.cp).part(rows)
    whole = [range(config.model.seq_length)] * len(rows)
    places: Sequence[Sequence[int]] = whole if part is None else part.positions.tolist()
    counts: Counter[int] = Counter()
    for sample in places:
        length = len(sample) // sizes.tp
        for place in sample[at.tp * length : (at.tp + 1) * length]:
            counts.update((place * moe.top_k + slot) % moe.num_experts for slot in range(moe.top_k))
    return [counts[expert] for expert in range(moe.num_experts)]


def known_rows(counts: Counts, grid: RankGrid, rank: int) -> KnownRows:
    """Count the token rows that a rank sends and receives under the expert choices `counts`."""
    sizes, place = grid.sizes, grid.sizes.expert_place(rank)
    num_local = len(counts[0]) // sizes.ep
    blocks = [slice(index * num_local, (index + 1) * num_local) for index in range(sizes.ep)]
    mine = counts[rank % sizes.expert_ranks]
    return KnownRows(
        to_members=[mine[block] for block in blocks for _ in range(sizes.etp)],
        from_members=[of_member[blocks[place.ep_index]] for of_member in counts],
    )


def know_rows(engine: Engine, known: KnownRows) -> None:
    """Set the row counts in each chunk's expert dispatch, because fake tensors have no values."""
    for chunk in engine.chunks:
        experts = cast(GPTChunk, chunk).context.experts
        assert experts is not None and isinstance(experts.dispatch, GatherDispatch | ExchangeDispatch)
        experts.dispatch.known = known


def choices_of_step(counts: Counts, config: Config, num_microbatches: int) -> Choices:
    """Add up a step's expert choices by layer. Every microbatch has `counts` in every layer."""
    total = [[num_microbatches * count for count in of_rank] for of_rank in counts]
    return dict.fromkeys(config.model.expert_layers, total)
