"""The tables that people read, as Markdown, from the rows of a results file."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.gpu_contenders.contenders import CONTENDERS, OURS
from benchmarks.gpu_contenders.kernel_classes import CLASSES, IDLE
from benchmarks.gpu_contenders.shapes import OPTIMISATIONS, SHAPES, overridden

WANTED_OF_BEST = 1.10
"""Ours over the best contender, in tokens per second."""

LONGEST_REASON = 240

Row = Mapping[str, Any]


def tables(rows: Sequence[Row]) -> str:
    """Format all rows, one machine after another, and at the end the contenders without numbers."""
    parts = []
    measured = [row for row in rows if row["status"] == "measured"]
    for machine in dict.fromkeys(map(machine_of, measured)):
        here = [row for row in measured if machine_of(row) == machine]
        parts.append(f"## {machine}\n\n{speeds(here)}")
        parts += [part for part in (targets(here), fp8(here), optimisations(here), breakdowns(here)) if part]
    return "\n\n".join([*parts, *filter(None, [failures(rows)])])


def machine_of(row: Row) -> str:
    known = row["machine"]
    return f"{known.get('gpu', known['cpu'])}, torch {row['versions']['torch']}, {row['dtype']}"


def speeds(rows: Sequence[Row]) -> str:
    """Format the speeds shape by shape, the fastest first."""
    headings = (
        "shape",
        "contender",
        "micro batch",
        "tokens/s",
        "s a step [min, p90]",
        "model TFLOP/s, causal",
        "non-causal",
        "hardware",
        "ceiling",
        "r",
        "peak GiB",
    )
    lines = []
    for shape in SHAPES:
        done = [row for row in rows if row["shape"] == shape and not row["variant"]]
        for row in sorted(done, key=lambda row: -row["tokens_per_second"]):
            seconds, peak = row["step_seconds"], row["peak_memory_bytes"]
            lines.append(
                (
                    shape,
                    row["contender"],
                    str(row["micro_batch_size"]),
                    f"{row['tokens_per_second']:,.0f}",
                    f"{seconds['median']:.3f} [{seconds['min']:.3f}, {seconds['p90']:.3f}]",
                    number(row["model_tflops_causal"]),
                    number(row["model_tflops_non_causal"]),
                    number(row["hardware_tflops"]),
                    number(row["ceiling_tflops"]["mean"]),
                    f"{row['r']:.3f}",
                    "" if peak is None else f"{peak / 2**30:.1f}",
                )
            )
    return markdown(headings, lines)


def targets(rows: Sequence[Row]) -> str:
    """Compare ours in bf16 with its targets: r, and the ratio to the best contender of the same shape."""
    rows = [row for row in rows if not CONTENDERS[row["contender"]].has_fp8]
    lines = []
    for shape, sizes in SHAPES.items():
        ours = best(row for row in rows if row["shape"] == shape and row["contender"] == OURS)
        if ours is None:
            continue
        peer = best(row for row in rows if row["shape"] == shape and not CONTENDERS[row["contender"]].is_ours)
        wanted_r = "" if sizes.target is None else f"{sizes.target:.2f}"
        beside = ("", "", "") if peer is None else (peer["contender"], f"{_ratio(ours, peer):.3f}", f"{WANTED_OF_BEST}")
        lines.append((shape, f"{ours['r']:.3f}", wanted_r, *beside))
    return markdown(("shape", "r", "wanted", "best contender", "ours / it, tokens/s", "wanted"), lines) if lines else ""


def fp8(rows: Sequence[Row]) -> str:
    """Compare each contender in FP8 with itself in bf16, and with the best of the others in FP8; the fastest first."""
    lines = []
    for shape, sizes in SHAPES.items():
        here = [row for row in rows if row["shape"] == shape]
        rounded = [row for row in here if CONTENDERS[row["contender"]].has_fp8]
        for row in sorted(rounded, key=lambda row: -row["tokens_per_second"]):
            one = CONTENDERS[row["contender"]]
            wide = best(other for other in here if other["contender"] == one.beside)
            peer = best(other for other in rounded if not CONTENDERS[other["contender"]].is_ours)
            gain = "" if wide is None else f"{_ratio(row, wide):.3f}"
            wanted = f"{sizes.fp8_target:.2f}" if one.is_ours and sizes.fp8_target is not None else ""
            beside = ("", "")
            if one.is_ours and peer is not None:
                beside = peer["contender"], f"{_ratio(row, peer):.3f}"
            ceiling = number(row["fp8_ceiling_tflops"]["mean"])
            lines.append((shape, row["contender"], gain, wanted, *beside, ceiling, f"{row['r_fp8']:.3f}"))
    headings = ("shape", "FP8", "FP8 / bf16, tokens/s", "wanted", "best contender in FP8", "ours / it", "FP8 ceiling")
    return markdown((*headings, "r of it"), lines) if lines else ""


def optimisations(rows: Sequence[Row]) -> str:
    """Compare ours with all optimisations to ours without each one."""
    lines = []
    for shape in SHAPES:
        ours = [row for row in rows if row["shape"] == shape and row["contender"] == OURS]
        for one, row in ((one, row) for one in OPTIMISATIONS for row in ours if row["variant"] == one.name):
            whole = best(other for other in ours if list(overridden(other["words"], one.off)) == row["words"])
            if whole is None:
                continue
            sizes = f"{whole['micro_batch_size']}, {row['micro_batch_size']}"
            words = " ".join(one.off)
            gave = f"{_ratio(whole, row):.3f}"
            lines.append((shape, one.name, words, gave, f"{row['tokens_per_second']:,.0f}", sizes))
    headings = ("shape", "optimisation", "off", "with / without", "tokens/s without", "micro batches, with and without")
    return markdown(headings, lines) if lines else ""


def breakdowns(rows: Sequence[Row]) -> str:
    """Format milliseconds of a step of ours by class of kernel, and their shares of it."""
    kinds = (*CLASSES, IDLE)
    lines = []
    for shape in SHAPES:
        row = best(row for row in rows if row["shape"] == shape and row["breakdown"] is not None)
        if row is None:
            continue
        milliseconds = row["breakdown"]["milliseconds"]
        step = row["step_seconds"]["median"] * 1e3
        cells = [f"{milliseconds[kind]:.1f} ({milliseconds[kind] / step:.1%})" for kind in kinds]
        lines.append((row["shape"], f"{step:.1f}", *cells))
    return markdown(("shape", "step, ms", *kinds), lines) if lines else ""


def failures(rows: Sequence[Row]) -> str:
    """List the contenders without numbers, with the reasons."""
    lines = [
        (row["shape"], _name(row), one_line(row["reason"]).replace("|", "/"))
        for row in rows
        if row["status"] == "failed"
    ]
    return markdown(("shape", "not measured", "why"), lines) if lines else ""


def best(rows: Iterable[Row]) -> Row | None:
    """Return the fastest of the rows with everything on; None where there is none."""
    return max((row for row in rows if not row["variant"]), key=lambda row: row["tokens_per_second"], default=None)


def one_line(reason: str) -> str:
    """Return the beginning of a reason."""
    words = " ".join(reason.split())
    return words if len(words) <= LONGEST_REASON else f"{words[:LONGEST_REASON]} ..."


def number(value: float) -> str:
    """Format a rate with its significant digits."""
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def markdown(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Format an aligned table."""
    cells = [list(headings), *map(list, lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headings))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([text[0], rule, *text[1:]])


def _ratio(row: Row, other: Row) -> float:
    return float(row["tokens_per_second"] / other["tokens_per_second"])


def _name(row: Row) -> str:
    return f"{row['contender']} without {row['variant']}" if row["variant"] else str(row["contender"])
