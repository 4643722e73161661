"""A check that weights from other programs are finite."""

import torch

from triaxis.engine.errors import CheckpointError

_ELEMENTS = 2**24
"""Elements that are checked together: the mask of a larger tensor would take half of its memory once more."""


def check_finite(values: torch.Tensor, name: str, source: object) -> None:
    """Refuse a tensor with NaN or infinite elements.

    Args:
        values: a floating-point tensor of any shape.
        name: what the source calls the tensor.
        source: the folder that it is from, for the message.

    Raises:
        CheckpointError: naming the tensor and how many of its elements are not finite.
    """
    parts = values.reshape(-1).split(_ELEMENTS)
    wrong = sum(part.numel() - int(part.isfinite().sum()) for part in parts)
    if wrong:
        raise CheckpointError(
            f"{source}: {name} has {wrong:,} of {values.numel():,} elements that are NaN or infinite: the first loss would be NaN, "
            "and no training mends it. The run that wrote it had diverged, or the file was damaged. Take another checkpoint of the "
            "model."
        )
