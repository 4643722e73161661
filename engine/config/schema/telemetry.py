"""The `telemetry` section: measuring and logging."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import Field

from triaxis.engine.config.schema.section import LAYOUT, OnResume, Section
from triaxis.engine.config.values.counts import Count

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
