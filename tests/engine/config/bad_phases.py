"""Phases that must be refused, in the form of `bad_configs.BAD`; `test_phases.py` has more, refused while they are read."""

from collections.abc import Sequence

BAD_PHASES: dict[str, tuple[Sequence[str], dict[str, int], Sequence[str]]] = {
    "two phases of one name": (
        ["train.steps=null", "checkpoint.interval=5", "phases=[{name: main, until: 5k}, {name: main, until: 9k}]"],
        {},
        ["phases.1.name = main", "two phases"],
    ),
    "an edge that is not saved": (
        ["train.steps=null", "checkpoint.interval=never", "phases=[{name: main, until: 5k}, {name: more, until: 9k}]"],
        {},
        ["checkpoint.interval = never", "several phases", "checkpoint.interval = null or 1000"],
    ),
}
