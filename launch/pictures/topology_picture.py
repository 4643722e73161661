"""Draws a layout with a box for each node and a cell for each rank.

A cell's hue shows the pipeline stage, and its lightness the index over dp and cp. So every tensor-parallel group has its own
colour. Each line in a box shows one tensor-parallel group. The line begins with labels for the pp, dp and cp indices.
"""

import colorsys
import math
from itertools import groupby
from pathlib import Path

from triaxis.engine.config.rules.problem import divisors
from triaxis.engine.errors import TopologyError, counted
from triaxis.engine.layout.rank_grid import Coordinates, RankGrid
from triaxis.launch.pictures.charts import scrolling
from triaxis.launch.pictures.drawing import element, text, write_picture

CELL = 40
"""Side of a rank's cell, in pixels; the sizes below are in cells."""
LABEL = 1.5
"""Width of the labels before a line of cells, such as `pp 0 dp 3`."""
MARGIN = 0.55
"""Margin inside a node's box and between boxes."""
MOST_RANKS = 8192
"""Largest number of ranks in a picture; with more, it would be many thousand pixels wide and show only colours."""
LEAST_WIDTH = 14.5
"""Smallest width of a picture in a file: the title and the legend fit."""
LEAST_PIXELS = 760
"""Smallest width of a large layout in a page, in pixels; on a narrower screen the picture scrolls."""
LEGEND = "one colour: a tensor-parallel group   ·   hue: pipeline stage   ·   shade: index over dp and cp"


def draw_topology(grid: RankGrid, path: Path) -> None:
    """Write a layout's picture to an SVG file.

    Raises:
        TopologyError: the layout has more than MOST_RANKS ranks.
        TriaxisError: `path` does not end in .svg, or cannot be written.
    """
    if grid.world_size > MOST_RANKS:
        raise TopologyError(
            f"{grid.world_size:,} ranks do not fit a picture that can be read (at most {MOST_RANKS:,}). Without --output the "
            "layout is printed as shortened text."
        )
    columns = _num_columns(grid)
    boxes_width, boxes_height = _size(grid, columns)
    width = max(boxes_width, LEAST_WIDTH)
    # Large pictures are viewed zoomed out, so their title grows with them.
    scale = min(4.0, max(1.0, width / 30))
    header = 2.2 * scale
    title = words(grid)
    parts = [
        text(title, MARGIN * CELL, 0.35 * header * CELL, 18 * scale, weight="bold"),
        text(LEGEND, MARGIN * CELL, 0.72 * header * CELL, 11 * scale, fill="#555555"),
        *_boxes(grid, columns, (width - boxes_width) / 2 + MARGIN, header),
    ]
    write_picture(path, width * CELL, (header + boxes_height) * CELL, title, parts)


def topology_chart(grid: RankGrid) -> str:
    """Draw the boxes for all nodes as HTML, at most as wide as the page."""
    columns = _num_columns(grid)
    width, height = (round(side * CELL) for side in _size(grid, columns))
    frame = {"viewBox": f"0 0 {width} {height}", "aria_label": words(grid)}
    # Small layouts are not enlarged; large ones scroll before they become too small to read.
    style = f"max-width: {width}px; min-width: {min(width, max(LEAST_PIXELS, width // 3))}px"
    boxes = _boxes(grid, columns, MARGIN, 0.0)
    return scrolling(element("svg", "".join(boxes), role="img", style=style, **frame))


def words(grid: RankGrid) -> str:
    """Describe the layout in words: its ranks, nodes and sizes."""
    return f"{counted(grid.world_size, 'rank')} on {counted(grid.num_nodes, 'node')}: {grid.sizes.product}"


def _size(grid: RankGrid, columns: int) -> tuple[float, float]:
    """Compute the width and height of all boxes with their margins, in cells."""
    width, height = _box(grid)
    return columns * (width + MARGIN) + MARGIN, -(-grid.num_nodes // columns) * (height + MARGIN)


def _box(grid: RankGrid) -> tuple[float, float]:
    """Compute the width and height of every node's box, in cells."""
    lines = [_lines_of(grid, node) for node in range(grid.num_nodes)]
    widest, tallest = max(len(ranks) for node in lines for ranks in node), max(map(len, lines))
    return LABEL + widest + MARGIN, tallest + MARGIN + 0.8


def _boxes(grid: RankGrid, columns: int, left: float, top: float) -> list[str]:
    """Draw each node's box as SVG elements. The upper left corner of the first box is (`left`, `top`), in cells."""
    width, height = _box(grid)
    parts = []
    for node in range(grid.num_nodes):
        x = left + node % columns * (width + MARGIN)
        y = top + node // columns * (height + MARGIN)
        parts.append(_rect(x, y, width, height, "#f5f6f8", rx=8, stroke="#b9bec8"))
        parts.append(text(f"node {node}", (x + 0.3) * CELL, (y + 0.5) * CELL, 12))
        for number, ranks in enumerate(_lines_of(grid, node)):
            parts += _draw_group(grid, ranks, x, y + 0.9 + number)
    return parts


def _draw_group(grid: RankGrid, ranks: list[int], left: float, top: float) -> list[str]:
    """Draw the labels and cells of one tensor-parallel group, as SVG elements in a line.

    The upper left corner of the line is (`left`, `top`), in cells.
    """
    at = grid.coordinates(ranks[0])
    parts = [
        text(f"{axis} {index}", (left + LABEL - 0.15) * CELL, (top + y) * CELL, 10, anchor="end", fill="#555555")
        for axis, index, y in _labels(grid, at)
    ]
    for column, rank in enumerate(ranks):
        x = left + LABEL + column
        colour, ink = _colours(grid, rank)
        cell = _rect(x + 0.04, top + 0.02, 0.92, 0.92, colour)
        number = text(str(rank), (x + 0.5) * CELL, (top + 0.48) * CELL, 13, fill=ink, anchor="middle")
        title = element("title", f"rank {rank}, node {grid.node(rank)}: {grid.coordinates(rank)}")
        parts.append(element("g", title + cell + number))
    return parts


def _labels(grid: RankGrid, at: Coordinates) -> list[tuple[str, int, float]]:
    """List the labels before a line of cells, each as (axis, index, y).

    y is the label's distance from the top of the line, in cells.
    """
    axes = [("pp", at.pp), ("dp", at.dp), ("cp", at.cp)][: 3 if grid.sizes.cp > 1 else 2]
    return [(axis, index, (place + 1) / (len(axes) + 1)) for place, (axis, index) in enumerate(axes)]


def _rect(x: float, y: float, width: float, height: float, fill: str, **rest: str | float) -> str:
    sides = {"x": x * CELL, "y": y * CELL, "width": width * CELL, "height": height * CELL}
    return element("rect", **sides, fill=fill, **rest)


def _lines_of(grid: RankGrid, node: int) -> list[list[int]]:
    """List the node's ranks, one list per tensor-parallel group. Groups that span nodes are split."""
    ranks = range(node * grid.ranks_per_node, (node + 1) * grid.ranks_per_node)
    return [list(group) for _, group in groupby(ranks, lambda rank: rank // grid.sizes.tp)]


def _num_columns(grid: RankGrid) -> int:
    """Choose the number of boxes per row, a divisor of the node count. With this number, width / height is closest to 1.6."""
    lines = math.ceil(grid.ranks_per_node / grid.sizes.tp)
    shape = (lines + 1.9) / (min(grid.sizes.tp, grid.ranks_per_node) + LABEL + 1.1)
    wanted = max(1.0, math.sqrt(grid.num_nodes * 1.6 * shape))
    return min(divisors(grid.num_nodes, 1), key=lambda columns: abs(math.log(columns / wanted)))


def _colours(grid: RankGrid, rank: int) -> tuple[str, str]:
    """Choose the colours for a rank's cell and the text in it."""
    at = grid.coordinates(rank)
    hue = (0.58 + at.pp / grid.sizes.pp) % 1.0
    shade = (at.dp * grid.sizes.cp + at.cp) / max(1, grid.sizes.dp_cp - 1)
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(hue, 0.86 - 0.26 * shade, 0.75))
    is_dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 110  # luminance of sRGB's primaries, 0 to 255
    return f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if is_dark else "#222222"
