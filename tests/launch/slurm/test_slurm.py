"""The batch script on a real SLURM: preempted by a job of higher priority, by hand, or robbed of a node, it goes on to the last
step, and its weights are those of a run that nobody disturbed.

A rank is stopped (SIGSTOP) where something is to happen, so that it happens at that step however fast the machine is. SLURM
continues it: SIGCONT comes before SIGTERM.

One test is in the CI tier, and is short: nearly all of its time are two starts of eight ranks.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.command_line import OTHER_LAUNCHERS, OTHER_RUNS, ROOT, records
from tests.launch.runs.undisturbed import CONFIG, NUM_STEPS, saved_fingerprint, undisturbed_fingerprint
from tests.slurm import Cluster, cluster

pytestmark = pytest.mark.distributed

SECRET = "a-key-that-no-log-may-show"

SHORT_STEPS = 20
SHORT = (f"train.steps={SHORT_STEPS}", "checkpoint.interval=1000")
"""Words for a run in which nothing is saved but at a stop and after the last step."""


class Run:
    """A job of the batch script, in a folder.

    Args:
        slurm: where it runs.
        folder: from which it is submitted.
        options: of sbatch.
        overrides: of the config.
    """

    def __init__(
        self, slurm: Cluster, folder: Path, *options: str, overrides: Sequence[str] = (), **variables: str
    ) -> None:
        self.slurm = slurm
        self.folder = folder
        self.output = folder / "job.out"
        (folder / "small.yaml").write_text(CONFIG)
        removed = {name: "" for name in os.environ if name.startswith(OTHER_LAUNCHERS) or name in OTHER_RUNS}
        variables = (
            removed
            | {
                "TRIAXIS_ROOT": str(ROOT),
                "TRIAXIS_PYTHON": sys.executable,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "WANDB_API_KEY": SECRET,
                "GLOO_SOCKET_IFNAME": "lo",  # both nodes are this machine, which may have no other network
                "RUN_NAME": "small",
            }
            | variables
        )
        # The header asks for what a machine with GPUs has; a command line says otherwise.
        script = (ROOT / "launch" / "slurm" / "pretrain_gpt.sbatch").read_text()
        self.script = folder / "small.sbatch"
        self.script.write_text(
            script.replace("#SBATCH --gpus-per-node=8\n", "").replace("#SBATCH --cpus-per-task=8\n", "")
        )
        resources = ("--nodes=2", "--ntasks-per-node=4", f"--output={self.output}", f"--chdir={folder}", *options)
        self.number = slurm.submit(*resources, str(self.script), "small.yaml", *overrides, **variables)

    @property
    def path(self) -> Path:
        return self.folder / "runs" / "small"

    @property
    def steps(self) -> list[dict[str, Any]]:
        metrics = self.path / "metrics.jsonl"
        return records(metrics) if metrics.exists() else []

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else "nothing yet"

    def hold(
        self, attempt: int, num_steps: int, saved: int | None = None, within_seconds: float = 300.0
    ) -> psutil.Process:
        """Stop rank 5 (on the second node) once this attempt has made so many steps, and `saved` is complete; returns it."""

        logs = self.path / "logs" / f"attempt_{attempt:02d}"

        def is_there() -> psutil.Process | None:
            if not all((logs / f"rank_{rank:05d}.log").exists() for rank in (0, 5)):
                return None
            return self.slurm.task(5, "triaxis.launch.cli")

        def has_come_so_far() -> bool:
            assert "Traceback" not in (logs / "rank_00000.log").read_text(), "rank 0 has failed"
            is_saved = saved is None or (self.path / "checkpoints" / f"step_{saved:08d}").is_dir()
            return is_saved and sum(record["attempt"] == attempt for record in self.steps) >= num_steps

        try:
            rank = self.slurm.wait_until(is_there, within_seconds, f"rank 5 of attempt {attempt}")
            self.slurm.wait_until(has_come_so_far, within_seconds, f"{num_steps} steps", poll_seconds=0.02)
        except AssertionError as error:
            raise AssertionError(f"{error}\n-- what the job said\n{self.said()}") from None
        rank.send_signal(signal.SIGSTOP)
        return rank

    def wait_for(self, state: str, within_seconds: float = 300.0) -> dict[str, str]:
        """The job's fields, once it is in this state."""

        def is_so() -> dict[str, str] | None:
            fields = self.slurm.job(self.number)
            return fields if fields["JobState"] == state else None

        try:
            return self.slurm.wait_until(is_so, within_seconds, f"job {self.number} to be {state}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n-- what the job said\n{self.said()}") from None

    def history(self) -> list[dict[str, Any]]:
        return json.loads((self.path / "slurm.json").read_text())

    def fingerprint(self, num_steps: int) -> dict[str, str]:
        """Of the newest checkpoint, which must be that of the last step."""
        return saved_fingerprint(self.path, num_steps)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The fingerprint after the last step of a run that nobody stopped."""
    path = tmp_path_factory.mktemp("undisturbed") / "small.yaml"
    path.write_text(CONFIG)
    return undisturbed_fingerprint(path, world_size=8, ranks_per_node=4)


@pytest.fixture
def slurm(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of two nodes, or of as many as the test says."""
    with cluster(Path(f"/tmp/triaxis-slurm-{os.getpid()}"), getattr(request, "param", 2)) as made:
        yield made


def preempt(run: Run) -> None:
    """A job of higher priority takes its nodes; returns when this one has left them."""
    job = run.slurm.job(run.number)
    nodes, before = f"--nodelist={job['NodeList']}", int(job["Restarts"])
    run.slurm.submit("--partition=high", nodes, "--ntasks-per-node=4", "--output=/dev/null", "--wrap=exit 0")
    run.slurm.wait_until(lambda: int(run.slurm.job(run.number)["Restarts"]) > before, 60.0, "the preemption")


def is_whole(run: Run, undisturbed: dict[str, str], num_steps: int = NUM_STEPS) -> None:
    """No step is missing, one made twice is the same twice, the last save is an undisturbed run's; no secret is written down."""
    losses: dict[int, set[float]] = {}
    for record in run.steps:
        losses.setdefault(record["step"], set()).add(record["loss"])
    assert list(losses) == list(range(1, num_steps + 1))
    assert all(len(values) == 1 for values in losses.values())
    assert run.fingerprint(num_steps) == undisturbed
    for file in (run.output, *run.path.rglob("*")):
        assert not (file.is_file() and SECRET.encode() in file.read_bytes()), file


def test_a_preempted_job_saves_comes_back_and_ends_as_if_nothing_had_been(slurm: Cluster, tmp_path: Path) -> None:
    run = Run(slurm, tmp_path, overrides=SHORT)
    run.hold(attempt=0, num_steps=2)
    preempt(run)
    # SLURM lets a requeued job wait until its old credentials are no longer good; meanwhile, the same without trouble.
    undisturbed = undisturbed_fingerprint(tmp_path / "small.yaml", world_size=8, ranks_per_node=4, overrides=SHORT)
    assert run.wait_for("COMPLETED")["Restarts"] == "1"
    is_whole(run, undisturbed, SHORT_STEPS)
    assert len(run.steps) == SHORT_STEPS, "none made twice"
    said = run.said()
    assert "SIGTERM: all ranks finish their step, save and stop" in said
    assert "SLURM requeues this job itself" in said
    first, second = run.history()
    assert (first["outcome"], second["outcome"]) == ("preempted", "finished")
    assert 0 < first["to_step"] == second["from_step"] < SHORT_STEPS
    assert f"resuming after step {first['to_step']} " in said
    for attempt in ("attempt_00", "attempt_01"):
        assert len(list((run.path / "logs" / attempt).glob("rank_*.log"))) == 8


@pytest.mark.slow  # five starts of eight ranks
@pytest.mark.parametrize("slurm", [3], indirect=True, ids=["one node to spare"])
def test_three_preemptions_and_a_dead_node_in_one_job(
    slurm: Cluster, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    run = Run(slurm, tmp_path)
    for attempt in (0, 1):
        run.hold(attempt, num_steps=3)
        preempt(run)
    dead = run.hold(attempt=2, num_steps=3).environ()["SLURMD_NODENAME"]
    slurm.kill_node(dead)
    # The node stays away. To one that is back in less than a minute slurmctld (22.05) sends, of itself, the end of this job's step
    # 0: most likely meant for the attempt that was lost there, but the step which runs there by then has the same number.
    run.hold(attempt=3, num_steps=3)
    preempt(run)
    assert int(run.wait_for("COMPLETED")["Restarts"]) == 4
    is_whole(run, undisturbed)
    attempts = run.history()
    assert [attempt["outcome"] for attempt in attempts] == ["preempted", "preempted", "failed", "preempted", "finished"]
    assert attempts[2]["blamed"] == [dead]
    assert attempts[2]["to_step"] == attempts[1]["to_step"], "it goes on from what was saved before"


@pytest.mark.slow
def test_before_the_time_limit_it_saves_and_where_requeueing_is_forbidden_a_dependent_job_goes_on(
    slurm: Cluster, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    run = Run(slurm, tmp_path, "--no-requeue", "--job-name=chained", "--time=60")
    held = run.hold(attempt=0, num_steps=3)
    slurm.command("scancel", "--batch", "--signal=USR1", run.number)  # as --signal=B:USR1@600 has SLURM do
    held.send_signal(signal.SIGCONT)
    slurm.wait_until(lambda: run.history()[-1]["outcome"] == "finished", 180.0, "the end of the run")
    is_whole(run, undisturbed)
    said = run.said()
    assert "SIGUSR1: all ranks finish their step, save and stop" in said
    assert f"`scontrol requeue {run.number}` was refused: " in said
    assert "instead, a job that starts when this one has ended: " in said
    first, second = run.history()
    assert (first["outcome"], second["outcome"]) == ("preempted", "finished")
    assert second["job"] != first["job"] == run.number
    assert slurm.job(second["job"])["JobName"] == "chained"


@pytest.mark.slow
def test_a_node_that_failed_twice_is_excluded_and_half_of_the_nodes_go_on(slurm: Cluster, tmp_path: Path) -> None:
    run = Run(slurm, tmp_path)
    run.hold(attempt=0, num_steps=13, saved=12).kill()
    run.hold(attempt=1, num_steps=2).kill()
    slurm.wait_until(lambda: run.slurm.job(run.number)["ExcNodeList"] == "node2", 120.0, "the exclusion of node2")
    assert "excluded after 2 failures: node2" in run.said()
    assert [attempt["blamed"] for attempt in run.history()] == [["node2"], ["node2"]]
    saved = run.history()[1]["to_step"]
    assert saved in (12, 24)
    slurm.command("scancel", run.number)

    smaller = Run(slurm, tmp_path, "--nodes=1", "--exclude=node2")
    smaller.wait_for("COMPLETED")
    assert f"resuming after step {saved} " in smaller.said()
    assert "dp 2 -> 1" in smaller.said()
    assert smaller.steps[-1]["step"] == NUM_STEPS


@pytest.mark.slow
def test_a_cancelled_job_saves_and_stays_away(slurm: Cluster, tmp_path: Path) -> None:
    run = Run(slurm, tmp_path)
    run.hold(attempt=0, num_steps=3)
    slurm.command("scancel", run.number)
    run.wait_for("CANCELLED")
    slurm.wait_until(lambda: "it was cancelled, so it is not started again" in run.said(), 30.0, "its last words")
    assert run.history()[0]["outcome"] == "preempted"
    assert run.history()[0]["to_step"] > 0, "what was trained is saved all the same"
