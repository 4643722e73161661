"""A run on several hosts over ssh: an `ssh` that starts its command here, and a launcher that says what it was told."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch.command_line import PRETRAIN, ROOT, ended, records, started, wait_for_steps
from triaxis.engine.errors import TopologyError
from triaxis.launch.start.hostfile import (
    Host,
    SshLaunch,
    is_asked_for,
    node_variables,
    passed_on,
    read_hosts,
    ssh_words,
    start,
)
from triaxis.launch.start.srun_task import is_rank
from triaxis.launch.start.variables import check_numbers

SECRET = "a-key-that-no-process-list-may-show"

LAUNCHER = """\
echo "$NODE_RANK of $NNODES, $NPROC_PER_NODE ranks, at $MASTER_ADDR $MASTER_PORT: $* in $PWD with $WANDB_API_KEY" > told_$NODE_RANK
trap 'echo saved >> told_$NODE_RANK; exit 75' TERM USR1
trap 'exit 130' INT
[ "$1" = fail ] && [ "$NODE_RANK" = 1 ] && { echo "a rank died" >&2; exit 137; }
[ "$1" = stuck ] && { [ "$NODE_RANK" = 1 ] && exit 2; trap '' TERM USR1 INT; trap 'exit 129' USR2; }
[ "$1" = wait ] || [ "$1" = stuck ] || exit 0
for _ in $(seq 600); do sleep 0.05; done
"""


def write_hosts(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def test_hosts_are_read(tmp_path: Path) -> None:
    text = "# rack 7\n\nnode0 slots=8\nnode1   slots=8 # the other\n"
    assert read_hosts(write_hosts(tmp_path, text)) == [Host("node0", 8), Host("node1", 8)]
    assert read_hosts(write_hosts(tmp_path, f"\ufeff{text}")) == [Host("node0", 8), Host("node1", 8)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it names no host"),
        ("node0\nnode1 slots=many\n", "line 2: 'node1 slots=many' is not `host slots=8`"),
        ("-oProxyCommand=x slots=8\n", "is not `host slots=8`"),
        ("node0 slots=²\n", "is not `host slots=8`"),
        (f"node0 slots={'9' * 5000}\n", "is not `host slots=8`"),
        ("node0 slots=8\nnode1 slots=4\n", "slots differ (node0: 8, node1: 4)"),
        ("node0 slots=8\nnode0 slots=8\n", "a host is listed twice"),
        ("localhost slots=8\nnode1 slots=8\n", "on every host localhost means that host itself"),
    ],
)
def test_hosts_that_do_not_fit_together(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="HOSTFILE=") as refused:
        read_hosts(write_hosts(tmp_path, text))
    assert words in str(refused.value)


def test_what_a_host_is_told() -> None:
    hosts = [Host("node0", 8), Host("node1", 8)]
    world = {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "8"}
    assert node_variables(hosts, 1, {}) == world | {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    chosen = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
    assert node_variables(hosts, 1, chosen) == world | chosen
    assert node_variables(hosts[:1], 0, {}) == {"NNODES": "1", "NODE_RANK": "0", "NPROC_PER_NODE": "8"}
    assert passed_on({"TP": "2", "NCCL_DEBUG": "INFO", "HOME": "/root", "HOSTFILE": "hosts"}) == {
        "TP": "2",
        "NCCL_DEBUG": "INFO",
    }
    assert is_asked_for({"HOSTFILE": "hosts"}) and not is_asked_for({"HOSTFILE": "hosts", "NODE_RANK": "1"})


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a checkout, and an ssh in TRIAXIS_SSH that writes its own command line down."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "pretrain_gpt.sh").write_text(LAUNCHER)
    ssh = tmp_path / "fake ssh"
    ssh.write_text(f'#!/bin/bash\necho "$*" >> "{tmp_path}/ssh_told"\nshift\nexec "$@"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("TRIAXIS_SSH", f"'{ssh}'")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def two_hosts(checkout: Path, *words: str) -> SshLaunch:
    launcher = ("bash", str(checkout / "launch" / "pretrain_gpt.sh"))
    return SshLaunch([Host("node0", 4), Host("node1", 4)], [*launcher, *words], os.environ)


def test_every_host_gets_its_launcher_and_no_secret_is_on_a_command_line(checkout: Path, capfd) -> None:
    assert two_hosts(checkout, "a.yaml", "b=c d").run() == 0
    for node in (0, 1):
        told = (checkout / f"told_{node}").read_text().strip()
        assert told == f"{node} of 2, 4 ranks, at node0 29500: a.yaml b=c d in {checkout} with {SECRET}"
    assert sorted((checkout / "ssh_told").read_text().splitlines()) == ["node0 bash -s", "node1 bash -s"]
    two_hosts(checkout, "a.yaml").show()
    shown = capfd.readouterr()
    assert SECRET not in shown.out + shown.err
    assert " TRIAXIS_SSH WANDB_API_KEY\n" in shown.out


def test_a_host_that_fails_is_named(checkout: Path, capfd) -> None:
    assert two_hosts(checkout, "fail").run() == 137
    assert "node1: a rank died" in capfd.readouterr().err


def test_hosts_that_outlive_a_failure_are_ended_and_the_failure_is_the_run_s(checkout: Path, monkeypatch) -> None:
    """Ranks of the other hosts may wait in NCCL for those that are gone, and react to no signal that asks them to save."""
    monkeypatch.setattr("triaxis.launch.start.hostfile.OTHERS_END_SECONDS", 0.5)
    started_seconds = time.monotonic()
    assert two_hosts(checkout, "stuck").run() == 2
    assert time.monotonic() - started_seconds < 15.0, "alone it would wait for 30 seconds"


def test_a_host_that_cannot_be_reached_is_named(checkout: Path, capfd, monkeypatch) -> None:
    monkeypatch.setenv("TRIAXIS_SSH", "sh -c 'echo no route >&2; exit 255'")
    assert two_hosts(checkout, "a.yaml").run() == 255
    said = capfd.readouterr().err
    assert "node0: no route" in said and "ssh could not start or keep the launcher on node0, node1" in said


WAITING = """\
import os, sys
from pathlib import Path
from triaxis.launch.start.hostfile import Host, SshLaunch
words = ["bash", str(Path.cwd() / "launch" / "pretrain_gpt.sh"), "wait"]
sys.exit(SshLaunch([Host("node0", 4), Host("node1", 4)], words, os.environ).run())
"""


@contextmanager
def waiting(checkout: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run whose launchers wait for a signal, once both do."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", WAITING], cwd=checkout, env=environment)
    try:
        for _ in range(600):
            if (checkout / "told_0").exists() and (checkout / "told_1").exists():
                break
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_every_host(checkout: Path, number: signal.Signals) -> None:
    with waiting(checkout) as process:
        process.send_signal(number)
        assert process.wait(30) == 75
    assert all("saved" in (checkout / f"told_{node}").read_text() for node in (0, 1))


def test_hosts_save_when_the_connection_is_gone(checkout: Path) -> None:
    with waiting(checkout) as process:
        process.kill()
        process.wait()
        for _ in range(600):
            if all("saved" in (checkout / f"told_{node}").read_text() for node in (0, 1)):
                return
            time.sleep(0.05)
    raise AssertionError("a launcher has outlived the one who started it")


def test_ssh_asks_for_no_password() -> None:
    assert ssh_words(Host("node0", 8), {}) == ["ssh", "-o", "BatchMode=yes", "node0", "bash", "-s"]


def test_an_ssh_that_cannot_be_started_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TopologyError, match="Balance its quotes"):
        ssh_words(Host("node0", 8), {"TRIAXIS_SSH": "ssh 'x"})
    with pytest.raises(TopologyError, match="no program nosuchssh is on PATH"):
        SshLaunch([Host("node0", 8)], ["true"], {"TRIAXIS_SSH": "nosuchssh -p 2"}).run()
    monkeypatch.setenv("HOSTFILE", "~nobody_of_this_name/hosts")
    with pytest.raises(TopologyError, match="no such user"):
        start(tmp_path / "c.yaml", [], [], dry_run=True)


def test_numbers_of_the_environment_are_numbers() -> None:
    check_numbers({"OMP_NUM_THREADS": "4", "MASTER_PORT": "", "SLURM_RESTART_COUNT": "0", "HOME": "x"})
    for name, text in (
        ("OMP_NUM_THREADS", "0"),
        ("OMP_NUM_THREADS", "100000"),
        ("MASTER_PORT", "99999"),
        ("MASTER_PORT", "http"),
        ("SLURM_RESTART_COUNT", "abc"),
        ("SLURM_RESTART_COUNT", "9" * 5000),
        ("SLURM_STEP_NUM_TASKS", "²"),
    ):
        with pytest.raises(TopologyError, match=f"{name}=.*must be a whole number") as caught:
            is_rank({"SLURM_PROCID": "0", name: text})
        assert len(str(caught.value)) < 400


@pytest.mark.slow
@pytest.mark.distributed
def test_two_hosts_train_and_save_when_they_are_told_to(checkout: Path) -> None:
    """The real launcher and real ranks: two hosts, both of them this machine."""
    write_hosts(checkout, "127.0.1.1 slots=1\n127.0.1.2 slots=1\n")
    words = (
        str(ROOT / "configs" / "gpt_tiny.yaml"),
        "data.synthetic=true",
        "train.steps=100000",
        "eval.interval=null",
    )
    variables = {"HOSTFILE": "hosts", "TRIAXIS_SSH": os.environ["TRIAXIS_SSH"], "GLOO_SOCKET_IFNAME": "lo"}
    sizes = {"TP": "1", "PP": "1", "VPP": "1", "DP": "2"}
    with started(checkout, *PRETRAIN, *words, **variables, **sizes) as launcher:
        metrics = checkout / "runs" / "gpt_tiny" / "metrics.jsonl"
        wait_for_steps(launcher, metrics, 2)
        launcher.terminate()
        said = ended(launcher, within_seconds=60.0)
    assert said.exit_code == 75, said.err
    steps = len(records(metrics))
    assert f"preempted: stopped after step {steps};" in said.out
    assert (checkout / "runs" / "gpt_tiny" / "checkpoints" / f"step_{steps:08d}").is_dir()
