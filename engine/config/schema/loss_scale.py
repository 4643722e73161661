"""The `precision.loss_scale` section."""

from typing import Annotated, ClassVar

from pydantic import Field

from triaxis.engine.config.schema.section import MEANT, OnResume, Section
from triaxis.engine.config.values.counts import Count

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
