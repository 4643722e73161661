"""Sub-layouts of a layout that differs: the same run with one axis collapsed, or one feature off (no torch here).

The reference stays the same, because no global batch changes. Where the difference vanishes with `tp=1` and stays with `pp=1` and
with `dp=1`, its cause is on tp, and no table is needed for that.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from engine.config.layout import schedule_problems
from engine.config.plan import parallel_sizes
from engine.config.tree import Config
from engine.errors import ConfigError
from launch.verify.trial import ONE_PROCESS, checked
from launch.verify.verdict.causes import cause_of
from launch.verify.verdict.evidence import Evidence, Outcome
from launch.verify.verdict.judge import Verdict

COLLAPSED: Mapping[str, Mapping[str, object]] = {
    "tp": {"tp": 1, "sequence_parallel": False},
    "pp": {"pp": 1, "vpp": 1, "layers_per_stage": None},
    "cp": {"cp": 1},
    "dp": {"dp": 1},
}
"""What an axis of one rank cannot have goes with it."""

Runner = Callable[[Config], bool | None]
"""Runs a sub-layout, and returns its verdict; None: it did not end well."""


def attributed(config: Config, evidence: Evidence, verdict: Verdict, is_equal: Runner) -> Verdict:
    """Return the verdict with the axis that sub-layouts name; they are run only where something differs.

    Args:
        is_equal: runs a sub-layout against the same reference.
    """
    if verdict.equal:
        return verdict
    steps = verdict.differences[0].step + 1
    outcomes = [Outcome(change, axis, is_equal(smaller)) for change, axis, smaller in _collapsed(config, steps)]
    vanished = {one.axis for one in outcomes if one.equal}
    outcomes += [
        Outcome(change, None, is_equal(smaller))
        for change, smaller in _features(config, steps, vanished, len(outcomes))
    ]
    return replace(verdict, cause=cause_of(evidence, verdict.differences, outcomes))


def _collapsed(config: Config, steps: int) -> Iterator[tuple[str, str, Config]]:
    sizes = parallel_sizes(config)
    for axis, parallel in COLLAPSED.items():
        if sizes.size(axis) > 1 and (smaller := _changed(config, steps, {"parallel": parallel})) is not None:
            yield f"{axis}=1", axis, smaller


def _features(config: Config, steps: int, vanished: set[str | None], num_axes: int) -> Iterator[tuple[str, Config]]:
    """Yield features that a difference on an axis may need; without an axis, the features that the reference has not."""
    parallel = config.parallel
    changes: dict[str, dict[str, Mapping[str, Any]]] = {}
    if "tp" in vanished and parallel.cuts_sequence:
        changes["sp=false"] = {"parallel": {"sequence_parallel": False}}
    if "pp" in vanished and parallel.vpp > 1:
        changes["vpp=1"] = {"parallel": {"vpp": 1, "layers_per_stage": None}}
    if not vanished:
        if num_axes > 1:
            changes["one process"] = {"parallel": ONE_PROCESS, "schedule": {"name": "auto"}}
        if config.recompute.is_any:
            changes["recompute.granularity=none"] = {
                "recompute": {"granularity": "none", "method": "uniform", "num_layers": 1, "modules": None}
                | {"head_tokens": None}
            }
        if config.offload.num_layers:
            changes["offload.num_layers=0"] = {"offload": {"num_layers": 0}}
    for change, sections in changes.items():
        if (smaller := _changed(config, steps, sections)) is not None:
            yield change, smaller


def _changed(config: Config, steps: int, sections: Mapping[str, Mapping[str, Any]]) -> Config | None:
    """Return the configuration with these values, for as many steps as are needed; None where it is not legal."""
    tree = config.model_dump(mode="json")
    for section, values in sections.items():
        tree[section] |= values
    if any(schedule_problems(tree["schedule"]["name"], tree["parallel"]["vpp"])):
        tree["schedule"]["name"] = "auto"
    if {"pp", "vpp", "dp"} & sections.get("parallel", {}).keys():
        # A file is of one layout's sizes.
        tree["schedule"]["file"] = None
    tree["train"]["steps"] = steps
    try:
        return checked(tree)
    except ConfigError:
        return None
