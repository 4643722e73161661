"""The products of a layer's linear layers: the one list that FLOPs, memory, traffic and step time are counted from.

A layer multiplies [rows, k] x [k, n] for each. h is the hidden size, d and dv the sizes of a query and a value head, a and g the
numbers of query and of key/value heads, f the MLP's width (2 f columns if gated), t the number of tensor-parallel ranks:

    attention.qkv    [h, (a + 2 g) d / t]     column     mlp.up, mlp.shared.up       [h, f / t or 2 f / t]   column
    attention.proj   [a dv / t, h]            row        mlp.down, mlp.shared.down   [f / t, h]              row

Latent attention has three products in place of qkv, with latent sizes r_q (queries; h if there are none) and r, and head sizes
dn + dr and dv (`engine/config/schema/mla.py`). A multi-token prediction layer begins with a product that joins two tensors:

    attention.down   [h, r_q + r + dr]        own        attention.kv_up             [r, a (dn + dv) / t]    latents
    attention.q_up   [r_q, a (dn + dr) / t]   column     mtp.projection              [2 h, h]                own

Routed experts multiply the rows that they get, not all tokens, so they are not listed.
"""

from dataclasses import dataclass
from typing import Literal

from triaxis.engine.config.schema.layer_kinds import LayerKind
from triaxis.engine.config.schema.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Product:
    """The product of one linear layer on a tensor-parallel rank.

    Attributes:
        name: the linear layer's name in its layer; an MLP's first is `up`, gated or not.
        k, n: sides of the rank's weight [k, n].
        kind: column or row: tp cuts the weight along n or k, and a rank multiplies all its context-parallel part's tokens. own: the
            weight is whole, and with sequence parallelism a rank multiplies its own tokens. latents: tp cuts n, and a rank
            multiplies the tokens of all context-parallel ranks.
        may_be_fp8: whether `precision.fp8` applies.
    """

    name: str
    k: int
    n: int
    kind: Literal["column", "row", "own", "latents"]
    may_be_fp8: bool = True

    @property
    def weights(self) -> int:
        """Number of the weight's elements on the rank."""
        return self.k * self.n


def kv_heads_on_rank(model: ModelConfig, t: int) -> int:
    """Count the key/value heads on one of `t` tensor-parallel ranks; if the model has fewer heads than ranks, each has one."""
    return max(1, model.kv_heads // t)


def layer_products(model: ModelConfig, kind: LayerKind, t: int = 1) -> list[Product]:
    """List a layer's products on one of `t` tensor-parallel ranks, in forward order."""
    h, heads, mla, moe = model.hidden_size, model.num_attention_heads // t, model.mla, model.moe
    products = [Product("mtp.projection", 2 * h, h, "own", may_be_fp8=False)] if kind.is_mtp else []
    if mla is None:
        width = (heads + 2 * kv_heads_on_rank(model, t)) * model.head_size
        products.append(Product("attention.qkv", h, width, "column"))
    else:
        made = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        products += [
            Product("attention.down", h, mla.latent_size, "own"),
            Product("attention.q_up", mla.q_lora_rank or h, heads * model.head_size, "column"),
            Product("attention.kv_up", mla.kv_lora_rank, made, "latents", may_be_fp8=False),
        ]
    products.append(Product("attention.proj", heads * model.value_size, h, "row"))
    mlp, f = ("mlp", model.ffn_size) if moe is None or not kind.has_experts else ("mlp.shared", moe.shared_size)
    if f:
        products += [
            Product(f"{mlp}.up", h, model.activation_kind.num_inputs * f // t, "column"),
            Product(f"{mlp}.down", f // t, h, "row"),
        ]
    return products


def token_weights(model: ModelConfig, kind: LayerKind) -> dict[str, int]:
    """Count the weights that one token is multiplied with in a layer, by product; of routed experts, the token's k."""
    weights = {product.name: product.weights for product in layer_products(model, kind)}
    if model.moe is not None and kind.has_experts:
        down = model.moe.top_k * model.moe.ffn_hidden_size * model.hidden_size
        weights["mlp.router"] = model.moe.num_experts * model.hidden_size
        weights["mlp.experts.up"], weights["mlp.experts.down"] = model.activation_kind.num_inputs * down, down
    return weights
