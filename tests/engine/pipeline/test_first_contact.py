"""Every program that a pipeline may run is proved under all rules that NCCL and CUDA may add, before one meets a GPU.

The grid: pp 2 to 16, vpp 1 to 4, from one microbatch to 8 pp, every schedule, forward-only too.
"""

from collections.abc import Iterator

import pytest

from tests.engine.pipeline.test_executor import split_backwards
from triaxis.engine.errors import ScheduleError
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action, Kind, Schedule
from triaxis.engine.pipeline.forwards import forward_only
from triaxis.engine.pipeline.lowering import Program, feeding_transfer, lower
from triaxis.engine.pipeline.programs import STEPS_AFTER_RETRY, Programs
from triaxis.engine.pipeline.validate import check, ring_connections

SIZES = [(pp, vpp) for pp in (2, 3, 4, 6, 8, 16) for vpp in (1, 2, 3, 4)]
LARGE_PP = 6
"""From here on the programs of 3 pp microbatches and more take most of the time: they are in the slow tier."""


def _tier(pp: int) -> list[pytest.MarkDecorator]:
    return [pytest.mark.distributed] * (pp >= 6) + [pytest.mark.slow] * (pp >= 16)


MOSTLY_SMALL = [pytest.param(size, False, marks=_tier(size[0]), id=str(size)) for size in SIZES]
"""From pp 6 on they take seconds: they are in the CI tier, and not in `make check`; from 16 on in the slow one."""

LARGE = [
    pytest.param(size, True, marks=[pytest.mark.distributed, pytest.mark.slow], id=f"{size} large")
    for size in SIZES
    if size[0] >= LARGE_PP
]


def all_schedules(pp: int, vpp: int, *, is_large: bool) -> Iterator[Schedule]:
    many = {3 * pp, 4 * pp, 8 * pp}
    few = {1, 2, 3, pp - 1, pp, pp + 1, 2 * pp, 2 * pp + 1} - {0}
    for num_microbatches in many - few if is_large else few if pp >= LARGE_PP else few | many:
        for name in ("interleaved", "forward_only") if vpp > 1 else ("gpipe", "1f1b", "zb_h1", "forward_only"):
            yield schedules.build(name, pp, vpp, num_microbatches)
        if vpp == 2:
            yield (training := schedules.zbv(pp, num_microbatches))
            yield forward_only(training.placement, num_microbatches)


def test_the_grid_has_720_programs() -> None:
    parts = [(*each.values[0], each.values[1]) for each in (*MOSTLY_SMALL, *LARGE)]
    assert sum(len(list(all_schedules(pp, vpp, is_large=is_large))) for pp, vpp, is_large in parts) == 720


@pytest.mark.parametrize(("size", "is_large"), [*MOSTLY_SMALL, *LARGE])
def test_both_forms_run_under_all_rules(size: tuple[int, int], is_large: bool) -> None:
    """`check` executes early receives with first use, masks, grouping and one queue; late ones with device waits as well."""
    ring = {frozenset(ends) for _, *ends in ring_connections(size[0])}
    for schedule in all_schedules(*size, is_large=is_large):
        for program in (lower(schedule), lower(schedule, "late")):
            check(program)
            for rank, row in enumerate(program.instructions):
                following = None
                for each in reversed(row):
                    if isinstance(each, Action):
                        # A W takes no message, and a receive is posted before those that follow its pair's send.
                        following = following if each.kind is Kind.W else each
                        continue
                    assert all(frozenset((t.source, t.destination)) in ring for t in each.transfers)
                    received = [t for t in each.transfers if t.destination == rank]
                    if received and program.receives == "late":
                        assert following is not None
                        assert received == [feeding_transfer(schedule, rank, following)], (
                            "a late receive stands further ahead"
                        )


@pytest.mark.parametrize(
    ("name", "pp", "vpp", "num_microbatches"),
    [("1f1b", 2, 1, 1), ("gpipe", 4, 1, 8), ("interleaved", 3, 2, 3), ("forward_only", 4, 2, 1)],
)
def test_without_open_connections_the_first_step_hangs(name: str, pp: int, vpp: int, num_microbatches: int) -> None:
    program = lower(schedules.build(name, pp, vpp, num_microbatches))
    with pytest.raises(ScheduleError, match="the first use of a connection that is not open holds the host") as caught:
        check(program, opened=())
    assert f"schedule {name} (pp {pp}, vpp {vpp}, {num_microbatches} microbatches)" in str(caught.value)


@pytest.mark.parametrize("size", [(2, 1, 8), (2, 2, 5), (3, 3, 7), (4, 2, 8), (6, 1, 13)], ids=str)
def test_split_backwards_run_under_all_rules(size: tuple[int, int, int]) -> None:
    """A W between a send and the late receive behind it must not keep the two ends of a pair apart."""
    pp, vpp, num_microbatches = size
    schedule = split_backwards(schedules.build("interleaved" if vpp > 1 else "1f1b", pp, vpp, num_microbatches))
    check(lower(schedule))
    check(lower(schedule, "late"))


def test_early_receives_in_the_place_of_late_ones_are_rejected() -> None:
    early = lower(schedules.one_f_one_b(2, 4))
    with pytest.raises(ScheduleError, match="an action that waits for the whole device"):
        check(Program(early.schedule, early.instructions, "late"))


def test_the_first_run_and_those_after_a_retry_are_late() -> None:
    programs = Programs(schedules.one_f_one_b(2, 3))
    assert programs.is_late and programs.next() is programs.late
    assert not programs.is_late and programs.next() is programs.early
    programs.receive_late()
    assert [programs.next() is programs.late for _ in range(STEPS_AFTER_RETRY + 1)] == [True] * STEPS_AFTER_RETRY + [
        False
    ]
