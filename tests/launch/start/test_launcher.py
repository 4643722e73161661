"""Ranks started for real, with a toy in the trainer's place: they get the right words, and none outlives its job.

The launcher is a process of its own, forked from the server of `tests/harness.py`: there torch is imported already. Its ranks
are started by torchrun, as always.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tests.harness  # noqa: F401  # says what the fork server imports

ROOT = Path(__file__).resolve().parents[3]
CONTEXT = multiprocessing.get_context("forkserver")

LAUNCHERS = (
    "SLURM_",
    "TORCHELASTIC_",
    "TP",
    "PP",
    "VPP",
    "DP",
    "NNODES",
    "NODE_RANK",
    "NPROC_",
    "MASTER_",
    "RANK",
    "WORLD_",
)


def start(folder: Path, words: list[str], environment: dict[str, str]) -> None:
    """The launcher: what it says goes to two files in its folder."""
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    if "TOY_READER_ENDS" in environment:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(":")
    from triaxis.launch.start import launcher
    from triaxis.launch.start.launcher import Request, launch

    if "TOY_OTHERS_END_SECONDS" in environment:
        launcher.OTHERS_END_SECONDS = int(environment["TOY_OTHERS_END_SECONDS"])
    explained_codes = (2,) if "TOY_EXPLAINS" in environment else ()
    request = Request(Path(words[0]), tuple(words[1:]), worker="toy_worker", explained_codes=explained_codes)
    sys.exit(launch(request, os.environ))


class Job:
    """A launcher with its ranks in a temporary folder."""

    def __init__(self, folder: Path, toy: str, *overrides: str, **variables: str) -> None:
        self.folder = folder
        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        environment |= {
            "TOY": toy,
            "TOY_FOLDER": str(folder / "toy"),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'launch' / 'runs'}",
            "CUDA_VISIBLE_DEVICES": "",
        }
        words = [str(ROOT / "configs" / "gpt_tiny.yaml"), "runtime.name=toy", f"runtime.runs_dir={folder}", *overrides]
        words += ["parallel.tp=2", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=2"]
        self.process = CONTEXT.Process(target=start, args=(folder, words, environment | variables))
        self.process.start()

    def finish(self) -> tuple[int, str, str]:
        self.process.join(60)
        assert self.process.exitcode is not None, "it did not end"
        return self.process.exitcode, (self.folder / "out").read_text(), (self.folder / "err").read_text()

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait_for_ranks(self) -> list[int]:
        """The process ids of the ranks, once all of them have started."""
        deadline_seconds = time.monotonic() + 60
        while time.monotonic() < deadline_seconds:
            files = list((self.folder / "toy").glob("pid_*"))
            if len(files) == 4 and all(file.stat().st_size for file in files):
                return self.ranks()
            time.sleep(0.05)
        raise AssertionError(f"the ranks did not start: {self.finish()}")

    def ranks(self) -> list[int]:
        return [int(file.read_text()) for file in sorted((self.folder / "toy").glob("pid_*"))]

    def log(self, rank: int) -> str:
        return (self.folder / "toy" / "logs" / "attempt_00" / f"rank_{rank:05d}.log").read_text()


@contextmanager
def job(folder: Path, toy: str, *overrides: str, **variables: str) -> Iterator[Job]:
    started = Job(folder, toy, *overrides, **variables)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.join()


def is_alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(process_ids: list[int], within_seconds: float) -> bool:
    deadline_seconds = time.monotonic() + within_seconds
    while any(map(is_alive, process_ids)):
        if time.monotonic() > deadline_seconds:
            return False
        time.sleep(0.05)
    return True


pytestmark = pytest.mark.distributed


def test_ranks_get_their_place_and_the_words_of_the_config(tmp_path):
    with job(tmp_path, "finish", "train.steps=77") as started:
        exit_code, out, err = started.finish()
        assert exit_code == 0, err
        assert "4 on 1 node, gloo" in out
        assert "tp=2 pp=1 vpp=1 dp=2" in out
        for rank in range(4):
            assert (
                f"RANK={rank} WORLD_SIZE=4 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=4 MASTER_ADDR=127.0.0.1"
                in started.log(rank)
            )
            assert "gpt_tiny.yaml', 'runtime.name=toy'" in started.log(rank)
            assert "'train.steps=77'" in started.log(rank)


@pytest.mark.parametrize(
    ("toy", "exit_code", "how"), [("die 3", 128 + signal.SIGKILL, "signal SIGKILL"), ("raise 2", 2, "exit code 2")]
)
def test_a_dead_rank_ends_the_job_and_is_named(tmp_path, toy, exit_code, how):
    with job(tmp_path, toy) as started:
        ended_with, _, err = started.finish()
        assert ended_with == exit_code, err
        culprit = int(toy.split()[1])
        assert f"rank {culprit} ended with {how}" in err
        assert f"toy/logs/attempt_00/rank_{culprit:05d}.log" in err
        assert "  | the last words of this rank" in err
        assert "Traceback" not in err
        assert all_end(started.ranks(), within_seconds=5)


def test_a_rank_that_has_explained_its_code_is_not_blamed(tmp_path):
    with job(tmp_path, "raise 2", TOY_EXPLAINS="1") as started:
        ended_with, _, err = started.finish()
        assert (ended_with, err) == (2, "")
        assert all_end(started.ranks(), within_seconds=5)


def test_ranks_that_do_not_listen_are_killed_and_not_blamed(tmp_path):
    """torchrun alone waits for 30 seconds."""
    with job(tmp_path, "deaf 1", TOY_OTHERS_END_SECONDS="1") as started:
        ranks = started.wait_for_ranks()
        os.kill(ranks[1], signal.SIGKILL)
        killed_seconds = time.monotonic()
        exit_code, _, err = started.finish()
        assert time.monotonic() - killed_seconds < 20
        assert exit_code == 128 + signal.SIGKILL
        assert "rank 1 ended with signal SIGKILL" in err
        assert all_end(ranks, within_seconds=5)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_launcher_stops_the_ranks(tmp_path, stop):
    with job(tmp_path, "sleep") as started:
        ranks = started.wait_for_ranks()
        started.send_signal(stop)
        exit_code, _, err = started.finish()
        assert exit_code == 128 + stop, err
        assert f"stopped by {stop.name}" in err
        assert "Traceback" not in err
        assert all_end(ranks, within_seconds=5)


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)],
    ids=lambda one: str(one),
)
def test_a_signal_is_handed_to_all_ranks_who_save(tmp_path, number, exit_code):
    with job(tmp_path, "save") as started:
        ranks = started.wait_for_ranks()
        started.send_signal(number)
        ended, _, err = started.finish()
        assert ended == exit_code, err
        assert all("saved" in started.log(rank) for rank in range(4))
        assert "so the job was stopped" not in err, "no rank has failed"
        assert all_end(ranks, within_seconds=5)


def test_a_hangup_reaches_the_ranks_though_the_terminal_is_gone(tmp_path):
    with job(tmp_path, "save", TOY_READER_ENDS="1") as started:
        ranks = started.wait_for_ranks()
        started.send_signal(signal.SIGHUP)
        exit_code, _, _ = started.finish()
        assert exit_code == 75
        assert all("saved" in started.log(rank) for rank in range(4))
        assert all_end(ranks, within_seconds=5)


@pytest.mark.slow
def test_a_dead_rank_has_its_exit_code_though_the_terminal_is_gone(tmp_path):
    with job(tmp_path, "die 3", TOY_READER_ENDS="1") as started:
        exit_code, _, _ = started.finish()
        assert exit_code == 128 + signal.SIGKILL
        assert all_end(started.ranks(), within_seconds=5)


def test_ctrl_c_twice_does_not_wait_for_a_save(tmp_path):
    with job(tmp_path, "save") as started:
        ranks = started.wait_for_ranks()
        started.send_signal(signal.SIGINT)
        time.sleep(0.3)
        started.send_signal(signal.SIGINT)
        ended, _, err = started.finish()
        assert ended == 130, err
        assert not any("saved" in started.log(rank) for rank in range(4))
        assert all_end(ranks, within_seconds=5)


def test_ranks_do_not_outlive_a_launcher_that_was_killed(tmp_path):
    with job(tmp_path, "sleep") as started:
        ranks = started.wait_for_ranks()
        started.process.kill()
        assert all_end(ranks, within_seconds=5)


def test_a_task_of_srun_is_a_rank(tmp_path):
    slurm = {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "here",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "31",
    }
    with (
        job(tmp_path, "finish", **slurm) as first,
        job(tmp_path, "finish", **slurm | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}) as second,
    ):
        for rank, started in enumerate((first, second)):
            exit_code, _, err = started.finish()
            assert exit_code == 0, err
            assert f"RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=2" in started.log(rank)
            assert "MASTER_ADDR=127.0.0.1 MASTER_PORT=15031" in started.log(rank)
