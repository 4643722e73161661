"""The cost model against published runs: `python -m benchmarks.published`.

    Run -> Setup -> seconds of each choice that fits -> those that the model cannot tell from the fastest -> their middle is scored

A run that leaves its micro batch, its recomputation or its chunks open was tuned by its authors. Of the legal values that fit, the
fastest is expected, and those within `RESOLUTION` of it: the worst error that the model may have. Nothing is fitted to any row.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmarks.published.runs import Run, Setup, read_runs, setup_of
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.device import Device
from triaxis.models.predict.rank_memory import Memo, predict
from triaxis.models.predict.step_time.estimate import Estimator
from triaxis.models.predict.step_time.implementation import Implementation

RESOLUTION = 0.12
"""The worst error that is claimed of the model: it cannot tell values apart whose times differ by less."""

FEWEST_ROWS = 3
"""Timed rows of a GPU type with which it is scored."""

POOLED_SHARE = 0.95
"""Share of the scored rows that the stated interval covers."""

CLEARLY = 0.05
"""Difference of published speeds from which on the order of two layouts counts: one recipe moves by up to 7 % between releases."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """The prediction of a run.

    Attributes:
        low, high: seconds of the fastest and the slowest of the values that are searched; equal where nothing is.
        searched: columns that the row leaves open, with the number of legal choices, and of those within `RESOLUTION`.
    """

    low: float
    high: float
    searched: str
    implementation: Implementation
    device: Device

    @property
    def seconds(self) -> float:
        """Return the middle of the range, which is scored."""
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True)
class Row:
    """A run with its prediction, or with what it lacks.

    Attributes:
        unscored: why it does not count; empty: it counts.
    """

    run: Run
    predicted: Predicted | None
    unscored: str

    @property
    def error(self) -> float | None:
        """Return predicted over published seconds, less one."""
        if self.predicted is None or self.run.seconds is None:
            return None
        return self.predicted.seconds / self.run.seconds - 1

    @property
    def is_scored(self) -> bool:
        return not self.unscored


@dataclass(frozen=True, slots=True)
class Pair:
    """Two scored runs of one model whose published speeds differ clearly."""

    first: Row
    second: Row

    @property
    def is_in_order(self) -> bool:
        """Return whether the prediction has the same one faster, by tokens per second and GPU."""
        return (_published(self.first) > _published(self.second)) == (_expected(self.first) > _expected(self.second))


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows of a file."""

    rows: tuple[Row, ...]

    @property
    def scored(self) -> list[Row]:
        return [row for row in self.rows if row.is_scored]

    @property
    def num_timed(self) -> int:
        """Return the number of rows that have a published time."""
        return sum(row.run.is_timed for row in self.rows)

    @property
    def errors(self) -> list[float]:
        """Return the sizes of the scored errors."""
        return [abs(error) for row in self.scored if (error := row.error) is not None]

    @property
    def mean(self) -> float:
        return sum(self.errors) / len(self.errors)

    @property
    def worst(self) -> float:
        return max(self.errors)

    @property
    def pairs(self) -> list[Pair]:
        """Return the layouts of one model on one cluster that differ clearly."""
        return [
            pair for pair in self._same_model() if pair.first.run.numbers["gpus"] == pair.second.run.numbers["gpus"]
        ]

    @property
    def sweeps(self) -> list[Pair]:
        """Return runs of one source and model on clusters of several sizes that differ clearly."""
        return [
            pair
            for pair in self._same_model()
            if pair.first.run.numbers["gpus"] != pair.second.run.numbers["gpus"]
            and pair.first.run.words["source"] == pair.second.run.words["source"]
        ]

    def _same_model(self) -> Iterator[Pair]:
        for first, second in combinations(self.scored, 2):
            if first.run.shape != second.run.shape or first.run.gpu_type != second.run.gpu_type:
                continue
            speeds = sorted((_published(first), _published(second)))
            if speeds[1] > (1 + CLEARLY) * speeds[0]:
                yield Pair(first, second)


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of published over predicted seconds, pooled over rows, and how often they hold for software that they do not know.

    Attributes:
        low, high: bounds of the middle `POOLED_SHARE` of the rows.
        num_held: rows inside the bounds that the rows of all other software give.
        num_rows: all rows.
    """

    low: float
    high: float
    num_held: int
    num_rows: int

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "Interval":
        """Pool the rows, then leave out one software at a time."""
        by_software: dict[str, list[float]] = {}
        for row in rows:
            assert row.predicted is not None and row.error is not None
            by_software.setdefault(row.predicted.implementation.name, []).append(1 / (1 + row.error))
        num_held = 0
        for left_out, ratios in by_software.items():
            others = [ratio for name, each in by_software.items() if name != left_out for ratio in each]
            low, high = _middle(others) if others else (math.inf, -math.inf)
            num_held += sum(low <= ratio <= high for ratio in ratios)
        pooled = [ratio for each in by_software.values() for ratio in each]
        return cls(*_middle(pooled), num_held, len(pooled))

    def __str__(self) -> str:
        held = self.num_held / self.num_rows
        return (
            f"interval: {POOLED_SHARE:.0%} of published seconds are {self.low:.3f} to {self.high:.3f} of predicted ones; with one "
            f"software left out at a time it holds for {self.num_held} of {self.num_rows} rows, {held:.1%}"
        )


def _middle(ratios: Sequence[float]) -> tuple[float, float]:
    """Compute the bounds of the middle `POOLED_SHARE` of numbers, interpolated."""
    low, high = np.quantile(ratios, [(1 - POOLED_SHARE) / 2, (1 + POOLED_SHARE) / 2])
    return float(low), float(high)


def _published(row: Row) -> float:
    assert row.run.seconds is not None
    return row.run.tokens / row.run.numbers["gpus"] / row.run.seconds


def _expected(row: Row) -> float:
    assert row.predicted is not None
    return row.run.tokens / row.run.numbers["gpus"] / row.predicted.seconds


def compare(path: Path) -> Comparison:
    """Predict the runs of a file.

    Raises:
        ConfigError: as `read_runs`.
    """
    runs = read_runs(path)
    by_type: dict[str, int] = {}
    for run in runs:
        by_type[run.gpu_type] = by_type.get(run.gpu_type, 0) + run.is_timed
    return Comparison(tuple(_row(run, by_type[run.gpu_type]) for run in runs))


def _row(run: Run, rows_of_type: int) -> Row:
    predicted, reasons = None, [f"lacks {'; '.join(run.lacks)}"] if run.lacks else []
    if not run.is_timed and not any("step_time_s" in word or "tokens_per_s" in word for word in run.lacks):
        reasons.append("lacks step_time_s or tokens_per_s_per_gpu")
    if run.is_timed and rows_of_type < FEWEST_ROWS:
        reasons.append(f"GPU type {run.gpu_type} has {rows_of_type} of {FEWEST_ROWS} timed rows")
    if not run.lacks:
        try:
            setup = setup_of(run)
            predicted = _predict(setup) if setup.choices else None
            reasons += [f"lacks a shape that can be: {'; '.join(setup.broken)}"] if setup.broken else []
        except ConfigError as error:
            reasons.append(f"lacks a cluster: {' '.join(error.problems)}")
        else:
            if predicted is None and not setup.broken:
                reasons.append(f"lacks a value of {', '.join(setup.open)} that is predicted to fit")
    return Row(run, predicted, "; ".join(reasons))


def _predict(setup: Setup) -> Predicted | None:
    """Predict a run; None where no value of what is open fits."""
    estimator = Estimator(setup.cluster, setup.implementation)
    device, how = estimator.device, setup.implementation
    if not setup.open:
        (config, sizes) = setup.choices[0]
        seconds = estimator.simulated(config, sizes).seconds
        return Predicted(seconds, seconds, "", how, device)
    memo: Memo = {}
    timed = sorted(
        ((estimator.closed_form(config, sizes).seconds, config, sizes) for config, sizes in setup.choices),
        key=lambda choice: choice[0],
    )
    # Memory takes longer to predict than time: it is asked of the fastest, and of those that are hardly slower.
    close: list[tuple[Config, ParallelSizes]] = []
    most = float("inf")
    for seconds, config, sizes in timed:
        if seconds > most:
            break
        if held_bytes(config, sizes, how, memo) <= device.memory_gb * 1e9:
            most = min(most, seconds * (1 + RESOLUTION))
            close.append((config, sizes))
    if not close:
        return None
    low, high = sorted(estimator.simulated(config, sizes).seconds for config, sizes in (close[0], close[-1]))
    return Predicted(low, high, f"{', '.join(setup.open)}: {len(close)} of {len(timed)}", how, device)


def held_bytes(config: Config, sizes: ParallelSizes, how: Implementation, memo: Memo) -> int:
    """Return the bytes of the fullest rank, with parameters, gradients and optimizer state sharded as the software does.

    Args:
        memo: of earlier predictions of this model.
    """
    most, n = 0, sizes.dp_cp
    for rank in predict(config, sizes, memo=memo).ranks:
        total = rank.total
        if how.shards == "parameters":
            total -= (rank.parameters + rank.gradients) * (n - 1) // n
        elif how.shards == "none":
            total += rank.optimizer * (n - 1)
        most = max(most, total)
    return most


def lines(found: Comparison) -> Iterator[str]:
    """Yield the report, a line each."""
    rows = [_cells(row) for row in found.rows if row.predicted is not None and row.run.is_timed]
    yield from aligned([("line", "model", "gpus", "layout", "predicted s", "published s", "error", ""), *rows])
    if others := [row for row in found.rows if not row.is_scored]:
        yield "not scored:"
        yield from (f"  line {row.run.line} {row.run.name} on {row.run.gpu_type}: {row.unscored}" for row in others)
    yield from _by_software(found.scored)
    devices = {row.predicted.device.name: row.predicted.device for row in found.rows if row.predicted is not None}
    for name, device in sorted(devices.items()):
        yield f"calibration {name}: sha256 {device.digest}"
    for name, pairs in (("pairs of one model and cluster", found.pairs), ("steps of sweeps", found.sweeps)):
        yield f"{name}: {sum(pair.is_in_order for pair in pairs)} of {len(pairs)} in order"
        yield from (
            f"  not in order: lines {pair.first.run.line} and {pair.second.run.line}, {pair.first.run.name}"
            for pair in pairs
            if not pair.is_in_order
        )
    if not found.scored:
        yield f"rows 0 of {found.num_timed}"
        return
    yield from _beyond(found.scored)
    yield str(Interval.of(found.scored)).replace("%", " %")
    yield f"mean {found.mean:.1%} worst {found.worst:.1%} rows {len(found.scored)} of {found.num_timed}".replace(
        "%", " %"
    )


def _beyond(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the rows beyond the claimed error with their software, and how far those of other software are off at most."""
    found = [
        (row, abs(row.error), row.predicted.implementation.name)
        for row in rows
        if row.error is not None and row.predicted
    ]
    software = {name for _, error, name in found if error > RESOLUTION}
    if not software:
        return
    named = ", ".join(
        f"line {row.run.line} {row.run.name} ({name})" for row, error, name in found if error > RESOLUTION
    )
    others = [error for _, error, name in found if name not in software]
    rest = f"; other software: mean {sum(others) / len(others):.1%} worst {max(others):.1%}" if others else ""
    yield f"beyond {RESOLUTION:.0%}: {named}{rest}".replace("%", " %")


def _cells(row: Row) -> tuple[str, ...]:
    run, predicted, error = row.run, row.predicted, row.error
    assert predicted is not None and error is not None
    words = ""
    if predicted.searched:
        words = f"[{predicted.low:.4g}, {predicted.high:.4g}] {predicted.searched}"
    if not row.is_scored:
        words = f"{words} not scored".strip()
    return (
        *(str(run.line), run.name, run.words["gpus"], run.layout),
        *(f"{predicted.seconds:.4g}", f"{run.seconds:.4g}", f"{error:+.1%}".replace("%", " %"), words),
    )


def aligned(table: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the rows of a table: four columns of words, numbers, and a last column that is free."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        left = [cell.ljust(width) for cell, width in zip(cells[:4], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(cells[4:-1], widths[4:], strict=False)]
        yield "  ".join([*left, *right, cells[-1]]).rstrip()


def _by_software(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the mean signed error of each software: one constant of a device stands for all of them."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        assert row.predicted is not None and row.error is not None
        errors.setdefault(row.predicted.implementation.name, []).append(row.error)
    for name, values in sorted(errors.items()):
        count = f"{len(values)} row{'s' * (len(values) > 1)}"
        yield f"{name}: {sum(values) / len(values):+.1%} on the mean of {count}".replace("%", " %")
