"""List a GPT's parameters, with shapes, cuts and initial values.

Each row has a parameter's name in layer N, its shape, and how tensor parallelism cuts it. Symbols: h is the hidden size, d the head
size, f the MLP's width, V the vocabulary size, S the sequence length.

    embedding.word.weight                [V, h]              rows cut (padded to vocab_multiple); if tied, the head reads it too
    embedding.position.weight            [S, h]              learned positions only
    layers.N.attention.norm.{weight,bias}     [h]            if norm_placement is before or both; bias with LayerNorm only
    layers.N.attention.post_norm.{weight,bias} [h]           if norm_placement is after or both
    layers.N.attention.q.weight          [heads, d, h]       heads cut; shares a GEMM with kv
    layers.N.attention.kv.weight         [2, kv_heads, d, h] heads cut; each is on several ranks if kv_heads < tp
    layers.N.attention.{q,kv}.bias       [heads, d], [2, kv_heads, d]
    layers.N.attention.sinks             [heads]             heads cut; only in layers whose kind has sinks
    layers.N.attention.{q,k}_norm.weight [d]                 with QK-norm of each head
                                  [heads, d], [kv_heads, d]  with QK-norm over all heads; heads cut
    layers.N.attention.proj.weight       [h, heads, d]       input heads cut (row parallel)
    layers.N.attention.proj.bias         [h]
    layers.N.mlp.{norm,post_norm}.{weight,bias} [h]
    layers.N.mlp.up.weight               [f, h]              if the MLP is not gated; rows cut
    layers.N.mlp.gate_up.weight          [2, f, h]           if the MLP is gated; dim 1 cut
    layers.N.mlp.down.weight             [h, f]              columns cut (row parallel)

In layers with E experts, each f_e wide, these replace up, gate_up and down:

    layers.N.mlp.router.weight           [E, h]              whole on every rank
    layers.N.mlp.router.bias             [E]                 added to scores when experts are chosen; has no gradient
    layers.N.mlp.experts.up.weight       [E, f_e, h]         if not gated; experts cut over ep, rows over etp
    layers.N.mlp.experts.gate_up.weight  [E, 2, f_e, h]      if gated; experts cut over ep, dim 2 over etp
    layers.N.mlp.experts.down.weight     [E, h, f_e]         experts cut over ep, columns over etp
    layers.N.mlp.shared.*                                    an MLP f_e x (number of shared experts) wide, cut over tp

Multi-token prediction layers continue the layer numbers. They have an ordinary layer's parameters, and also:

    layers.N.mtp.embedding_norm.*        [h]                 norm of the embedding of a token ahead
    layers.N.mtp.hidden_norm.*           [h]                 norm of the previous layer's hidden states
    layers.N.mtp.projection.weight       [h, 2 h]            whole on every rank
    layers.N.mtp.norm.*                  [h]                 norm between this layer and the head

After the model's own layers:

    final_norm.{weight,bias}             [h]
    head.weight                          [V, h]              rows cut; only if the embedding is not tied

Latent attention has other parameters instead of q and kv (`models/attention_specs.py`). An extension's parts list their own
parameters (`engine/config/schema/extension_parts.py`).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.moe import MoEConfig
from triaxis.engine.layout.partition import StageLayers
from triaxis.engine.layout.shard_spec import Init, ParamSpec
from triaxis.models.attention_specs import heads_specs, initial_gain

WORD_EMBEDDING = "embedding.word.weight"
HEAD = "head.weight"


class StageContents(Protocol):
    """A pipeline stage's layers, and whether it has embedding and head; see `engine/layout/partition.py`."""

    @property
    def layers(self) -> range: ...
    @property
    def has_embedding(self) -> bool: ...
    @property
    def has_head(self) -> bool: ...
    @property
    def num_mtp(self) -> int: ...
    @property
    def num_own(self) -> int: ...


def model_specs(model: ModelConfig) -> tuple[ParamSpec, ...]:
    """List each of the model's parameters once, in forward order."""
    layers = range(model.num_layers + model.num_mtp_layers)
    return stage_specs(model, StageLayers(layers, has_embedding=True, has_head=True, num_mtp=model.num_mtp_layers))


def num_parameters(model: ModelConfig) -> int:
    """Count the elements of all parameters, without vocabulary padding. A tied embedding counts once."""
    return sum(spec.numel for spec in model_specs(model))


def stage_specs(model: ModelConfig, stage: StageContents) -> tuple[ParamSpec, ...]:
    """List one pipeline stage's parameters in forward order.

    The word embedding is on the first stage. The last stage also holds it if the head is tied, or if multi-token prediction embeds
    tokens there.
    """
    specs: list[ParamSpec] = []
    if stage.has_embedding:
        specs += embedding_specs(model)
    for layer in stage.layers[: stage.num_own]:
        specs += layer_specs(model, layer)
    if stage.has_head:
        specs += final_norm_specs(model)
        if model.embedding_is_at_head and not stage.has_embedding:
            specs.append(_word_embedding(model))
        if not model.tie_embeddings:
            specs.append(_vocabulary_matrix(model, HEAD, tied_ends=False))
    for layer in stage.layers[stage.num_own :]:
        specs += layer_specs(model, layer)
    return tuple(specs)


def embedding_specs(model: ModelConfig) -> Iterator[ParamSpec]:
    yield _word_embedding(model)
    if model.position_kind.has_table:
        shape = (model.seq_length, model.hidden_size)
        yield ParamSpec("embedding.position.weight", shape, Init("normal", model.init_std), grad_is_partial="sequence")


def layer_specs(model: ModelConfig, layer: int) -> Iterator[ParamSpec]:
    at, block = f"layers.{layer}.", model.own.block
    if layer >= model.num_layers:
        yield from _joining(model, f"{at}mtp", Init("normal", model.init_std))
    yield from _block(model, layer, at) if block is None else within(at, block.specs(model, layer))


def block_specs(model: ModelConfig, layer: int) -> Iterator[ParamSpec]:
    """List a layer's parameters by their names inside it, such as `mlp.down.weight`."""
    return _block(model, layer, "")


def attention_specs(model: ModelConfig, layer: int) -> Iterator[ParamSpec]:
    """List the parameters in a layer's attention by their names inside it, such as `proj.weight`."""
    return _attention(model, layer, "")


def mlp_specs(model: ModelConfig, layer: int) -> Iterator[ParamSpec]:
    """List a dense layer's MLP parameters by their names inside it, such as `down.weight`."""
    return _mlp(model, "", model.ffn_size)


def within(at: str, specs: Iterable[ParamSpec]) -> Iterator[ParamSpec]:
    """Prefix each parameter's name with `at`, such as `layers.3.mlp.`."""
    return (replace(spec, name=f"{at}{spec.name}") for spec in specs)


def _block(model: ModelConfig, layer: int, at: str) -> Iterator[ParamSpec]:
    attention, mlp, own = f"{at}attention.", f"{at}mlp.", model.own
    if model.norms_before:
        yield from _norm(model, f"{attention}norm")
    if own.attention is None:
        yield from _attention(model, layer, attention)
    else:
        yield from within(attention, own.attention.specs(model, layer))
    if model.norms_after:
        yield from _norm(model, f"{attention}post_norm")
    if model.norms_before:
        yield from _norm(model, f"{mlp}norm")
    if model.moe is not None and model.layer_kind(layer).has_experts:
        yield from _experts(model, model.moe, mlp)
    elif own.mlp is None:
        yield from _mlp(model, mlp, model.ffn_size)
    else:
        yield from within(mlp, own.mlp.specs(model, layer))
    if model.norms_after:
        yield from _norm(model, f"{mlp}post_norm")


def _residual(model: ModelConfig) -> Init:
    """Initialise a projection that adds to the residual stream.

    std / sqrt(2 * layers), as in GPT-2, for the 2 * layers additions in a forward.
    """
    return Init("normal", model.init_std / math.sqrt(2 * model.num_layers))


def _attention(model: ModelConfig, layer: int, at: str) -> Iterator[ParamSpec]:
    h = model.hidden_size
    yield from heads_specs(model, layer, at)
    yield ParamSpec(f"{at}proj.weight", (h, model.num_attention_heads, model.value_size), _residual(model), tp_dim=1)
    if model.bias == "all":
        yield ParamSpec(f"{at}proj.bias", (h,), Init("zeros"), decay=False, grad_is_partial="sequence")


def up_name(model: ModelConfig) -> str:
    """Name of an MLP's first projection, `gate_up` if gated, else `up`."""
    return "gate_up" if model.activation_kind.is_gated else "up"


def _mlp(model: ModelConfig, at: str, f: int) -> Iterator[ParamSpec]:
    h, up = model.hidden_size, up_name(model)
    rows = (2, f) if model.activation_kind.is_gated else (f,)
    yield ParamSpec(f"{at}{up}.weight", (*rows, h), Init("normal", model.init_std), tp_dim=len(rows) - 1)
    if model.bias == "all":
        yield ParamSpec(f"{at}{up}.bias", rows, Init("zeros"), decay=False, tp_dim=len(rows) - 1)
    yield ParamSpec(f"{at}down.weight", (h, f), _residual(model), tp_dim=1)
    if model.bias == "all":
        yield ParamSpec(f"{at}down.bias", (h,), Init("zeros"), decay=False, grad_is_partial="sequence")


def _experts(model: ModelConfig, moe: MoEConfig, at: str) -> Iterator[ParamSpec]:
    h, f, count = model.hidden_size, moe.ffn_hidden_size, moe.num_experts
    normal = Init("normal", model.init_std)
    # Tokens are cut over tp before the router, with or without sequence parallelism.
    yield ParamSpec(f"{at}router.weight", (count, h), normal, grad_is_partial="always", in_backward=True)
    if moe.has_bias:
        yield ParamSpec(f"{at}router.bias", (count,), Init("zeros"), decay=False, is_trained=False)
    rows = (2, f) if model.activation_kind.is_gated else (f,)
    experts, up = f"{at}experts", up_name(model)
    yield ParamSpec(f"{experts}.{up}.weight", (count, *rows, h), normal, tp_dim=len(rows), ep_dim=0)
    yield ParamSpec(f"{experts}.down.weight", (count, h, f), _residual(model), tp_dim=2, ep_dim=0)
    if moe.shared_size:
        yield from _mlp(model, f"{at}shared.", moe.shared_size)


def _joining(model: ModelConfig, name: str, normal: Init) -> Iterator[ParamSpec]:
    """List the parameters that a multi-token prediction layer has besides an ordinary layer's."""
    h = model.hidden_size
    yield from _norm(model, f"{name}.embedding_norm")
    yield from _norm(model, f"{name}.hidden_norm")
    yield ParamSpec(f"{name}.projection.weight", (h, 2 * h), normal, grad_is_partial="sequence")
    yield from _norm(model, f"{name}.norm")


def final_norm_specs(model: ModelConfig) -> Iterator[ParamSpec]:
    yield from _norm(model, "final_norm")


def _word_embedding(model: ModelConfig) -> ParamSpec:
    return _vocabulary_matrix(model, WORD_EMBEDDING, tied_ends=model.embedding_is_at_head)


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
    """List the parameters of the norm over h named `name`."""
    if model.own.norm is not None:
        yield from within(f"{name}.", model.own.norm.specs(model))
        return
    initial = {"weight": initial_gain(model), "bias": Init("zeros")}
    for each in model.norm_kind.parameters:
        yield ParamSpec(f"{name}.{each}", (model.hidden_size,), initial[each], decay=False, grad_is_partial="sequence")
