"""Chooses between a checkpoint's trained weights and their moving average."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from triaxis.engine.checkpoint.directory import Candidate
from triaxis.engine.checkpoint.format.manifest import Kind, Manifest
from triaxis.engine.config.values.optimizer_kinds import EMA, MASTER
from triaxis.engine.errors import CheckpointError

WhichWeights = Literal["trained", "ema"]

KINDS: Mapping[WhichWeights, Kind] = MappingProxyType({"trained": MASTER, "ema": EMA})
"""Saved state kind for each choice of weights."""


def check_weights(candidate: Candidate, which: WhichWeights) -> None:
    """Refuse a checkpoint that lacks the chosen weights.

    Raises:
        CheckpointError: the checkpoint has no moving average.
    """
    if KINDS[which] in candidate.manifest.kinds:
        return
    raise CheckpointError(
        f"{candidate.folder} holds no moving average of the weights: its run had no optimizer.ema, or an import has the weights "
        "alone. The trained weights would be another model. Leave --weights out to read those; to have an average, train with "
        "optimizer.ema.decay=0.999."
    )


def kind_to_read(manifest: Manifest, name: str, which: WhichWeights) -> Kind:
    """Return the state kind to read for a parameter. An untrained parameter has no average, so its weight is read."""
    kind, tensor = KINDS[which], manifest.tensors.get(name)
    return kind if tensor is not None and kind in manifest.kinds_of(tensor) else MASTER
