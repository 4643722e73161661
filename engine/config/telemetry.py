"""The `telemetry` section and its rules: measuring and logging."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import Field

from triaxis.engine.config.counts import Count
from triaxis.engine.config.plan import planned_steps
from triaxis.engine.config.problem import Problem, Rule, Subject
from triaxis.engine.config.section import LAYOUT, OnResume, Section

SINKS: Mapping[str, str] = MappingProxyType(
    {
        "wandb": "triaxis.engine.telemetry.outlets.wandb:WandbSink",
        "tensorboard": "triaxis.engine.telemetry.outlets.tensorboard:TensorBoardSink",
    }
)
"""Import paths of the sinks (`triaxis.engine.telemetry.outlets.sink`), by the `telemetry` field that turns each on. A run opens its
sinks in this order. They are imported only then: a run loads what it uses, and `engine/config` is a lower layer than the sinks."""


class WandbConfig(Section):
    """Logging to Weights & Biases; offline if there is no key or no network."""

    project: str = Field(description="project of the run")
    entity: str | None = Field(None, description="user or team; null: the default of the key")
    name: str | None = Field(None, description="name on the page; null: the run's name")
    tags: list[str] = Field(default_factory=list, description="labels to filter runs by")


class ProfileConfig(Section):
    """A torch profiler trace over some steps, one file per rank in the run directory."""

    start: Count = Field(gt=0, description="first traced step, counted from 1; the first steps of a run warm up")
    steps: Count = Field(2, gt=0, description="number of steps")
    ranks: list[int] = Field(default_factory=lambda: [0], description="ranks that write a trace")


class TimelineConfig(Section):
    """A timeline for all ranks over a few steps, in the run directory. It is cheap; `profile` shows kernels."""

    start: Count = Field(gt=0, description="first step shown, counted from 1; the first steps of a run warm up")
    steps: Count = Field(2, gt=0, description="number of steps")


class TelemetryConfig(Section):
    """A training run's measurements and logs; metrics.jsonl is always written."""

    on_resume: ClassVar[OnResume | None] = LAYOUT

    log_interval: Count = Field(10, gt=0, description="steps between lines on the terminal")
    wandb: WandbConfig | None = Field(None, description="log to Weights & Biases; null: off")
    tensorboard: bool = Field(False, description="write event files into the run directory")
    names: Literal["triaxis", "megatron"] = Field(
        "triaxis",
        description="names of wandb's and TensorBoard's charts; megatron: Megatron-LM's (`lm loss`, ..)",
    )
    time_split: bool = Field(True, description="measure where the time of a step goes, and name slow ranks")
    timeline: TimelineConfig | None = Field(None, description="steps of all ranks on one time axis; null: off")
    profile: ProfileConfig | None = Field(None, description="traces by torch's profiler; null: off")
    nvtx: bool = Field(False, description="name steps, phases and schedule actions for Nsight Systems; needs a GPU")
    memory_history: bool = Field(
        False, description="record CUDA allocations for the snapshot at out of memory; needs a GPU"
    )
    norms_interval: Count | None = Field(
        None,
        gt=0,
        description="steps between norms of gradients, weights and updates by groups of parameters; null: off",
    )
    sample_tokens: Count = Field(0, ge=0, description="tokens of text that the model writes after training")
    peak_tflops: float | None = Field(
        None, gt=0, description="peak TFLOP/s of a device, for MFU; null: from a table of GPUs, or no MFU"
    )


def traced_steps_are_in_the_run(subject: Subject) -> Iterator[Problem]:
    telemetry, num_steps = subject.config.telemetry, planned_steps(subject.config)
    for name, traced in (("profile", telemetry.profile), ("timeline", telemetry.timeline)):
        if traced is None or num_steps is None or traced.start + traced.steps - 1 <= num_steps:
            continue
        last = traced.start + traced.steps - 1
        yield subject.problem(
            f"telemetry.{name}.start",
            f"asks for a trace of steps {traced.start} to {last}, but the run has {num_steps}: it would never be whole",
            {
                f"telemetry.{name}.start": [num_steps - traced.steps + 1] if traced.steps <= num_steps else [],
                f"telemetry.{name}.steps": [num_steps - traced.start + 1] if traced.start <= num_steps else [],
                "train.steps": [last] if subject.config.train.steps is not None else [],
            },
        )


def profiled_ranks_are_in_the_run(subject: Subject) -> Iterator[Problem]:
    profile = subject.config.telemetry.profile
    if profile is None:
        return
    world_size, dp = subject.world_size, subject.dp
    if world_size is None and dp is not None:
        world_size = subject.config.parallel.tp * subject.config.parallel.pp * dp
    missing = [rank for rank in profile.ranks if rank < 0 or (world_size is not None and rank >= world_size)]
    if missing or not profile.ranks:
        legal = [rank for rank in profile.ranks if rank not in missing]
        yield subject.problem(
            "telemetry.profile.ranks",
            f"must name ranks of the run{'' if world_size is None else f', 0 to {world_size - 1}'}: no trace would be written"
            + (f" of {', '.join(map(str, missing))}" if missing else ""),
            {"telemetry.profile.ranks": [legal or [0]], "telemetry.profile": [None]},
        )


def gpu_tools_have_a_gpu(subject: Subject) -> Iterator[Problem]:
    if subject.config.runtime.device == "cpu":
        for problem in gpu_tool_problems(subject.config.telemetry, "runtime.device = cpu"):
            yield replace(problem, candidates={**problem.candidates, "runtime.device": ["auto", "cuda"]})


def gpu_tool_problems(telemetry: TelemetryConfig, why: str) -> Iterator[Problem]:
    """Yield a problem for each field that is on and needs a GPU; `why` explains why there is none."""
    for name in ("nvtx", "memory_history"):
        if getattr(telemetry, name):
            field = f"telemetry.{name}"
            yield Problem(field, True, f"looks at a GPU, but {why}: it would show nothing", {field: [False]})


TELEMETRY_RULES: tuple[Rule, ...] = (traced_steps_are_in_the_run, profiled_ranks_are_in_the_run, gpu_tools_have_a_gpu)
