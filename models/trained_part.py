"""The part of a model through which gradients flow, where `optimizer.groups` freezes parameters (no torch here).

    embedding   layers 0 1 2 3   head        frozen: embedding, layers 0 1      the part: layers 2 3, head
                                             frozen: layers 2 3                 the part: all of it

The backward goes from the head down to the first layer with a trained parameter and ends there. What is before that layer runs
forward only and keeps nothing. Pipeline stages of nothing else have no backward, and no gradient is sent to them. A parameter
frozen within the part has no gradient, and those of other parameters pass by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from triaxis.engine.config.groups import is_frozen
from triaxis.engine.config.model import ModelConfig
from triaxis.engine.config.plan import batch_plan, stages_of
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.partition import StageLayers
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Schedule
from triaxis.models.specs import StageContents, embedding_specs, layer_specs, up_name


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """The part of a model that has a backward.

    Attributes:
        has_embedding: the embedding, and so everything.
        first_layer: of its layers; the model's number of layers (those of tokens ahead aside) where it is the head alone.
    """

    has_embedding: bool
    first_layer: int

    @classmethod
    def of(cls, config: Config) -> "TrainedPart":
        """Return the part of a run that trains something."""
        model, optimizer = config.model, config.optimizer
        if not any(group.get("freeze") for group in optimizer.groups):
            return cls(True, 0)
        if any(not is_frozen(spec.name, optimizer) for spec in embedding_specs(model)):
            return cls(True, 0)
        for layer in range(model.num_layers):
            if any(spec.is_trained and not is_frozen(spec.name, optimizer) for spec in layer_specs(model, layer)):
                return cls(False, layer)
        return cls(False, model.num_layers)

    def first_stage(self, stages: Sequence[StageContents]) -> int:
        """Return the number of the first stage with a backward."""
        return next(number for number, stage in enumerate(stages) if self.holds(stage))

    def holds(self, stage: StageContents) -> bool:
        """Return whether something of the part is on a stage."""
        return (
            (self.has_embedding and stage.has_embedding) or stage.has_head or self.layers_before(stage) < stage.num_own
        )

    def layers_before(self, stage: StageContents) -> int:
        """Return how many of a stage's own layers come before the part: they run forward only."""
        return min(max(self.first_layer - stage.layers.start, 0), stage.num_own)

    def begins_on(self, stage: StageContents) -> bool:
        """Return whether the part begins on a stage, behind something else: no gradient leaves the stage."""
        return not self.has_embedding and self.holds(stage) and stage.layers.start <= self.first_layer

    def on(self, stage: StageContents) -> StageLayers:
        """Return the contents of a stage that have a backward; nothing, where it has none."""
        layers = stage.layers[self.layers_before(stage) :]
        return StageLayers(layers, stage.has_embedding and self.has_embedding, stage.has_head, stage.num_mtp)


def frozen_products(config: Config, layer: int) -> frozenset[str]:
    """Return the products of a layer whose weights are all frozen, by their modules in `triaxis.models.predict`.

    They have no weight gradient, so their inputs are not kept for one.
    """
    model, optimizer = config.model, config.optimizer
    if not any(group.get("freeze") for group in optimizer.groups):
        return frozenset()
    frozen = [spec.name for spec in layer_specs(model, layer) if is_frozen(spec.name, optimizer)]
    held = {name.removeprefix(f"layers.{layer}.").removesuffix(".weight") for name in frozen}
    return frozenset(
        product for product, weights in weights_of_products(model, layer).items() if held.issuperset(weights)
    )


def weights_of_products(model: ModelConfig, layer: int) -> dict[str, tuple[str, ...]]:
    """List the products of a layer with the names of their weights, without the layer's and `.weight`."""
    kind, mla, up = model.layer_kind(layer), model.mla, up_name(model)
    products: dict[str, tuple[str, ...]] = {"attention.proj": ("attention.proj",)}
    if mla is None:
        products["attention.qkv"] = ("attention.q", "attention.kv")
    else:
        latents = ("attention.kv_a",) if mla.q_lora_rank is None else ("attention.q_a", "attention.kv_a")
        products["attention.down"] = latents
        products["attention.q_up"] = ("attention.q" if mla.q_lora_rank is None else "attention.q_b",)
        products["attention.kv_up"] = ("attention.kv_b",)
    groups = [("mlp", True)]
    if model.moe is not None and kind.has_experts:
        groups = [("mlp.experts", True), ("mlp.shared", model.moe.shared_size > 0)]
    for name, is_there in groups:
        if is_there:
            products |= {f"{name}.up": (f"{name}.{up}",), f"{name}.down": (f"{name}.down",)}
    if kind.is_mtp:
        products["mtp.projection"] = ("mtp.projection",)
    return products


def head_is_frozen(config: Config) -> bool:
    """Return whether the weight of the output's head keeps its value."""
    name = "embedding.word.weight" if config.model.tie_embeddings else "head.weight"
    return is_frozen(name, config.optimizer)


def trained_from(config: Config) -> int:
    """Return the number of the first pipeline stage with a backward."""
    return TrainedPart.of(config).first_stage(stages_of(config))


def schedule_of_step(config: Config, sizes: ParallelSizes) -> Schedule:
    """Build the schedule of a training step, as `triaxis.engine.pipeline.schedules.of_step` does."""
    return schedule_of(config, sizes, batch_plan(config, sizes.dp).num_microbatches)


def schedule_of(config: Config, sizes: ParallelSizes, num_microbatches: int) -> Schedule:
    """Build the training schedule of a configuration for so many microbatches."""
    return schedules.of_config(config, sizes.pp, sizes.vpp, num_microbatches, trained_from(config))
