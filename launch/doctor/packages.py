"""Look for the packages that a run may use on this node, and try some.

    torch, megatron-core, wandb    found by their metadata
    transformer-engine, apex       loaded as in a run; a small computation in each is compared with torch's

Packages lead to no finding, because a run that names an unusable one is refused anyway.
"""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from triaxis.engine.kernels.apex import apex_failure
from triaxis.engine.kernels.te import gemm_failure
from triaxis.engine.numerics.precision import main_grad_dtype
from triaxis.launch.doctor.records import PackageFacts

USES = {
    "torch": "the engine: tensors, autograd, process groups",
    "megatron-core": "Megatron checkpoints in and out, verify --oracle megatron-core; never in training",
    "transformer-engine": "kernels.linear=te, kernels.attention=te, precision.fp8.backend=te; auto takes none",
    "apex": "kernels.optimizer=apex, NVIDIA's; auto does not take it",
    "wandb": "metrics, where telemetry.wandb is set",
}


def read_packages(device: torch.device, dtype: torch.dtype) -> tuple[PackageFacts, ...]:
    """Read the versions of the packages in `USES`, and try Transformer Engine and apex if they are installed.

    Args:
        device, dtype: the run's device and dtype, with which Transformer Engine and apex are tried.
    """
    trials = {
        "transformer-engine": lambda: gemm_failure(dtype, main_grad_dtype(dtype, "full"), device),
        "apex": lambda: apex_failure(device),
    }
    found = []
    for name, use in USES.items():
        number = _version(name)
        found.append(PackageFacts(name, number, use, trials[name]() if number and name in trials else ""))
    return tuple(found)


def _version(name: str) -> str:
    """Version of an installed package, "of unknown version" if it has no metadata; "" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version" if find_spec(name.replace("-", "_")) else ""
