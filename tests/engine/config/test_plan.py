"""What follows from a configuration: stages and the local part of a sequence."""

import pytest

from engine.config.plan import local_seq_length, stages_of
from engine.errors import ScheduleError
from tests.engine.config.bad_configs import config_with


def test_stages_follow_the_layout() -> None:
    stages = stages_of(config_with("parallel={pp: 2, vpp: 2}"))
    assert [stage.layers for stage in stages] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    listed = stages_of(config_with("parallel={pp: 2, layers_per_stage: [7, 1]}"))
    assert [len(stage.layers) for stage in listed] == [7, 1]
    with pytest.raises(ScheduleError, match="16 stages"):
        stages_of(config_with("parallel={pp: 8, vpp: 2}"))


@pytest.mark.parametrize(("sequence_parallel", "length"), [("false", 32), ("true", 8)])
def test_sequence_parallelism_cuts_a_sequence_over_tp(sequence_parallel: str, length: int) -> None:
    assert local_seq_length(config_with(f"parallel={{tp: 4, sequence_parallel: {sequence_parallel}}}")) == length
