"""The run that is disturbed, as a scheduler sees it: launchers on two hosts, what they said, files that grow, processes.

Every launcher is `triaxis train` in a host of its own (`tests/netns.py`); attempt after attempt goes on in one run directory.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from tests import netns
from tests.launch.command_line import OTHER_LAUNCHERS, OTHER_RUNS, ROOT
from tests.soak.scene import NUM_HOSTS, RANKS_PER_HOST, address
from triaxis.engine.storage.files import write_atomically
from triaxis.engine.telemetry.record.events import read_events
from triaxis.engine.telemetry.record.jsonl import read_records
from triaxis.launch.start.process.parent_death import end_with_parent

MARK = "TRIAXIS_SOAK"
"""The variable by which every process of a soak is known; its value is the soak's folder."""

NAME = "soak"
POLL_SECONDS = 0.05
_READER_ENDS_SECONDS = 1.0
_PORT = 29_500
_IN_RANKS = Path(__file__).parent / "in_ranks"


class Stuck(Exception):  # noqa: N818 - no error of ours: the run did not do what it has to
    """Something that has to happen did not happen in time."""


@dataclass(frozen=True)
class Launcher:
    """`triaxis train` on one host, the reader of its standard output, and the file that the reader writes."""

    host: int
    process: subprocess.Popen[bytes]
    reader: subprocess.Popen[bytes]
    said: Path

    @property
    def words(self) -> str:
        if self.process.poll() is not None:
            # The reader ends with the last writer; ranks may outlive a launcher that was killed.
            with suppress(subprocess.TimeoutExpired):
                self.reader.wait(_READER_ENDS_SECONDS)
        return self.said.read_text(errors="replace")


class Grown:
    """The objects of a .jsonl file that were written since they were asked for last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end = 0

    def new(self) -> Sequence[Mapping[str, Any]]:
        read = read_records(self.path, self._end)
        self._end = read.end
        return read.records


class Run:
    """One run and its attempts.

    Args:
        folder: of the soak; the run directory is made below it.
        hosts: names of the network namespaces.
        disk: where checkpoints are written.

    Attributes:
        launchers: of the present attempt, or of the last one.
        steps: records of metrics.jsonl of all attempts, events: records of the events of all nodes, as far as they were read.
    """

    def __init__(self, folder: Path, hosts: Sequence[str], disk: Path) -> None:
        self.folder = folder
        self.disk = disk
        self.path = folder / "runs" / NAME
        self.launchers: list[Launcher] = []
        self.steps: list[Mapping[str, Any]] = []
        self.events: list[Mapping[str, Any]] = []
        self.attempt = -1
        self._hosts = hosts
        self._metrics = Grown(self.path / "metrics.jsonl")
        self._events_read: Mapping[str, int] = {}

    # Its life

    def start(self, *overrides: str) -> None:
        """Start the next attempt on all hosts: the same command as always, with these overrides."""
        self.attempt += 1
        self.launchers = [self._launch(host, overrides) for host in range(NUM_HOSTS)]

    def exit_codes(self) -> list[int | None]:
        """Of the launchers; None: it runs still."""
        return [launcher.process.poll() for launcher in self.launchers]

    def has_ended(self) -> bool:
        return None not in self.exit_codes()

    def end(self) -> None:
        """Kill what is left of it; nothing survives a soak."""
        for launcher in self.launchers:
            launcher.process.kill()
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        for launcher in self.launchers:
            launcher.process.wait()
            launcher.reader.kill()
            launcher.reader.wait()

    def read(self) -> None:
        """Read what has been written since the last time."""
        self.steps += self._metrics.new()
        read = read_events(self.path, self._events_read)
        self._events_read = read.ends
        self.events += [event.to_record() for event in read.events]

    def wait(self, is_so: Callable[[], Any], within_seconds: float, what: str) -> Any:
        """What `is_so` says as soon as it is true; the files are read before each look.

        Raises:
            Stuck: it was not, in so long.
        """
        deadline_seconds = time.monotonic() + within_seconds
        while True:
            is_late = time.monotonic() > deadline_seconds
            self.read()
            if answer := is_so():
                return answer
            if is_late:
                raise Stuck(f"waited {within_seconds:.0f} s for {what}")
            time.sleep(POLL_SECONDS)

    # What is known of it

    def last_step(self) -> int:
        """The last step of the present attempt that was written down; where it began if it has made none."""
        made = self.rows()
        return int(made[-1]["step"]) if made else self.began() or 0

    def rows(self) -> list[Mapping[str, Any]]:
        """Return the records of the steps of the present attempt."""
        return [record for record in self.steps if record["attempt"] == self.attempt]

    def slowest_seconds(self) -> float:
        """Return the longest time between two steps of the present attempt, after its first two steps."""
        times = [row["unix_time_seconds"] for row in self.rows()[1:]]
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)

    def began(self) -> int | None:
        """The step that the present attempt goes on from; None: it has not said so yet."""
        return next((int(event["step"]) for event in self.of_kind("begun")), None)

    def of_kind(self, kind: str, since: float = 0.0) -> Iterator[Mapping[str, Any]]:
        """Events of the present attempt since a moment of Unix time."""
        return (
            event
            for event in self.events
            if event["kind"] == kind and event["attempt"] == self.attempt and event["unix_time_seconds"] >= since
        )

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank."""
        launcher = self.launchers[rank // RANKS_PER_HOST]
        for process in psutil.Process(launcher.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if process.environ().get("RANK") == str(rank):
                    return process
        raise Stuck(f"rank {rank} has no process")

    def rank_log(self, rank: int) -> str:
        path = self.path / "logs" / f"attempt_{self.attempt:02d}" / f"rank_{rank:05d}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def hang_report(self) -> Mapping[str, Any] | None:
        path = self.path / "hangs" / f"attempt_{self.attempt:02d}" / "report.json"
        return json.loads(path.read_bytes()) if path.exists() else None

    def processes(self) -> list[psutil.Process]:
        """Every live process of this soak but the one that calls."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_ours = process.environ().get(MARK) == str(self.folder) and process.pid != os.getpid()
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def remove_directory(self) -> None:
        """Remove the run directory under the live run. It gets another name first, so that none sees half of it."""
        removed = self.path.with_name("removed")
        self.path.rename(removed)
        self._metrics = Grown(self.path / "metrics.jsonl")
        self._events_read = {}
        shutil.rmtree(removed)

    def cut(self) -> None:
        netns.cut(self._hosts[-1])

    def mend(self) -> None:
        netns.mend(self._hosts[-1])

    def host_name(self, host: int) -> str:
        return self._hosts[host]

    def _launch(self, host: int, overrides: Sequence[str]) -> Launcher:
        def begin() -> None:
            netns.enter(self._hosts[host])
            end_with_parent()  # a soak that is killed leaves nothing behind
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a soak under nohup has ignored it, and the run would too

        said = self.folder / "said" / f"attempt_{self.attempt:02d}.host_{host}"
        said.parent.mkdir(exist_ok=True)
        meeting = {
            "NNODES": str(NUM_HOSTS),
            "NODE_RANK": str(host),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(_PORT),
        }
        variables = {**meeting, "NPROC_PER_NODE": str(RANKS_PER_HOST), "RUN_NAME": NAME}
        with said.open("wb") as file:
            reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file, preexec_fn=end_with_parent)
        assert reader.stdin is not None, "it was asked for a pipe"
        # This process keeps no end of the pipe: the reader ends with its last writer, and a writer learns that it has ended.
        with reader.stdin as pipe:
            process = subprocess.Popen(
                train_command(self.folder, overrides),
                env=environment(self.folder, disturbed=True) | variables,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=subprocess.STDOUT,
                preexec_fn=begin,
            )
        return Launcher(host, process, reader, said)


def train_command(folder: Path, overrides: Sequence[str]) -> list[str]:
    """What a person would type."""
    return [sys.executable, "-m", "triaxis.launch.cli", "train", str(folder / f"{NAME}.yaml"), *overrides]


def environment(folder: Path, *, disturbed: bool) -> dict[str, str]:
    """Of a launcher; with `disturbed`, its ranks import `in_ranks/sitecustomize.py`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OTHER_LAUNCHERS) and name not in OTHER_RUNS and not name.endswith("_SOCKET_IFNAME")
    }
    path = [str(_IN_RANKS), str(ROOT)] if disturbed else [str(ROOT)]
    return kept | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        MARK: str(folder),
    }


def write_plan(path: Path, plan: Mapping[str, Any] | None) -> None:
    """Tell the ranks what to do in their next step; None: nothing."""
    if plan is None:
        path.unlink(missing_ok=True)
    else:
        write_atomically(path, [json.dumps(plan).encode()])
