"""Renders a plan as one HTML file."""

from collections.abc import Mapping
from html import escape

from triaxis.engine.config.quantities.plan import batch_plan, rank_grid
from triaxis.engine.config.write import to_yaml
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.simulate import simulate
from triaxis.engine.storage.redaction import without_secrets
from triaxis.engine.telemetry.outlets.format import gigabytes, significant
from triaxis.engine.telemetry.record.flops import convention
from triaxis.launch.pictures.charts import Dot, scatter_chart, stacked_bar_chart
from triaxis.launch.pictures.document import html_document, html_table, tiles
from triaxis.launch.pictures.schedule_picture import schedule_chart
from triaxis.launch.pictures.sections import memory_table, schedule_words, seconds_text, time_table
from triaxis.launch.pictures.topology_picture import LEGEND, MOST_RANKS, topology_chart, words
from triaxis.launch.planning.search import WORDS, Plan
from triaxis.models.predict.rank_memory import KINDS
from triaxis.models.predict.step_time.estimate import COMPONENTS, SIMULATED_ROUNDS, Estimator

MOST_REASONS = 20
"""Most layouts that do not fit to list with their reasons."""
MOST_ACTIONS = 250
"""Most actions per rank in the schedule picture; more would be drawn as thin stripes. One round is always drawn."""
FAR = 0.25
"""Layouts slower than the fastest by more than this share of its step, and than the whole front, are not plotted.

They would flatten the rest of the plot.
"""
HEAD = ("", "s/step", "tokens/s/GPU", "TFLOP/s/GPU", "MFU", "memory", "bubble")
GB = 1e9

CHOSEN, FRONT, OTHER = "c0 large", "c1", "c7"
"""Dot styles, the most important first."""
MEANINGS = {CHOSEN: "chosen: the fastest", FRONT: "no other is both faster and smaller", OTHER: "others"}


def render(plan: Plan, name: str, budget: str = "") -> str:
    """Render a plan's page.

    Args:
        plan: finished search.
        name: the run's name, such as its config's path.
        budget: line with the hours and the cost of a training; "": no such line.
    """
    best, cluster = plan.best, plan.cluster
    numbers = [
        ("seconds per step", significant(best.time.seconds)),
        ("tokens per second and GPU", f"{best.tokens_per_second / cluster.num_gpus:,.0f}"),
        ("TFLOP/s per GPU", f"{best.model_tflops:,.0f}"),
        ("MFU", f"{plan.mfu(best):.1%}"),
        ("fullest rank", gigabytes(best.memory.fullest.total)),
        ("usable of a GPU", gigabytes(plan.usable_bytes)),
        ("legal layouts", f"{plan.num_legal:,}" + (f", {plan.num_left_out:,} left out" if plan.num_left_out else "")),
        ("found too large", f"{plan.num_too_large:,}"),
        ("cluster", f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.device}"),
    ]
    sections = {
        "pareto": ("Speed against memory", _pareto(plan)),
        "layouts": ("Layouts", _layouts(plan)),
        "time": ("Where the time of the chosen layout goes", _time(plan)),
        "memory": ("Memory of the chosen layout", _memory(plan)),
        "schedule": ("Schedule of the chosen layout", _schedule(plan)),
        "ranks": ("Rank map of the chosen layout", _ranks(plan)),
        "config": ("Configuration of the chosen layout", f'<pre class="tall">{escape(to_yaml(best.config))}</pre>'),
    }
    lines = [f"Chosen: {best.layout}", f"Memory of a GPU: {plan.memory_line}.", *([budget] if budget else [])]
    before = tiles(numbers) + "".join(f"<p>{escape(line)}</p>" for line in lines)
    footer = "Predicted by triaxis plan: no device was used. docs/footprint.md says where predictions are wrong."
    return without_secrets(html_document(f"{name}: Triaxis plan", f"Plan of {name}", before, sections, footer))


def _pareto(plan: Plan) -> str:
    """Draw each found layout as a dot at its memory and time. A staircase marks the Pareto front."""
    styles = _styles(plan)
    slowest = max(plan.pareto[-1].time.seconds, (1 + FAR) * plan.best.time.seconds)
    drawn = [(number, one) for number, one in enumerate(plan.found, 1) if one.time.seconds <= slowest]
    dots = [
        Dot(
            one.memory.fullest.total / GB,
            one.time.seconds,
            f"{number}: {one.layout}: {significant(one.time.seconds)} s, {gigabytes(one.memory.fullest.total)}",
            styles.get(id(one), OTHER),
            str(number) if id(one) in styles else "",
        )
        for number, one in drawn
    ]
    # The most important dots last, so that they lie on top.
    order = list(MEANINGS)
    dots.sort(key=lambda dot: -order.index(dot.style))
    held = [dot.x for dot in dots]
    usable = plan.usable_bytes / GB
    is_near = usable - max(held) <= 2 * (max(held) - min(held))
    chart = scatter_chart(
        "seconds per step against memory of the fullest rank",
        dots,
        {style: meaning for style, meaning in MEANINGS.items() if any(dot.style == style for dot in dots)},
        "memory of the fullest rank, GB",
        "seconds per step",
        front=[(one.memory.fullest.total / GB, one.time.seconds) for one in reversed(plan.pareto)],
        limit=(usable, f"usable: {gigabytes(plan.usable_bytes)}") if is_near else None,
    )
    left_out = len(plan.found) - len(drawn)
    said = (
        f"The {len(plan.found)} fastest layouts that fit. Left is less memory, down is faster; numbers are those of the table. "
        "Point at a dot for its layout."
    )
    if left_out:
        said += f" Slower than {significant(slowest)} s, and in the table alone: {left_out}."
    return f'<p class="soft">{escape(said)}</p>{chart}'


def _styles(plan: Plan) -> dict[int, str]:
    """Map the id of each layout on the Pareto front to its dot's style."""
    return {id(one): FRONT for one in plan.pareto} | {id(plan.best): CHOSEN}


def _layouts(plan: Plan) -> str:
    keys = {at: f'<i class="key {style}" title="{MEANINGS[style]}"></i>' for at, style in _styles(plan).items()}
    columns = [
        *((name, "n") for name in HEAD),
        ("", ""),
        ("layout", "text"),
        ("slower than the chosen one by", "text soft"),
    ]
    rows = [
        (
            f"{number}",
            significant(one.time.seconds),
            f"{one.tokens_per_second / plan.cluster.num_gpus:,.0f}",
            f"{one.model_tflops:,.0f}",
            f"{plan.mfu(one):.1%}",
            gigabytes(one.memory.fullest.total),
            f"{one.time.bubble_share:.1%}",
            keys.get(id(one), ""),
            escape(one.layout),
            "chosen" if one is plan.best else escape(plan.slower_by(one)),
        )
        for number, one in enumerate(plan.found, 1)
    ]
    said = f"{WORDS}. TFLOP/s and MFU: {convention(plan.best.config.model)}."
    table = f'{html_table(columns, rows, tall=True)}<p class="soft">{escape(said)}</p>'
    reasons = [(escape(layout), escape(reason)) for layout, reason in list(plan.too_large.items())[:MOST_REASONS]]
    if not reasons:
        return table
    summary = f"Of layouts as fast as these {plan.num_too_large:,} do not fit: {len(reasons)} of them with the reason"
    folded = html_table((("", ""), ("", "")), reasons, tall=True)
    return f"{table}<details><summary>{escape(summary)}</summary>{folded}</details>"


def _time(plan: Plan) -> str:
    """Draw each pipeline rank's step time by component. Compare the layouts on the Pareto front in the same way."""
    best = plan.best
    ranks = Estimator(plan.cluster, expert_load=plan.expert_load).simulated_ranks(best.config, best.sizes)
    rows = [(f"pp {pp}", _values(components)) for pp, components in enumerate(ranks)]
    chart = stacked_bar_chart("seconds by component and pipeline rank", COMPONENTS, rows, seconds_text)
    said = "All pipeline ranks take as long as the slowest: a faster one waits in its bubble." if len(ranks) > 1 else ""
    table = time_table({name: best.time.components.get(name, 0.0) for name in COMPONENTS})
    text = f'<p class="soft">{said}</p><div class="tall">{chart}</div><h3>Of the slowest pipeline rank</h3>{table}'
    if len(plan.pareto) > 1:
        numbers = {id(one): number for number, one in enumerate(plan.found, 1)}
        front = [(f"{numbers[id(one)]}", _values(one.time.components)) for one in plan.pareto]
        drawn = stacked_bar_chart("seconds by component of the layouts on the front", COMPONENTS, front, seconds_text)
        text += f"<h3>Beside the other layouts on the front, by their numbers</h3>{drawn}"
    return text


def _memory(plan: Plan) -> str:
    """Draw each pipeline rank's memory, by kind, against a device's memory."""
    best, device = plan.best, plan.cluster.load_device()
    ranks = best.memory.ranks
    rows = [(f"pp {pp}", [float(getattr(held, kind)) for kind in KINDS]) for pp, held in enumerate(ranks)]
    marks = [
        (float(plan.usable_bytes), f"usable: {gigabytes(plan.usable_bytes)}"),
        (device.memory_gb * GB, f"device: {gigabytes(round(device.memory_gb * GB))}"),
    ]
    chart = stacked_bar_chart(
        "memory by kind and pipeline rank", KINDS, rows, lambda value: gigabytes(round(value)), marks
    )
    said = "Every rank of a pipeline stage holds the same. docs/footprint.md says what is in a kind."
    return f'<p class="soft">{said}</p><div class="tall">{chart}</div>{memory_table(ranks)}'


def _schedule(plan: Plan) -> str:
    """Draw the schedule of a step in predicted seconds. A step with too many microbatches to draw is shortened."""
    best = plan.best
    config, sizes = best.config, best.sizes
    whole = batch_plan(config, sizes.dp).num_microbatches
    rounds = min(SIMULATED_ROUNDS, max(1, MOST_ACTIONS // (2 * sizes.vpp * sizes.pp)))
    drawn = min(whole, rounds * sizes.pp)
    costs = Estimator(plan.cluster, expert_load=plan.expert_load).costs(config, sizes)
    timeline = simulate(schedules.of_config(config, sizes.pp, sizes.vpp, drawn), costs)
    return schedule_words(timeline, whole, sizes.dp) + schedule_chart(timeline, seconds_text)


def _ranks(plan: Plan) -> str:
    grid = rank_grid(plan.best.config, plan.best.sizes, plan.cluster.gpus_per_node)
    said = f"{words(grid)}. {LEGEND.capitalize()}. Point at a rank for its coordinates."
    if grid.world_size > MOST_RANKS:
        return f'<p class="soft">{escape(words(grid))}: too many for a picture; <code>triaxis topology</code> prints them.</p>'
    return f'<p class="soft">{escape(said)}</p>{topology_chart(grid)}'


def _values(components: Mapping[str, float]) -> list[float]:
    return [components.get(name, 0.0) for name in COMPONENTS]
