"""A GPT as a list of parameter specs: names, shapes, cuts, initial values (no torch here).

Modules, the parameter count, initialisation, predictions and checkpoints are built from this list, so a parameter has
one name and one shape everywhere. h hidden size, d head size, f MLP width, V vocabulary, S sequence length:

    embedding.word.weight                [V, h]              rows cut (padded to vocab_multiple); tied: also the head
    embedding.position.weight            [S, h]              learned positions only
    layers.N.attention.norm.{weight,bias}     [h]            bias with LayerNorm only
    layers.N.attention.post_norm.{weight,bias} [h]           norm_placement after or both; the others before or both
    layers.N.attention.q.weight          [heads, d, h]       heads cut; shares a GEMM with kv
    layers.N.attention.kv.weight         [2, kv_heads, d, h] heads cut, replicated when kv_heads < tp
    layers.N.attention.{q,kv}.bias       [heads, d], [2, kv_heads, d]
    layers.N.attention.sinks             [heads]             heads cut; kinds with sinks only
    layers.N.attention.{q,k}_norm.weight [d]                 QK-norm; over all heads [heads, d], [kv_heads, d], cut
    layers.N.attention.proj.weight       [h, heads, d]       input heads cut (row parallel)
    layers.N.attention.proj.bias         [h]
    layers.N.mlp.{norm,post_norm}.{weight,bias} [h]
    layers.N.mlp.up.weight               [f, h]              not gated; rows cut
    layers.N.mlp.gate_up.weight          [2, f, h]           gated; dim 1 cut
    layers.N.mlp.down.weight             [h, f]              columns cut (row parallel)
    final_norm.{weight,bias}             [h]
    head.weight                          [V, h]              untied only

Models with latent attention have others in place of q and kv (`models/attention_specs.py`).
"""

import math
from collections.abc import Iterator
from typing import Protocol

from engine.config.model import ModelConfig
from engine.layout.shard_spec import Init, ParamSpec
from models.attention_specs import heads_specs, initial_gain


class StageContents(Protocol):
    """Contents of a pipeline stage (`engine.layout.partition.StageLayers`)."""

    @property
    def layers(self) -> range: ...
    @property
    def has_embedding(self) -> bool: ...
    @property
    def has_head(self) -> bool: ...


def model_specs(model: ModelConfig) -> tuple[ParamSpec, ...]:
    """List every parameter of the model once, in forward order."""
    specs = [*embedding_specs(model)]
    for layer in range(model.num_layers):
        specs += layer_specs(model, layer)
    specs += final_norm_specs(model)
    specs += () if model.tie_embeddings else head_specs(model)
    return tuple(specs)


def num_parameters(model: ModelConfig) -> int:
    """Count the elements of all parameters."""
    return sum(spec.numel for spec in model_specs(model))


def stage_specs(model: ModelConfig, stage: StageContents) -> tuple[ParamSpec, ...]:
    """List the parameters of one pipeline stage in forward order; a tied embedding is on both end stages."""
    specs: list[ParamSpec] = []
    if stage.has_embedding:
        specs += embedding_specs(model)
    for layer in stage.layers:
        specs += layer_specs(model, layer)
    if stage.has_head:
        specs += final_norm_specs(model)
        if not (model.tie_embeddings and stage.has_embedding):
            specs += head_specs(model)
    return tuple(specs)


def embedding_specs(model: ModelConfig) -> Iterator[ParamSpec]:
    yield _word_embedding(model)
    if model.position_kind.has_table:
        shape = (model.seq_length, model.hidden_size)
        yield ParamSpec("embedding.position.weight", shape, Init("normal", model.init_std), grad_is_partial="sequence")


def head_specs(model: ModelConfig) -> Iterator[ParamSpec]:
    """List the output projection: the tied word embedding itself, or a matrix of its own."""
    if model.tie_embeddings:
        yield _word_embedding(model)
    else:
        yield _vocabulary_matrix(model, "head.weight", tied_ends=False)


def layer_specs(model: ModelConfig, layer: int) -> Iterator[ParamSpec]:
    h, f = model.hidden_size, model.ffn_size
    normal = Init("normal", model.init_std)
    # GPT-2's rule: the two projections that write to the residual stream start smaller, by the number of writes.
    residual = Init("normal", model.init_std / math.sqrt(2 * model.num_layers))
    attention, mlp = f"layers.{layer}.attention", f"layers.{layer}.mlp"

    if model.norms_before:
        yield from _norm(model, f"{attention}.norm")
    yield from heads_specs(model, layer, attention)
    yield ParamSpec(f"{attention}.proj.weight", (h, model.num_attention_heads, model.value_size), residual, tp_dim=1)
    if model.bias == "all":
        yield ParamSpec(f"{attention}.proj.bias", (h,), Init("zeros"), decay=False, grad_is_partial="sequence")

    if model.norms_after:
        yield from _norm(model, f"{attention}.post_norm")
    if model.norms_before:
        yield from _norm(model, f"{mlp}.norm")
    up, rows = ("gate_up", (2, f)) if model.activation_kind.is_gated else ("up", (f,))
    yield ParamSpec(f"{mlp}.{up}.weight", (*rows, h), normal, tp_dim=len(rows) - 1)
    if model.bias == "all":
        yield ParamSpec(f"{mlp}.{up}.bias", rows, Init("zeros"), decay=False, tp_dim=len(rows) - 1)
    yield ParamSpec(f"{mlp}.down.weight", (h, f), residual, tp_dim=1)
    if model.bias == "all":
        yield ParamSpec(f"{mlp}.down.bias", (h,), Init("zeros"), decay=False, grad_is_partial="sequence")
    if model.norms_after:
        yield from _norm(model, f"{mlp}.post_norm")


def final_norm_specs(model: ModelConfig) -> Iterator[ParamSpec]:
    yield from _norm(model, "final_norm")


def _word_embedding(model: ModelConfig) -> ParamSpec:
    return _vocabulary_matrix(model, "embedding.word.weight", tied_ends=model.tie_embeddings)


def _vocabulary_matrix(model: ModelConfig, name: str, *, tied_ends: bool) -> ParamSpec:
    return ParamSpec(
        name,
        (model.vocab_size, model.hidden_size),
        Init("normal", model.init_std),
        tp_dim=0,
        padded_size=model.padded_vocab_size,
        tied_ends=tied_ends,
    )


def _norm(model: ModelConfig, name: str) -> Iterator[ParamSpec]:
    initial = {"weight": initial_gain(model), "bias": Init("zeros")}
    for each in model.norm_kind.parameters:
        yield ParamSpec(f"{name}.{each}", (model.hidden_size,), initial[each], decay=False, grad_is_partial="sequence")
