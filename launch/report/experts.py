"""Draws the load on experts as heat maps.

A cell's shade shows the load ratio: an expert's tokens divided by the mean over its layer's experts. Ratios below 1 have the first
colour, strongest at 0. Ratios above 1 have the second colour, strongest from `heat_map`'s argument `full` on.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from statistics import fmean

from triaxis.engine.telemetry.record.expert_load import max_over_mean
from triaxis.launch.pictures.charts import WIDTH, scrolling, tick, ticks
from triaxis.launch.report.record import RunRecord, number

MOST_COLUMNS = 150
"""Largest number of columns in a map over steps; with more steps, each column is the mean over several."""
MOST_EXPERTS = 256
"""Largest number of columns in a map of experts; with more experts, each column is the fullest among several neighbours."""
FULL_EXPERT, FULL_LAYER = 2.0, 3.0
"""Load ratios that get the full second colour: in the map of experts, and in the map of each layer's fullest expert."""
MOST_TITLES = 2048
"""Largest number of cells in a map that shows values under the pointer; a larger map shows no values."""
LEVELS = 10
"""Shades per colour."""

_LEFT, _TOP, _BOTTOM = 62, 6, 36


def expert_load(run: RunRecord) -> str:
    """Render the load on the experts as HTML; "" if no step records it."""
    known = [(number(each, "step"), each["experts"]) for each in run.steps if isinstance(each.get("experts"), Mapping)]
    steps = [(step, dict(zip(layers, ratios, strict=False))) for step, layers, ratios in _ratios(known)]
    if not steps:
        return ""
    dropped = sum(number(experts, "dropped") for _, experts in known if math.isfinite(number(experts, "dropped")))
    step, last = steps[-1]
    layer = max(last, key=last.__getitem__)
    said = (
        f"In step {step:,.0f} the fullest expert has {last[layer]:.2f} times the mean load, in layer {layer}. "
        f"Rows of tokens dropped in all steps: {dropped:,.0f}."
    )
    return f'<p class="soft">{escape(said)}</p>{_by_expert(known)}{_by_step(steps)}'


def _ratios(known: Sequence[tuple[float, Mapping[str, object]]]) -> Iterator[tuple[float, list[int], list[float]]]:
    for step, experts in known:
        layers, ratios = experts.get("layers"), experts.get("load_max_over_mean")
        if isinstance(layers, list) and isinstance(ratios, list) and layers and len(layers) == len(ratios):
            yield step, layers, [float(ratio) if isinstance(ratio, int | float) else math.nan for ratio in ratios]


def _by_expert(known: Sequence[tuple[float, Mapping[str, object]]]) -> str:
    """Draw each expert's load, from the last step with token counts of all experts."""
    experts = next((experts for _, experts in reversed(known) if isinstance(experts.get("counts"), list)), None)
    if experts is None:
        return '<p class="missing">No step has recorded the counts of all experts yet.</p>'
    counts, layers = experts["counts"], experts.get("layers")
    if not isinstance(counts, list) or not isinstance(layers, list) or not _are_counts(counts, len(layers)):
        return '<p class="missing">The counts of the experts cannot be read.</p>'
    shares = [[count * len(row) / (sum(row) or 1) for count in row] for row in counts]
    size = -(-len(shares[0]) // MOST_EXPERTS)
    cells = [[max(row[at : at + size]) for at in range(0, len(row), size)] for row in shares]
    first, last = number(experts, "first_step"), number(experts, "last_step")
    title = f"Load of each expert, steps {first:,.0f} to {last:,.0f}"
    merged = f" Each column is the fullest of {size} neighbours." if size > 1 else ""
    worst = max(zip(map(max_over_mean, counts), layers, strict=True))
    note = f"Added over these steps, the fullest expert has {worst[0]:.2f} times the mean, in layer {worst[1]}.{merged}"
    drawn = heat_map(
        title,
        [f"layer {layer}" for layer in layers],
        cells,
        "expert",
        _places(len(shares[0]), size),
        lambda row, column: f"layer {layers[row]}, expert {column * size}: {cells[row][column]:.2f} of the mean",
        full=FULL_EXPERT,
    )
    return f'<h3>{escape(title)}</h3><p class="soft">{escape(note)}</p>{_key(0, FULL_EXPERT)}{drawn}'


def _are_counts(counts: Sequence[object], layers: int) -> bool:
    """Whether `counts` has equally long rows, one per layer, with a positive count in each."""
    rows = [row for row in counts if isinstance(row, list) and row]
    return (
        len(rows) == len(counts) == layers
        and len({len(row) for row in rows}) == 1
        and all(isinstance(count, int) and count >= 0 for row in rows for count in row)
        and all(map(any, rows))
    )


def _by_step(steps: Sequence[tuple[float, Mapping[int, float]]]) -> str:
    """Draw, for each layer and step, the fullest expert's load divided by the layer's mean."""
    layers = sorted({layer for _, ratios in steps for layer in ratios})
    size = -(-len(steps) // MOST_COLUMNS)
    groups = [steps[at : at + size] for at in range(0, len(steps), size)]
    cells = [
        [fmean([*(ratios[layer] for _, ratios in group if layer in ratios)] or [math.nan]) for group in groups]
        for layer in layers
    ]
    places = [
        (next(at for at, group in enumerate(groups) if group[-1][0] >= step), tick(step))
        for step in ticks(steps[0][0], steps[-1][0], most=10)
    ]
    title = "Fullest expert over the mean, by layer"
    drawn = heat_map(
        title,
        [f"layer {layer}" for layer in layers],
        cells,
        "step",
        places,
        lambda row, column: f"layer {layers[row]}, step {tick(groups[column][0][0])}: {cells[row][column]:.2f}",
        full=FULL_LAYER,
        stretched=True,
    )
    of = f'<p class="soft">Each column is the mean of {size} steps.</p>' if size > 1 else ""
    return f"<h3>{escape(title)}</h3>{of}{_key(1, FULL_LAYER)}{drawn}"


def _places(experts: int, size: int) -> list[tuple[int, str]]:
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 2**20) if -(-experts // (size * step)) <= 32)
    return [(at, str(at * size)) for at in range(0, -(-experts // size), every)]


def heat_map(
    label: str,
    rows: Sequence[str],
    cells: Sequence[Sequence[float]],
    axis: str,
    places: Sequence[tuple[int, str]],
    title: Callable[[int, int], str],
    *,
    full: float,
    stretched: bool = False,
) -> str:
    """Draw a heat map of load ratios as SVG inside HTML.

    Args:
        label: description of the map for readers who cannot see it.
        rows: row names.
        cells: ratios by row and column; NaN is a gap.
        axis: name of the column axis.
        places: (column, text) for each mark below the map.
        title: function (row, column) -> text shown under the pointer.
        full: load ratio from which the shade is strongest. Ratios above 1 have the second colour, and ratios below 1 the first.
        stretched: whether the columns fill the width, however few they are.
    """
    columns = len(cells[0])
    room = (WIDTH - _LEFT - 8) / columns
    wide = room if stretched else min(room, 34.0)
    high = min(24.0, max(7.0, 360 / len(rows)))
    bottom = _TOP + high * len(rows)
    height = math.ceil(bottom + _BOTTOM)
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">']
    parts.append(
        f'<rect class="idle" x="{_LEFT}" y="{_TOP}" width="{wide * columns:.1f}" height="{high * len(rows):.1f}"/>'
    )
    gap = 1.0 if min(wide, high) > 10 else 0.0
    has_titles = len(rows) * columns <= MOST_TITLES
    shades: dict[tuple[str, int], list[str]] = {}
    for row, values in enumerate(cells):
        for column, value in enumerate(values):
            if not math.isfinite(value):
                continue
            x, y = _LEFT + column * wide, _TOP + row * high
            shade = _shade(value, full)
            if has_titles:
                parts.append(
                    f'<rect class="{shade[0]}" fill-opacity="{shade[1] / LEVELS:g}" x="{x:.1f}" y="{y:.1f}" '
                    f'width="{wide - gap:.1f}" height="{high - gap:.1f}"><title>{escape(title(row, column))}</title></rect>'
                )
            elif shade[1]:
                shades.setdefault(shade, []).append(
                    f"M{x:.1f} {y:.1f}h{wide - gap:.1f}v{high - gap:.1f}h{gap - wide:.1f}z"
                )
    parts += [
        f'<path class="{style}" fill-opacity="{level / LEVELS:g}" d="{"".join(outlines)}"/>'
        for (style, level), outlines in shades.items()
    ]
    every = -(-len(rows) // max(1, int(high * len(rows) / 14)))
    parts += [
        f'<text class="tick" x="{_LEFT - 8}" y="{_TOP + (at + 0.5) * high + 4:.1f}" text-anchor="end">{escape(name)}</text>'
        for at, name in enumerate(rows)
        if at % every == 0
    ]
    parts += [
        f'<text class="tick" x="{_LEFT + (at + 0.5) * wide:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{escape(text)}</text>'
        for at, text in places
    ]
    middle = _LEFT + wide * columns / 2
    parts.append(f'<text class="tick" x="{middle:.1f}" y="{bottom + 30:.1f}" text-anchor="middle">{axis}</text>')
    return scrolling("".join([*parts, "</svg>"]))


def _shade(ratio: float, full: float) -> tuple[str, int]:
    """Choose a ratio's colour, and the colour's level from 0 to `LEVELS`."""
    if ratio < 1:
        return "c0", round((1 - ratio) * LEVELS)
    return "c1", min(LEVELS, round((ratio - 1) / (full - 1) * LEVELS))


def _key(low: float, full: float) -> str:
    """Draw the legend for load ratios from `low` to `full`. `low` is 0 or 1."""
    shades = [_shade(low + (full - low) * step / LEVELS, full) for step in range(LEVELS + 1)]
    even = round((1 - low) / (full - low) * LEVELS)
    texts = {0: f"{low:g}", even: "1, the mean", LEVELS: f"{full:g}+"}
    drawn = "".join(
        f'<rect class="idle" x="{_LEFT + 26 * at}" y="0" width="26" height="12"/>'
        f'<rect class="{style}" fill-opacity="{level / LEVELS:g}" x="{_LEFT + 26 * at}" y="0" width="26" height="12"/>'
        for at, (style, level) in enumerate(shades)
    )
    marks = "".join(
        f'<text class="tick" x="{_LEFT + 26 * at + 13}" y="26" text-anchor="middle">{text}</text>'
        for at, text in texts.items()
    )
    return f'<svg viewBox="0 0 {WIDTH} 30" role="img" aria-label="scale: load over the mean of the layer">{drawn}{marks}</svg>'
