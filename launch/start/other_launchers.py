"""Adopt, refuse or clear the variables that another launcher has set.

Each row has examples of such variables, where they come from, and what happens to them:

    PET_NNODES=2 PET_NODE_RANK=1 ..      torchrun's own, set by a Kubernetes operator   taken as NNODES, NODE_RANK, ..
    PET_TEE=3, PET_RDZV_BACKEND=c10d     settings that our launcher decides             cleared
    WORLD_SIZE=8 RANK=3, OMPI_COMM_..    another launcher has started 8 copies of us    refused, unless NNODES is set
    WORLD_SIZE=1 RANK=0                  another launcher has started one copy          cleared

With NNODES, each copy is one node's launcher. torchrun reads PET_* as defaults for its options.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from triaxis.engine.errors import TopologyError

PREFIX = "PET_"

TAKEN = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")
"""Our launcher's variables that torchrun reads under `PREFIX`."""

_OPEN = ("auto", "gpu", "cpu", "xpu")
"""Values of PET_NPROC_PER_NODE that leave the number of ranks open."""

PROCESSES = (
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)
"""Process count and process number, as torchrun, Open MPI, MVAPICH and other MPIs set them."""

OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@dataclass(frozen=True, slots=True)
class Environment:
    """A launcher's environment, cleared of other launchers' variables.

    Attributes:
        variables: remaining variables. Adopted ones, such as PET_NNODES, have lost their `PREFIX`.
        removed: names that must not reach torchrun or the ranks.
        notes: phrases about adopted and cleared variables.
    """

    variables: dict[str, str]
    removed: tuple[str, ...]
    notes: tuple[str, ...]


def without_other_launchers(variables: Mapping[str, str]) -> Environment:
    """Adopt, refuse or clear the variables that other launchers have set.

    Raises:
        TopologyError: variables contradict each other, or do not fix the number of nodes.
        TopologyError: another launcher has started several copies of this command.
    """
    ours = dict(variables)
    given = {name: value for name, value in variables.items() if name.startswith(PREFIX)}
    taken, problems = {}, []
    for name in TAKEN:
        value = given.get(PREFIX + name, "")
        if not value or (name == "NPROC_PER_NODE" and value in _OPEN):
            continue
        if name == "NNODES" and ":" in value:
            least, _, most = value.partition(":")
            if least != most:
                problems.append(
                    f"{PREFIX}NNODES={value}: a run here has a fixed number of nodes. Give the operator one number."
                )
                continue
            value = most
        if variables.get(name) and variables[name] != value:
            problems.append(
                f"{name}={variables[name]} and {PREFIX}{name}={value} contradict each other. Unset one of them."
            )
        taken[name] = value
    ours |= taken
    for size, rank in PROCESSES:
        count, number = variables.get(size) or "1", variables.get(rank) or "0"
        if (count, number) != ("1", "0") and not ours.get("NNODES"):
            problems.append(
                f"{size}={variables.get(size, 'unset')} and {rank}={variables.get(rank, 'unset')}: another launcher has started "
                "this command several times, and each would train by itself. Start it once per node, with NNODES, NODE_RANK and "
                "MASTER_ADDR (our launcher starts the ranks); or unset both."
            )
            break
    if ours.get("NODE_RANK") not in (None, "", "0") and not ours.get("NNODES"):
        problems.append(
            f"NODE_RANK={ours['NODE_RANK']} without NNODES: this node would train by itself. Give NNODES=<number of nodes> too."
        )
    if problems:
        raise TopologyError("\n".join(problems))
    removed = [*given, *(name for name in OF_A_RANK if name in variables)]
    for name in removed:
        ours.pop(name)
    cleared = [name for name in removed if name.removeprefix(PREFIX) not in taken]
    notes = []
    if taken:
        notes.append(f"taken from {PREFIX}*: " + " ".join(f"{name}={value}" for name, value in taken.items()))
    if cleared:
        notes.append(f"cleared: {', '.join(sorted(cleared))}")
    return Environment(ours, tuple(removed), tuple(notes))
