"""To what this engine would lose a step's time in the layouts of published runs: `python -m benchmarks.published --losses`.

    peak        the model's FLOPs at the data sheet's rate: what remains without any loss, the MFU
    kernels     the rest of the computation: rates below peak, elementwise passes, time between kernels
    recompute, tp, cp, experts, host, pipeline bubble, transfers, dp, optimizer
                exposed seconds, as `triaxis.models.predict.step_time.estimate` has them

The shares of a row add up to the step. The published seconds are those of the run's own software. No row is fitted, and none is
measured with this engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.published.compare import Row, aligned
from benchmarks.published.runs import setup_of
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.telemetry.record.flops import model_flops_per_token
from triaxis.models.predict.rank_memory import GB, predict
from triaxis.models.predict.step_time.estimate import COMPONENTS, Estimator

PEAK, KERNELS = "peak", "kernels"
SHARES = (PEAK, KERNELS, *COMPONENTS[1:])
"""Names of the shares, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Losses:
    """A published run's layout with this engine.

    Attributes:
        seconds: predicted seconds of a step; 0: none is predicted.
        shares: share of the step by name (`SHARES`); they add up to 1.
        note: how the published run differs.
        lacks: why no step is predicted; empty: one is.
    """

    row: Row
    seconds: float
    shares: dict[str, float]
    note: str = ""
    lacks: str = ""


def losses(rows: Sequence[Row]) -> Iterator[Losses]:
    """Predict this engine's step for each scored row."""
    for row in rows:
        if row.is_scored:
            try:
                yield _losses(row)
            except ConfigError as error:
                yield Losses(row, 0.0, {}, lacks=error.problems[0])


def _losses(row: Row) -> Losses:
    setup = setup_of(row.run)
    estimator = Estimator(setup.cluster)
    device = estimator.device
    timed = sorted(
        (
            (estimator.closed_form(config, sizes).seconds, number)
            for number, (config, sizes) in enumerate(setup.choices)
        ),
    )
    fitting = (setup.choices[number] for _, number in timed if _fits(*setup.choices[number], device.memory_gb * GB))
    if (chosen := next(fitting, None)) is None:
        return Losses(row, 0.0, {}, lacks="no value of what is open is predicted to fit")
    config, sizes = chosen
    step = estimator.simulated(config, sizes)
    rate = device.peak_tflops[config.precision.dtype] * 1e12
    tokens = config.train.global_batch_size * config.model.seq_length
    peak = model_flops_per_token(config.model) * tokens / sizes.world_size / rate
    parts = {PEAK: peak, KERNELS: step.components["compute"] - peak}
    parts |= {name: step.components.get(name, 0.0) for name in COMPONENTS[1:]}
    note = "published in FP8" if setup.implementation.fp8 else ""
    return Losses(row, step.seconds, {name: seconds / step.seconds for name, seconds in parts.items()}, note)


def _fits(config: Config, sizes: ParallelSizes, most_bytes: float) -> bool:
    return predict(config, sizes).fullest.total <= most_bytes


def lines(found: Sequence[Losses]) -> Iterator[str]:
    """Yield the table, a line per row, then the rows without a prediction."""
    names = [name.removeprefix("pipeline ") for name in SHARES]
    table = [("line", "model", "gpus", "layout", "published s", "ours s", *names, "")]
    for one in found:
        if not one.lacks:
            run = one.row.run
            words = str(run.line), run.name, run.words["gpus"], run.layout, f"{run.seconds:.4g}", f"{one.seconds:.4g}"
            table.append((*words, *(f"{abs(round(one.shares[name], 2)):.0%}" for name in SHARES), one.note))
    yield "predicted step of this engine in published layouts, and the shares of it:"
    yield from aligned(table)
    yield from (f"  line {one.row.run.line} {one.row.run.name}: {one.lacks}" for one in found if one.lacks)
