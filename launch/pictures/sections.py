"""Writes the parts that the page of a run and the page of a plan share, as HTML."""

from collections.abc import Mapping, Sequence
from html import escape

from triaxis.engine.errors import counted
from triaxis.engine.pipeline.simulate import SimulatedTimeline
from triaxis.engine.telemetry.outlets.format import in_bytes, significant
from triaxis.launch.pictures.document import html_table
from triaxis.launch.pictures.style import NUM_COLOURS
from triaxis.models.predict.rank_memory import KINDS, Memory


def seconds_text(value: float) -> str:
    """Format seconds, as milliseconds below 1 s."""
    return f"{significant(value)} s" if value >= 1 else f"{significant(1e3 * value)} ms"


def time_table(parts: Mapping[str, float]) -> str:
    """List each part's seconds per step, and its share of their sum. The colours c0, c1, .. follow the order of `parts`."""
    whole = sum(parts.values()) or 1.0
    rows = [
        (f'<i class="key c{place % NUM_COLOURS}"></i>{escape(name)}', seconds_text(seconds), f"{seconds / whole:.1%}")
        for place, (name, seconds) in enumerate(parts.items())
        if seconds > 0
    ]
    return html_table((("part", ""), ("per step", "n"), ("share", "n")), rows)


def memory_table(ranks: Sequence[Memory]) -> str:
    """List the predicted bytes of each pipeline rank by kind, without the kinds that no rank holds."""
    names = [name for name in (*KINDS, "total", "host") if any(getattr(held, name) for held in ranks)]
    rows = [(f"pp {pp}", *(in_bytes(getattr(held, name)) for name in names)) for pp, held in enumerate(ranks)]
    return html_table([("ranks of", ""), *((name, "n") for name in names)], rows, tall=True)


def schedule_words(drawn: SimulatedTimeline, num_microbatches: int, dp: int) -> str:
    """Explain a schedule's picture, which may show fewer microbatches than the `num_microbatches` of a step."""
    placement = drawn.schedule.placement
    said = (
        f"{drawn.schedule.name}: pp {placement.pp}, vpp {placement.vpp}, "
        f"{counted(num_microbatches, 'microbatch', 'microbatches')} per step and pipeline ({counted(dp, 'pipeline')}). Numbers in "
        "the picture are microbatches; time goes to the right. Point at an action for its name."
    )
    if drawn.schedule.num_microbatches < num_microbatches:
        said += f" The picture shows a step of {drawn.schedule.num_microbatches:,}."
    return f'<p class="soft">{escape(said)}</p>'
