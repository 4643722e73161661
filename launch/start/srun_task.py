"""Run a task of `srun` as a rank, with torchrun's variables translated from SLURM's.

    srun --ntasks=16 --ntasks-per-node=8          SLURM_PROCID 11 of 16, SLURM_LOCALID 3 on node 1
      ->  RANK=11 WORLD_SIZE=16 LOCAL_RANK=3 LOCAL_WORLD_SIZE=8 MASTER_ADDR=<first host> MASTER_PORT=<from job and restart>

One task is one rank, with no torchrun in between. So `scancel`, time limits and `--kill-on-bad-exit` reach the rank itself.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping

from triaxis.engine.errors import TopologyError
from triaxis.launch.start.variables import check_numbers

FIRST_PORT = 15_000
NUM_PORTS = 15_000
"""Number of ports from `FIRST_PORT` on; all are below 32768, where Linux starts to assign ports to outgoing connections."""
PORTS_APART = 97
"""Distance between the ports of a job's successive attempts: a port in use ends one attempt, not the job."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def is_rank(variables: Mapping[str, str]) -> bool:
    """Whether `srun` started this process as one of several tasks, with no other launcher in between.

    A batch script has SLURM_PROCID and SLURM_NTASKS too. Only tasks that `srun` starts have SLURM_STEP_NUM_TASKS.

    Raises:
        TopologyError: a variable that must be a number is not one.
    """
    check_numbers(variables)
    return (
        "SLURM_PROCID" in variables
        and int(variables.get("SLURM_STEP_NUM_TASKS", "1")) > 1
        and "WORLD_SIZE" not in variables
    )


def rank_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Translate this task's SLURM variables to torchrun's.

    Raises:
        TopologyError: a SLURM variable is missing or unreadable, or ranks on several nodes would meet at a loopback address.
    """
    try:
        world_size = int(variables["SLURM_STEP_NUM_TASKS"])
        num_nodes = int(variables["SLURM_STEP_NUM_NODES"])
        local_sizes = tasks_per_node(variables["SLURM_STEP_TASKS_PER_NODE"])
        return {
            "RANK": variables["SLURM_PROCID"],
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": variables["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(local_sizes[int(variables["SLURM_NODEID"])]),
            "MASTER_ADDR": _master_address(variables, num_nodes),
            "MASTER_PORT": variables.get("MASTER_PORT") or str(_port(variables)),
        }
    except (KeyError, ValueError, IndexError) as error:
        raise TopologyError(
            f"the variables of this SLURM step are incomplete: {error!r}. A rank that does not know its place cannot join "
            f"a group. Start it as launch/slurm/pretrain_gpt.sbatch does: srun, one task per GPU."
        ) from error


def tasks_per_node(text: str) -> list[int]:
    """Parse SLURM_STEP_TASKS_PER_NODE, such as `"4(x2),3"` into `[4, 4, 3]`.

    Raises:
        ValueError: the text has another form.
    """
    sizes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text!r}")
        sizes += [int(match[1])] * int(match[2] or 1)
    return sizes


def _port(variables: Mapping[str, str]) -> int:
    attempt = int(variables.get("SLURM_RESTART_COUNT") or 0)
    return FIRST_PORT + (int(variables["SLURM_JOB_ID"]) + PORTS_APART * attempt) % NUM_PORTS


def _master_address(variables: Mapping[str, str], num_nodes: int) -> str:
    """Return the address at which all ranks meet.

    It is MASTER_ADDR, or else the step's first host, or the loopback if there is only one node.

    Raises:
        TopologyError: MASTER_ADDR is a loopback address for several nodes, or scontrol does not name the first host.
    """
    given = variables.get("MASTER_ADDR")
    if given and not (num_nodes > 1 and given in LOOPBACK):
        return given
    if given:
        raise TopologyError(
            f"MASTER_ADDR={given} means a different machine on every node: the ranks of {num_nodes} nodes would each "
            "wait alone until the timeout. Unset it, or give a name that all nodes resolve."
        )
    if num_nodes == 1:
        return LOOPBACK[0]
    scontrol = shutil.which("scontrol", path=variables.get("PATH"))
    if scontrol is None:
        raise TopologyError(
            f"scontrol is not on PATH, so the first host of {variables['SLURM_STEP_NODELIST']} is not known and the ranks "
            f"have nowhere to meet. Set MASTER_ADDR to the job's first host, or add scontrol to PATH."
        )
    listed = subprocess.run(
        [scontrol, "show", "hostnames", variables["SLURM_STEP_NODELIST"]], capture_output=True, text=True, check=False
    )
    hosts = listed.stdout.split()
    if listed.returncode or not hosts:
        raise TopologyError(
            f"scontrol could not list the hosts of {variables['SLURM_STEP_NODELIST']} ({listed.stderr.strip()}), so the "
            f"ranks have nowhere to meet. Set MASTER_ADDR to the job's first host."
        )
    return hosts[0]
