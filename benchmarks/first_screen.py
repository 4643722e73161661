"""The README's picture: the schedule of the first command's layout, and the table that its run has printed, light and dark.

bash launch/pretrain_gpt.sh | tee run.log
python -m benchmarks.first_screen run.log docs/first_screen.svg
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Kind
from triaxis.engine.pipeline.simulate import Costs, SimulatedTimeline, simulate
from triaxis.launch.pictures.drawing import element

CONFIG = "gpt_tiny"
MOST_COLUMNS = 100
COLUMN, LINE, MARGIN = 8.4, 19, 16
"""Width of a character of 14 pixels and height of a line, and the ground around them, in pixels."""
ROW = 26
WIDTH = MOST_COLUMNS * COLUMN + 2 * MARGIN
LABEL = 9 * COLUMN
STEPS = re.compile(r"^ *(1|120|240)/240 .*")
STYLE = """
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; white-space: pre; }
.ground { fill: #f6f8fa; } .soft { fill: #59636e; } .own { font-weight: 600; } .idle { fill: #e4e8ec; }
.F0 { fill: #a6cee3; } .F1 { fill: #5fa2ce; } .B0 { fill: #b2df8a; } .B1 { fill: #7fbf5a; } .bar { fill: #14171b; font-size: 12px; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .ground { fill: #151b23; } .soft { fill: #9198a1; } .idle { fill: #2a3038; } .bar { fill: #14171b; }
}
"""


def table_of(log: str) -> Iterator[tuple[str, str]]:
    """Yield (class, line) of the run's table: its head, three steps with their split of time, and the losses of the end."""
    lines = log.splitlines()
    yield "soft", next(line for line in lines if line.split()[:2] == ["step", "loss"])
    for number, line in enumerate(lines):
        if STEPS.match(line) and "validation" not in line:
            yield "", line
            if "compute" in lines[number + 1]:
                yield "soft", lines[number + 1]
    end = next(number for number, line in enumerate(lines) if line.startswith("Finished:"))
    yield "", ""
    for line in lines[end : end + 6]:
        yield ("own" if "this model" in line else ""), line


def draw(timeline: SimulatedTimeline, rows: Sequence[tuple[str, str]], sizes: ParallelSizes) -> str:
    """Return the picture: a row for each pipeline rank, and the lines below them."""
    first_of_rank = [f"pp {rank}" for rank in range(sizes.pp)]
    scale = (WIDTH - 2 * MARGIN - LABEL) / timeline.span
    height = MARGIN * 2 + LINE * (2 + len(rows)) + ROW * len(first_of_rank)
    parts = [
        element("style", STYLE),
        element("rect", **{"class": "ground"}, width=WIDTH, height=height, rx=8),
        _line(
            f"{sizes}: interleaved 1F1B. Forward blue, backward green, second chunk darker",
            MARGIN,
            "soft",
        ),
    ]
    for rank, label in enumerate(first_of_rank):
        y = MARGIN + LINE + rank * ROW
        parts.append(_line(label, y + 3, ""))
        left = MARGIN + LABEL
        parts.append(
            element("rect", **{"class": "idle"}, x=left, y=y, width=timeline.span * scale, height=ROW - 6, rx=2)
        )
        for interval in timeline.intervals[rank]:
            action = interval.action
            x, width = left + interval.start * scale, (interval.end - interval.start) * scale
            kind = "F" if action.kind is Kind.F else "B"
            bar = {"class": f"{kind}{action.chunk}", "x": x, "y": y, "width": width - 1, "height": ROW - 6}
            parts.append(element("rect", **bar))
            number = {"class": "bar", "x": x + width / 2, "y": y + 14, "text_anchor": "middle"}
            parts.append(element("text", str(action.microbatch), **number))
    top = MARGIN + LINE * 2 + ROW * len(first_of_rank)
    parts += [_line(line, top + number * LINE, name) for number, (name, line) in enumerate(rows)]
    label = element("title", "A training step's schedule, and the table of a run with losses and the time of each axis")
    frame = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" width="{WIDTH:g}" role="img"'
    return f"<svg {frame}>\n{label}\n" + "\n".join(parts) + "\n</svg>\n"


def _line(line: str, y: float, name: str) -> str:
    if len(line) > MOST_COLUMNS:
        raise ValueError(f"{len(line)} columns, and the picture has {MOST_COLUMNS}: {line}")
    place = {"class": name, "x": MARGIN, "y": y + 12, "xml:space": "preserve"}
    return element("text", escape(line), **place)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the picture from a run's log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="what the first command has printed")
    parser.add_argument("picture", type=Path)
    args = parser.parse_args(argv)
    config = load_config(CONFIG)
    sizes = parallel_sizes(config)
    replica = config.train.micro_batch_size * sizes.dp
    schedule = schedules.build("interleaved", sizes.pp, config.parallel.vpp, config.train.global_batch_size // replica)
    timeline = simulate(schedule, Costs.uniform(schedule.placement.num_stages))
    args.picture.write_text(draw(timeline, list(table_of(args.log.read_text())), sizes), encoding="utf-8")


if __name__ == "__main__":
    main()
