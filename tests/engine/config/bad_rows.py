"""Values that break a row of the tables of rules (`engine/config/rules/rows.py`), in the form of `bad_configs.BAD`."""

from collections.abc import Sequence
from pathlib import Path

PARTS = Path(__file__).parents[2] / "models" / "gpt" / "own_parts.py"
FORWARDS = Path(__file__).with_name("forwards.txt")
"""A schedule without backwards, for pp 1 and 8 microbatches."""

WIDE_MLA = (
    "model.bias=none",
    "model.mla={q_lora_rank: 16, kv_lora_rank: 16, qk_nope_head_dim: 16, qk_rope_head_dim: 16, v_head_dim: 16}",
    "precision.fp8={}",
)

PHASES = "phases=[{name: main, until: 5k}, {name: more, until: 9k}]"

BAD_ROWS: dict[str, tuple[Sequence[str], dict[str, int], Sequence[str]]] = {
    "queries between tiles": (
        ["precision.fp8={}", "model.num_attention_heads=2", "model.head_dim=4"],
        {},
        ["model.num_attention_heads = 2", "8 numbers of a token's heads on a rank that are queries", "heads = 4 or 8"],
    ),
    "values between tiles": (
        [*WIDE_MLA, "model.mla.v_head_dim=9"],
        {},
        ["model.num_attention_heads = 8", "72 numbers", "that attention returns", "heads = 16 or 32"],
    ),
    "keys between tiles": (
        ["precision.fp8={}", "model.num_kv_heads=1"],
        {},
        ["model.num_kv_heads = 1", "8 numbers of a token's heads on a rank that are keys", "num_kv_heads = 2 or 4"],
    ),
    "a latent of queries between tiles": (
        [*WIDE_MLA, "model.mla.q_lora_rank=24"],
        {},
        ["q_lora_rank = 24", "24 numbers of a latent", "tensorwise takes multiples of 16", "q_lora_rank = 16 or 32"],
    ),
    "a latent between tiles": (
        [*WIDE_MLA, "model.mla.kv_lora_rank=24"],
        {},
        ["kv_lora_rank = 24", "24 numbers of a latent", "kv_lora_rank = 16 or 32"],
    ),
    "a rotated key between tiles": (
        [*WIDE_MLA, "model.mla.qk_rope_head_dim=24"],
        {},
        ["qk_rope_head_dim = 24", "24 numbers of a rotated key", "qk_rope_head_dim = 16 or 32"],
    ),
    "shared experts between tiles": (
        [
            "precision.fp8={}",
            "model.moe={num_experts: 4, top_k: 2, ffn_hidden_size: 24, shared_experts: 1}",
            "model.layers=[moe]",
            "model.bias=none",
        ],
        {},
        ["shared_experts = 1", "24 numbers of their inner width on a rank", "shared_experts = 2 or 4"],
    ),
    "a kind's share of latents": (
        [*WIDE_MLA[:2], "model.layers=[a]", "model.layer_kinds={a: {rotary_share: 0.5}}"],
        {},
        ["model.layer_kinds.a.rotary_share = 0.5", "has no effect with model.mla", "qk_rope_head_dim"],
    ),
    "no kind of layers": (["model.layers=[]"], {}, ["model.layers = []", "must name a kind", "model.layers = null"]),
    "a share of nothing": (
        ["model.position=learned", "model.rotary_share=0.5"],
        {},
        ["model.rotary_share = 0.5", "no effect with position = learned", "rotary_share = 1", "position = rope"],
    ),
    "a kind that rotates beside a table": (
        ["model.position=learned", "model.layers=[a]", "model.layer_kinds={a: {position: rope}}"],
        {},
        ["model.layer_kinds.a.position = rope", "a token would have two positions"],
    ),
    "a file of another layout": (
        ["parallel.pp=1", f"schedule.file={FORWARDS.with_name('two_rows.txt')}"],
        {},
        ["parallel.pp = 1", "must be 2, the pp of schedule.file", "schedule.file = null"],
    ),
    "a file of forwards": (
        ["parallel.dp=1", f"schedule.file={FORWARDS}"],
        {},
        ["schedule.file = ", "forwards only", "schedule.file = null"],
    ),
    "a mean that stands still": (
        ["precision.moments=bf16", "optimizer.beta1=0.999"],
        {},
        ["optimizer.beta1 = 0.999", "at most 0.99", "beta1 = 0.99", "moments = full"],
    ),
    "a momentum that stands still": (
        ["precision.moments=bf16", "optimizer.name=sgd", "optimizer.momentum=0.999"],
        {},
        ["optimizer.momentum = 0.999", "at most 0.99", "momentum = 0.99", "moments = full"],
    ),
    "experts' columns without experts": (
        ["parallel.tp=2", "parallel.etp=2"],
        {},
        ["parallel.etp = 2", "the model has none", "parallel.etp = 1"],
    ),
    "a form of GEMMs without experts": (
        ["kernels.experts=loop"],
        {},
        ["kernels.experts = loop", "no effect without experts", "kernels.experts = auto"],
    ),
    "parts of a head that is not there": (
        [f"model.extension={PARTS}", "recompute.head_tokens=64"],
        {},
        ["recompute.head_tokens = 64", "the engine's own loss", "head_tokens = auto"],
    ),
    "a head's gradients of several microbatches at once": (
        ["schedule.name=gpipe", "parallel.dp=2", "parallel.zero=2", "recompute.head_tokens=64"],
        {},
        ["recompute.head_tokens = 64", "parallel.zero = 2", "zero = 1", "schedule.name = 1f1b"],
    ),
    "a phase of none": (["train.phase=main"], {}, ["train.phase = main", "the run has none", "train.phase = null"]),
    "steps beside phases": (
        [PHASES],
        {},
        ["train.steps = 10", "the last one ends the run", "one of both would be ignored", "train.steps = null"],
    ),
    "tokens beside phases": (
        ["train.steps=null", "train.tokens=1000", PHASES],
        {},
        ["train.tokens = 1000", "the last one ends the run", "train.tokens = null"],
    ),
    "a warm-up in steps of two sizes": (
        [
            "train.steps=null",
            "optimizer.warmup_steps=2",
            "phases=[{name: main, until: 5k}, {name: more, until: 9k, train.global_batch_size: 32}]",
        ],
        {},
        ["optimizer.warmup_steps = 2", "have 512 or 1,024 tokens", "would jump at an edge", "warmup_steps = 0"],
    ),
    "kept steps of a run that saves at its end": (
        ["checkpoint.keep_every=100"],
        {},
        ["keep_every = 100", "multiple of checkpoint.interval = null", "keep_every = null"],
    ),
    "a first mean of SGD": (
        ["optimizer.name=sgd", "optimizer.beta1=0.8"],
        {},
        ["optimizer.beta1 = 0.8", "is a field of AdamW", "optimizer.name = sgd", "beta1 = 0.9"],
    ),
    "an eps of SGD": (
        ["optimizer.name=sgd", "optimizer.eps=1e-6"],
        {},
        ["optimizer.eps = 1e-06", "is a field of AdamW", "eps = 1e-08"],
    ),
    "a momentum of AdamW": (
        ["optimizer.momentum=0.8"],
        {},
        ["optimizer.momentum = 0.8", "is a field of SGD with momentum", "optimizer.name = adamw", "momentum = 0.9"],
    ),
    "split masters of exact weights": (
        ["precision={dtype: fp32, masters: split}"],
        {},
        ["precision.masters = split", "precision.dtype = fp32", "masters = full", "dtype = bf16"],
    ),
    "a field of another optimizer": (
        ["optimizer.name=sgd", "optimizer.beta2=0.99"],
        {},
        ["optimizer.beta2 = 0.99", "is a field of AdamW", "optimizer.name = sgd", "beta2 = 0.95"],
    ),
    "a moment that stands still": (
        ["precision={dtype: bf16, moments: bf16}", "optimizer.beta2=0.999"],
        {},
        ["optimizer.beta2 = 0.999", "at most 0.99", "beta2 = 0.99", "moments = full"],
    ),
    "narrow moments of exact weights": (
        ["precision={dtype: fp32, moments: bf16}"],
        {},
        ["precision.moments = bf16", "precision.dtype = fp32", "moments = full", "dtype = bf16"],
    ),
    "narrow gradients of exact weights": (
        ["precision={dtype: fp32, gradients: bf16}"],
        {},
        ["precision.gradients = bf16", "precision.dtype = fp32", "gradients = full", "dtype = bf16"],
    ),
    "a static scale with a first one": (
        ["precision={dtype: fp16, loss_scale: {static: 128, initial: 4}}"],
        {},
        ["loss_scale.initial = 4", "static = 128", "no effect", "initial = 65536", "static = null"],
    ),
    "a static scale with patience": (
        ["precision={dtype: fp16, loss_scale: {static: 128, hysteresis: 3}}"],
        {},
        ["loss_scale.hysteresis = 3", "static = 128", "no effect", "hysteresis = 2", "static = null"],
    ),
    "a static scale with a smallest one": (
        ["precision={dtype: fp16, loss_scale: {static: 128, minimum: 4}}"],
        {},
        ["loss_scale.minimum = 4", "static = 128", "no effect", "minimum = 1", "static = null"],
    ),
    "a method of nothing": (
        ["recompute.method=block"],
        {},
        ["recompute.method = block", "granularity = none", "no effect", "method = uniform", "granularity = full"],
    ),
    "whole layers whose inputs wait": (
        ["parallel.pp=2", "schedule.name=zb_h1", "recompute.granularity=full"],
        {},
        ["recompute.granularity = full", "schedule.name = zb_h1", "kept after all", "selective or none"],
    ),
}
