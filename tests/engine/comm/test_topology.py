"""The options that NCCL gets for each group, with a stand-in for torch's record (a CPU build has none)."""

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from triaxis.engine.comm.topology import nccl_options
from triaxis.engine.layout.axis_groups import STREAM_USE, StreamUse, stream_use


class Options:
    """Has the fields of `ProcessGroupNCCL.Options` that are set."""

    class Config:
        max_ctas = -1

    def __init__(self, is_high_priority_stream: bool) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = self.Config()
        self._timeout = timedelta(minutes=10)


@pytest.mark.parametrize("make", [Options, pytest.param(None, marks=pytest.mark.gpu)])
def test_options_say_what_the_use_says(make: Any) -> None:
    make = make or dist.ProcessGroupNCCL.Options
    options = nccl_options(StreamUse(is_urgent=True, max_ctas=4), timedelta(seconds=77), make)
    assert options.is_high_priority_stream and options.config.max_ctas == 4
    assert options._timeout == timedelta(seconds=77)
    unset = make(is_high_priority_stream=False).config.max_ctas
    options = nccl_options(StreamUse(is_urgent=False, max_ctas=None), None, make)
    assert not options.is_high_priority_stream and options.config.max_ctas == unset


@pytest.mark.parametrize(
    ("axes", "use"),
    [
        (["tp"], STREAM_USE["tp"]),
        (["world", "tp"], STREAM_USE["tp"]),
        (["world", "dp"], STREAM_USE["dp"]),
        (["pp_forward"], STREAM_USE["pp_forward"]),
        (["world", "pp", "ends"], StreamUse(is_urgent=False, max_ctas=None)),
    ],
)
def test_axes_that_share_a_group_get_the_use_of_the_most_urgent(axes: list[str], use: StreamUse) -> None:
    assert stream_use(axes) == use
