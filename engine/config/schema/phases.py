"""A run's phases: parts of its tokens, each with its own fields.

    phases:                                            a phase begins where the one before it ends; the last one ends the run
      - {name: main, until: 8T}
      - {name: long, until: 8.1T, model.seq_length: 131072, train.global_batch_size: 32}

Reading completes the entries (`engine/config/load.py`): each entry gets every field that any phase names. Fields that an entry
lacks get the config's own value. So a config in one phase holds all phases, and `at_phase` switches it to another phase's fields.
`train.phase` names the phase whose fields a config has.

Where each phase begins and ends follows from the config alone (`engine/config/quantities/run_phases.py`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Required

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from triaxis.engine.config.values.counts import Count
from triaxis.engine.config.values.places import Name

PHASE_FIELDS = (
    *("data.train", "data.attention", "data.positions", "data.count_document_starts"),
    *("model.seq_length", "model.rope_base", "model.rope_scaling"),
    *("train.global_batch_size", "train.micro_batch_size"),
)
"""Fields that a phase may have, besides those in `PHASE_SECTIONS`."""

PHASE_SECTIONS = ("parallel", "schedule", "recompute", "offload", "kernels")
"""Sections from which a phase may have any field: they decide where the work is done, not what is trained."""


class PhaseFields(TypedDict, total=False):
    """A phase: its name, its end in the run's consumed tokens, and configuration fields by dotted name."""

    __pydantic_config__ = ConfigDict(extra="allow", allow_inf_nan=False)  # type: ignore[misc]

    name: Required[Name]
    until: Required[Annotated[Count, Field(gt=0)]]


def fields_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration fields that a phase sets, by dotted name."""
    return {key: value for key, value in entry.items() if key not in PhaseFields.__annotations__}
