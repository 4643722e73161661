"""The request to one process, its answer, and the numbers that follow from it.

    Job  --process-->  Row  --appended-->  results.jsonl        one JSON object per line

A row is known by its request (`Job.key`): shape, contender, settings, sizes. What the file has of a request is not measured again,
a failure neither; the newest row of a request counts. `benchmarks/results/README.md` describes every field.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_contenders.shapes import SHAPES, Shape
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.telemetry.record.flops import hardware_flops_per_token, model_flops_per_token
from triaxis.engine.telemetry.record.jsonl import heal

FORMAT = 1

DID_NOT_FIT = 75
NO_DEVICE = 76
"""Exit codes of a process that leaves no row: its microbatch is too large, and a smaller one may be tried; torch finds no GPU."""

COMMIT_VARIABLE = "GPU_BENCHMARK_COMMIT"
COMMAND_VARIABLE = "GPU_BENCHMARK_COMMAND"
"""Say to a process which commit the files are of, and by which command it was started."""


@dataclass(frozen=True, slots=True)
class Job:
    """One process's work.

    Attributes:
        words: settings of ours, `section.key=value`, each field once; empty for the others.
        variant: the optimisation that is turned off in them; empty: none.
        micro_batch_sizes: those that may be tried, largest first.
        micro_batch_size: of this try.
        tried: those that did not fit, before this one.
        steps, warm_up: timed optimizer steps, and those before them.
        traced: steps that are profiled after them (ours alone).
        ceiling_size: of the square matrices whose product is the ceiling.
        ceiling_seconds: how long products run before they are timed.
    """

    shape: str
    contender: str
    device: str
    dtype: str
    micro_batch_sizes: tuple[int, ...]
    micro_batch_size: int
    words: tuple[str, ...] = ()
    variant: str = ""
    tried: tuple[int, ...] = ()
    steps: int = 30
    warm_up: int = 10
    traced: int = 0
    ceiling_size: int = 8192
    ceiling_seconds: float = 3.0

    @property
    def sizes(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def model(self) -> ModelConfig:
        return ModelConfig.model_validate(dict(self.sizes.model))

    @property
    def is_last_try(self) -> bool:
        return self.micro_batch_size == self.micro_batch_sizes[-1]

    @property
    def key(self) -> str:
        """Return the values that two rows of the same measurement share."""
        fields = ("shape", "contender", "device", "dtype", "micro_batch_sizes", "words", "variant", "steps", "warm_up")
        return json.dumps([getattr(self, name) for name in (*fields, "ceiling_size")])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        values = json.loads(text)
        for name in ("micro_batch_sizes", "words", "tried"):
            values[name] = tuple(values[name])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Run:
    """Results of a contender's training.

    Attributes:
        step_seconds: of each timed step, in order.
        first_loss, last_loss: of all steps, per token in nats.
        peak_memory_bytes: the most that the allocator had handed out; None on a CPU.
        recompute: what the contender computes twice.
        settings: what else a reader must know about how it ran.
        breakdown: see `kernel_classes.breakdown`; None where nothing was traced or no kernel is in the trace.
    """

    step_seconds: Sequence[float]
    first_loss: float
    last_loss: float
    peak_memory_bytes: int | None
    recompute: RecomputeConfig
    settings: Mapping[str, Any]
    breakdown: Mapping[str, Any] | None = None


def rates(job: Job, run: Run, ceiling_tflops: float) -> dict[str, Any]:
    """Compute tokens and FLOPs per second of a run, over the whole of its timed steps.

    FLOPs are those of `triaxis.engine.telemetry.record.flops`: model FLOPs of the logical vocabulary, causal and not;
    hardware FLOPs with its padding and with what is computed twice. r = causal model TFLOP/s / `ceiling_tflops`.
    """
    model, seconds = job.model, sum(run.step_seconds)
    tokens_per_second = job.sizes.samples_per_step * model.seq_length * len(run.step_seconds) / seconds
    causal = model_flops_per_token(model) * tokens_per_second / 1e12
    hardware = hardware_flops_per_token(model, run.recompute, [model.num_layers])
    return {
        "tokens_per_second": tokens_per_second,
        "model_tflops_causal": causal,
        "model_tflops_non_causal": model_flops_per_token(model, causal=False) * tokens_per_second / 1e12,
        "hardware_tflops": hardware * tokens_per_second / 1e12,
        "r": causal / ceiling_tflops,
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, least, most and 90th percentile of step times."""
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "p90": ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))],
    }


def measured(
    job: Job,
    run: Run,
    ceilings: Mapping[str, float],
    about: Mapping[str, Any],
    *,
    fp8_ceilings: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Build the row of a run that went to its end; `fp8_ceilings` where it has FP8 linear layers."""
    ceiling = with_mean(ceilings)
    numbers = rates(job, run, ceiling["mean"])
    fp8_ceiling = None if fp8_ceilings is None else with_mean(fp8_ceilings)
    return {
        **_head(job, "measured"),
        **numbers,
        "r_fp8": None if fp8_ceiling is None else numbers["model_tflops_causal"] / fp8_ceiling["mean"],
        "ceiling_tflops": ceiling,
        "fp8_ceiling_tflops": fp8_ceiling,
        "step_seconds": spread(run.step_seconds),
        "all_step_seconds": list(run.step_seconds),
        "peak_memory_bytes": run.peak_memory_bytes,
        "first_loss": run.first_loss,
        "last_loss": run.last_loss,
        "settings": dict(run.settings),
        "breakdown": run.breakdown,
        **about,
    }


def with_mean(ceilings: Mapping[str, float]) -> dict[str, float]:
    return {**ceilings, "mean": sum(ceilings.values()) / len(ceilings)}


def failed(job: Job, reason: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Build the row of a contender without numbers, with the reason."""
    return {**_head(job, "failed"), "reason": reason, **about}


def _head(job: Job, status: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "key": job.key,
        "status": status,
        "shape": job.shape,
        "contender": job.contender,
        "variant": job.variant,
        "words": list(job.words),
        "micro_batch_size": job.micro_batch_size,
        "did_not_fit": list(job.tried),
        "tokens_per_step": job.sizes.samples_per_step * job.sizes.model["seq_length"],
        "steps": job.steps,
        "warm_up": job.warm_up,
        "dtype": job.dtype,
        "device": job.device,
    }


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line; the remains of a killed process are cut off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    heal(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Read all rows, oldest first; none where there is no file."""
    if not path.exists():
        return []
    heal(path)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def newest(rows: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the newest row of each request, by its key, in the order in which requests first came."""
    return {row["key"]: row for row in rows}
