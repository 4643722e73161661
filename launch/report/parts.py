"""Renders numbers over steps or ranks as HTML, or notes why they are missing."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from statistics import fmean

from triaxis.engine.config.quantities.plan import batch_plan, parallel_sizes
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import TriaxisError, attempt_name, counted
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.pipeline import schedules
from triaxis.engine.telemetry.outlets.format import in_bytes
from triaxis.engine.telemetry.timing.time_split import PARTS
from triaxis.launch.pictures.charts import (
    MOST_POINTS,
    Line,
    bar_chart,
    line_chart,
    one_bar,
    stacked_chart,
    thinned,
)
from triaxis.launch.pictures.document import html_table
from triaxis.launch.pictures.schedule_picture import in_forwards, schedule_chart
from triaxis.launch.pictures.sections import memory_table, schedule_words, time_table
from triaxis.launch.report.record import RunRecord, as_number, number, value_at
from triaxis.models.predict.rank_memory import Memory, predict

MOST_COLUMNS = 150
"""Columns in the chart of times; in longer runs each column is the mean over several steps."""
MOST_RANKS = 64
"""Largest number of ranks with their own bars; with more ranks, each bar is the largest of a pipeline stage's ranks."""
MOST_ACTIONS = 4000
"""Largest number of actions in a schedule's picture; in a longer schedule only the first microbatches are drawn."""
MISSING = '<p class="missing">{}</p>'

PART_NAMES = {
    "compute": "compute",
    "exposed_tp": "waiting for tensor-parallel calls",
    "exposed_cp": "waiting for keys and values over context-parallel ranks",
    "exposed_ep": "waiting for tokens on their way to experts and back",
    "host_read": "waiting for numbers that the host reads",
    "bubble": "pipeline bubble",
    "exposed_pp": "waiting for transfers between stages",
    "exposed_dp": "waiting for data-parallel calls",
    "optimizer": "optimizer",
    "data": "data",
    "checkpoint": "checkpoint",
    "other": "other",
}


def series(records: Sequence[Mapping[str, object]], *keys: str) -> list[tuple[float, float]]:
    """List (step, value) for every record with a value at the nested `keys`. NaN and infinities are kept."""
    found = ((each, value_at(each, *keys)) for each in records)
    return [(number(each, "step"), as_number(value)) for each, value in found if value is not None]


def curve(records: Sequence[Mapping[str, object]], *keys: str) -> list[tuple[float, float]]:
    """List each record's (step, value at the nested `keys`), thinned to about 4 * MOST_POINTS points.

    Thinning saves memory in a long run.
    """
    return thinned(series(records, *keys), 4 * MOST_POINTS)


def _has(record: Mapping[str, object], *keys: str) -> bool:
    return value_at(record, *keys) is not None


def starts(run: RunRecord) -> list[tuple[float, str]]:
    """List (first step, text) for each attempt that recorded a step, except the run's first attempt."""
    return [
        (float(attempt.first_step), f"{attempt_name(attempt.number)} begins with step {attempt.first_step:,}")
        for attempt in run.attempts[1:]
        if attempt.first_step is not None
    ]


def loss(run: RunRecord) -> str:
    """Render training loss, validation loss, and the loss in repeated or lost steps."""
    # A broad line below the others, so that both are visible if a repeated step has bitwise the same loss.
    lines = [
        Line("repeated or lost, after a resume or rollback", curve(each, "loss"), "c1 broad") for each in run.replaced
    ]
    lines.append(Line("training loss", curve(run.steps, "loss"), "c0"))
    if validation := [point for point in series(run.steps, "val_loss") if math.isfinite(point[1])]:
        lines.append(Line("validation loss", validation, "c2 dots"))
    lines = [line for line in lines if line.points]
    if not any(math.isfinite(y) for line in lines for _, y in line.points):
        return MISSING.format("No step has a finite loss yet." if run.steps else "No step is recorded yet.")
    chart = line_chart("loss over steps", lines, marks=starts(run))
    notes = [f"{_steps_of(group)}" for group in run.replaced]
    if notes:
        more = f" and {len(notes) - 8} more" if len(notes) > 8 else ""
        chart += f'<p class="soft">Steps that were repeated or lost: {"; ".join(notes[:8])}{more}.</p>'
    lost = [x for x, y in series(run.steps, "loss") if not math.isfinite(y)]
    if lost:
        chart += f'<p class="bad">The loss of {counted(len(lost), "step")} is not finite; the first is step {lost[0]:,.0f} (×).</p>'
    return chart


def _steps_of(group: Sequence[Mapping[str, object]]) -> str:
    first, last = group[0]["step"], group[-1]["step"]
    attempts = sorted({int(number(each, "attempt")) for each in group if _has(each, "attempt")})
    return f"{first:,} to {last:,} ({', '.join(map(attempt_name, attempts))})"


def small_charts(run: RunRecord) -> str:
    """Render learning rate and gradient norm side by side, then charts for optional measurements."""
    rate = Line("learning rate", curve(run.steps, "lr"), "c4")
    norm = Line("gradient norm", curve(run.steps, "grad_norm"), "c1")
    pair = _pair(run, [("Learning rate", [rate]), ("Gradient norm, before clipping", [norm])])
    return f"{pair}{loss_over_rate(run)}{group_norms(run)}"


def _pair(run: RunRecord, charts: Iterable[tuple[str, Sequence[Line]]]) -> str:
    """Draw small charts side by side. Lines without points, and charts without a finite value, are left out."""
    drawn = ""
    for title, lines in charts:
        if any(math.isfinite(y) for line in lines for _, y in line.points):
            known = [line for line in lines if line.points]
            chart = line_chart(title, known, marks=starts(run), from_zero=True, small=True)
            drawn += f"<div><h3>{escape(title)}</h3>{chart}</div>"
    return f'<div class="pair">{drawn}</div>' if drawn else ""


def loss_over_rate(run: RunRecord) -> str:
    """Render the loss over the learning rate; "" unless the run is a range test.

    A range test raises the learning rate in every step.
    """
    logs = [(math.log10(rate), number(each, "loss")) for each in run.steps if (rate := number(each, "lr")) > 0]
    if not logs or logs[-1][0] < logs[0][0] + 1 or any(other[0] <= one[0] for one, other in pairwise(logs)):
        return ""
    drawn = line_chart("loss over rate", [Line("training loss", logs, "c0")], x_label="log10 of the learning rate")
    return f"<h3>Loss over the learning rate</h3>{drawn}"


def group_norms(run: RunRecord) -> str:
    """Render the norms of gradients, weights and updates by parameter group; "" if none is recorded."""
    measured = [each for each in run.steps if isinstance(each.get("norms"), Mapping)]
    groups = list(dict.fromkeys(group for each in measured for group in each["norms"]))
    charts = []
    for title, key in (
        ("Gradient norm by group", "grad"),
        ("Norm of weights by group", "weight"),
        ("Update over weights by group", "relative_update"),
    ):
        points = {
            group: [(number(each, "step"), _norm(each["norms"].get(group), key)) for each in measured]
            for group in groups
        }
        charts.append((title, [Line(group, points[group], f"c{place % 6}") for place, group in enumerate(groups)]))
    return _pair(run, charts)


def _norm(norms: object, key: str) -> float:
    """Read one number from a parameter group's record; NaN if there is none.

    `relative_update` is in no record. It is computed from the record as update / weight.
    """
    record = norms if isinstance(norms, Mapping) else {}
    if key != "relative_update":
        return number(record, key)
    weight = number(record, "weight")
    return number(record, "update") / weight if weight else math.nan


def throughput(run: RunRecord) -> str:
    """Render the job's tokens per second, its TFLOP/s per device, and its share of the hardware's peak."""
    tokens = curve(run.steps, "tokens_per_second")
    if not any(math.isfinite(y) for _, y in tokens):
        return MISSING.format("No step is recorded yet.")
    flops = [
        Line("model FLOPs", curve(run.steps, "model_tflops_per_device"), "c2"),
        Line("TFLOP/s with recompute", curve(run.steps, "hardware_tflops_per_device"), "c1 dashed"),
    ]
    mfu = [Line("MFU", [(x, 100 * y) for x, y in curve(run.steps, "mfu")], "c4")]
    mfu.append(Line("HFU", [(x, 100 * y) for x, y in curve(run.steps, "hfu")], "c1 dashed"))
    drawn = _pair(
        run,
        [
            ("Tokens per second, all ranks", [Line("tokens/s", tokens, "c0")]),
            ("TFLOP/s per device", flops),
            ("Share of the device's peak, %", mfu),
        ],
    )
    has_peak = any(line.points for line in mfu)
    return drawn + ("" if has_peak else '<p class="soft">No peak is known for this device, so there is no MFU.</p>')


def times(run: RunRecord) -> str:
    """Render the parts of a step's time: means over all ranks if measured, else times of the logging rank's host."""
    split = [each for each in run.steps if number(each, "time_split", "step_seconds") > 0]
    if split:
        names = [part for part in PARTS if any(number(each, "time_split", f"{part}_seconds") > 0 for each in split)]
        keys = [("time_split", f"{part}_seconds") for part in names]
        said = "Seconds per step, the mean over all ranks and over the steps between two lines of the log; it adds up to the step."
        labels = [PART_NAMES[part] for part in names]
        columns = _columns(split, keys, ("time_split", "first_step"), ("time_split", "last_step"))
    else:
        timed = [each for each in run.steps if isinstance(each.get("spans_seconds"), Mapping)]
        if not timed:
            return MISSING.format("No times are recorded.")
        labels = list(dict.fromkeys(str(name) for each in timed for name in each["spans_seconds"]))
        columns = _columns(timed, [("spans_seconds", name) for name in labels], ("step",), ("step",))
        said = (
            "Parts of a step by the clock of the logging rank's host, in seconds per step. Waits in its forward and backward are "
            "not split: no step of this run has a time split."
        )
        labels = [name.replace("_", " ") for name in labels]
    num_steps = sum(size for *_, size in columns)
    means = {
        name: sum(size * row[place] for _, _, row, size in columns) / num_steps for place, name in enumerate(labels)
    }
    said += _context_parallelism(run)
    columns_drawn = stacked_chart("seconds per step, by part", labels, [column[:3] for column in columns])
    return f'<p class="soft">{escape(said)}</p>{time_table(means)}<h3>Seconds per step</h3>{columns_drawn}'


def _context_parallelism(run: RunRecord) -> str:
    """Describe how much time of context-parallel calls is hidden, and the attention imbalance. "" if no step records either."""
    said = ""
    known = [each for each in run.steps if _has(each, "time_split", "hidden_cp_seconds")]
    if known:
        hidden, exposed = (
            sum(number(each, "time_split", key) for each in known) / len(known)
            for key in ("hidden_cp_seconds", "exposed_cp_seconds")
        )
        taken = 1e3 * (hidden + exposed)
        said += f" Calls of context parallelism took {taken:,.1f} ms of a step, {1e3 * hidden:,.1f} ms of it hidden."
    unequal = finite(run, "cp_imbalance")
    if unequal:
        said += (
            f" The context-parallel rank with most attention work of a microbatch had {fmean(unequal) - 1:.1%} more than the mean, "
            f"{max(unequal) - 1:.1%} in the most unequal step."
        )
    return said


def _zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _columns(
    records: Sequence[Mapping[str, object]], keys: Sequence[Sequence[str]], first: Sequence[str], last: Sequence[str]
) -> list[tuple[float, float, Sequence[float], int]]:
    """Merge neighbouring records into at most `MOST_COLUMNS` columns.

    Args:
        records: records in the order of their steps.
        keys: nested keys of each number to average.
        first, last: nested keys of a record's first and last step.

    Returns:
        For each column: (first step, last step, means of the numbers at `keys`, number of records). A missing number counts as 0.
    """
    size = -(-len(records) // MOST_COLUMNS)
    groups = [records[start : start + size] for start in range(0, len(records), size)]
    return [
        (
            number(group[0], *first),
            number(group[-1], *last),
            [sum(_zero(number(each, *key)) for each in group) / len(group) for key in keys],
            len(group),
        )
        for group in groups
    ]


def sizes_of(run: RunRecord) -> ParallelSizes | None:
    """Determine the run's parallel sizes; None if they are unknown. An unset dp follows from the recorded number of ranks."""
    if run.config is None:
        return None
    world_size = run.layout.get("world_size")
    try:
        return parallel_sizes(run.config, world_size if isinstance(world_size, int) else None)
    except TriaxisError:
        return None


def memory(run: RunRecord) -> str:
    """Render each rank's measured peak memory next to the predicted one, then the predictions by kind.

    With more than `MOST_RANKS` ranks, there is one bar pair per pipeline stage.
    """
    sizes = sizes_of(run)
    predicted = {} if sizes is None or run.config is None else _predicted(run.config, sizes)
    measured = _measured_memory(run, sizes)
    if not predicted and not measured:
        return MISSING.format("Neither measured nor predicted: there is no step, and no configuration of this version.")
    on_cpu = str(run.layout.get("device", "")).startswith("cpu")
    notes = []
    if measured:
        what = (
            "all that the process had in RAM, Python and torch themselves included: on a CPU that is far more than the tensors"
            if on_cpu
            else "peak memory allocated by torch"
        )
        notes.append(f"Measured: {what}.")
    if predicted:
        notes.append(
            "Predicted: parameters, gradients, optimizer state and kept activations, from the configuration alone."
        )
    if len(measured) == 1 and sizes is not None and sizes.world_size > 1:
        notes.append(
            "Only the logging rank's memory is known: the others report theirs when an attempt ends without a failure."
        )
    grid = None if sizes is None else RankGrid(sizes, allow_tp_across_nodes=True)
    stages = {} if grid is None else {rank: grid.coordinates(rank).pp for rank in range(grid.world_size)}
    rows = [(f"rank {rank}", stages.get(rank), measured.get(rank)) for rank in sorted(stages or measured)]
    if len(rows) > MOST_RANKS:
        held = {
            pp: [measured[rank] for rank, stage in stages.items() if stage == pp and rank in measured]
            for pp in predicted
        }
        rows = [(f"pp {pp}", pp, max(held[pp], default=None)) for pp in predicted]
        notes.append(f"Each bar is the largest of a pipeline stage's ranks ({len(stages):,} ranks in all).")
    bars = [
        (
            name,
            [
                *([one_bar("c0", "measured", held, in_bytes)] if held is not None else []),
                *(
                    [one_bar("c1", "predicted", predicted[pp].total, in_bytes)]
                    if pp is not None and pp in predicted
                    else []
                ),
            ],
        )
        for name, pp, held in rows
    ]
    bars = [(name, own) for name, own in bars if own]
    table = f"<h3>Predicted, by kind</h3>{memory_table(list(predicted.values()))}" if predicted else ""
    return f'<p class="soft">{escape(" ".join(notes))}</p>{bar_chart("memory per rank", bars)}{table}'


def _predicted(config: Config, sizes: ParallelSizes) -> dict[int, Memory]:
    try:
        # Measured numbers cover tensors only, without NCCL's buffers.
        return dict(enumerate(predict(config, sizes, nccl=False).ranks))
    except TriaxisError:
        return {}


def _measured_memory(run: RunRecord, sizes: ParallelSizes | None) -> dict[int, int]:
    """Return peak bytes by rank from the last attempt that recorded them. If none did, return rank 0's from the last step."""
    for event in reversed(run.events):
        held = event.details.get("peak_memory_bytes")
        if isinstance(held, list) and held and (sizes is None or len(held) == sizes.world_size):
            return {rank: int(each) for rank, each in enumerate(held) if isinstance(each, int | float)}
    peak = number(run.steps[-1], "peak_memory_bytes") if run.steps else math.nan
    return {0: int(peak)} if math.isfinite(peak) else {}


def schedule(run: RunRecord) -> str:
    """Render the run's schedule, with the simulated bubble next to the measured one."""
    sizes = sizes_of(run)
    if run.config is None or sizes is None:
        return MISSING.format("Unknown without a configuration of this version and the number of ranks.")
    try:
        num_microbatches = batch_plan(run.config, sizes.dp).num_microbatches
        whole = in_forwards(schedules.of_config(run.config, sizes.pp, sizes.vpp, num_microbatches))
        drawn = whole
        if num_microbatches * sizes.pp * sizes.vpp * 2 > MOST_ACTIONS:
            shown = max(MOST_ACTIONS // (sizes.pp * sizes.vpp * 2) // sizes.pp, 1) * sizes.pp
            drawn = in_forwards(schedules.of_config(run.config, sizes.pp, sizes.vpp, min(shown, num_microbatches)))
    except TriaxisError as error:
        return MISSING.format(escape(str(error)))
    rows = [
        (
            "by the schedule alone",
            f"{whole.largest_bubble_fraction:.1%}",
            "of the pipeline's span, on the rank that idles most; a backward takes 2 forwards, transfers nothing",
        )
    ]
    split = [each for each in run.steps if _has(each, "time_split", "bubble_seconds")]
    for what, key, meaning in (
        ("by the schedule, with measured durations", "schedule_bubble_seconds", "of the step, the mean over all ranks"),
        ("measured", "bubble_seconds", "of the step, the mean over all ranks"),
        (
            "next to it, the cost of messages",
            "exposed_pp_seconds",
            "of the step; more where a link between stages is slow",
        ),
    ):
        step_seconds = sum(number(each, "time_split", "step_seconds") for each in split)
        if split and step_seconds > 0:
            share = sum(number(each, "time_split", key) for each in split) / step_seconds
            rows.append((what, f"{share:.1%}", meaning))
    missing = "" if len(rows) > 1 else MISSING.format("No step of this run has a measured bubble.")
    picture = schedule_words(drawn, num_microbatches, sizes.dp) + schedule_chart(drawn)
    return f"{picture}<h3>Bubble</h3>{html_table((('', ''), ('', 'n'), ('', 'soft')), rows)}{missing}"


def finite(run: RunRecord, key: str) -> list[float]:
    """List the finite values at `key` in the run's steps."""
    return [y for _, y in series(run.steps, key) if math.isfinite(y)]


def trained_seconds(run: RunRecord) -> float:
    """Sum the seconds in steps over all attempts; a repeated step counts each time."""
    made = [*run.steps, *(each for group in run.replaced for each in group)]
    return sum(_zero(number(each, "step_time_seconds")) for each in made)


def last(points: Sequence[tuple[float, float]]) -> str:
    """Format the last point's y with four decimals, as "2.0748" or "nan". No points give "unknown"."""
    return f"{points[-1][1]:.4f}" if points else "unknown"
