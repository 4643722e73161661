"""Loss scales, sections of FP8 and kernels of other packages that must be refused, in the form of `bad_configs.BAD`."""

from collections.abc import Sequence

from tests.engine.config.bad_fp8 import BAD_FP8
from tests.engine.config.bad_packages import BAD_PACKAGES

BAD_SCALES: dict[str, tuple[Sequence[str], dict[str, int], Sequence[str]]] = {
    "a loss scale of bf16": (
        ["precision.loss_scale.window=500"],
        {},
        ["precision.loss_scale", "is for fp16, and precision.dtype = bf16", "no effect", "precision.dtype = fp16"],
    ),
    "a static scale that grows": (
        ["precision={dtype: fp16, loss_scale: {static: 128, window: 500}}"],
        {},
        ["loss_scale.window = 500", "static = 128", "no effect", "window = 1000", "static = null"],
    ),
    "a first scale below the smallest": (
        ["precision={dtype: fp16, loss_scale: {initial: 2, minimum: 8}}"],
        {},
        ["loss_scale.initial = 2", "at least precision.loss_scale.minimum = 8", "initial = 8", "minimum = 2"],
    ),
    "narrow state of fp16": (
        ["precision={dtype: fp16, masters: split}"],
        {},
        ["precision.masters = split", "for weights in bf16", "precision.masters = full"],
    ),
    **BAD_FP8,
    **BAD_PACKAGES,
}
