"""Prints a plan as text: the request, the answer, and a row per layout.

In a pipe, lines have at most `PIPE_WIDTH` columns.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from triaxis.engine.telemetry.outlets.format import gigabytes
from triaxis.engine.telemetry.record.flops import convention
from triaxis.launch.pictures.tables import terminal_table
from triaxis.launch.planning.memory_text import memory_bar, memory_lines
from triaxis.launch.planning.pruning import LEFT_OUT
from triaxis.launch.planning.search import WORDS, Found, Plan
from triaxis.models.predict.step_time.estimate import PUBLISHED_OVER_PREDICTED

PIPE_WIDTH = 100
"""Columns if the output is not a terminal."""

MOST_REASONS = 3
"""Most layouts that do not fit to list with their reasons."""


def plan_console() -> Console:
    """Create a console that folds long lines instead of truncating them."""
    # Names of recomputed parts are in brackets, which rich would read as markup.
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def show(console: Console, plan: Plan, name: str, top: int) -> None:
    """Print a plan.

    Args:
        console: console to print on.
        plan: finished search.
        name: the run's name, such as its config's path.
        top: number of layouts to list.
    """
    best, cluster, found = plan.best, plan.cluster, plan.found[:top]
    again = _marks([*found, *plan.pareto])
    console.print(f"{name} on {cluster.nodes} x {cluster.gpus_per_node} {cluster.device}")
    console.print(f"memory of a GPU: {plan.memory_line}")
    if (like := cluster.load_device().rates_as) != "":
        console.print(f"rates: not calibrated; from data sheets, with the shares of their peak that {like} reaches")
    if (extension := best.config.model.extension) is not None:
        console.print("\n".join(["extension", *(f"  {line}" for line in extension.lines)]))
    not_fitting = f"; {plan.num_too_large:,} that are as fast do not fit" if plan.num_too_large else ""
    console.print(f"{plan.num_legal:,} legal layouts{not_fitting}. The fastest: {_row(best, again)}")
    if plan.num_left_out:
        console.print(f"  of those, {plan.num_left_out:,} were left out, so one of them may be faster: {LEFT_OUT}")
    console.print(
        f"  {best.time.seconds:.4g} s per step, {best.model_tflops:,.0f} TFLOP/s per GPU, MFU {plan.mfu(best):.1%}, "
        f"{gigabytes(best.memory.fullest.total)} on the fullest GPU"
    )
    low, high = (best.time.seconds * bound for bound in PUBLISHED_OVER_PREDICTED)
    console.print(
        f"  {low:.4g} to {high:.4g} s, if it is as far off as 95 % of published runs are from their predictions"
    )
    console.print()
    console.print(_table(plan, found, again, with_reason=console.width >= PIPE_WIDTH))
    console.print(WORDS)
    for choice, mark in again.items():
        console.print(f"{mark}: recomputes {choice}")
    if len(plan.pareto) > 1:
        console.print("less memory for more time, of these:")
        for one in plan.pareto:
            bar, held = memory_bar(one.memory.fullest, plan.usable_bytes, columns=24), one.memory.fullest.total
            numbers = f"  {one.time.seconds:9.4g} s  {gigabytes(held):>9}  "
            console.print(Text.assemble(numbers, bar, f"  {_row(one, again)}"))
    for layout, reason in list(plan.too_large.items())[:MOST_REASONS]:
        console.print(f"not {layout}: {reason}")
    parts = sorted(best.time.components.items(), key=lambda part: -part[1])
    shares = ", ".join(f"{part} {seconds / best.time.seconds:.1%}" for part, seconds in parts if seconds > 0)
    console.print(f"the step of the first: {shares}")
    if best.time.components["host"]:
        calls = f"{best.time.calls:,} calls, {cluster.load_device().host_us:g} us each"
        console.print(f"  host-bound: the GPU is done before the host has posted a microbatch's {calls}")
    for line in memory_lines(best.memory, plan.usable_bytes):
        console.print(line)
    console.print(f"TFLOP/s and MFU: {convention(best.config.model)}")


def as_json(plan: Plan, top: int) -> dict[str, object]:
    """Convert a plan's `top` fastest layouts to JSON. Step times are in seconds, the fullest GPU's memory in bytes."""
    layouts = [
        {
            "layout": one.layout,
            "parallel": one.config.parallel.model_dump(mode="json"),
            "recompute": str(one.config.recompute),
            "seconds": one.time.seconds,
            "seconds_95_percent": [one.time.seconds * bound for bound in PUBLISHED_OVER_PREDICTED],
            "tokens_per_second": one.tokens_per_second,
            "tflops": one.model_tflops,
            "mfu": plan.mfu(one),
            "memory_bytes": one.memory.fullest.total,
        }
        for one in plan.found[:top]
    ]
    return {
        "gpus": plan.cluster.num_gpus,
        "device": plan.cluster.device,
        "legal": plan.num_legal,
        "left_out": plan.num_left_out,
        "layouts": layouts,
    }


def _marks(found: Sequence[Found]) -> dict[str, str]:
    """Assign a short mark (r1, r2, ..) to each recomputation choice, in order of appearance."""
    choices = dict.fromkeys(str(one.config.recompute) for one in found if one.config.recompute.is_any)
    return {choice: f"r{number}" for number, choice in enumerate(choices, start=1)}


def _row(one: Found, again: dict[str, str]) -> str:
    return f"{one.cut} {again[str(one.config.recompute)]}" if one.config.recompute.is_any else one.cut


def _table(plan: Plan, found: Sequence[Found], again: dict[str, str], *, with_reason: bool) -> Table:
    numbers = ("s/step", "tokens/s\nper GPU", "TFLOP/s\nper GPU", "MFU", "memory", "bubble")
    reason = ["slower by"] if with_reason else []
    table = terminal_table(*numbers, *reason, "layout", names=("layout",))
    for one in found:
        table.add_row(
            f"{one.time.seconds:.4g}",
            f"{one.tokens_per_second / plan.cluster.num_gpus:,.0f}",
            f"{one.model_tflops:,.0f}",
            f"{plan.mfu(one):.1%}",
            gigabytes(one.memory.fullest.total),
            f"{one.time.bubble_share:.1%}",
            *([plan.slower_by(one)] if with_reason else []),
            _row(one, again),
        )
    return table
