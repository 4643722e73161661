"""What the batch job makes of srun's words, of its own history, and of SLURM's answers; `test_slurm.py` has a real SLURM."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.command_line import OTHER_LAUNCHERS, OTHER_RUNS
from triaxis.engine.errors import ExitCode, TopologyError, TriaxisError
from triaxis.launch.slurm.allocation import Job, check_lead
from triaxis.launch.slurm.history import History, Outcome
from triaxis.launch.slurm.job import (
    NextAttempt,
    SrunStep,
    is_out_of_time,
    judge,
    main,
    step_variables,
    step_words,
    submit_words,
)
from triaxis.launch.slurm.srun_report import StepReport

TINY = Path(__file__).resolve().parents[3] / "configs" / "gpt_tiny.yaml"
JOB = Job("31", 1, ("node1", "node2"), (4, 4))
ROOT = Path("/checkout")


def report(text: str) -> StepReport:
    """Of a step of eight tasks on two nodes."""
    read = StepReport(JOB.nodes, JOB.tasks_per_node)
    for line in text.strip().splitlines():
        read.read(f"{line.strip()}\n")
    return read


PREEMPTED = """
    srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
    srun: error: node1: tasks 0-3: Exited with exit code 75
    srun: launch/slurm: _step_signal: Terminating StepId=2.0
    srun: error: node2: tasks 4,6-7: Exited with exit code 75
    srun: error: node2: task 5: Killed
"""
KILLED_RANK = """
    srun: error: node2: task 5: Killed
    srun: launch/slurm: _step_signal: Terminating StepId=2.0
    srun: error: node1: tasks 0-3: Exited with exit code 1
    srun: error: node2: tasks 4,6-7: Killed
"""
DIVERGED_RANK = """
    srun: error: node2: task 5: Exited with exit code 6
    srun: launch/slurm: _step_signal: Terminating StepId=2.0
    srun: error: node1: tasks 0-3: Exited with exit code 6
    srun: error: node2: tasks 4,6-7: Killed
"""
DEAD_NODE = """
    srun: error: node1: task 1: Exited with exit code 1
    srun: launch/slurm: _step_signal: Terminating StepId=2.0
    srun: error: node1: tasks 0,2-3: Killed
    srun: error: Timed out waiting for job step to complete
"""
NOT_LAUNCHED = """
    srun: error: Task launch for StepId=2.0 failed on node node1: Communication connection failure
    srun: error: Application launch failed: Communication connection failure
"""
ALL_AT_ONCE = "srun: error: node[1-2]: tasks 0-7: Exited with exit code 1"


@pytest.mark.parametrize(
    ("exit_code", "text", "told", "outcome", "suspects"),
    [
        (0, "step 3: loss 4.1", None, Outcome.FINISHED, None),
        (137, PREEMPTED, signal.SIGTERM, Outcome.PREEMPTED, None),
        (75, "srun: error: node1: task 0: Exited with exit code 75", None, Outcome.PREEMPTED, None),
        (2, "srun: error: node1: tasks 0-3: Exited with exit code 2", None, Outcome.MISTAKE, None),
        (6, "srun: error: node1: tasks 0-3: Exited with exit code 6", None, Outcome.DIVERGED, None),
        (137, DIVERGED_RANK, None, Outcome.DIVERGED, None),
        (76, "srun: error: node1: tasks 0-3: Exited with exit code 76", None, Outcome.NEXT_PHASE, None),
        (76, "srun: error: node1: task 0: Exited with exit code 76", signal.SIGUSR1, Outcome.PREEMPTED, None),
        (130, "srun: error: node1: tasks 0-3: Exited with exit code 130", None, Outcome.INTERRUPTED, None),
        (143, "srun: error: node1: tasks 0-3: Terminated", signal.SIGTERM, Outcome.STOPPED, None),
        (137, KILLED_RANK, None, Outcome.FAILED, ["node2"]),
        (137, DEAD_NODE, None, Outcome.FAILED, ["node2"]),
        (1, NOT_LAUNCHED, None, Outcome.FAILED, ["node1"]),
        (1, ALL_AT_ONCE, None, Outcome.FAILED, []),
    ],
)
def test_how_an_attempt_ended_and_who_is_to_blame(exit_code, text, told, outcome, suspects) -> None:
    read = report(text)
    assert judge(exit_code, read, told) is outcome
    assert suspects is None or read.suspects() == suspects


def test_lines_of_the_ranks_are_no_words_of_srun() -> None:
    read = report("rank 3 said: srun: error: node1: task 0: Killed\n[node1: task 0: Killed]")
    assert not read.is_bad


def test_a_node_is_excluded_when_it_has_failed_twice(tmp_path: Path) -> None:
    for restart, blamed in enumerate((["node2"], [], ["node1"], ["node2"])):
        history = History(tmp_path / "run")
        history.begin("31", restart, JOB.nodes, from_step=restart)
        assert history.excluded == []
        history.end(Outcome.FAILED, restart + 1, blamed)
    assert History(tmp_path / "run").excluded == ["node2"]


def test_a_reader_that_has_gone_is_no_error_of_a_dry_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "triaxis.launch.slurm.job", "script", str(TINY), "--dry-run"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"5", b'["x"]', b'[{"job": "1"}]', b"\xff", b"[" * 100_000, b'[{"nodes": 1, "blamed": []}]']
)
def test_a_history_that_is_damaged_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "slurm.json").write_bytes(content)
    with pytest.raises(TriaxisError, match=r"slurm.json is damaged .* or remove it to start counting anew"):
        History(tmp_path)


def test_a_pipe_in_the_place_of_the_history_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slurm.json")
    with pytest.raises(TriaxisError, match="it is a FIFO, not a regular file"):
        History(tmp_path)


@pytest.mark.parametrize(
    ("attempts", "count"),
    [
        ([], 0),
        ([(Outcome.FAILED, 0, 0)] * 3, 3),
        ([(Outcome.FAILED, 0, 0), (Outcome.FAILED, 0, 10), (Outcome.FAILED, 10, 10)], 1),
        # Preempted three times before a step was made: the scheduler's doing, no sign of a broken run.
        ([(Outcome.STOPPED, 0, 0)] * 3, 0),
        ([(Outcome.FAILED, 5, 5), (Outcome.STOPPED, 5, 5), (None, 5, None), (Outcome.FAILED, 5, 5)], 2),
        # It ends as it should every time, and saves nothing: checkpoint.interval=never under a time limit.
        ([(Outcome.PREEMPTED, 0, 0)] * 3, 3),
    ],
)
def test_attempts_without_progress_are_counted(attempts, count: int, tmp_path: Path) -> None:
    history = History(tmp_path)
    for outcome, from_step, to_step in attempts:
        history.begin("31", 0, JOB.nodes, from_step)
        if outcome is not None:
            history.end(outcome, to_step)
    assert History(tmp_path).without_progress == count


# The lines that it types --------------------------------------------------------------------------------------------------


def test_the_step_of_a_site() -> None:
    plain = step_words(ROOT, ["a.yaml"], {})
    assert plain == ["srun", "--kill-on-bad-exit=1", "bash", "/checkout/launch/pretrain_gpt.sh", "a.yaml"]
    site = {
        "SLURM_CPUS_PER_TASK": "6",
        "TRIAXIS_CONTAINER": "image.sqsh",
        "TRIAXIS_CONTAINER_MOUNTS": "/data:/data:ro",
        "TRIAXIS_SRUN": "--mpi=none --network='a b'",
    }
    here = Path.cwd()
    assert step_words(ROOT, ["a.yaml"], site)[2:10] == [
        "--cpus-per-task=6",
        "--distribution=block:block",
        "--cpu-bind=cores",
        "--container-image=image.sqsh",
        f"--container-mounts=/checkout:/checkout,{here}:{here},/data:/data:ro",
        f"--container-workdir={here}",
        "--mpi=none",
        "--network=a b",
    ]


def test_tasks_stay_on_neighbouring_cores_unless_the_user_says_otherwise() -> None:
    def options(**variables: str) -> list[str]:
        words = step_words(ROOT, [], {"SLURM_CPUS_PER_TASK": "8"} | variables)
        return words[3 : words.index("bash")]

    assert options() == ["--distribution=block:block", "--cpu-bind=cores"]
    assert options(SLURM_DISTRIBUTION="cyclic") == ["--cpu-bind=cores"]
    assert options(SLURM_CPU_BIND="none") == ["--distribution=block:block"]
    assert options(TRIAXIS_SRUN="--cpu-bind=none")[-1] == "--cpu-bind=none", "srun takes the last one"


def test_a_job_has_the_memory_of_its_nodes_unless_the_user_says_otherwise() -> None:
    script = Path(__file__).resolve().parents[3] / "launch" / "slurm" / "pretrain_gpt.sbatch"
    assert "\n#SBATCH --mem=0\n" in script.read_text()
    assert "--mem=4096" in submit_words(JOB, "s", [], {}, {"SLURM_MEM_PER_NODE": "4096"}, [])


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of PATH whose scontrol and sbatch write down what they are told; `answers` says what they answer."""
    for name in ("scontrol", "sbatch"):
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/told\n'
            f'key=$(echo "{name} $1" | cut -d" " -f1,2 | tr " " _ | cut -d= -f1)\n'
            f'[ -f "{tmp_path}/$key" ] || exit 1\ncat "{tmp_path}/$key"\n'
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def told(slurm: Path) -> list[str]:
    return (slurm / "told").read_text().splitlines()


def again(slurm: Path, shown: str, excluded: list[str]) -> bool:
    (slurm / "scontrol_show").write_text(shown)
    before = signal.getsignal(signal.SIGTERM)
    try:
        return NextAttempt(JOB, "/spool/script", ["a.yaml", "b=c d", "--from-scratch"], "my-run").start(excluded)
    finally:
        signal.signal(signal.SIGTERM, before)


RUNNING = "JobId=31 JobState=RUNNING Restarts=1 ExcNodeList=bad[1-2] TimeLimit=02:00:00 RunTime=00:10:00 Partition=gpu QOS=(null)"


def test_a_job_requeues_itself_and_leaves_bad_nodes_out(slurm: Path, capfd) -> None:
    (slurm / "scontrol_requeue").touch()
    (slurm / "scontrol_update").touch()
    assert again(slurm, RUNNING, ["node2"])
    assert told(slurm)[1:] == ["scontrol requeue 31", "scontrol update JobId=31 ExcNodeList=bad[1-2],node2"]
    assert "excluded after 2 failures: node2" in capfd.readouterr().out


def test_a_job_that_slurm_requeues_is_not_requeued_twice(slurm: Path) -> None:
    (slurm / "scontrol_requeue").touch()
    assert again(slurm, RUNNING.replace("RUNNING", "COMPLETING").replace("Restarts=1", "Restarts=2"), [])
    assert told(slurm) == ["scontrol show job --oneliner 31"]


def test_a_cancelled_job_is_not_started_again_and_one_out_of_time_is(slurm: Path, capfd) -> None:
    (slurm / "scontrol_requeue").touch()
    cancelled = RUNNING.replace("RUNNING", "COMPLETING")
    assert not again(slurm, cancelled, ["node2"])
    assert told(slurm) == ["scontrol show job --oneliner 31"]
    assert "it was cancelled, so it is not started again" in capfd.readouterr().out
    assert again(slurm, cancelled.replace("RunTime=00:10:00", "RunTime=02:00:03"), [])
    assert told(slurm)[-1] == "scontrol requeue 31"


def test_where_requeueing_is_refused_a_dependent_job_is_submitted(slurm: Path, capfd, monkeypatch) -> None:
    (slurm / "sbatch_--parsable").write_text("32\n")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert again(slurm, RUNNING, ["node2"])
    assert told(slurm)[-1] == (
        "sbatch --parsable --dependency=afterany:31 --nodes=2 --ntasks-per-node=4 --partition=gpu --time=02:00:00 "
        "--exclude=node2 /spool/script a.yaml b=c d"
    )
    said = capfd.readouterr().out
    assert "`scontrol requeue 31` was refused" in said
    assert "instead, a job that starts when this one has ended: 32 (run my-run)" in said
    (slurm / "sbatch_--parsable").unlink()
    assert not again(slurm, RUNNING, [])
    assert "Submit again with RUN_NAME=my-run" in capfd.readouterr().out


def test_what_is_not_set_is_no_option_of_the_dependent_job() -> None:
    fields = {"Account": "(null)", "QOS": "N/A", "TimeLimit": "UNLIMITED"}
    assert submit_words(JOB, "s", [], fields, {}, []) == [
        "sbatch",
        "--parsable",
        "--dependency=afterany:31",
        "--nodes=2",
        "--ntasks-per-node=4",
        "s",
    ]


@pytest.mark.parametrize(
    ("limit", "ran", "is_out"),
    [
        ("1-00:00:00", "1-00:00:07", True),
        ("1-00:00:00", "23:59:59", False),
        ("UNLIMITED", "9-00:00:00", False),
        ("00:30:00", "00:30:00", True),
    ],
)
def test_out_of_time(limit: str, ran: str, is_out: bool) -> None:
    assert is_out_of_time({"TimeLimit": limit, "RunTime": ran}) is is_out


def test_ranks_meet_at_the_address_that_slurm_knows(slurm: Path) -> None:
    (slurm / "scontrol_show").write_text("NodeName=node1 NodeAddr=10.0.0.7 NodeHostName=n1")
    assert step_variables(JOB, {"A": "b"}) == {"A": "b", "MASTER_ADDR": "10.0.0.7"}
    assert step_variables(JOB, {"MASTER_ADDR": "10.9.9.9"}) == {"MASTER_ADDR": "10.9.9.9"}
    (slurm / "scontrol_show").write_text("NodeName=node1 NodeAddr=127.0.0.1")
    assert step_variables(JOB, {}) == {}, "never the loopback: the name has to do"
    in_container = step_variables(
        Job("31", 0, ("node1",), (4,)), {"TRIAXIS_CONTAINER": "i", "TRIAXIS_PYTHON": "/host/python"}
    )
    assert in_container["TRIAXIS_PYTHON"] == "python3"


def test_a_job_from_its_variables(slurm: Path) -> None:
    variables = {"SLURM_JOB_ID": "31", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}
    (slurm / "scontrol_show").write_text("node1\nnode2\n")
    assert Job.from_variables(variables | {"SLURM_RESTART_COUNT": "1"}) == JOB
    for spoiled in ({"SLURM_TASKS_PER_NODE": "4(x3)"}, {"SLURM_TASKS_PER_NODE": "many"}):
        with pytest.raises(TopologyError, match="ntasks-per-node"):
            Job.from_variables(variables | spoiled)
    with pytest.raises(TopologyError, match="no SLURM job around it"):
        Job.from_variables({})


def test_srun_that_does_not_end_after_a_dead_rank_is_killed(slurm: Path, capfd, monkeypatch) -> None:
    monkeypatch.setattr("triaxis.launch.slurm.job.LONGEST_END_SECONDS", 0.5)
    srun = slurm / "srun"
    srun.write_text(
        '#!/bin/sh\necho "srun: error: node1: task 1: Exited with exit code 1" >&2\nexec sleep 60 2>/dev/null\n'
    )
    srun.chmod(0o755)
    step = SrunStep(JOB)
    assert step.run([str(srun)], dict(os.environ)) == -signal.SIGKILL
    assert step.report.suspects() == ["node2"], "no word was heard of its tasks"
    assert "it is killed" in capfd.readouterr().out


def test_tasks_that_outlive_a_bad_end_are_killed(slurm: Path, capfd, monkeypatch) -> None:
    """SLURM itself would wait for KillWait after its SIGTERM, to which a rank that waits in NCCL does not react."""
    monkeypatch.setattr("triaxis.launch.slurm.job.OTHERS_END_SECONDS", 0.2)
    srun, scancel = slurm / "srun", slurm / "scancel"
    srun.write_text(
        "#!/bin/bash\n"
        'echo "srun: error: node1: task 1: Exited with exit code 2" >&2\n'
        'echo "srun: launch/slurm: _step_signal: Terminating StepId=31.4" >&2\n'
        f'for _ in $(seq 600); do sleep 0.05; [ -e "{slurm}/killed" ] && exit 137; done\n'
    )
    scancel.write_text(f'#!/bin/sh\necho "$*" >> "{slurm}/killed"\n')
    for program in (srun, scancel):
        program.chmod(0o755)
    step = SrunStep(JOB)
    assert step.run([str(srun)], dict(os.environ)) == 137
    assert (slurm / "killed").read_text() == "--signal=KILL 31.4\n"
    assert "tasks that still run" in capfd.readouterr().out
    assert judge(137, step.report, None) is Outcome.MISTAKE


@pytest.fixture
def handlers() -> Iterator[None]:
    """The batch job's signal handlers end with the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("code", "outcome", "exit_code", "is_requeued"),
    [
        (1, Outcome.FAILED, 0, True),
        (ExitCode.MISTAKE, Outcome.MISTAKE, ExitCode.MISTAKE, False),
        (ExitCode.HUNG, Outcome.FAILED, 0, True),
        (ExitCode.DIVERGED, Outcome.DIVERGED, ExitCode.DIVERGED, False),
    ],
)
@pytest.mark.usefixtures("handlers")
def test_only_what_may_end_better_is_started_again(
    code: int, outcome: Outcome, exit_code: int, is_requeued: bool, slurm: Path, tmp_path: Path, monkeypatch
) -> None:
    (slurm / "srun").write_text(
        f'#!/bin/sh\necho "srun: error: node1: tasks 0-3: Exited with exit code {code}" >&2\nexit {code}\n'
    )
    inside_a_job(slurm, monkeypatch)
    assert main(["script", str(TINY), "data.synthetic=true"]) == exit_code
    assert ("scontrol requeue 31" in (slurm / "told").read_text()) is is_requeued
    assert History(tmp_path / "runs" / "small").attempts[-1].outcome == outcome.value


@pytest.mark.usefixtures("handlers")
def test_the_next_phase_starts_in_the_same_allocation(slurm: Path, tmp_path: Path, monkeypatch) -> None:
    (slurm / "srun").write_text(
        f'#!/bin/sh\necho "$*" >> {slurm}/steps\n[ $(wc -l < {slurm}/steps) = 2 ] && exit 0\n'
        'echo "srun: error: node1: tasks 0-3: Exited with exit code 76" >&2\nexit 76\n'
    )
    inside_a_job(slurm, monkeypatch)
    phases = "phases=[{name: a, until: 41k}, {name: b, until: 90k}]"
    more = ["train.steps=null", "checkpoint.interval=10", "optimizer.warmup_steps=2", phases]
    assert main(["script", str(TINY), "data.synthetic=true", *more, "--from-scratch"]) == 0
    first, second = (slurm / "steps").read_text().splitlines()
    assert first == f"{second} --from-scratch", "the next phase goes on from what the first one has saved"
    assert "requeue" not in (slurm / "told").read_text()
    outcomes = [attempt.outcome for attempt in History(tmp_path / "runs" / "small").attempts]
    assert outcomes == ["next phase", "finished"]


def inside_a_job(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be job 31 on two nodes, which may be requeued, with the run called small."""
    (slurm / "scontrol_show").write_text("node1\nnode2\n")
    (slurm / "scontrol_requeue").write_text("")
    (slurm / "srun").chmod(0o755)
    monkeypatch.chdir(slurm)
    for name in [name for name in os.environ if name.startswith(OTHER_LAUNCHERS) or name in OTHER_RUNS]:
        monkeypatch.delenv(name)
    for name, value in (("JOB_ID", "31"), ("JOB_NODELIST", "node[1-2]"), ("TASKS_PER_NODE", "4(x2)")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("RUN_NAME", "small")


def test_the_signal_before_the_time_limit_is_handed_to_srun(slurm: Path) -> None:
    srun = slurm / "srun"
    srun.write_text(
        "#!/bin/bash\ntrap 'echo \"srun: error: node1: tasks 0-3: Exited with exit code 75\" >&2; exit 75' USR1\n"
        f"touch {slurm}/ready\nfor _ in $(seq 600); do sleep 0.05; done\n"
    )
    srun.chmod(0o755)
    step = SrunStep(JOB)

    def hand_over(number: int, frame: object) -> None:
        step.on_signal(signal.SIGUSR1, None)

    before = signal.signal(signal.SIGALRM, hand_over)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        exit_code = step.run([str(srun)], dict(os.environ))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert judge(exit_code, step.report, step.received) is Outcome.PREEMPTED


@pytest.mark.parametrize(
    ("limit", "header", "variables", "is_refused"),
    [
        ("00:05:00", "#SBATCH --signal=B:USR1@600", {}, True),
        ("00:10:00", "#SBATCH --signal=B:USR1@600", {}, True),
        ("00:10:01", "#SBATCH --signal=B:USR1@600", {}, False),
        ("1-00:00:00", "#SBATCH --signal=B:USR1@600", {}, False),
        ("UNLIMITED", "#SBATCH --signal=B:USR1@600", {}, False),
        ("00:05:00", "##SBATCH --signal=B:USR1@600", {}, False),
        ("00:05:00", "#SBATCH --signal=B:USR1@600", {"SBATCH_SIGNAL": "B:USR1@60"}, False),
        ("00:05:00", "", {"SBATCH_SIGNAL": "B:USR1@300"}, True),
    ],
)
def test_a_time_limit_within_the_lead_of_the_signal_is_refused(
    limit: str, header: str, variables: dict[str, str], is_refused: bool
) -> None:
    script, fields = f"#!/bin/bash\n{header}\n", {"TimeLimit": limit}
    if not is_refused:
        check_lead(script, fields, variables)
        return
    with pytest.raises(TopologyError, match=rf"--time={limit} is not longer than the \d00 seconds of --signal=B:USR1@"):
        check_lead(script, fields, variables)
