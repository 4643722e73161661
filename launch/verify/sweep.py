"""Find the axis or feature that causes a difference, by runs with one axis collapsed or one feature off.

The reference stays the same, because the global batch does not change. If the difference vanishes with `tp=1` and stays with `pp=1`
and `dp=1`, its cause is on tp.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from triaxis.engine.config.quantities.head_pieces import head_tokens
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.rules.layout import schedule_problems
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.launch.verify.trial import ONE_PROCESS, checked, without_gather
from triaxis.launch.verify.verdict.causes import cause_of
from triaxis.launch.verify.verdict.evidence import ALONE, Evidence, SublayoutVerdict
from triaxis.launch.verify.verdict.judge import Verdict

EXPERT_AXES = ("ep", "etp")

COLLAPSED: Mapping[str, Mapping[str, object]] = {
    "tp": {"tp": 1, "sequence_parallel": False},
    "pp": {"pp": 1, "vpp": 1, "layers_per_stage": None},
    "cp": {"cp": 1},
    "dp": {"dp": 1, "dp_replicas": 1},
    "ep": {"ep": 1},
    "etp": {"etp": 1},
}
"""Changes to `parallel` that collapse each axis to one rank, and turn off features that need more than one."""

Runner = Callable[[Config], bool | None]
"""Runs a sub-layout and returns whether it is equal; None: the run failed."""


def attributed(config: Config, evidence: Evidence, verdict: Verdict, is_equal: Runner) -> Verdict:
    """Run sub-layouts, and add the likely cause of the difference to the verdict.

    A sub-layout is the layout with one axis collapsed or feature off. Its run ends after the verdict's first differing step. If no
    step differs, nothing runs, and the verdict is returned unchanged.

    Args:
        is_equal: function (sub-layout) -> whether its run equals the same reference; None: the run failed.
    """
    if verdict.equal:
        return verdict
    steps = verdict.differences[0].step + 1
    collapsed = list(_collapsed(config, steps))
    outcomes = _narrowest(
        config, [SublayoutVerdict(one.change, one.axis, is_equal(one.config)) for one in collapsed], collapsed
    )
    vanished = {one.axis for one in outcomes if one.equal}
    outcomes += [
        SublayoutVerdict(change, None, is_equal(smaller))
        for change, smaller in _features(config, steps, vanished, len(outcomes))
    ]
    return replace(verdict, cause=cause_of(evidence, verdict.differences, outcomes))


@dataclass(frozen=True, slots=True)
class _Collapsed:
    """A sub-layout with one axis collapsed to one rank, and the changes that this required."""

    change: str
    axis: str
    config: Config


def _collapsed(config: Config, steps: int) -> Iterator[_Collapsed]:
    sizes = parallel_sizes(config)
    for axis, parallel in COLLAPSED.items():
        if sizes.size(axis) == 1:
            continue
        experts = _experts_of(sizes, axis)
        smaller = _changed(config, steps, {"parallel": {**parallel, **experts}})
        if smaller is not None:
            words = [f"{axis}=1", *(f"{name}={size}" for name, size in experts.items() if size != sizes.size(name))]
            yield _Collapsed(" and ".join(words), axis, smaller)


def _experts_of(sizes: ParallelSizes, axis: str) -> dict[str, int]:
    """Choose ep and etp for the ranks that remain if `axis` has one rank.

    If `axis` is ep or etp, the result is empty. If `axis` is tp, etp becomes 1. ep shrinks until ep x etp divides the
    remaining ranks.
    """
    if axis in EXPERT_AXES:
        return {}
    etp = 1 if axis == "tp" else sizes.etp
    left = sizes.tp * sizes.cp * sizes.dp // (1 if axis == "pp" else sizes.size(axis))
    return {"ep": math.gcd(sizes.ep, left // etp), "etp": etp}


def _narrowest(
    config: Config, outcomes: list[SublayoutVerdict], collapsed: Sequence[_Collapsed]
) -> list[SublayoutVerdict]:
    """Set a verdict's axis to None if ep or etp explains why its difference vanished.

    Two facts are required. The difference also vanishes if only ep, or only etp, is collapsed. The verdict's sub-layout
    collapsed another axis, which changed the size of that expert axis too.
    """
    sizes = parallel_sizes(config)
    explained = {one.axis for one in outcomes if one.equal and one.axis in EXPERT_AXES}

    def is_explained(smaller: Config) -> bool:
        return any(smaller.parallel.model_dump()[name] != sizes.size(name) for name in explained if name is not None)

    return [
        replace(outcome, axis=None)
        if outcome.equal and one.axis not in EXPERT_AXES and is_explained(one.config)
        else outcome
        for outcome, one in zip(outcomes, collapsed, strict=True)
    ]


def _features(config: Config, steps: int, vanished: set[str | None], num_axes: int) -> Iterator[tuple[str, Config]]:
    """Yield runs with one feature off, as (change, configuration).

    If the difference vanishes with an axis collapsed, features on that axis are turned off, such as `zero` on dp. Otherwise,
    features that the reference lacks are turned off, such as recompute. In this second case, the reference (`ALONE`) also runs
    again if `num_axes`, the number of collapsed sub-layouts, exceeds 1.
    """
    parallel = config.parallel
    changes: dict[str, dict[str, Mapping[str, Any]]] = {}
    if "tp" in vanished and parallel.cuts_sequence:
        changes["sp=false"] = {"parallel": {"sequence_parallel": False}}
    if vanished & {"dp", "cp"} and parallel.zero > 1:
        changes["zero=1"] = {"parallel": {"zero": 1}}
    if vanished & {"dp", "cp"} and parallel.dp_replicas > 1:
        changes["dp_replicas=1"] = {"parallel": {"dp_replicas": 1}}
    if "pp" in vanished and parallel.vpp > 1:
        changes["vpp=1"] = {"parallel": {"vpp": 1, "layers_per_stage": None}}
    if not vanished:
        if num_axes > 1:
            changes[ALONE] = {"parallel": ONE_PROCESS, "schedule": {"name": "auto"}}
        if config.recompute.is_any or head_tokens(config) is not None:
            changes["recompute.granularity=none"] = {
                "recompute": {"granularity": "none", "method": "uniform", "num_layers": 1, "modules": None}
                | {"head_tokens": None}
            }
        if config.offload.num_layers:
            changes["offload.num_layers=0"] = {"offload": {"num_layers": 0}}
        if config.optimizer.offload != "none":
            changes["optimizer.offload=none"] = {"optimizer": {"offload": "none"}}
    for change, sections in changes.items():
        if (smaller := _changed(config, steps, sections)) is not None:
            yield change, smaller


def _changed(config: Config, steps: int, sections: Mapping[str, Mapping[str, Any]]) -> Config | None:
    """Build the configuration with these values and this number of steps; None: it is not legal.

    A schedule that is not legal with the new vpp becomes `auto`.
    """
    tree = config.model_dump(mode="json")
    for section, values in sections.items():
        tree[section] |= values
    if any(schedule_problems(tree["schedule"]["name"], tree["parallel"]["vpp"])):
        tree["schedule"]["name"] = "auto"
    if {"pp", "vpp", "dp"} & sections.get("parallel", {}).keys():
        # A schedule file fits one layout's sizes only.
        tree["schedule"]["file"] = None
    tree["train"]["steps"] = steps
    without_gather(tree)
    try:
        return checked(tree)
    except ConfigError:
        return None
