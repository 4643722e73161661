"""Kernels of other packages that must be refused before a device is looked at, in the form of `bad_configs.BAD`."""

from collections.abc import Sequence

BAD_PACKAGES: dict[str, tuple[Sequence[str], dict[str, int], Sequence[str]]] = {
    "apex for SGD": (
        ["kernels.optimizer=apex", "optimizer.name=sgd"],
        {},
        ["optimizer.name = sgd", "FusedAdam is AdamW", "kernels.optimizer = auto"],
    ),
    "apex in float64": (
        ["kernels.optimizer=apex", "precision.dtype=float64"],
        {},
        ["precision.dtype = float64", "computes in fp32", "exact", "kernels.optimizer = auto"],
    ),
    "apex with split masters": (
        ["kernels.optimizer=apex", "precision={dtype: bf16, masters: split}"],
        {},
        ["precision.masters = split", "in fp32", "precision.masters = full", "kernels.optimizer = auto"],
    ),
    "apex with narrow moments": (
        ["kernels.optimizer=apex", "precision={dtype: bf16, moments: bf16}"],
        {},
        ["precision.moments = bf16", "in fp32", "precision.moments = full", "kernels.optimizer = auto"],
    ),
    "documents by Transformer Engine's attention": (
        ["kernels.attention=te", "data.attention=within"],
        {},
        ["kernels.attention = te", "has no documents", "kernels.attention = auto", "varlen"],
    ),
    "FP8 of float64 by Transformer Engine": (
        ["precision={dtype: float64, fp8: {backend: te}}"],
        {},
        ["precision.fp8.backend = te", "sums in fp32", "exact", "backend = emulated"],
    ),
}
