"""A layout as a picture: each node a box, each rank a cell in it.

hue         the pipeline stage        }  so every tensor-parallel group has a colour of its own, and the groups that
lightness   the data-parallel index   }  work on one stage look related
a line      one tensor-parallel group of the node, with its pp and dp in front; nodes in the order of their ranks
"""

import colorsys
import math
from itertools import groupby
from pathlib import Path
from typing import Any

from engine.errors import TopologyError
from engine.layout.rank_grid import RankGrid

CELL_INCHES = 0.42
LABEL_CELLS = 1.5
"""Width of the `pp 0 dp 3` in front of a line, in cells."""
MARGIN_CELLS = 0.55
"""Inside a node's box, and between boxes."""
MOST_RANKS = 8192
"""A picture of more would be many thousand pixels wide and show only colours."""
LEAST_WIDTH_CELLS = 14.5
"""What the title and the legend need."""
LEGEND = "one colour: a tensor-parallel group   ·   hue: pipeline stage   ·   shade: data-parallel index"


def draw(grid: RankGrid, path: Path) -> None:
    """Write the picture; the format follows from the ending of `path` (.png, .svg, .pdf).

    Raises:
        TopologyError: too many ranks for a picture, or a folder or format that does not exist.
    """
    if grid.world_size > MOST_RANKS:
        raise TopologyError(
            f"{grid.world_size:,} ranks do not fit a picture that can be read (at most {MOST_RANKS:,}). Leave --out away: the text "
            f"shortens itself."
        )
    from matplotlib.figure import Figure

    lines = [_lines_of(grid, node) for node in range(grid.num_nodes)]
    columns = _num_columns(grid)
    rows = -(-grid.num_nodes // columns)
    widest, tallest = max(len(ranks) for node in lines for ranks in node), max(map(len, lines))
    box_width, box_height = LABEL_CELLS + widest + MARGIN_CELLS, tallest + MARGIN_CELLS + 0.8
    boxes_width = columns * (box_width + MARGIN_CELLS) + MARGIN_CELLS
    width = max(boxes_width, LEAST_WIDTH_CELLS)
    # Large pictures are looked at from further away: their title grows with them.
    scale = min(4.0, max(1.0, width / 30))
    header = 2.2 * scale
    height = header + rows * (box_height + MARGIN_CELLS)
    figure = Figure(figsize=(width * CELL_INCHES, height * CELL_INCHES), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    sizes, nodes = grid.sizes, "1 node" if grid.num_nodes == 1 else f"{grid.num_nodes:,} nodes"
    title = f"{grid.world_size:,} ranks on {nodes}: tp {sizes.tp} x pp {sizes.pp} x dp {sizes.dp}"
    left = (width - boxes_width) / 2 + MARGIN_CELLS
    axes.text(MARGIN_CELLS, 0.35 * header, title, fontsize=13 * scale, weight="bold", va="center")
    axes.text(MARGIN_CELLS, 0.72 * header, LEGEND, fontsize=7.5 * scale, color="#555555", va="center")
    for node, groups in enumerate(lines):
        x = left + node % columns * (box_width + MARGIN_CELLS)
        y = header + node // columns * (box_height + MARGIN_CELLS)
        _draw_node(axes, grid, node, groups, x, y, box_width, box_height)
    try:
        figure.savefig(path, dpi=150 if grid.world_size <= 2048 else 75)
    except (OSError, ValueError) as error:
        raise TopologyError(
            f"the picture cannot be written to {path}: {error}. Give a path such as layout.png."
        ) from error


def _draw_node(
    axes: Any, grid: RankGrid, node: int, lines: list[list[int]], left: float, top: float, width: float, height: float
) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    axes.add_patch(
        FancyBboxPatch(
            (left, top),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.25",
            facecolor="#f5f6f8",
            edgecolor="#b9bec8",
        )
    )
    axes.text(left + 0.3, top + 0.5, f"node {node}", fontsize=8, color="#333333", va="center")
    for number, ranks in enumerate(lines):
        at = grid.coordinates(ranks[0])
        y = top + 0.9 + number
        axes.text(
            left + LABEL_CELLS - 0.1,
            y + 0.45,
            f"pp {at.pp}\ndp {at.dp}",
            fontsize=6.2,
            color="#555555",
            va="center",
            ha="right",
        )
        for column, rank in enumerate(ranks):
            x = left + LABEL_CELLS + column
            axes.add_patch(Rectangle((x + 0.04, y + 0.02), 0.92, 0.92, facecolor=_colour(grid, rank), edgecolor="none"))
            axes.text(x + 0.5, y + 0.48, str(rank), fontsize=8 if rank < 1000 else 6.5, va="center", ha="center")


def _lines_of(grid: RankGrid, node: int) -> list[list[int]]:
    """The node's ranks, one list per tensor-parallel group (or part of one, where it spans nodes)."""
    ranks = range(node * grid.ranks_per_node, (node + 1) * grid.ranks_per_node)
    return [list(group) for _, group in groupby(ranks, lambda rank: rank // grid.sizes.tp)]


def _num_columns(grid: RankGrid) -> int:
    """Boxes per row: whole pipeline stages per row where that keeps the picture from being a strip."""
    lines = math.ceil(grid.ranks_per_node / grid.sizes.tp)
    shape = (lines + 1.9) / (min(grid.sizes.tp, grid.ranks_per_node) + LABEL_CELLS + 1.1)
    wanted = max(1.0, math.sqrt(grid.num_nodes * 1.6 * shape))
    choices = [columns for columns in range(1, grid.num_nodes + 1) if grid.num_nodes % columns == 0]
    return min(choices, key=lambda columns: abs(math.log(columns / wanted)))


def _colour(grid: RankGrid, rank: int) -> tuple[float, float, float]:
    at = grid.coordinates(rank)
    hue = (0.58 + at.pp / grid.sizes.pp) % 1.0
    shade = at.dp / max(1, grid.sizes.dp - 1)
    return colorsys.hls_to_rgb(hue, 0.86 - 0.26 * shade, 0.75)
