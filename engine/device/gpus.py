"""Finds the GPUs that torch can use on this node, and chooses device and backend.

    launcher     decides by find_gpus -> device_type -> backend_of, and hands TRIAXIS_DEVICE and TRIAXIS_BACKEND to its ranks
    a rank       reads these two variables; if they are not set, it decides by the same functions

A GPU that torch cannot use is an error unless the user asked for the CPU. No run falls back to the CPU silently. torch is imported
only if NVIDIA's driver shows a GPU, or if the caller asks for it.
"""

import platform
import shlex
import socket
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from triaxis.engine.config.schema.run import RuntimeConfig
from triaxis.engine.device.nvidia_driver import FIRST_DRIVERS, Driver, is_hidden, read_driver
from triaxis.engine.errors import TopologyError, counted
from triaxis.engine.program import IS_CHECKOUT, ROOT

CPU, CUDA = "cpu", "cuda"
GLOO, NCCL = "gloo", "nccl"

DEVICE_VARIABLE, BACKEND_VARIABLE = "TRIAXIS_DEVICE", "TRIAXIS_BACKEND"


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs on this node.

    Attributes:
        count: number of GPUs that torch can use.
        note: harmless reason why torch uses none of the node's GPUs; else "".
        problem: reason why torch cannot use the node's GPUs, an error unless the user asked for the CPU; else "".
    """

    count: int
    note: str = ""
    problem: str = ""


def find_gpus(variables: Mapping[str, str], *, ask_torch: bool = False) -> Gpus:
    """Count the GPUs that torch can use on this node.

    If the driver shows GPUs and torch uses none, `note` or `problem` says why.

    Args:
        variables: environment; CUDA_VISIBLE_DEVICES is read.
        ask_torch: query torch even if NVIDIA's driver shows no GPU.
    """
    driver = read_driver()
    if not (driver.num_gpus or ask_torch):
        return Gpus(0)
    import torch

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count or not driver.num_gpus:
        return Gpus(count)
    if is_hidden(variables):
        return Gpus(0, note=f"CUDA_VISIBLE_DEVICES={variables['CUDA_VISIBLE_DEVICES']} hides the GPUs")
    reason = str(given[-1].message).splitlines()[0] if given else ""
    return Gpus(0, problem=why_unusable(driver, torch.__version__, torch.version.cuda, reason))


def why_unusable(
    driver: Driver, torch_version: str, cuda: str | None, reason: str = "", machine: str = platform.machine()
) -> str:
    """Explain why torch uses none of this node's GPUs, and what to do.

    Args:
        driver: this node's driver.
        torch_version: version of the running torch.
        cuda: CUDA version of torch's build; None for a CPU build.
        reason: torch's own warning, if any.
        machine: this node's processor, such as "x86_64".
    """
    # Some package indexes have only a CPU build for this processor: the script would install it again.
    is_all = cuda is None and machine != "x86_64"
    if cuda is None:
        others = f", which is all that some package indexes have for {machine}" if is_all else ""
        needs = f"torch {torch_version} is a CPU build{others}"
    else:
        major = int(cuda.partition(".")[0])
        first = FIRST_DRIVERS.get(major)
        branch = f"driver {first} or newer" if first else f"a driver for CUDA {major}"
        needs = f"torch {torch_version} is built for CUDA {cuda}, which needs {branch}"
        if driver.runs(major):
            needs += "; this driver is new enough, so something else is wrong"
    own_words = f" (torch: {reason})" if reason else ""
    gpus = counted(driver.num_gpus, "GPU")
    checkout = shlex.quote(str(ROOT))
    install = (
        f"  python3 -m venv --clear {checkout}/.venv && bash {checkout}/launch/bootstrap.sh\n"
        f"                            installs the versions of launch/constraints.txt, with a torch for this driver\n"
    )
    return (
        f"{socket.gethostname()} has {gpus} with driver {driver.version or 'of unknown version'}, and torch can use none: "
        f"{needs}{own_words}. The run would train on the CPU, many times slower. Choose one of these:\n"
        f"  TRIAXIS_PYTHON=<python>   uses a Python whose torch fits the driver, such as that of a container\n"
        f"{'' if is_all or not IS_CHECKOUT else install}"
        f"  runtime.device=cpu        trains on the CPU"
    )


def device_type(config: RuntimeConfig, gpus: Gpus) -> str:
    """Return `CPU` or `CUDA`; `auto` is CUDA if torch can use a GPU on this node.

    Raises:
        TopologyError: torch cannot use the GPUs, or the user asked for CUDA and there is none.
    """
    if config.device == CPU:
        return CPU
    if gpus.problem:
        raise TopologyError(gpus.problem)
    if gpus.count:
        return CUDA
    if config.device == CUDA:
        raise TopologyError(
            f"runtime.device = cuda: {gpus.note or 'this node shows no GPU'}. Every rank would stop at its first tensor. "
            f"Use runtime.device=auto or cpu to train on the CPU."
        )
    return CPU


def backend_of(config: RuntimeConfig, device: str, note: str = "") -> str:
    """Return `NCCL` on CUDA unless `runtime.collectives` is gloo, and `GLOO` on the CPU.

    Args:
        config: the run's runtime section.
        device: `CPU` or `CUDA`.
        note: reason for using the CPU, for the message.

    Raises:
        TopologyError: the user asked for NCCL on the CPU.
    """
    if device == CUDA:
        return GLOO if config.collectives == GLOO else NCCL
    if config.collectives == NCCL:
        raise TopologyError(
            f"runtime.collectives = nccl: {note or 'this node shows no GPU'}, and NCCL moves tensors of GPUs only. Use "
            f"runtime.collectives=auto to train on the CPU."
        )
    return GLOO
