"""Create this rank's shards of one pipeline stage's parameters."""

from collections.abc import Mapping

import torch

from triaxis.engine.config.quantities.update_settings import is_frozen
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.shard_spec import ExpertPlace, localize
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion
from triaxis.engine.tensor_parallel.parameter import ShardedParameter
from triaxis.models.specs import StageContents, stage_specs


def stage_parameters(
    config: Config,
    region: TensorParallelRegion,
    place: ExpertPlace,
    dtype: torch.dtype,
    stage: StageContents,
    held: dict[str, ShardedParameter],
) -> Mapping[str, ShardedParameter]:
    """Collect the stage's parameters by name, and add the stage's uses to their `num_uses`.

    `held` has the parameters that this rank already created for other stages; new parameters are added to it.
    """
    parameters = {}
    for spec in stage_specs(config.model, stage):
        if spec.name not in held:
            record = localize(
                spec,
                tp=region.axis.size,
                tp_index=region.axis.index,
                sequence_parallel=region.sequence_parallel,
                experts=place,
                is_frozen=is_frozen(spec.name, config.optimizer),
            )
            held[spec.name] = ShardedParameter(record, dtype)
            held[spec.name].num_uses = 0
        held[spec.name].num_uses += _num_uses(config.model, stage, spec.name)
        parameters[spec.name] = held[spec.name]
    return parameters


def _num_uses(model: ModelConfig, stage: StageContents, name: str) -> int:
    """Count the uses of a parameter in the stage. Multi-token prediction layers also use the head and the word embedding."""
    heads = stage.has_head + stage.num_mtp
    if name == "head.weight":
        return heads
    if name == "embedding.word.weight":
        return stage.has_embedding + stage.num_mtp + (heads if model.tie_embeddings else 0)
    return 1
