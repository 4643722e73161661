"""Reads a SLURM allocation, and calls SLURM commands inside it."""

import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from triaxis.engine.errors import TopologyError
from triaxis.launch.start.srun_task import tasks_per_node
from triaxis.launch.start.variables import check_numbers

CALL_SECONDS = 120.0
"""Time limit for a SLURM command; a busy controller answers late."""


@dataclass(frozen=True, slots=True)
class Job:
    """A SLURM allocation, read from SLURM's variables.

    Attributes:
        number: job number; a task of an array has its own.
        restart: number of requeues so far.
        nodes: node names in task order; the first node runs this program.
        tasks_per_node: task counts in the same order.
    """

    number: str
    restart: int
    nodes: tuple[str, ...]
    tasks_per_node: tuple[int, ...]

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> "Job":
        """Read SLURM_JOB_ID, SLURM_RESTART_COUNT, SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE.

        Raises:
            TopologyError: this process is in no job, or the job's task counts are unknown.
        """
        if "SLURM_JOB_ID" not in variables:
            raise TopologyError(
                "this is a batch script and there is no SLURM job around it: srun would have nowhere to start ranks. Submit it "
                "with sbatch, look at it with --dry-run, or train on this machine with `triaxis train`."
            )
        check_numbers(variables)
        try:
            listed = call("scontrol", "show", "hostnames", variables["SLURM_JOB_NODELIST"])
            nodes = tuple(listed.stdout.split())
            sizes = tuple(tasks_per_node(variables["SLURM_TASKS_PER_NODE"]))
            if listed.returncode or len(nodes) != len(sizes):
                raise ValueError(f"{listed.stderr.strip() or nodes} for {len(sizes)} counts of tasks")
        except (KeyError, ValueError) as error:
            raise TopologyError(
                f"SLURM's variables do not say which tasks run where: {error!r}. Ranks could not be counted, nor a bad node be "
                "named. Keep --nodes and --ntasks-per-node in the header of the batch script."
            ) from error
        return cls(variables["SLURM_JOB_ID"], int(variables.get("SLURM_RESTART_COUNT") or 0), nodes, sizes)

    @property
    def world_size(self) -> int:
        return sum(self.tasks_per_node)


def call(*words: str, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a SLURM command. A command that is missing or does not answer in time has the exit code 1, and says why."""
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=False,
            timeout=CALL_SECONDS,
            env=variables,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, "", str(error))


def say(text: str) -> None:
    """Print a line to the job's output, with the local time."""
    print(f"triaxis: {time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


def job_fields(number: str) -> dict[str, str]:
    """Return the fields of `scontrol show job`; {} if SLURM does not answer."""
    return dict(re.findall(r"(\w+)=(\S*)", call("scontrol", "show", "job", "--oneliner", number).stdout))


def seconds_of(text: str) -> int | None:
    """Convert a text like `"1-02:03:04"` to seconds. None if the text is no time, as "UNLIMITED"."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def check_lead(script: str, fields: Mapping[str, str], variables: Mapping[str, str]) -> None:
    """Refuse a time limit that is not longer than the lead of SLURM's signal.

    The lead is the time by which the signal precedes the limit. It is read from SBATCH_SIGNAL or the script's header.

    Args:
        script: text of the batch script.
        fields: output of `scontrol show job`.
        variables: the job's environment.

    Raises:
        TopologyError: the ranks would be asked to stop as soon as they start.
    """
    header = re.search(r"^#SBATCH\s+--signal[=\s]\s*(\S+)", script, re.MULTILINE)
    asked = variables.get("SBATCH_SIGNAL") or (header[1] if header else "")
    lead, limit = re.search(r"@(\d+)$", asked), seconds_of(fields.get("TimeLimit", ""))
    if lead is None or limit is None or limit > int(lead[1]):
        return
    raise TopologyError(
        f"--time={fields['TimeLimit']} is not longer than the {int(lead[1]):,} seconds of --signal={asked}: SLURM would tell the "
        "ranks to save and stop as soon as they start, again and again, and no step would be made. Give more time, or a shorter "
        "lead: in the header, or as SBATCH_SIGNAL=B:USR1@60 in front of sbatch (a job cannot see a --signal of the command line)."
    )
