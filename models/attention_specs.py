"""List the parameters from which queries, keys and values are computed.

`models/specs.py` lists all others. Latent attention (`engine/config/schema/mla.py`) has these instead of q.weight and kv.weight:

    layers.N.attention.q_a.weight        [r_q, h]            whole on every tp rank
    layers.N.attention.kv_a.weight       [r_kv + dr, h]      whole on every tp rank: rows of the latent, then of the rotated key
    layers.N.attention.{q,kv}_a_norm.weight [r_q], [r_kv]    whole on every tp rank
    layers.N.attention.q_b.weight        [heads, dr + dn, r_q]   heads cut over tp
    layers.N.attention.kv_b.weight       [heads, dn + dv, r_kv]  heads cut over tp

h is the hidden size. r_q and r_kv are the sizes of the query latent and of the key/value latent. A query or key head has dr + dn
elements, of which RoPE rotates dr. A value head has dv elements.

If there is no query latent, q.weight [heads, dr + dn, h] replaces q_a, its norm and q_b. The output projection is
proj.weight [h, heads, dv].
"""

from collections.abc import Iterator

from triaxis.engine.config.schema.mla import MLAConfig
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.layout.shard_spec import Init, ParamSpec


def heads_specs(model: ModelConfig, layer: int, at: str) -> Iterator[ParamSpec]:
    """List a layer's parameters between its first norm and its output projection. `at` is the prefix of their names."""
    yield from _qkv(model, at) if model.mla is None else _through_latents(model, model.mla, at)
    if model.layer_kind(layer).sinks:
        initial = Init("normal", model.init_std)
        yield ParamSpec(f"{at}sinks", (model.num_attention_heads,), initial, decay=False, tp_dim=0)
    yield from _qk_norms(model, at)


def _qkv(model: ModelConfig, at: str) -> Iterator[ParamSpec]:
    heads, kv_heads, d, h = model.num_attention_heads, model.kv_heads, model.head_size, model.hidden_size
    normal = Init("normal", model.init_std)
    yield ParamSpec(f"{at}q.weight", (heads, d, h), normal, tp_dim=0)
    yield ParamSpec(f"{at}kv.weight", (2, kv_heads, d, h), normal, tp_dim=1, fused_with_previous=True)
    if model.bias in ("all", "qkv"):
        yield ParamSpec(f"{at}q.bias", (heads, d), Init("zeros"), decay=False, tp_dim=0)
        yield ParamSpec(
            f"{at}kv.bias", (2, kv_heads, d), Init("zeros"), decay=False, tp_dim=1, fused_with_previous=True
        )


def _through_latents(model: ModelConfig, mla: MLAConfig, at: str) -> Iterator[ParamSpec]:
    """List latent attention's projections and norms.

    With sequence parallelism, a down-projection reads only a part of the sequence, so its gradient on a rank is partial.
    """
    heads, h, gain = model.num_attention_heads, model.hidden_size, initial_gain(model)
    normal = Init("normal", model.init_std)
    down = {"q_a": mla.q_lora_rank or 0, "kv_a": mla.cached_size}
    for name, size in down.items():
        if size:
            yield ParamSpec(f"{at}{name}.weight", (size, h), normal, grad_is_partial="sequence")
    for name, size in {"q_a_norm": mla.q_lora_rank or 0, "kv_a_norm": mla.kv_lora_rank}.items():
        if size:
            yield ParamSpec(f"{at}{name}.weight", (size,), gain, decay=False, grad_is_partial="sequence")
    query = ("q", h) if mla.q_lora_rank is None else ("q_b", mla.q_lora_rank)
    yield ParamSpec(f"{at}{query[0]}.weight", (heads, mla.qk_head_dim, query[1]), normal, tp_dim=0)
    out = mla.qk_nope_head_dim + mla.v_head_dim
    yield ParamSpec(f"{at}kv_b.weight", (heads, out, mla.kv_lora_rank), normal, tp_dim=0)


def _qk_norms(model: ModelConfig, at: str) -> Iterator[ParamSpec]:
    d = model.head_size
    if model.qk_norm == "all_heads":
        for name, count in (("q_norm", model.num_attention_heads), ("k_norm", model.kv_heads)):
            yield ParamSpec(f"{at}{name}.weight", (count, d), initial_gain(model), decay=False, tp_dim=0)
    elif model.qk_norm:
        for name in ("q_norm", "k_norm"):
            gain = initial_gain(model)
            yield ParamSpec(f"{at}{name}.weight", (d,), gain, decay=False, grad_is_partial="always")


def initial_gain(model: ModelConfig) -> Init:
    """Choose the initial value of a norm's weight so that its gain is 1."""
    return Init("zeros" if model.norm_kind.offset else "ones")
