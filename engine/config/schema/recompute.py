"""The `recompute` and `offload` sections: what is kept for the backward, and where."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from triaxis.engine.config.schema.model import MOST_LAYERS
from triaxis.engine.config.schema.section import LAYOUT, OnResume, Section
from triaxis.engine.config.values.counts import Count


class RecomputeConfig(Section):
    """Activation recomputation in the backward, which saves memory."""

    on_resume: ClassVar[OnResume | None] = LAYOUT

    granularity: Literal["none", "selective", "full", "auto"] = Field(
        "none", description="selective: only `modules`; full: whole layers; auto: the cheapest that fits `memory_gb`"
    )
    modules: list[Literal["attention", "norm", "activation", "rope", "mlp"]] | None = Field(
        None, description="selective: parts to recompute (null: attention); full with block: parts of the other layers"
    )
    method: Literal["uniform", "block"] = Field(
        "uniform", description="full: recompute all layers, or (block) the first num_layers of each model chunk"
    )
    num_layers: int = Field(
        1, gt=0, le=MOST_LAYERS, description="uniform: layers per recomputed group; block: layers to recompute"
    )
    gathered_inputs: Literal["auto", "keep", "regather"] = Field(
        "auto", description="sequence parallelism: keep gathered inputs or regather; auto: keep if they fit `memory_gb`"
    )
    gathered_kv: Literal["auto", "keep", "regather"] = Field(
        "auto",
        description="cp by all_gather: keep gathered keys and values or regather; auto: keep if they fit",
    )
    memory_gb: float | None = Field(
        None, gt=0, description="auto: predicted memory that a rank may use, without communicators, in 10^9 bytes"
    )
    head_tokens: Annotated[Count, Field(gt=0)] | Literal["auto"] | None = Field(
        "auto",
        description="tokens of the head at a time, with gradients; null: all; auto: a quarter, from 2048",
    )

    @property
    def is_resolved(self) -> bool:
        """Whether every `auto` has been resolved (`triaxis.models.predict.rank_memory.resolve_recompute`)."""
        return "auto" not in (self.granularity, self.gathered_inputs, self.gathered_kv, self.head_tokens)

    @property
    def is_any(self) -> bool:
        """Whether anything is recomputed."""
        return self.granularity != "none"

    @property
    def takes_modules(self) -> bool:
        """Whether `modules` has an effect."""
        return self.granularity == "selective" or (self.granularity == "full" and self.method == "block")

    @property
    def parts(self) -> frozenset[str]:
        """Names of the parts that are recomputed in each layer that is not recomputed as a whole."""
        default = ["attention"] if self.granularity == "selective" else []
        return frozenset(default if self.modules is None else self.modules)

    @property
    def parts_made_again(self) -> frozenset[str]:
        """`parts`, plus `activation` if `mlp` is among them.

        Recomputing `mlp` provides the activation's input in the backward, so the activation's output need not be kept either.
        """
        return self.parts | ({"activation"} if "mlp" in self.parts else set())

    def __str__(self) -> str:
        """Format the choice as the configuration spells it; "none" if nothing is recomputed."""
        words: list[str] = []
        if self.granularity != "none":
            words.append(self.granularity)
        if self.granularity == "full":
            words.append(f"{self.method} num_layers={self.num_layers}")
        if self.parts:
            words.append(f"modules=[{', '.join(sorted(self.parts))}]")
        return " ".join(words) or "none"


class OffloadConfig(Section):
    """Activations moved to host memory between forward and backward, while other layers are computed."""

    on_resume: ClassVar[OnResume | None] = LAYOUT

    num_layers: int = Field(
        0, ge=0, le=MOST_LAYERS, description="offload the first N layers of each model chunk; 0: none"
    )
    min_bytes: int = Field(2**20, gt=0, description="keep smaller tensors on the device: a copy has a fixed cost")
