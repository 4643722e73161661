"""Schedules whose first stages have no backward: still complete, lowered without their gradients, proved and timed."""

from dataclasses import replace

import pytest

from triaxis.engine.errors import ScheduleError
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action, Kind
from triaxis.engine.pipeline.lowering import Post, lower
from triaxis.engine.pipeline.programs import Programs
from triaxis.engine.pipeline.simulate import Costs, simulate
from triaxis.engine.pipeline.text import from_text, program_to_text, to_text
from triaxis.engine.pipeline.validate import check

SHAPES = [
    ("gpipe", 4, 1, 6),
    ("1f1b", 4, 1, 8),
    ("1f1b", 3, 1, 2),
    ("interleaved", 2, 3, 5),
    ("interleaved", 4, 2, 8),
    ("zb_h1", 4, 1, 7),
    ("zbv", 3, 2, 5),
]
TEXT = """\
schedule=1f1b pp=3 vpp=1 microbatches=3 forward_only=no trained_from=1
rank 0: 0F0 [>F0@1] 0F1 [>F1@1] 0F2 [>F2@1]
rank 1: [<F0@1] [<F1@1] 0F0 [>F0@2] [<B0@1] 0F1 [<F2@1 >F1@2] 0B0 [<B1@1] 0F2 [>F2@2] [<B2@1] 0B1 0B2
rank 2: [<F0@2] 0F0 [<F1@2] 0B0 [>B0@1] 0F1 [<F2@2] 0B1 [>B1@1] 0F2 0B2 [>B2@1]
"""


@pytest.mark.parametrize(("name", "pp", "vpp", "num_microbatches"), SHAPES)
def test_gradients_go_down_to_the_first_trained_stage_and_no_further(
    name: str, pp: int, vpp: int, num_microbatches: int
) -> None:
    whole = schedules.build(name, pp, vpp, num_microbatches)
    for stage in range(pp * vpp):
        schedule = whole.with_backward_from(stage)
        programs = Programs(schedule)
        for program in (programs.early, programs.late):
            sent = {
                each
                for row in program.instructions
                for post in row
                if isinstance(post, Post)
                for each in post.transfers
            }
            receivers = {each.stage for each in sent if each.direction == "backward"}
            place = schedule.placement
            between = {at for at in range(pp * vpp - 1) if place.rank_of(at) != place.rank_of(at + 1)}
            assert receivers == {at for at in between if at >= stage}
            assert len(sent) == num_microbatches * (len(between) + len(receivers))
        kinds = {
            (place.stage_of(rank, each.chunk), each.kind) for rank, row in enumerate(schedule.actions) for each in row
        }
        assert {at for at, kind in kinds if kind is not Kind.F} == set(range(stage, pp * vpp))
        assert from_text(to_text(schedule)) == schedule
        for rank in range(pp):
            is_forward_only = all(at < stage for at in place.stages_on(rank))
            assert (programs.facts.peak_in_flight[rank] == 0) == is_forward_only
        costs = Costs.uniform(pp * vpp)
        assert simulate(schedule, costs).span <= simulate(whole, costs).span


def test_a_lowered_program_as_text() -> None:
    program = lower(schedules.build("1f1b", 3, 1, 3).with_backward_from(1))
    assert program_to_text(program) == TEXT


def test_a_backward_below_and_a_missing_one_above_are_refused() -> None:
    schedule = schedules.build("1f1b", 2, 1, 2).with_backward_from(1)
    below = replace(schedule, actions=((*schedule.actions[0], Action(Kind.B, 0, 0)), schedule.actions[1]))
    with pytest.raises(ScheduleError, match="a backward of a stage before stage 1"):
        check(below)
    with pytest.raises(ScheduleError, match="never runs 0B0"):
        check(replace(schedule, trained_from=0))
