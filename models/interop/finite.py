"""Check that weights written by other programs are finite."""

import torch

from triaxis.engine.errors import CheckpointError

_ELEMENTS = 2**24
"""Elements checked at once. The mask for a larger tensor would take half the tensor's memory again."""


def check_finite(values: torch.Tensor, name: str, source: object) -> None:
    """Refuse a tensor with NaN or infinite elements.

    Args:
        values: floating-point tensor, any shape.
        name: tensor's name in the source.
        source: folder the tensor was read from, for the message.

    Raises:
        CheckpointError: some elements are not finite. The error has the tensor's name and the number of such elements.
    """
    parts = values.reshape(-1).split(_ELEMENTS)
    wrong = sum(part.numel() - int(part.isfinite().sum()) for part in parts)
    if wrong:
        raise CheckpointError(
            f"{source}: {name} has {wrong:,} of {values.numel():,} elements that are NaN or infinite: the first loss would be NaN, "
            "and training cannot recover. The run that wrote it had diverged, or the file was damaged. Take another checkpoint "
            "of the model."
        )
