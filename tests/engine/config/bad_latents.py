"""Configurations of latent attention and multi-token prediction, each with one mistake."""

from collections.abc import Sequence

MLA = (
    "model.bias=none",
    "model.mla.kv_lora_rank=16",
    "model.mla.qk_nope_head_dim=8",
    "model.mla.qk_rope_head_dim=4",
    "model.mla.v_head_dim=8",
)

BAD_LATENTS: dict[str, tuple[Sequence[str], dict[str, int], Sequence[str]]] = {
    "latents and shared heads": (
        [*MLA, "model.num_kv_heads=4"],
        {},
        ["model.num_kv_heads = 4: has no meaning with model.mla", "made from one latent", "num_kv_heads = null"],
    ),
    "latents and a size of all heads": (
        [*MLA, "model.head_dim=16"],
        {},
        ["model.head_dim = 16: has no meaning with model.mla", "v_head_dim", "head_dim = null"],
    ),
    "latents and norms of heads": (
        [*MLA, "model.qk_norm=true"],
        {},
        ["model.qk_norm = true: does not go with model.mla", "a norm on each latent", "qk_norm = false"],
    ),
    "latents and biases": (
        [*MLA, "model.bias=all"],
        {},
        ["model.bias = all: does not go with model.mla", "bias = none"],
    ),
    "latents and a share": (
        [*MLA, "model.rotary_share=0.5"],
        {},
        ["model.rotary_share = 0.5: has no effect with model.mla", "qk_rope_head_dim", "rotary_share = 1"],
    ),
    "an odd part that rotates": (
        [*MLA, "model.mla.qk_rope_head_dim=3"],
        {},
        ["model.mla.qk_rope_head_dim = 3: must be even", "qk_rope_head_dim = 2 or 4"],
    ),
    "values larger than keys": (
        [*MLA, "model.mla.v_head_dim=20"],
        {},
        ["v_head_dim = 20: must be at most the 12 elements of a query", "v_head_dim = 12", "qk_nope_head_dim = 20"],
    ),
    "latents that trade heads": (
        [*MLA, "parallel.cp=2", "parallel.cp_method=ulysses"],
        {},
        ["parallel.cp_method = ulysses: trades tokens for heads", "smaller than the heads", "cp_method = all_gather"],
    ),
    "latents that are kept anyway": (
        [*MLA, "parallel.cp=2", "recompute.gathered_kv=keep"],
        {},
        ["recompute.gathered_kv = keep: has no effect with model.mla", "gathered_kv = auto"],
    ),
    "no token so far ahead": (
        ["model.seq_length=2", "model.mtp={num_layers: 2}"],
        {},
        ["model.seq_length = 2", "above model.mtp.num_layers = 2", "so far ahead", "seq_length = 3"],
    ),
    "a table for tokens ahead": (
        ["model.position=learned", "model.mtp={}"],
        {},
        ["model.position = learned", "model.mtp", "on the first stage", "position = rope"],
    ),
}
