"""Print the findings of `triaxis doctor` for people, or build them as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from triaxis.engine.layout.rank_grid import RankGrid
from triaxis.engine.telemetry.outlets.format import in_bytes, significant
from triaxis.launch.doctor.judge import worst
from triaxis.launch.doctor.rates import middle
from triaxis.launch.doctor.records import Examination, Finding, GroupRate, Level, RankFacts

STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
WIDTH = 132
"""Report width in columns, if the output is not a terminal."""

MOST_NODES = 64
"""Most lines in the table of nodes; a node that is out of line is always named below the table."""


def show(console: Console, grid: RankGrid, seen: Examination, findings: Sequence[Finding]) -> None:
    """Print tables of the nodes, of rank 0's packages, and of the measured bandwidths.

    Then come the findings, worst last, and the verdict.
    """
    console.print(_nodes(seen))
    if seen.facts[0].packages:
        console.print(_packages(seen.facts[0]))
    if seen.groups or seen.paths:
        console.print(_rates(seen))
        console.print(
            "GB/s is bus bandwidth, 10^9 bytes that a ring sends per rank and second: 2 (n-1)/n of the tensor for an all-reduce, "
            "(n-1)/n of the whole for all-gather and reduce-scatter, all of it for a send; ms a step: if nothing were overlapped",
            style="dim",
        )
    levels = list(Level)
    for finding in sorted(findings, key=lambda one: levels.index(one.level)):
        console.print(f"[{STYLES[finding.level]}]{finding.level.value:<5}[/]{finding.check:<11}", end="")
        named = [host for host in finding.hosts if host not in finding.text]
        console.print(f"{', '.join(named)}: {finding.text}" if named else finding.text, markup=False)
        if finding.advice:
            console.print(f"{'':16}{finding.advice}", style="dim", markup=False)
    level = worst(findings)
    hosts = dict.fromkeys(host for one in findings if one.level is Level.FAIL for host in one.hosts)
    verdict = {
        Level.OK: f"{grid.sizes}: nothing is out of line.",
        Level.WARN: f"{grid.sizes}: no node is out of line; see the warnings.",
        Level.FAIL: f"{grid.sizes}: out of line: {', '.join(hosts) or 'see above'}",
    }[level]
    console.print(f"[{STYLES[level]}]{level.value}[/] ", end="")
    console.print(verdict, markup=False)


def _nodes(seen: Examination) -> Table:
    table = Table(title="Nodes", title_justify="left", box=SIMPLE_HEAD)
    for column in ("host", "ranks", "GPU", "interface", "clock", "free disk"):
        table.add_column(column, no_wrap=True)
    by_node: dict[int, list[RankFacts]] = {}
    for one in seen.facts:
        by_node.setdefault(one.node, []).append(one)
    for ranks in list(by_node.values())[:MOST_NODES]:
        first, last = ranks[0], ranks[-1]
        clock = (
            ""
            if (at := first.clock) is None
            else f"{at.offset_seconds * 1e3:+.2f} ± {at.precision_seconds * 1e3:.2f} ms"
        )
        table.add_row(
            first.host,
            str(first.rank) if first is last else f"{first.rank}-{last.rank}",
            first.equal.get("GPU", "none"),
            f"{first.network.interface} {first.network.address}".strip() or "none",
            clock,
            ", ".join(f"{root.key.partition('.')[2]} {root.free_bytes / 1e9:,.0f} GB" for root in first.roots),
        )
    if len(by_node) > MOST_NODES:
        table.caption = f"and {len(by_node) - MOST_NODES} more"
    return table


def _packages(first: RankFacts) -> Table:
    table = Table(title=f"Packages on {first.host}", title_justify="left", box=SIMPLE_HEAD)
    for column in ("package", "here", "used for"):
        table.add_column(column, overflow="fold")
    for one in first.packages:
        table.add_row(one.name, str(one), one.use)
    return table


def _rates(seen: Examination) -> Table:
    table = Table(title="Bandwidth", title_justify="left", box=SIMPLE_HEAD)
    for column in (
        "axis",
        "operation",
        "size",
        "groups",
        "ms",
        "GB/s min",
        "median",
        "max",
        "calls a step",
        "ms a step",
    ):
        table.add_column(column, justify="left" if column in ("axis", "operation") else "right", no_wrap=True)
    kinds: dict[tuple[str, str, int], list[GroupRate]] = {}
    for one in (*seen.groups, *seen.paths):
        kinds.setdefault((one.axis if one in seen.groups else "node to node", one.op, one.num_bytes), []).append(one)
    for (axis, op, num_bytes), same in kinds.items():
        rates = sorted(one.bytes_per_second / 1e9 for one in same)
        milliseconds = middle([one.seconds * 1e3 for one in same])
        calls = same[0].calls
        table.add_row(
            axis,
            op.replace("_", "-"),
            in_bytes(num_bytes),
            str(len(same)),
            significant(milliseconds),
            *(significant(rate) for rate in (rates[0], middle(rates), rates[-1])),
            *((str(calls), significant(calls * milliseconds)) if calls else ("", "")),
        )
    return table


def as_json(grid: RankGrid, seen: Examination, findings: Sequence[Finding]) -> dict[str, object]:
    """Build a JSON tree with all facts, rates (bytes per second) and findings."""
    return {
        "verdict": worst(findings).value,
        "layout": str(grid.sizes),
        "ranks_per_node": grid.ranks_per_node,
        "findings": [asdict(one) | {"level": one.level.value} for one in findings],
        "needs": asdict(seen.needs),
        "ranks": _trees(seen.facts),
        "groups": _trees(seen.groups),
        "node_paths": _trees(seen.paths),
    }


def _trees(records: Iterable[RankFacts | GroupRate]) -> list[dict[str, object]]:
    return [asdict(one) for one in records]
