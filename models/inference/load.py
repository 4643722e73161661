"""Load a GPT for inference, with only the weights for this rank's layout.

    checkpoint of any layout  --pieces that meet this rank's boxes-->  one flat tensor of weights  ->  chunks

A parameter takes 2 bytes in bf16, instead of 18 in training with main grads, masters and moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triaxis.engine.checkpoint.directory import Candidate
from triaxis.engine.checkpoint.format.manifest import Manifest
from triaxis.engine.checkpoint.format.store import Shard, load
from triaxis.engine.checkpoint.inspect.weights import WhichWeights, check_weights, kind_to_read
from triaxis.engine.comm.texts import gather_text
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.head_pieces import head_tokens
from triaxis.engine.config.quantities.plan import stages_of
from triaxis.engine.config.schema.recompute import OffloadConfig, RecomputeConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import CheckpointError
from triaxis.engine.kernels.registry import open_kernels
from triaxis.engine.numerics.precision import DTYPES, accumulation_dtype
from triaxis.engine.pipeline.forwards import of_forward
from triaxis.engine.tensor_parallel.parameter import ShardedParameter
from triaxis.models.gpt.chunk import GPTChunk, build_chunks
from triaxis.models.gpt.losses import TokenLosses
from triaxis.models.specs import model_specs


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One rank's part of a model, without gradients or optimizer."""

    config: Config
    topology: Topology
    chunks: Sequence[GPTChunk]


def load_model(
    candidate: Candidate, config: Config, topology: Topology, which: WhichWeights = "trained"
) -> LoadedModel:
    """Build this rank's chunks in evaluation mode with weights from the checkpoint.

    Every rank calls it. Chunks compute the cross-entropy, whatever the training loss was.

    Raises:
        CheckpointError: the checkpoint is damaged, belongs to another model or lacks the weights `which`. Raised on every rank.
    """
    sizes, stages = topology.sizes, stages_of(config)
    mine = [stages[stage] for stage in of_forward(sizes, 1).placement.stages_on(topology.coordinates.pp)]
    forward_only = for_reading(config)
    chunks, parameters = build_chunks(forward_only, topology, open_kernels(forward_only, topology), mine)
    for chunk in chunks:
        if chunk.losses is not None:
            # Evaluate with cross-entropy, whatever the training loss was.
            chunk.losses = TokenLosses(chunk.context)
    refused = ""
    try:
        _refuse_other_tensors(candidate, config)
        check_weights(candidate, which)
        dtype = DTYPES[config.precision.dtype]
        flat = _allocate(list(parameters.values()), dtype, topology.device, candidate.manifest, which)
        load(candidate.folder, candidate.manifest, flat)
    except CheckpointError as error:
        refused = str(error)
    # Share failures: a rank that cannot load must not leave the others waiting in a collective.
    reasons = [reason for reason in gather_text(topology.axis("world"), refused, topology.device, "loading") if reason]
    if reasons:
        raise CheckpointError(reasons[0])
    return LoadedModel(config, topology, [chunk.train(False) for chunk in chunks])


def for_reading(config: Config) -> Config:
    """Adapt a config to forward-only use.

    Nothing is recomputed or offloaded, and no gradient is computed. Kernels that compute or use gradients are replaced by plain
    ones, so the configured ones need not run on this device. No operand is in FP8, where a token's scale would depend on the
    other tokens in its batch.
    """
    without_gradients = {"weight_grad": "separate", "optimizer": "torch", "graphs": "off"}
    return config.model_copy(
        update={
            "recompute": RecomputeConfig(
                head_tokens=head_tokens(config), gathered_inputs="regather", gathered_kv="regather"
            ),
            "offload": OffloadConfig(),
            "precision": config.precision.model_copy(update={"fp8": None}),
            "kernels": config.kernels.model_copy(update=without_gradients),
        }
    )


def _refuse_other_tensors(candidate: Candidate, config: Config) -> None:
    """Refuse a checkpoint with tensors that this model lacks."""
    strangers = sorted(candidate.manifest.tensors.keys() - {spec.name for spec in model_specs(config.model)})
    if strangers:
        raise CheckpointError(
            f"{candidate.folder} holds tensors that this model has no place for: {', '.join(strangers[:5])}"
            f"{', ...' if len(strangers) > 5 else ''}. The checkpoint is of another model, and without them its outputs would be "
            "another model's. Leave out overrides of model.*, or give the config that it was trained with."
        )


def _allocate(
    parameters: Sequence[ShardedParameter],
    dtype: torch.dtype,
    device: torch.device,
    manifest: Manifest,
    which: WhichWeights,
) -> list[Shard]:
    """Bind the parameters to newly allocated tensors, one flat tensor for the trained ones.

    Returns views to fill: this rank's part of each parameter, without padding.

    Padding stays zero. Parameters are in forward order, so weights that share a GEMM stay one matrix. Untrained parameters use the
    accumulation dtype. With a rounded bias, a router would choose other experts.
    """
    trained = [parameter.record.numel for parameter in parameters if parameter.record.spec.is_trained]
    flat = torch.zeros(sum(trained), dtype=dtype, device=device)
    targets = []
    at = 0
    for parameter in parameters:
        record = parameter.record
        if record.spec.is_trained:
            part = flat[at : at + record.numel]
            at += record.numel
        else:
            part = torch.zeros(record.numel, dtype=accumulation_dtype(dtype), device=device)
        parameter.bind(part.view(record.local_shape))
        kind = kind_to_read(manifest, record.name, which)
        targets.append(Shard(record.name, kind, record.spec.shape, record.box, 0, part[: record.box_numel]))
    return targets
