"""A real SLURM on one machine: munged, slurmctld and several slurmd in a temporary folder, as root, without systemd.

    node1   slurmd at 127.0.1.1   4 CPUs in name      partition `main`: jobs are requeued when `high` needs their nodes
    node2   slurmd at 127.0.1.2   4 CPUs in name      partition `high`

Where it cannot be started the test is skipped with the reason, or fails (tests/lacking.py).
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import psutil

from tests.lacking import give_up

CPUS_PER_NODE = 4
KILL_WAIT_SECONDS = 30
"""SLURM's own default: as long may ranks save after SIGTERM."""

DEAD_AFTER_SECONDS = 10
"""A node that does not answer for so long is down (SLURM's default is 300)."""

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
_READY_SECONDS = 30.0
_END_SECONDS = 15.0


class Cluster:
    """A running cluster.

    Args:
        folder: of its files, short: munge's socket has to fit in 108 bytes.
        num_nodes: node1, node2, ...
        port: of slurmctld, 20000 or more; the nodes have those after it.
    """

    def __init__(self, folder: Path, num_nodes: int, port: int) -> None:
        self.folder = folder
        self.nodes = [f"node{index + 1}" for index in range(num_nodes)]
        self._port = port

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    # Life and death of its daemons

    def start(self) -> None:
        for name in ("state", "log", "munge", "socket", *(f"spool.{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        (self.folder / "munge").chmod(0o700)
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        self.conf.write_text(self._configuration())
        # Said outright: slurmd looks for cgroups by itself, and dies where only version 2 is there or none is mounted.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        munge = self.folder / "munge"
        self._daemon(
            "munged",
            "--force",
            f"--key-file={key}",
            f"--socket={self.folder}/socket/munge",
            f"--pid-file={self.folder}/munged.pid",
            f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
            "--num-threads=2",
        )
        self._daemon("slurmctld", "-c", "-f", str(self.conf))
        for node in self.nodes:
            self.start_node(node)
        self.wait_until(lambda: self.idle_nodes() == len(self.nodes), _READY_SECONDS, "the nodes to be idle")

    def start_node(self, node: str) -> None:
        self._daemon("slurmd", "-N", node, "-f", str(self.conf))

    def kill_node(self, node: str) -> None:
        """As a power cut would: its slurmd, its step managers and their tasks, at once."""
        doomed = {psutil.Process(self._pid_of(f"slurmd.{node}"))}
        for task in self.processes():
            with _gone_already():
                if task.environ().get("SLURMD_NODENAME") == node:
                    doomed |= {task, *(parent for parent in task.parents() if "slurmstepd" in parent.name())}
        for process in sorted(doomed, key=lambda process: "slurm" not in process.name()):
            _end(process, signal.SIGKILL)

    def stop(self) -> None:
        """End everything that was started, jobs and daemons, whatever state they are in."""
        if self.conf.exists():
            self.command("scancel", "--full", "--user=root", check=False)
        doomed = [*self.processes(), *self.step_managers()]
        for name in ("slurmctld", *(f"slurmd.{node}" for node in self.nodes), "munged"):
            with _gone_already():
                doomed.append(psutil.Process(self._pid_of(name)))
        for process in doomed:
            _end(process, signal.SIGTERM)
        for process in psutil.wait_procs(doomed, timeout=_END_SECONDS)[1]:
            _end(process, signal.SIGKILL)
        for process in [*self.step_managers(), *self.processes()]:
            _end(process, signal.SIGKILL)

    def processes(self) -> list[psutil.Process]:
        """Every live process of this cluster's jobs: SLURM tells them where it is configured."""
        found = []
        for process in psutil.process_iter():
            with _gone_already():
                if process.environ().get("SLURM_CONF") == str(self.conf) and "SLURM_JOB_ID" in process.environ():
                    found.append(process)
        return found

    def task(self, number: int, word: str) -> psutil.Process | None:
        """The process of a step's task that has this word on its command line; None: there is none (yet, or any more)."""
        for process in self.processes():
            with _gone_already():
                if process.environ().get("SLURM_PROCID") == str(number) and word in process.cmdline():
                    return process
        return None

    def step_managers(self) -> list[psutil.Process]:
        """Every live slurmstepd of this cluster; they outlive slurmd. Their environment is gone, but their log is open."""
        found = []
        for process in psutil.process_iter():
            with _gone_already():
                is_one = process.name() == "slurmstepd"
                if is_one and any(Path(file.path).is_relative_to(self.folder) for file in process.open_files()):
                    found.append(process)
        return found

    # What a person types

    def command(self, *words: str, check: bool = True, **variables: str) -> str:
        """Run a command of SLURM and return what it said; `AssertionError` where it fails."""
        environment = os.environ | {"SLURM_CONF": str(self.conf)} | variables
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert not check or ended.returncode == 0, f"{words}: {ended.stderr}\n{self.logs()}"
        return ended.stdout

    def submit(self, *words: str, **variables: str) -> str:
        """sbatch; the job's number."""
        return self.command("sbatch", "--parsable", *words, **variables).strip()

    def job(self, number: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        words = self.command("scontrol", "show", "job", "--oneliner", number).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def idle_nodes(self) -> int:
        answer = self.command("sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D", check=False)
        return int(answer.strip() or 0)

    def wait_until(self, is_so: Callable[[], Any], within_seconds: float, what: str, poll_seconds: float = 0.1) -> Any:
        """Return what `is_so` says as soon as it is true of something."""
        deadline_seconds = time.monotonic() + within_seconds
        while not (answer := is_so()):
            assert time.monotonic() < deadline_seconds, f"waited {within_seconds} s for {what}\n{self.logs()}"
            time.sleep(poll_seconds)
        return answer

    def logs(self) -> str:
        """The ends of the daemons' logs, for a test that failed."""
        texts = [f"-- {log.name}\n{log.read_text()[-2000:]}" for log in sorted((self.folder / "log").glob("*"))]
        return "\n".join(texts)

    def _daemon(self, *words: str) -> None:
        """Start a program that goes to the background by itself."""
        environment = os.environ | {"SLURM_CONF": str(self.conf)}
        environment.pop("SLURM_JOB_ID", None)
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=30)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")

    def _pid_of(self, name: str) -> int:
        try:
            return int((self.folder / f"{name}.pid").read_text())
        except (FileNotFoundError, ValueError) as error:
            raise psutil.NoSuchProcess(0) from error

    def _configuration(self) -> str:
        last = len(self.nodes)
        ports = f"{self._port + 1}-{self._port + last}" if last > 1 else f"{self._port + 1}"
        numbers = f"[1-{last}]" if last > 1 else "1"
        # The ranks of a job meet at port 15000 + its number + 97 per restart: another one in each cluster of this machine, and no
        # daemon's.
        first_job = 1 + self._port % 4_000
        return f"""\
ClusterName=test
FirstJobId={first_job}
SlurmctldHost={socket.gethostname().partition(".")[0]}(127.0.0.1)
SlurmctldPort={self._port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={self.folder}/socket/munge,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=1,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait={KILL_WAIT_SECONDS}
SlurmdTimeout={DEAD_AFTER_SECONDS}
MessageTimeout=20
TreeWidth=64
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool.%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd.%n.pid
SlurmctldLogFile={self.folder}/log/slurmctld
SlurmdLogFile={self.folder}/log/slurmd.%n
NodeName=node{numbers} NodeHostname={socket.gethostname()} NodeAddr=127.0.1.{numbers} Port={ports} \\
  CPUs={CPUS_PER_NODE} RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@contextmanager
def cluster(folder: Path, num_nodes: int = 2) -> Iterator[Cluster]:
    """Start a cluster and end it with everything in it, whatever happened. `folder` must not exist yet."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        _give_up(f"{', '.join(missing)} missing (apt-get install slurmctld slurmd slurm-client munge)")
    if os.geteuid() != 0:
        _give_up("only root may start slurmd for others")
    folder.mkdir()
    made = Cluster(folder, num_nodes, 20_000 + os.getpid() % 10_000)
    try:
        try:
            made.start()
        except RuntimeError as error:
            _give_up(str(error))
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _gone_already() -> Iterator[None]:
    try:
        yield
    except psutil.Error:
        return


def _end(process: psutil.Process, number: int) -> None:
    with _gone_already():
        process.send_signal(number)


def _give_up(reason: str) -> NoReturn:
    give_up(f"cannot start SLURM: {reason}")
