"""torchrun's own restarts: a dead rank, the same command again by itself, from the newest checkpoint."""

import sys
import time
from pathlib import Path

import pytest

from tests.launch.command_line import ended, events, ranks_of, started, wait_for_steps
from tests.launch.runs.undisturbed import CONFIG, saved_fingerprint, undisturbed_fingerprint

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "--max-restarts=1")


def wait_for_folder(path: Path, within_seconds: float = 60.0) -> None:
    deadline_seconds = time.monotonic() + within_seconds
    while not path.is_dir():
        assert time.monotonic() < deadline_seconds, path
        time.sleep(0.02)


def test_a_dead_rank_restarts_all_and_they_resume(tmp_path: Path) -> None:
    config = tmp_path / "small.yaml"
    config.write_text(CONFIG)
    run = tmp_path / "runs" / "small"
    with started(tmp_path, *TORCHRUN, "--module", "triaxis.launch.pretrain_gpt", "small.yaml") as torchrun:
        wait_for_steps(torchrun, run / "metrics.jsonl", 13)
        wait_for_folder(run / "checkpoints" / "step_00000012")
        ranks_of(torchrun)[2].kill()
        said = ended(torchrun, within_seconds=240.0)
    assert said.exit_code == 0, said.err
    begun = [event for event in events(run) if event["kind"] == "begun"]
    assert [event["attempt"] for event in begun] == [0, 1]
    assert begun[1]["step"] in (12, 24)
    assert saved_fingerprint(run) == undisturbed_fingerprint(config, world_size=4, ranks_per_node=4)
