"""How `recompute.head_tokens: auto` cuts the head."""

import pytest

from tests.launch.command_line import ROOT
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.head_pieces import head_tokens

TINY = ROOT / "configs" / "gpt_tiny.yaml"


@pytest.mark.parametrize(
    ("seq_length", "micro_batch_size", "settings", "expected"),
    [
        (4095, 1, (), None),
        (4096, 1, (), 2048),
        (2048, 2, (), 2048),
        (8192, 1, (), 2048),
        (8192, 4, (), 8192),
        (8202, 1, (), 2051),
        (8192, 2, ("parallel.cp=4", "parallel.sequence_parallel=false"), 2048),
        (8192, 1, ("parallel.cp=4", "parallel.sequence_parallel=false"), None),
        (8192, 1, ("recompute.head_tokens=null",), None),
        (64, 1, ("recompute.head_tokens=16",), 16),
        (8192, 1, ("parallel.dp=2", "parallel.zero=2", "schedule.name=1f1b"), 2048),
        (8192, 1, ("parallel.dp=2", "parallel.zero=2", "schedule.name=gpipe"), None),
        (8192, 1, ("parallel.dp=2", "parallel.zero=1", "schedule.name=gpipe"), 2048),
    ],
)
def test_auto_cuts_a_long_microbatch_into_at_most_four(
    seq_length: int, micro_batch_size: int, settings: tuple[str, ...], expected: int | None
) -> None:
    words = [f"model.seq_length={seq_length}", f"train.micro_batch_size={micro_batch_size}", *settings]
    assert head_tokens(load_config(TINY, ["parallel.tp=1", "parallel.pp=1", "parallel.vpp=1", *words], {})) == expected
