"""A training step stays short: the files that it enters, what stands in them, and the way through a layer are bounded.

A bound only falls. The commit that raises one argues why.
"""

import pytest

from benchmarks.step_trace import CONFIGURATIONS, PAGE, Counts, Trace, counts, merged, page_of, trace_rank
from tests.harness import run_ranks

pytestmark = pytest.mark.distributed

MOST = {
    #                  files, code lines, classes, stays of a layer's forward and of a column-parallel backward
    "gpt_tiny": Counts(43, 2485, 87, {"layer forward": 58, "column backward": 20}),
    "moe_tiny": Counts(53, 3006, 111, {"layer forward": 144, "column backward": 20}),
    "cp": Counts(47, 2822, 102, {"layer forward": 95, "column backward": 20}),
    "fp8": Counts(47, 2845, 95, {"layer forward": 148, "column backward": 57}),
    "zbv": Counts(46, 2708, 95, {"layer forward": 62, "column backward": 11}),
}
MOST_OF_ALL = Counts(62, 3852, 140, MOST["fp8"].ways)


def trace(name: str) -> Trace:
    return merged(run_ranks(trace_rank, 8, CONFIGURATIONS[name]))


def longer(found: Counts, most: Counts) -> list[str]:
    """Return the numbers of a trace that are above their bounds."""
    pairs = [(found.files, most.files), (found.code_lines, most.code_lines), (found.classes, most.classes)]
    pairs += [(found.ways[way], most.ways[way]) for way in most.ways]
    return [f"{number} > {bound}" for number, bound in pairs if number > bound]


def test_a_step_of_gpt_tiny_is_short_and_its_page_lists_its_files() -> None:
    found = trace("gpt_tiny")
    assert not longer(counts(found), MOST["gpt_tiny"]), counts(found)
    assert page_of(found, PAGE.read_text()) == PAGE.read_text(), "python -m benchmarks.step_trace gpt_tiny --page"


@pytest.mark.slow
def test_no_other_step_is_longer_than_before() -> None:
    found = {name: trace(name) for name in CONFIGURATIONS}
    numbers = {name: counts(each) for name, each in found.items()}
    assert not {name: above for name, each in numbers.items() if (above := longer(each, MOST[name]))}, numbers
    union = counts(merged(list(found.values())))
    assert not longer(union, MOST_OF_ALL), union
