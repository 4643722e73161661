"""The configuration: one tree of pydantic models.

A config is data and never rewritten after reading. Sections compute what follows from their own fields, such as the padded
vocabulary; `engine/config/quantities/plan.py` computes what follows from several sections, such as the pipeline stages.
Reading is in `engine/config/load.py`, the check of its rules in `engine/config/rules/check.py`.

    YAML  <  environment  <  section.key=value   ->   Config   ->   ParallelSizes, BatchPlan
"""

from typing import Annotated

from pydantic import Field

from triaxis.engine.config.schema.data import DataConfig
from triaxis.engine.config.schema.kernels import KernelsConfig
from triaxis.engine.config.schema.layout import ParallelConfig, ScheduleConfig
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.phases import PhaseFields
from triaxis.engine.config.schema.recompute import OffloadConfig, RecomputeConfig
from triaxis.engine.config.schema.run import CheckpointConfig, ResilienceConfig, RuntimeConfig
from triaxis.engine.config.schema.section import MEANT, OnResume, Section, Verdict
from triaxis.engine.config.schema.telemetry import TelemetryConfig
from triaxis.engine.config.schema.training import EvalConfig, OptimizerConfig, PrecisionConfig, TrainConfig
from triaxis.engine.config.values.optimizer_kinds import StateKind, state_kinds

FORMAT_VERSION = 2
"""Version number for configuration files, raised when a key changes its name or its meaning (`engine/config/names/earlier.py`)."""


class Config(Section):
    """The whole configuration tree."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    precision: PrecisionConfig = PrecisionConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    offload: OffloadConfig = OffloadConfig()
    kernels: KernelsConfig = KernelsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    phases: Annotated[list[PhaseFields], MEANT] = Field(
        default_factory=list, description="parts of the run in order, each to `until` tokens, with fields of its own"
    )

    @property
    def state_kinds(self) -> tuple[StateKind, ...]:
        """A trained parameter's kinds of optimizer state, the master first."""
        own = () if self.model.extension is None else self.model.extension.moments
        return state_kinds(self.optimizer.name, own, has_ema=self.optimizer.ema is not None)


def is_whole(config: Config) -> bool:
    """Whether every field has a value; fields with a wrong type have none."""
    values = [getattr(config, name, None) for name in Config.model_fields]
    return all(
        value is not None
        and (not isinstance(value, Section) or all(name in value.__dict__ for name in type(value).model_fields))
        for value in values
    )


def resume_verdict(config: Config, key: str) -> Verdict:
    """Return the verdict on a resume with the new configuration `config`, in which the field `key` has changed."""
    found = on_resume(key)
    return "layout" if found.is_layout is not None and found.is_layout(config) else found.verdict


def on_resume(key: str) -> OnResume:
    """Look up a field's resume rule: its own, else the nearest enclosing section's; if neither exists, `never`."""
    found = OnResume("never")
    for about, section in Config.along(key.split(".")):
        found = next((one for one in about.metadata if isinstance(one, OnResume)), found)
        found = found if section is None else section.on_resume or found
    return found
