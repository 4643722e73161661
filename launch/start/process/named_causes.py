"""Recognise known causes of a failure in the libraries' own error texts, and name the remedies."""

import re
import signal
from dataclasses import dataclass

SHARED_MEMORY_ADVICE = (
    "See df -h /dev/shm on that node. Start a container with --shm-size=16g or --ipc=host (Kubernetes: mount an emptyDir of medium "
    "Memory there). Remove what dead jobs have left."
)
LOCKED_MEMORY_ADVICE = (
    "Set it to unlimited where the job is started, which `ulimit -l` in a login shell does not show: --ulimit memlock=-1 for a "
    "container, LimitMEMLOCK=infinity in the unit of slurmd or containerd, memlock in /etc/security/limits.conf for ssh."
)


@dataclass(frozen=True, slots=True)
class NamedCause:
    """A cause, its pattern in the end of a rank's log, and the advice."""

    pattern: re.Pattern[str]
    cause: str
    advice: str


CAUSES = (
    NamedCause(
        re.compile(
            r"error while creating shared memory segment"
            r"|failed to extend /dev/shm/"
            r"|posix_fallocate failed *: *no space left"
            r"|unable to allocate shared memory ?\(shm\)"
            r"|no space left on device[^\n]*/dev/shm/",
            re.IGNORECASE,
        ),
        "shared memory of the node (/dev/shm) is full or too small.",
        SHARED_MEMORY_ADVICE,
    ),
    NamedCause(
        re.compile(
            r"\bibv_(?:reg_\w+|create_cq|create_qp)\b[^\n]*(?:cannot allocate memory|errno 12\b|error -12\b)",
            re.IGNORECASE,
        ),
        "InfiniBand could not lock memory: RLIMIT_MEMLOCK of the rank is too small.",
        LOCKED_MEMORY_ADVICE,
    ),
)
"""Patterns: NCCL's words in misc/shmutils.cc (older versions: include/shm.h) and misc/ibvwrap.cc, torch's for its shared files."""

BUS_ERROR = (
    "a page of a mapped file could not be had: /dev/shm is full, or a corpus was cut short while it was read. "
    f"{SHARED_MEMORY_ADVICE}"
)


OUT_OF_HOST_MEMORY = (
    "the kernel ended a process of this node, because host memory ran out. Give the job more (SLURM: --mem=0; a container: a "
    "higher memory limit), or hold less there: optimizer.offload=none, a lower offload.num_layers, checkpoint.async=false, fewer "
    "ranks on a node."
)


def named_causes(log: str, exit_code: int, *, kernel_killed: bool = False) -> list[str]:
    """List the causes that the end of a rank's log or its last signal indicates, each with advice.

    Args:
        log: text at the end of the log.
        exit_code: the rank's exit code, negative for a signal.
        kernel_killed: whether the kernel has ended a process during the run, because memory ran out.
    """
    found = [f"{known.cause} {known.advice}" for known in CAUSES if known.pattern.search(log)]
    if exit_code == -signal.SIGKILL and kernel_killed:
        found.append(OUT_OF_HOST_MEMORY)
    return [BUS_ERROR] if not found and exit_code == -signal.SIGBUS else found
