"""The `checkpoint`, `resilience` and `runtime` sections."""

from contextlib import suppress
from typing import ClassVar, Literal

from pydantic import Field, create_model, field_validator

from triaxis.engine.config.schema.section import LAYOUT, OnResume, Section
from triaxis.engine.config.values.counts import Count, count
from triaxis.engine.config.values.places import LocalPath
from triaxis.engine.layout.rank_rules import MOST_RANKS

SHORTEST_TIMEOUT = 1.0
"""Shortest allowed timeout in seconds: starting a process alone takes at least that long."""

LONGEST_TIMEOUT = 30 * 24 * 3600.0
"""Longest allowed timeout in seconds: 30 days."""

MOST_REMEMBERED = 10_000
"""Maximum number of steps whose losses and gradient norms are kept, and written into each checkpoint."""


# Users know the word `async`, but it is a Python keyword, so a class body cannot declare it as a field.
_InBackground = create_model(
    "_InBackground",
    __base__=Section,
    **{"async": (bool, Field(True, description="write while training continues; false: training waits for the disk"))},  # type: ignore[call-overload]
)


class CheckpointConfig(_InBackground):
    """Saving and loading. The same command resumes a run directory that holds checkpoints."""

    on_resume: ClassVar[OnResume | None] = LAYOUT

    dir: LocalPath | None = Field(
        None, description="folder of checkpoints, not inside another run; null: checkpoints/ in the run directory"
    )
    interval: Count | Literal["never"] | None = Field(
        None, description="steps between saves; the last step and a stop are saved too; null: only these; never: none"
    )
    keep_last: int | None = Field(3, gt=0, description="newest checkpoints to keep; null: all")
    keep_every: Count | None = Field(None, gt=0, description="keep checkpoints at multiples of this step for good")
    load: LocalPath | None = Field(None, description="checkpoint, or folder of checkpoints, to start from")
    load_what: Literal["all", "weights"] = Field("all", description="weights: start at step 0 with a fresh optimizer")
    accept: list[str] = Field(
        default_factory=list, description="fields or sections that may differ from those of the loaded checkpoint"
    )
    fingerprint_interval: Count | None = Field(None, gt=0, description="steps between logged fingerprints; null: none")

    @field_validator("interval", mode="before")
    @classmethod
    def _is_a_count_or_never(cls, value: object) -> object:
        """Refuse values other than null, never and a number of steps in one message; pydantic would give one per union member."""
        if value is None or value == "never":
            return value
        with suppress(ValueError):
            steps = count(value)
            if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0:
                return steps
        raise ValueError("must be a number of steps such as 1000 or 1k, null (the last step and a stop), or never")

    @property
    def saves(self) -> bool:
        """Whether the run saves at all."""
        return self.interval != "never"

    @property
    def every(self) -> int | None:
        """Number of steps between saves; None if the run saves only at its end, or never."""
        return self.interval if isinstance(self.interval, int) else None

    @property
    def in_background(self) -> bool:
        """Whether saves are written while training continues; False if the run saves only at its end, when training is over."""
        return bool(getattr(self, "async")) and self.every is not None


class ResilienceConfig(Section):
    """Policies for faults during training."""

    on_resume: ClassVar[OnResume | None] = LAYOUT

    on_nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="skip: leave that update out; rollback: to the last checkpoint before it, without its samples",
    )
    loss_spike: float | None = Field(
        None, gt=1, description="treat a loss above this multiple of the running median as not finite; null: never"
    )
    skip_above_deviations: float | None = Field(
        None,
        gt=0,
        description="leave out an update whose loss or norm is this many deviations above the mean; null: none",
    )
    skip_window: Count = Field(
        128, ge=4, le=MOST_REMEMBERED, description="last updates in that mean; with half of them there is a limit"
    )
    max_rollbacks: int = Field(3, gt=0, description="rollbacks of a run over all its attempts; one more stops it")
    max_skips_in_a_row: int = Field(
        10, gt=0, description="consecutive updates that may be skipped; one more stops the run"
    )
    replica_check_interval: Count | None = Field(
        100, gt=0, description="steps between comparisons of replicated weights; null: none"
    )


class RuntimeConfig(Section):
    """A run's device, communication, time limits and name."""

    on_resume: ClassVar[OnResume | None] = LAYOUT

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where there is a GPU; a GPU that torch cannot use is an error"
    )
    collectives: Literal["auto", "nccl", "gloo"] = Field(
        "auto", description="auto: nccl between GPUs, else gloo; gloo on GPUs is slow, but ranks may share one"
    )
    expandable_segments: bool = Field(
        True, description="CUDA memory in segments that grow; a PYTORCH_ALLOC_CONF in the environment wins"
    )
    memory: Literal["error", "warn"] = Field(
        "error", description="error: refuse a run whose predicted memory exceeds the GPU's; warn: only print it"
    )
    ranks_per_node: int | None = Field(None, gt=0, le=MOST_RANKS, description="null: LOCAL_WORLD_SIZE of the launcher")
    timeout_seconds: float = Field(
        600.0, ge=SHORTEST_TIMEOUT, le=LONGEST_TIMEOUT, description="a collective that takes longer ends the job"
    )
    hang_seconds: float | None = Field(
        None,
        gt=0,
        le=LONGEST_TIMEOUT,
        description="a rank without progress for this long ends the job; null: half of timeout_seconds",
    )
    gc_interval: Count = Field(
        100, gt=0, description="steps between collections of Python's cyclic garbage, which is off otherwise"
    )
    deterministic: bool = Field(False, description="deterministic CUDA kernels (CPU kernels always are)")
    runs_dir: LocalPath = Field("runs", description="parent of the run directories")
    name: str | None = Field(None, description="name of the run; null: the config file's stem")

    @property
    def hangs_after_seconds(self) -> float:
        """Seconds without progress after which a rank counts as hanging."""
        return self.timeout_seconds / 2 if self.hang_seconds is None else self.hang_seconds
