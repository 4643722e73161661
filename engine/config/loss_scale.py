"""The `precision.loss_scale` section and its rules."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from triaxis.engine.config.counts import Count
from triaxis.engine.config.section import MEANT, OnResume, Problem, Rule, Section, Subject

SMALLEST_SCALE = 2.0**-24
"""Smallest loss scale: the smallest positive fp16 number."""

LARGEST_SCALE = 2.0**64
"""Largest loss scale. From here, some 50 halvings lead down to fp16's range; Megatron-LM starts at 2^32. fp32 cannot hold 2^128."""


Scale = Annotated[float, Field(ge=SMALLEST_SCALE, le=LARGEST_SCALE)]


class LossScaleConfig(Section):
    """The factor on the loss in an fp16 run's backward; dynamic (1710.03740, section 3.2) unless `static` is given."""

    on_resume: ClassVar[OnResume | None] = MEANT

    initial: Scale = Field(65536.0, description="scale of the first step")
    window: Count = Field(1000, gt=0, description="steps without an overflow before it doubles")
    hysteresis: Count = Field(2, gt=0, description="overflows before it halves, counted anew when it has doubled")
    minimum: Scale = Field(1.0, description="smallest scale; an overflow there is a divergence")
    static: Scale | None = Field(None, description="one scale for the whole run; null: dynamic")


def only_fp16_has_a_scale(subject: Subject) -> Iterator[Problem]:
    precision = subject.config.precision
    if precision.loss_scale is not None and precision.dtype != "fp16":
        yield subject.problem(
            "precision.loss_scale",
            f"is for fp16, and precision.dtype = {precision.dtype}, whose gradients fit without one: it would have no effect",
            {"precision.loss_scale": [None], "precision.dtype": ["fp16"]},
        )


def scale_is_one_of_two(subject: Subject) -> Iterator[Problem]:
    """Yield a problem if fields for a dynamic scale are set beside `static`, or if a dynamic scale starts below its minimum."""
    scale = subject.config.precision.loss_scale
    if scale is None:
        return
    if scale.static is not None:
        for key, value in scale:
            default = LossScaleConfig.model_fields[key].default
            if key != "static" and value != default:
                yield subject.problem(
                    f"precision.loss_scale.{key}",
                    f"is of a scale that changes, and precision.loss_scale.static = {scale.static:g}: it would have no effect",
                    {f"precision.loss_scale.{key}": [default], "precision.loss_scale.static": [None]},
                )
    elif scale.initial < scale.minimum:
        yield subject.problem(
            "precision.loss_scale.initial",
            f"must be at least precision.loss_scale.minimum = {scale.minimum:g}: the first overflow would raise it",
            {"precision.loss_scale.initial": [scale.minimum], "precision.loss_scale.minimum": [scale.initial]},
        )


LOSS_SCALE_RULES: tuple[Rule, ...] = (only_fp16_has_a_scale, scale_is_one_of_two)
