"""The `optimizer.ema` section."""

from typing import ClassVar

from pydantic import Field

from triaxis.engine.config.schema.section import MEANT, OnResume, Section


class EmaConfig(Section):
    """An exponential moving average e of the exact weights w: e <- e + (1 - decay) (w - e) after each update (1703.01780).

    The average starts as the weights at the run's first step and has no bias correction.
    """

    on_resume: ClassVar[OnResume | None] = MEANT

    decay: float = Field(0.999, gt=0, lt=1, description="share of the average that an update keeps")
