"""Describes a layout as text: nodes with their ranks, then each axis's groups.

    16 ranks: tp 2 x pp 2 x dp 4, on 2 nodes of 8

    node 0   pp 0   dp 0 [0 1]   dp 1 [2 3]   dp 2 [4 5]   dp 3 [6 7]
    node 1   pp 1   dp 0 [8 9]   ...

Consecutive ranks are written `0-7`, equally spaced ranks `0 8 .. 120`. Long lists are shortened in the middle.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.errors import counted
from triaxis.engine.layout.rank_grid import Coordinates, RankGrid

MEANINGS = {
    "tp": "one layer's matrices, cut",
    "cp": "parts of the same samples",
    "dp": "the same part of the model, other samples",
    "pp": "one replica's stages, in order",
}
MOST_LINES = 16
"""Largest number of node lines, or groups per axis; of a longer list only the first and last ones are shown."""
MOST_LISTED = 8
"""Largest number of equally spaced ranks that are listed one by one."""
WIDTH = 110
"""Approximate line width, in columns."""


def describe_layout(grid: RankGrid, model: ModelConfig | None = None) -> str:
    """Describe the layout in lines of text. With `model`, the groups that only some models need are included."""
    sizes = grid.sizes
    ranks, nodes = counted(grid.world_size, "rank"), counted(grid.num_nodes, "node")
    lines = [
        f"{ranks}: {sizes.product}, on {nodes} of {grid.ranks_per_node}",
        "",
        *_node_lines(grid),
    ]
    for axis, meaning in MEANINGS.items():
        if axis != "cp" or sizes.cp > 1:
            lines += ["", *_group_lines(grid, axis, meaning, grid.groups(axis))]
    if sizes.cp > 1 and sizes.dp > 1:
        meaning = "gradients are summed, and the optimizer's state is cut"
        lines += ["", *_group_lines(grid, "dp and cp", meaning, grid.groups("dp", "cp"))]
    if sizes.dp_replicas > 1:
        meaning = "each rank owns a part of the same copy of the state"
        lines += ["", *_group_lines(grid, "dp shard", meaning, grid.shards("dp"))]
        meaning = "ranks own the same part, in different copies of the state"
        lines += ["", *_group_lines(grid, "dp replicas", meaning, grid.state_replicas())]
    if model is not None and model.tie_embeddings and sizes.pp > 1:
        meaning = "first and last stage hold the tied embedding"
        lines += ["", *_group_lines(grid, "ends", meaning, grid.end_stage_groups())]
    if model is not None and model.kv_heads < sizes.tp:
        meaning = f"replicas of one of {counted(model.kv_heads, 'key/value head')}"
        lines += ["", *_group_lines(grid, "kv replicas", meaning, grid.tp_blocks(sizes.tp // model.kv_heads))]
    return "\n".join(lines) + "\n"


def _replica(grid: RankGrid, at: Coordinates) -> str:
    return f"dp {at.dp} cp {at.cp}" if grid.sizes.cp > 1 else f"dp {at.dp}"


def shorten(ranks: Sequence[int]) -> str:
    """Format a list of ranks, as `0 1`, `0-7` or `0 8 .. 120`. Ranks with unequal steps are all written."""
    steps = {after - before for before, after in pairwise(ranks)}
    if steps == {1} and len(ranks) > 4:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(steps) == 1 and len(ranks) > MOST_LISTED:
        return f"{ranks[0]} {ranks[1]} .. {ranks[-1]}"
    return " ".join(map(str, ranks))


def _node_lines(grid: RankGrid) -> Iterator[str]:
    """Yield a line for each pipeline stage on each node, with the stage's tensor-parallel groups."""
    rows: list[tuple[str, list[str]]] = []
    digits = len(str(grid.num_nodes - 1))
    for node in range(grid.num_nodes):
        ranks = range(node * grid.ranks_per_node, (node + 1) * grid.ranks_per_node)
        start = f"node {node:>{digits}}"
        for pp, on_stage in groupby(ranks, lambda rank: grid.coordinates(rank).pp):
            by_replica = groupby(on_stage, lambda rank: replace(grid.coordinates(rank), pp=0, tp=0))
            parts = [f"{_replica(grid, at)} [{shorten(list(group))}]" for at, group in by_replica]
            if sum(len(part) + 3 for part in parts) > WIDTH:
                parts = [*parts[:3], f".. {len(parts) - 4} more ..", parts[-1]]
            rows.append((f"{start}   pp {pp}", parts))
            start = " " * len(start)
    width = max(len(part) for _, parts in rows for part in parts)
    lines = [f"{start}   {'   '.join(part.ljust(width) for part in parts)}".rstrip() for start, parts in rows]
    yield from _middle_out(lines, "line")


def _group_lines(grid: RankGrid, name: str, meaning: str, groups: Sequence[tuple[int, ...]]) -> Iterator[str]:
    """Yield a headline for an axis's groups, and the groups. If each group is one rank, yield one line."""
    size = len(groups[0])
    if size == 1:
        yield f"{name}: every rank is alone on this axis and sends nothing"
        return
    spans = max(len({grid.node(rank) for rank in group}) for group in groups)
    where = "inside a node" if spans == 1 else f"over {spans} nodes"
    yield f"{name}: {counted(len(groups), 'group')} of {size} ranks, {where}: {meaning}"
    texts = [f"[{shorten(group)}]" for group in groups]
    if len(texts) > MOST_LINES:
        texts = [*texts[:4], f".. {len(texts) - 6:,} more ..", *texts[-2:]]
    line = " "
    for text in texts:
        if len(line) + 1 + len(text) > WIDTH:
            yield line
            line = " "
        line += f" {text}"
    yield line


def _middle_out(lines: Sequence[str], noun: str) -> Iterator[str]:
    if len(lines) <= MOST_LINES:
        yield from lines
        return
    head, tail = MOST_LINES // 2, MOST_LINES // 4
    yield from lines[:head]
    yield f"  .. {counted(len(lines) - head - tail, f'more {noun}')} .."
    yield from lines[-tail:]
