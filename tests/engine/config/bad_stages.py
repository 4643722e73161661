"""Stages that must be refused, in the form of `bad_configs.BAD`; `test_stages.py` has more, refused while they are read."""

from collections.abc import Sequence

BAD_STAGES: dict[str, tuple[Sequence[str], dict[str, int], Sequence[str]]] = {
    "two stages of one name": (
        ["train.steps=null", "checkpoint.interval=5", "stages=[{name: main, until: 5k}, {name: main, until: 9k}]"],
        {},
        ["stages.1.name = main", "two stages"],
    ),
    "an edge that is not saved": (
        ["train.steps=null", "checkpoint.interval=never", "stages=[{name: main, until: 5k}, {name: more, until: 9k}]"],
        {},
        ["checkpoint.interval = never", "several stages", "checkpoint.interval = null or 1000"],
    ),
}
