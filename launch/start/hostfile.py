"""Start one run on the hosts listed in the file `HOSTFILE=path`, over ssh.

    # hosts           here:  ssh host0  ->  bash: NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 ... launch/pretrain_gpt.sh words
    host0 slots=8            ssh host1  ->  bash: NNODES=2 NODE_RANK=1 MASTER_ADDR=host0 ... launch/pretrain_gpt.sh words
    host1 slots=8

A host's bash reads its script from standard input, because a command line would show the environment's secrets. After the script,
the same stream carries signal names. The stream ends when this process or the connection is gone. The remote launcher then gets
SIGTERM, and its ranks save.
"""

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from triaxis.engine.comm.stop import stop_signals
from triaxis.engine.config.load import load_config
from triaxis.engine.config.rules.check import require_legal
from triaxis.engine.config.values.places import local_path
from triaxis.engine.errors import TopologyError, shown
from triaxis.engine.program import IS_CHECKOUT, ROOT
from triaxis.engine.storage.state_files import read_text, reason
from triaxis.launch.start.process.failure import AFTER, OTHERS_END_SECONDS
from triaxis.launch.start.process.forward_signals import END_RANKS
from triaxis.launch.start.process.lasting_output import lasting_output
from triaxis.launch.start.srun_task import LOOPBACK
from triaxis.launch.start.variables import DEFAULT_PORT, check_numbers

LAUNCHER = (
    ("bash", str(ROOT / "launch" / "pretrain_gpt.sh"))
    if IS_CHECKOUT
    else (sys.executable, "-P", "-m", "triaxis.launch.cli", "train")
)
"""Launcher command on each host, before the run's words. The checkout or the installed Python has the same path on all hosts."""

VARIABLE = "HOSTFILE"

_PASSED_ON = (
    "TP",
    "PP",
    "VPP",
    "CP",
    "DP",
    "EP",
    "ETP",
    "MICRO_BATCH_SIZE",
    "GLOBAL_BATCH_SIZE",
    "RUN_NAME",
    "OMP_NUM_THREADS",
)
_PASSED_ON_BEGINNINGS = (
    "TRIAXIS_",
    "WANDB_",
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "LD_LIBRARY_PATH",
    "UCX_",
    "FI_",
)
"""Beginnings of further environment variables that are passed to all hosts, as are `_PASSED_ON`; others stay on this host."""

_SSH_FAILED = 255
_POLL_SECONDS = 0.1
_SLOTS = re.compile(r"slots=([1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class Host:
    """A host in the hostfile, named as for ssh. `slots` is the number of ranks that start there."""

    name: str
    slots: int


def read_hosts(path: Path) -> list[Host]:
    """Read the hosts in a file, one per line as `name slots=8`. `#` begins a comment.

    Raises:
        TopologyError: the file cannot be read, a line is wrong, or the hosts contradict each other.
    """
    try:
        lines = read_text(path).removeprefix("\ufeff").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(
            f"{VARIABLE}={path} cannot be read ({reason(error)}), so there are no hosts to start on."
        ) from error
    hosts: list[Host] = []
    wrong: list[str] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = _SLOTS.fullmatch(" ".join(words[1:]))
        if slots is None or words[0].startswith("-"):
            wrong.append(f"line {number}: {shown(line.strip())} is not `host slots=8`")
            continue
        hosts.append(Host(words[0], int(slots[1])))
    names = [host.name for host in hosts]
    if not hosts and not wrong:
        wrong.append("it names no host")
    if len({host.slots for host in hosts}) > 1:
        wrong.append(
            f"slots differ ({', '.join(f'{host.name}: {host.slots}' for host in hosts)}); all hosts must have as many"
        )
    if len(set(names)) < len(names):
        wrong.append("a host is listed twice; its ranks would fight for the same GPUs")
    if len(hosts) > 1 and names[0] in LOOPBACK:
        wrong.append(f"the ranks meet at the first host, but on every host {names[0]} means that host itself")
    if wrong:
        raise TopologyError(
            f"{VARIABLE}={path}: " + "; ".join(wrong) + ". Ranks would wait for others that never come."
        )
    return hosts


def node_variables(hosts: Sequence[Host], index: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return host `index`'s NNODES, NODE_RANK, NPROC_PER_NODE; with several hosts also MASTER_ADDR, MASTER_PORT."""
    address = variables.get("MASTER_ADDR") or hosts[0].name
    world = {"NNODES": str(len(hosts)), "NODE_RANK": str(index), "NPROC_PER_NODE": str(hosts[index].slots)}
    if len(hosts) == 1:
        return world
    return world | {"MASTER_ADDR": address, "MASTER_PORT": variables.get("MASTER_PORT") or DEFAULT_PORT}


def script(folder: Path, words: Sequence[str], variables: Mapping[str, str]) -> str:
    """Build the remote bash's input, which sets the environment and starts the launcher.

    Later, this process writes names of signals for the launcher to the same stream. Because of the braces, bash reads the
    whole script first.
    """
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(variables.items()))
    command = shlex.join(words)
    return (
        "{\n"
        f"cd {shlex.quote(str(folder))} || exit 1\n"
        f"{exports}"
        f"{command} </dev/null & launcher=$!\n"
        "{ while read -r name; do kill -s $name $launcher; done; kill -s TERM $launcher; } <&0 2>/dev/null & reader=$!\n"
        "wait $launcher; code=$?; kill $reader; exit $code\n"
        "}\n"
    )


def passed_on(variables: Mapping[str, str]) -> dict[str, str]:
    """Select the variables for other hosts, by a name in `_PASSED_ON` or a beginning in `_PASSED_ON_BEGINNINGS`."""
    return {
        name: value for name, value in variables.items() if name in _PASSED_ON or name.startswith(_PASSED_ON_BEGINNINGS)
    }


def ssh_words(host: Host, variables: Mapping[str, str]) -> list[str]:
    """Return the local ssh command, which by default never asks for a password. TRIAXIS_SSH replaces `ssh` and its options.

    Raises:
        TopologyError: TRIAXIS_SSH has an unbalanced quote.
    """
    given = variables.get("TRIAXIS_SSH")
    try:
        words = shlex.split(given) if given else ["ssh", "-o", "BatchMode=yes"]
    except ValueError as error:
        raise TopologyError(f"TRIAXIS_SSH={given}: {error}, so its words are unclear. Balance its quotes.") from None
    return [*words, host.name, "bash", "-s"]


class SshLaunch:
    """A run on several hosts, with one launcher on each.

    Args:
        hosts: hosts from `read_hosts`.
        words: command line for each host's launcher.
        variables: this process's environment.
    """

    def __init__(self, hosts: Sequence[Host], words: Sequence[str], variables: Mapping[str, str]) -> None:
        self._hosts = hosts
        self._words = words
        self._variables = variables
        self._connections: list[subprocess.Popen[str]] = []

    def show(self) -> None:
        """Print each host's command, and the names of the variables that are passed on but not their values."""
        print(f"environment passed on: {' '.join(sorted(passed_on(self._variables)))}")
        for index, host in enumerate(self._hosts):
            given = " ".join(
                f"{name}={value}" for name, value in node_variables(self._hosts, index, self._variables).items()
            )
            command = shlex.join(self._words)
            print(
                f"{shlex.join(ssh_words(host, self._variables))}  <<  cd {shlex.quote(str(Path.cwd()))}; {given} {command}"
            )

    def run(self) -> int:
        """Start all hosts, wait for them, and return the run's exit code.

        The first host's output and all hosts' errors are shown. Stop signals are forwarded to all launchers.

        Raises:
            TopologyError: this machine has no ssh.
        """
        program = ssh_words(self._hosts[0], self._variables)[0]
        if shutil.which(program) is None:
            raise TopologyError(
                f"no program {program} is on PATH, so no host of {VARIABLE} could be reached. Install OpenSSH, or name "
                "another program: TRIAXIS_SSH='/opt/bin/ssh -p 2222'."
            )
        before = {number: signal.signal(number, self._hand_on) for number in stop_signals()}
        readers = []
        try:
            for index, host in enumerate(self._hosts):
                connection = subprocess.Popen(
                    ssh_words(host, self._variables),
                    stdin=subprocess.PIPE,
                    stdout=None if index == 0 else subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="backslashreplace",
                    start_new_session=True,  # Ctrl-C goes to this process, which forwards it
                )
                assert connection.stdin is not None and connection.stderr is not None, "pipes"
                self._connections.append(connection)
                reader = threading.Thread(target=_relay, args=(host.name, connection.stderr), daemon=True)
                reader.start()
                readers.append(reader)
                exported = passed_on(self._variables) | node_variables(self._hosts, index, self._variables)
                self._write(connection, script(Path.cwd(), self._words, exported))
            codes, first_failure = self._wait()
        finally:
            for connection in self._connections:
                with contextlib.suppress(BrokenPipeError):
                    if connection.stdin is not None:
                        connection.stdin.close()
            for reader in readers:
                reader.join(5.0)
            for number, handler in before.items():
                signal.signal(number, handler)
        ended = list(zip(self._hosts, codes, strict=True))
        if lost := [host.name for host, code in ended if code == _SSH_FAILED]:
            print(f"ssh could not start or keep the launcher on {', '.join(lost)}", file=sys.stderr)
        failed = [f"{host.name} ({code})" for host, code in ended if code not in (0, _SSH_FAILED, *AFTER.values())]
        if failed:
            print(f"the launcher ended with an exit code on {', '.join(failed)}", file=sys.stderr)
        return next((code for code in AFTER.values() if code in codes), abs(first_failure))

    def _wait(self) -> tuple[list[int], int]:
        """Wait for all launchers, and end the others `OTHERS_END_SECONDS` after one fails.

        A rank that waits in NCCL for a dead peer on another host does not end by itself. A lost ssh connection is not a
        failure here, because all ranks then save and end.

        Returns:
            Exit codes by host, and the first failure among them (0: none).
        """
        first_failure, kill_at_seconds = 0, math.inf
        while None in (codes := [connection.poll() for connection in self._connections]):
            failures = [code for code in codes if code and code != _SSH_FAILED and code not in AFTER.values()]
            if failures and not first_failure:
                first_failure, kill_at_seconds = failures[0], time.monotonic() + OTHERS_END_SECONDS
            if time.monotonic() > kill_at_seconds:
                self._hand_on(END_RANKS, None)
                kill_at_seconds = math.inf
            time.sleep(_POLL_SECONDS)
        ended = [code for code in codes if code is not None]
        return ended, first_failure or next((code for code in ended if code), 0)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        for connection in self._connections:
            self._write(connection, f"{signal.Signals(number).name.removeprefix('SIG')}\n")

    @staticmethod
    def _write(connection: subprocess.Popen[str], text: str) -> None:
        assert connection.stdin is not None, "a pipe"
        try:
            connection.stdin.write(text)
            connection.stdin.flush()
        except (BrokenPipeError, ValueError):
            return  # it has ended; its exit code is the reason


def _relay(host: str, stream: TextIO) -> None:
    for line in stream:
        sys.stderr.write(f"{host}: {line}")
        sys.stderr.flush()


def is_asked_for(variables: Mapping[str, str]) -> bool:
    """Whether this process must start a launcher on each host in HOSTFILE.

    False in such a launcher itself, which has NODE_RANK.
    """
    return bool(variables.get(VARIABLE)) and "NODE_RANK" not in variables


def start(config_path: Path, overrides: Sequence[str], flags: Sequence[str], *, dry_run: bool) -> int:
    """Check the config for the hosts' ranks, then start the run there over ssh.

    With `dry_run`, print each host's command instead. Returns the exit code.

    Raises:
        ConfigError: all problems in the configuration at once.
        TopologyError: the hosts do not fit together.
    """
    check_numbers(os.environ)
    try:
        path = local_path(os.environ[VARIABLE])
    except ValueError as error:
        raise TopologyError(f"{VARIABLE}={os.environ[VARIABLE]}: {error}, so there are no hosts to start on.") from None
    hosts = read_hosts(Path(path))
    config = load_config(config_path, overrides, os.environ)
    world_size = sum(host.slots for host in hosts)
    ranks_per_node = config.runtime.ranks_per_node or hosts[0].slots
    require_legal(config, f"{config_path} on {world_size} ranks of {VARIABLE}", world_size, ranks_per_node)
    run = SshLaunch(hosts, [*LAUNCHER, str(config_path), *overrides, *flags], os.environ)
    if dry_run:
        run.show()
        return 0
    with lasting_output():
        return run.run()
