"""The part of the configuration about measuring and logging (no torch here)."""

from pydantic import Field

from engine.config.counts import Count
from engine.config.section import Section


class WandbConfig(Section):
    """Weights & Biases; offline where there is no key or no network."""

    project: str = Field(description="project that the run belongs to")
    entity: str | None = Field(None, description="user or team; null: the key's default")
    name: str | None = Field(None, description="null: the run's name")
    tags: list[str] = Field(default_factory=list, description="labels to filter runs by")


class ProfileConfig(Section):
    """A trace of some steps by torch's profiler, one file per rank in the run directory."""

    start: Count = Field(gt=0, description="first traced step, counted from 1; the first ones warm up")
    steps: Count = Field(2, gt=0, description="how many")
    ranks: list[int] = Field(default_factory=lambda: [0], description="which ranks write a trace")


class TimelineConfig(Section):
    """A timeline of a few steps of all ranks, in the run directory. It is cheap; `profile` shows kernels."""

    start: Count = Field(gt=0, description="first step in it, counted from 1; the first ones warm up")
    steps: Count = Field(2, gt=0, description="how many")


class TelemetryConfig(Section):
    """Measurements and logs of a training run; metrics.jsonl is always written."""

    log_interval: Count = Field(10, gt=0, description="steps between lines on the terminal")
    wandb: WandbConfig | None = Field(None, description="null: off")
    tensorboard: bool = Field(False, description="event files in the run directory")
    time_split: bool = Field(True, description="measure where the time of a step goes, and name ranks that are slow")
    timeline: TimelineConfig | None = Field(None, description="null: off")
    profile: ProfileConfig | None = Field(None, description="null: off")
    nvtx: bool = Field(False, description="name steps, phases and schedule actions for Nsight Systems; needs a GPU")
    memory_history: bool = Field(
        False, description="keep CUDA's latest allocations, for the snapshot at out of memory; needs a GPU"
    )
    sample_tokens: Count = Field(0, ge=0, description="tokens of text that the model writes when it is trained")
    peak_tflops: float | None = Field(
        None, gt=0, description="per device, for MFU; null: from a table of GPUs, or no MFU"
    )
