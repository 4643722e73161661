"""Names that users of other engines type, with ours, and features that are not built.

An unknown key is refused with the name that was probably meant.

    tensor-model-parallel-size, model.n_embd, num_key_value_heads           another engine's name for one of our fields
    model.tp, hidden_size at the top level                                  a field of ours in another section
    train.step                                                              the nearest spelling
    precision.fp4                                                           known, not built yet
    moe_aux_loss_coeff                                                      depends on the layout, so it is refused
"""

import difflib
from collections.abc import Mapping, Sequence

from triaxis.engine.config.names.earlier import RENAMED
from triaxis.engine.config.names.megatron_arguments import ARGUMENTS
from triaxis.engine.config.names.sharding_names import SHARDING_ALWAYS_ON, SHARDING_NAMES, SHARDING_NOT_BUILT
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.optimizer_kinds import OPTIMIZERS

FOREIGN_NAMES = {
    **{
        theirs: each.ours
        for each in ARGUMENTS.values()
        # A section's own field needs no entry: `unknown_key` names the section.
        if each.ours and each.ours.split(".")[1:] != [theirs := each.name.replace("-", "_")]
    },
    # Layout, in older versions of Megatron-LM and elsewhere
    "virtual_pipeline_model_parallel_size": "parallel.vpp",
    "data_parallel_size": "parallel.dp",
    "fsdp": "parallel.zero=3",
    "cpu_offload": "optimizer.offload=cpu",
    "offload_optimizer": "optimizer.offload=cpu",
    "transformer_engine": "kernels.linear=te",
    "compile": "kernels.elementwise=compiled",
    "torch_compile": "kernels.elementwise=compiled",
    "moments_dtype": "precision.moments",
    # Model
    "qk_nope_head_dim": "model.mla.qk_nope_head_dim",
    "qk_rope_head_dim": "model.mla.qk_rope_head_dim",
    "max_sequence_length": "model.seq_length",
    "model_max_length": "model.seq_length",
    "layernorm_epsilon": "model.norm_eps",
    "softmax_scale": "model.attention_scale",
    "add_bias_linear": "model.bias=all",
    # Multi-token prediction
    "num_nextn_predict_layers": "model.mtp.num_layers",
    # Experts
    "num_local_experts": "model.moe.num_experts",
    "n_routed_experts": "model.moe.num_experts",
    "num_experts_per_tok": "model.moe.top_k",
    "moe_intermediate_size": "model.moe.ffn_hidden_size",
    "n_shared_experts": "model.moe.shared_experts",
    "scoring_func": "model.moe.score",
    "norm_topk_prob": "model.moe.normalize",
    "routed_scaling_factor": "model.moe.scaling",
    "n_group": "model.moe.groups",
    "topk_group": "model.moe.top_groups",
    "first_k_dense_replace": "model.layers",
    "decoder_sparse_step": "model.layers",
    # Transformers, torchtitan: checkpoints
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep_last",
    "keep_latest_k": "checkpoint.keep_last",
    "async_mode": "checkpoint.async",
    "initial_load_path": "checkpoint.load",
    "resume": "checkpoint.load (a run directory with checkpoints resumes by itself)",
    "resume_from_checkpoint": "checkpoint.load",
    # Training
    "cpu_offloading": "offload.num_layers",
    "fp16.enabled": "precision.dtype (fp16)",
    "initial_scale_power": "precision.loss_scale.initial (2 to that power)",
    "sigma_factor": "resilience.skip_above_deviations",
    "rolling_interval_length": "resilience.skip_window",
    # Hugging Face: config.json and TrainingArguments
    "n_layer": "model.num_layers",
    "num_hidden_layers": "model.num_layers",
    "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size",
    "n_head": "model.num_attention_heads",
    "num_heads": "model.num_attention_heads",
    "num_key_value_heads": "model.num_kv_heads",
    "n_inner": "model.ffn_hidden_size",
    "intermediate_size": "model.ffn_hidden_size",
    "n_positions": "model.seq_length",
    "n_ctx": "model.seq_length",
    "block_size": "model.seq_length",
    "max_seq_len": "model.seq_length",
    "activation_function": "model.activation",
    "hidden_act": "model.activation",
    "layer_norm_epsilon": "model.norm_eps",
    "layer_norm_eps": "model.norm_eps",
    "rms_norm_eps": "model.norm_eps",
    "rope_theta": "model.rope_base",
    "rope_parameters": "model.rope_scaling and model.rope_base",
    "rotary_pct": "model.rotary_share",
    "partial_rotary_factor": "model.rotary_share",
    "sliding_window": "model.window",
    "layer_types": "model.layers and model.layer_kinds",
    "query_pre_attn_scalar": "model.attention_scale (to the power -1/2)",
    "attention_multiplier": "model.attention_scale",
    "attn_logit_softcapping": "model.attention_softcap",
    "tie_word_embeddings": "model.tie_embeddings",
    "initializer_range": "model.init_std",
    "attention_bias": "model.bias",
    "attn_pdrop": "model.attention_dropout",
    "resid_pdrop": "model.hidden_dropout",
    "embd_pdrop": "model.hidden_dropout",
    "torch_dtype": "precision.dtype",
    "max_steps": "train.steps",
    "steps": "train.steps",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size (microbatches follow from it)",
    "learning_rate": "optimizer.lr",
    "max_grad_norm": "optimizer.clip_grad",
    "grad_clip": "optimizer.clip_grad",
    "lr_scheduler_type": "optimizer.lr_schedule",
    "optim": "optimizer.name",
    "logging_steps": "telemetry.log_interval",
    "eval_iterations": "eval.steps",
    "gradient_checkpointing": "recompute.granularity",
    # torchtitan
    "tensor_parallel_degree": "parallel.tp",
    "pipeline_parallel_degree": "parallel.pp",
    "context_parallel_degree": "parallel.cp",
    "expert_parallel_degree": "parallel.ep",
    "pipeline_parallel_schedule": "schedule.name",
    "data_parallel_replicate_degree": "parallel.dp_replicas",
    "data_parallel_shard_degree": "parallel.dp_replicas (dp / shard degree)",
    "local_batch_size": "train.micro_batch_size",
    "seq_len": "model.seq_length",
    **SHARDING_NAMES,
    # Optimizers
    **{
        theirs: f"optimizer.{ours}"
        for kind in OPTIMIZERS.values()
        for ours, names in kind.fields.items()
        for theirs in names
    },
    "ema_decay": "optimizer.ema.decay",
    "model_ema_decay": "optimizer.ema.decay",
    "optimizer.kind": "optimizer.name",
    "optimizer.type": "optimizer.name",
}
"""Our names by other engines' names. Theirs are written with `_` for `-`, some dotted; ours are a field, `field=value`, or a field
with a remark."""

AND_FIELD = " with "
"""Separator, in `FOREIGN_VALUES`, between a value and the `field=value` that must be set with it."""

DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true", "b16"), "bf16"),
    **dict.fromkeys(("float16", "half", "f16", "f2", "16", "16-mixed", "16-true"), "fp16"),
    **dict.fromkeys(("float32", "float", "single", "f32", "f4", "32", "32-true"), "fp32"),
    **dict.fromkeys(("fp64", "double", "f64", "f8", "64", "64-true"), "float64"),
    **dict.fromkeys(("float8", "float8_e4m3fn", "float8_e5m2", "e4m3", "e5m2", "hybrid"), "fp8"),
}
"""Our dtype names by those in torch, numpy, transformers, Megatron and Lightning, in lower case and without `torch.` or `np.`."""

FOREIGN_VALUES: Mapping[str, Mapping[str, str]] = {
    "precision.dtype": {"fp8": f"bf16{AND_FIELD}precision.fp8.recipe=tensorwise"},
    "precision.moments": {"fp32": "full"},
    "precision.gradients": {"fp32": "full"},
    "model.norm": {"ln": "layernorm", "layer_norm": "layernorm", "rms": "rmsnorm", "rms_norm": "rmsnorm"},
    "model.norm_placement": {
        **dict.fromkeys(("pre", "pre_norm", "prenorm", "pre_ln"), "before"),
        **dict.fromkeys(("post", "post_norm", "postnorm", "post_ln"), "after"),
        "sandwich": "both",
    },
    "model.position": {
        **dict.fromkeys(("learned_absolute", "absolute"), "learned"),
        "rotary": "rope",
        **dict.fromkeys(("nope", "no_pe"), "none"),
    },
    "model.bias": {"true": "all", "attention": "qkv"},
    "model.activation": {"silu": "swiglu", "squared_relu": "relu2"}
    | dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
    "data.attention": dict.fromkeys(("document", "block_diagonal", "reset", "varlen"), "within"),
    "data.positions": {"reset": "document"},
    "parallel.cp_method": {"a2a": "ulysses", "all_to_all": "ulysses", "allgather": "all_gather"},
    "optimizer.name": {
        "adamw_torch": "adamw",
        **{kind.megatron: name for name, kind in OPTIMIZERS.items() if kind.megatron},
    },
    "optimizer.lr_schedule": {
        "inverse-square-root": "inverse_sqrt",
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "wsd",
    },
    "schedule.name": {"interleaved1f1b": "interleaved", "zbvzerobubble": "zbv"},
    "recompute.granularity": {"true": "full"},
    "recompute.modules": {"core_attn": "attention", "layernorm": "norm", "moe_act": "activation"},
    "kernels.attention": {
        **dict.fromkeys(("flash_attention_2", "flash_attn", "fa2"), "flash"),
        **dict.fromkeys(("eager", "math", "unfused"), "explicit"),
        **dict.fromkeys(("mem_efficient", "xformers"), "efficient"),
    },
    "kernels.experts": {"grouped_gemm": "grouped", "gmm": "grouped"},
    "kernels.dispatch": {"alltoall": "all_to_all", "a2a": "all_to_all", "allgather": "all_gather"},
    "checkpoint.load_what": {"model": "weights", "weights_only": "weights"},
    "resilience.on_nonfinite": dict.fromkeys(("error", "raise", "abort"), "stop"),
    "runtime.device": {"gpu": "cuda"},
}
"""For each field: our values by other engines' values, the latter in lower case."""

OFF, OFF_HERE = ("false", "no", "off", "none", "null", "disabled"), ("none", "never")
"""Words for "off" in other engines, and the words that our fields use for it."""

ALWAYS_ON = {
    "dropout_rng": "dropout masks never depend on the layout",
    "use_distributed_optimizer": "the optimizer state is always sharded over dp (ZeRO-1)",
    "overlap_grad_reduce": "gradient reduction always overlaps the backward",
    "overlap_param_gather": "parameters are always gathered under the next forward",
    "use_mcore_models": "there is one model",
    "accumulate_allreduce_grads_in_fp32": "gradients always accumulate in at least fp32",
    **SHARDING_ALWAYS_ON,
}
"""Foreign switches for behaviour that is always on here."""

NOT_BUILT = {
    "fp4": "FP4",
    "cuda_graphs": "CUDA graphs",
    "enable_cuda_graph": "CUDA graphs",
    **SHARDING_NOT_BUILT,
}
"""Features that are not built yet, by the keys that ask for them; a key is the last part of a name or a whole dotted name."""


OF_THE_LAYOUT = {
    "moe_aux_loss_coeff": "it weighs the load of one microbatch on one rank",
    "router_aux_loss_coef": "it weighs the load of one microbatch",
    "aux_loss_alpha": "without sequences it weighs the load of one microbatch",
    "moe_router_load_balancing_type": "some of its types weigh the load of one microbatch on one rank",
    "moe_expert_capacity_factor": "which tokens are dropped follows from the tokens that a rank has",
    "capacity_factor": "which tokens are dropped follows from the tokens that a rank has",
    "moe_token_drop_policy": "which tokens are dropped follows from the tokens that a rank has",
}
"""Reasons why another engine's key depends on the layout or the micro batch, by that key; such keys are refused."""


def our_value(field: str, value: object, choices: Sequence[str]) -> str | None:
    """Translate a field's value into our spelling; None if the value is unknown.

    Args:
        field: the field's dotted name.
        value: the value as given: `BF16`, `torch.bfloat16`, `RMSNorm`, False.
        choices: the legal values.
    """
    # `torch.bfloat16`, `np.float32` and numpy's `<f4` name a dtype after a prefix, which is stripped.
    text = str(value).strip().lower()
    bare = text.rpartition(".")[2].lstrip("<>=|")
    named = FOREIGN_VALUES.get(field, {})
    for word in (text, bare, DTYPES.get(bare, "")):
        if word in named or word in choices:
            return named.get(word, word)
    return next((word for word in OFF_HERE if word in choices), None) if text in OFF else None


def our_name(dotted: str) -> str | None:
    """Translate a name into ours; the result is a field, `field=value`, a field with a remark, or a name in `ALWAYS_ON`.

    Return None if no name of ours fits, or several do.

    Args:
        dotted: another engine's name, or ours without its section: `tensor-model-parallel-size`, `training.seq_len`, `tp`.
    """
    *sections, last = dotted.lstrip("-").split(".")
    name = last.replace("-", "_").lower()
    whole = ".".join([*sections, name])
    fields = list(Config.dotted_names())
    if sections and whole in fields:
        return whole
    if name in ALWAYS_ON:
        return name
    if (meant := FOREIGN_NAMES.get(whole, FOREIGN_NAMES.get(name))) is not None:
        return meant
    named = sorted((field for field in fields if field.rpartition(".")[2] == name and "." in field), key=_depth)
    alone = [field for field in named if _depth(field) == _depth(named[0])]
    return alone[0] if len(alone) == 1 else None


def _depth(field: str) -> int:
    return field.count(".")


def is_foreign(dotted: str) -> bool:
    """Whether another engine's key is in a table of this module."""
    tables: tuple[Mapping[str, str], ...] = (FOREIGN_NAMES, ALWAYS_ON, NOT_BUILT)
    return any(dotted in table or dotted.rpartition(".")[2] in table for table in tables)


def unknown_key(dotted: str, origin: str | None = None) -> str:
    """Describe an unknown key: what was probably meant, and that the key would have had no effect.

    Args:
        dotted: the key's dotted name, such as `model.n_embd`.
        origin: place where it was given, if not in the file.
    """
    *sections, last = dotted.lstrip("-").split(".")
    name = last.replace("-", "_").lower()
    given = dotted if origin is None else f"{dotted} ({origin})"
    if dotted in RENAMED:
        return f"{given}: renamed: it is {RENAMED[dotted]} now. It would have had no effect under this name."
    candidates = (".".join([*sections, name]), *sections[:1], name)
    if (feature := next((NOT_BUILT[key] for key in candidates if key in NOT_BUILT), None)) is not None:
        return f"{given}: known, not built yet: {feature}. It would have had no effect. Remove the key."
    if name in OF_THE_LAYOUT:
        return (
            f"{given}: refused: {OF_THE_LAYOUT[name]}, so another layout or micro batch would train another model. Use "
            "model.moe.balance (bias_rate, sequence_loss, z_loss) instead; no token is ever dropped."
        )
    if name in ALWAYS_ON:
        return f"{given}: not a choice here: {ALWAYS_ON[name]}. Remove the key."
    if (meant := FOREIGN_NAMES.get(dotted, FOREIGN_NAMES.get(name))) is not None:
        return f"{given}: unknown key; here it is {meant}. It would have had no effect under this name."
    fields = list(Config.dotted_names())
    elsewhere = [field for field in fields if field.rpartition(".")[2] == name]
    if elsewhere:
        return f"{given}: no such key here; it belongs to {' or '.join(elsewhere)}. It would have had no effect in this place."
    prefix = ".".join(sections)
    siblings = [field for field in fields if field.rpartition(".")[0] == prefix]
    near = difflib.get_close_matches(f"{prefix}.{name}".lstrip("."), siblings, n=1, cutoff=0.75)
    if not near:
        by_leaf = {field.rpartition(".")[2]: field for field in fields} | {other: other for other in FOREIGN_NAMES}
        near = difflib.get_close_matches(name, by_leaf, n=1, cutoff=0.75)
        near = [FOREIGN_NAMES.get(by_leaf[name], by_leaf[name]) for name in near]
    if near:
        return f"{given}: unknown key. Did you mean {near[0]}? It would have had no effect under this name."
    names = ", ".join(field.rpartition(".")[2] for field in siblings)
    place = f"section {prefix} has" if prefix else "the sections are"
    return f"{given}: unknown key; {place} {names}. It would have had no effect."
