"""The `parallel` and `schedule` sections: how the model and a step are cut over ranks."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from triaxis.engine.config.schema.model import MOST_LAYERS
from triaxis.engine.config.schema.section import LAYOUT, OnResume, Section
from triaxis.engine.config.values.schedule_file import ScheduleFile
from triaxis.engine.layout.rank_rules import MOST_RANKS

Method = Literal["all_gather", "ulysses"]


class ParallelConfig(Section):
    """The layout over ranks: it changes speed and memory, and results by rounding only."""

    on_resume: ClassVar[OnResume | None] = LAYOUT

    tp: int = Field(1, gt=0, le=MOST_RANKS, description="tensor parallel: each matrix is cut over tp ranks of one node")
    pp: int = Field(1, gt=0, le=MOST_RANKS, description="pipeline parallel: layers are cut into pp x vpp stages")
    vpp: int = Field(1, gt=0, le=MOST_LAYERS, description="model chunks per pipeline rank (interleaved schedule)")
    dp: int | None = Field(
        None, gt=0, le=MOST_RANKS, description="data parallel replicas; null: world size / (tp cp pp)"
    )
    zero: Literal[1, 2, 3] = Field(
        1,
        description="dp x cp ranks share 1: the optimizer's state; 2: layers' main grads too; 3: and weights",
    )
    dp_replicas: int = Field(
        1,
        gt=0,
        le=MOST_RANKS,
        description="copies of the state that zero cuts (HSDP); each is cut over dp / N x cp ranks",
    )
    cp: int = Field(
        1, gt=0, le=MOST_RANKS, description="context parallel: the tokens of each sample are cut over cp ranks"
    )
    cp_method: Literal["auto", Method] = Field(
        "auto", description="cp: gather keys and values, or exchange tokens for heads; auto: fewest exposed bytes"
    )
    cp_gradients: Literal["run", "accumulation"] = Field(
        "run",
        description="cp by all_gather: dtype in which gradients of keys and values are summed over ranks",
    )
    ep: int = Field(
        1, gt=0, le=MOST_RANKS, description="expert parallel: experts are cut over ep of a stage's tp x cp x dp ranks"
    )
    etp: int = Field(1, gt=0, le=MOST_RANKS, description="each expert is cut over etp ranks: 1 or tp")
    sequence_parallel: bool = Field(False, description="cut the sequence over tp in norms, dropout and residuals")
    layers_per_stage: Literal["auto"] | list[int] | None = Field(
        None, description="layers of each of the pp x vpp stages; null: even; auto: by their work, the head's included"
    )
    allow_tp_across_nodes: bool = Field(False, description="let tensor-parallel traffic cross the slow network")

    @field_validator("layers_per_stage", mode="before")
    @classmethod
    def _is_auto_or_numbers(cls, value: object) -> object:
        """Refuse values other than null, auto and whole numbers in one message; pydantic would give one per union member."""
        if value is None or value == "auto":
            return value
        if not isinstance(value, list | tuple) or not all(
            isinstance(each, int) or str(each).strip().isdecimal() for each in value
        ):
            raise ValueError("must be whole numbers such as [2, 3, 2, 1], auto, or null (even)")
        return list(value)

    @property
    def cuts_sequence(self) -> bool:
        """Whether a rank holds less than the whole sequence outside the tensor-parallel region."""
        return self.sequence_parallel and self.tp > 1


ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zbv"]

IS_INTERLEAVED: Mapping[str, bool] = MappingProxyType(
    {"gpipe": False, "1f1b": False, "interleaved": True, "zb_h1": False, "zbv": True}
)
"""Whether a training schedule runs several model chunks per rank, by its name; False: it runs one."""

DEFERS_WEIGHT_GRADIENTS = frozenset({"zb_h1", "zbv"})
"""Schedules that compute weight gradients apart from the backward (`W` in `triaxis.engine.pipeline.actions`)."""

RUNS_IN_A_V = frozenset({"zbv"})
"""Schedules that place two model chunks per rank in a V (`triaxis.engine.pipeline.actions.Placement`)."""


class ScheduleConfig(Section):
    """The order in which a pipeline rank runs forwards and backwards."""

    on_resume: ClassVar[OnResume | None] = LAYOUT

    name: Literal["auto", ScheduleName] = Field(
        "auto",
        description="auto: 1f1b, or interleaved when vpp > 1; zb_h1: late weight gradients; zbv: and a V (vpp 2)",
    )
    file: ScheduleFile | None = Field(
        None, description="in place of a name: the actions of each rank, as `triaxis schedule print` writes them"
    )

    @property
    def defers_weight_gradients(self) -> bool:
        """Whether weight gradients are computed apart from the backward."""
        if self.file is not None:
            return self.file.text.defers_weight_gradients
        return self.name in DEFERS_WEIGHT_GRADIENTS

    @property
    def is_v(self) -> bool:
        """Whether the model's chunks are placed on the ranks in a V (`engine/layout/placement.py`)."""
        return self.name in RUNS_IN_A_V if self.file is None else self.file.text.is_v
