"""The kernel of apex's FusedAdam: AdamW of many tensors in one launch.

    g <- g inv_scale,  m <- beta1 m + (1 - beta1) g,  v <- beta2 v + (1 - beta2) g^2
    w <- w - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay w)             (1711.05101, algorithm 2)

In fp32, in which bias corrections too are computed: 1 - 0.999 is 5e-5 of itself off, so first updates differ from torch's by up to
that. Learning rate, step, scale and the skip are read on the device. apex's optimizer class is not used: it owns whole parameters
and makes masters and moments of its own, where here they are parts of flat buffers, saved and resharded by the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

ADAMW_MODE = 1
"""apex's number of decoupled weight decay; 0 is L2."""
CHUNK = 2048 * 32
"""Elements of a tensor that one block of threads updates, as apex's applier has it."""
MOST = 2**30
"""Elements of one tensor of a call: apex counts them in 32 bits."""

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Apex:
    """The update of an installed apex.

    Attributes:
        adam: `amp_C.multi_tensor_adam_capturable` of lists [g, w, m, v].
        adam_with_masters: `amp_C.multi_tensor_adam_capturable_master` of lists [g, parameters, m, v, w]: w is fp32, and the
            parameters are written with it, in the dtype of the gradients.
    """

    adam: Callable[..., None]
    adam_with_masters: Callable[..., None]

    def update(
        self,
        lists: Sequence[Tensors],
        *,
        lr: torch.Tensor,
        betas: tuple[float, float],
        eps: float,
        decay: float,
        step: torch.Tensor,
        scale: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        """Update flat tensors [n] in place, and scale the gradients; where `skip`, nothing changes.

        Args:
            lists: of each run of elements its gradients, weights, and fp32 moments, as in `adam`; or with masters.
            lr, scale: fp32 [1].
            step: int32 [1], number of the update, from 1.
            skip: int32 [1], 1 or 0.
        """
        kernel = self.adam_with_masters if len(lists) == 5 else self.adam
        pieces = [[piece for tensor in tensors for piece in tensor.split(MOST)] for tensors in lists]
        corrects_bias = 1
        kernel(CHUNK, skip, pieces, lr, *betas, eps, step, ADAMW_MODE, corrects_bias, decay, scale)


def open_apex() -> Apex:
    """Import apex's kernels.

    Raises:
        ImportError: they are not installed; the message says what is, if another package of the same name is.
    """
    try:
        kernels = import_module("amp_C")
        return Apex(kernels.multi_tensor_adam_capturable, kernels.multi_tensor_adam_capturable_master)
    except (ImportError, AttributeError) as error:
        raise ImportError(_reason(error)) from error


def apex_failure(device: torch.device) -> str:
    """Update a few numbers with apex and with torch; return the reason if that fails or they differ, else ""."""
    generator = torch.Generator().manual_seed(1)
    g, w, m = (torch.randn(64, generator=generator).to(device) for _ in range(3))
    v = m.square()
    scale, lr, decay, (beta1, beta2) = 0.5, 1e-2, 0.1, (0.9, 0.95)
    mean, square = beta1 * m + (1 - beta1) * scale * g, beta2 * v + (1 - beta2) * (scale * g).square()
    direction = mean / (1 - beta1**2) / ((square / (1 - beta2**2)).sqrt() + 1e-8)
    wanted = w - lr * (direction + decay * w)
    numbers = {"lr": lr, "scale": scale}
    try:
        open_apex().update(
            [[g], [w], [m], [v]],
            **{name: torch.full((1,), value, device=device) for name, value in numbers.items()},
            betas=(beta1, beta2),
            eps=1e-8,
            decay=decay,
            step=torch.full((1,), 2, dtype=torch.int32, device=device),
            skip=torch.zeros(1, dtype=torch.int32, device=device),
        )
        if not (w - wanted).norm() < 1e-4 * lr * wanted.norm():
            return "its update is not that of AdamW"
    except Exception as error:  # a foreign library's, about devices or its own build
        return (str(error).splitlines() or [type(error).__name__])[0].strip().rstrip(".")[:240]
    return ""


def apex_refusal(device: torch.device, reason: str) -> str:
    """Return the problem of `kernels.optimizer = apex` where it does not run."""
    return (
        f"kernels.optimizer = apex does not run here, on {device.type} ({reason}). Another kernel would have other bits than what "
        "was asked for. NVIDIA's apex is built from its sources (github.com/NVIDIA/apex, with its C++ and CUDA extensions). "
        "kernels.optimizer=compiled updates in one pass too, and kernels.optimizer=torch runs anywhere."
    )


def _reason(error: Exception) -> str:
    found = find_spec("apex")
    if found is None:
        return "apex is not installed"
    folders = [Path(each) for each in found.submodule_search_locations or []]
    if not any((folder / "optimizers" / "fused_adam.py").exists() for folder in folders):
        return "the apex that is installed is the package index's, another project of that name, and not NVIDIA's"
    return f"apex is installed without its CUDA kernels: {error}"
