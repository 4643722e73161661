"""Names of DeepSpeed and FSDP (torch, torchtitan, accelerate) that users type, with ours.

The tables are parts of `foreign_names.py`, which describes them.
"""

SHARDING_NAMES = {
    # DeepSpeed
    "zero_stage": "parallel.zero",
    "zero_optimization": "parallel.zero",
    "zero_optimization.stage": "parallel.zero (1 for 0)",
    "mics_shard_size": "parallel.dp_replicas (dp / shard size)",
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_clipping": "optimizer.clip_grad",
    "reduce_bucket_size": "optimizer.bucket_bytes (bytes, not elements)",
    "allgather_bucket_size": "optimizer.bucket_bytes (bytes, not elements)",
    "bf16.enabled": "precision.dtype (bf16)",
    "bfloat16.enabled": "precision.dtype (bf16)",
    "grad_accum_dtype": "precision.gradients",
    "bf16_optimizer_states": "precision.moments (bf16)",
    "optimizer.params": "optimizer.lr (and beta1, beta2, eps, weight_decay beside it)",
    "betas": "optimizer.beta1 and optimizer.beta2",
    "scheduler": "optimizer.lr_schedule",
    "warmup_num_steps": "optimizer.warmup_steps",
    "warmup_max_lr": "optimizer.lr",
    "total_num_steps": "optimizer.decay_steps and train.steps",
    "cos_min_ratio": "optimizer.min_lr (a rate, not a share of lr)",
    "steps_per_print": "telemetry.log_interval",
    "autotp_size": "parallel.tp",
    "sequence_parallel_size": "parallel.cp (its method is ulysses)",
    "ep_size": "parallel.ep",
    "activation_checkpointing": "recompute.granularity",
    "partition_activations": "parallel.sequence_parallel",
    "cpu_checkpointing": "offload.num_layers",
    # FSDP: torch, torchtitan, accelerate
    **{
        f"{prefix}{name}": ours
        for prefix in ("", "fsdp_")
        for name, ours in {
            "reshard_after_forward": "parallel.zero (3 for true, 2 for false)",
            "sharding_strategy": "parallel.zero (FULL_SHARD: 3; SHARD_GRAD_OP: 2; HYBRID_SHARD: 3 with parallel.dp_replicas)",
        }.items()
    },
    "fully_shard": "parallel.zero=3",
    "fsdp_config": "parallel.zero=3",
    "fsdp_activation_checkpointing": "recompute.granularity=full",
    "mixed_precision": "precision.dtype",
    "mixed_precision_param": "precision.dtype",
    "mixed_precision_reduce": "precision.gradients",
    "param_dtype": "precision.dtype",
    "reduce_dtype": "precision.gradients",
}
"""Their names -> our fields."""

_ONE_AHEAD = "with parallel.zero=3 a rank always gathers one layer ahead, and holds two layers whole"
_BY_LAYER = "parallel.zero=3 always cuts and gathers layer by layer"

SHARDING_ALWAYS_ON = {
    # DeepSpeed
    "overlap_comm": "reductions always overlap the backward, and gathers of weights the next layer or forward",
    "contiguous_gradients": "main grads always lie in contiguous buffers",
    "reduce_scatter": "gradients are always reduce-scattered to the ranks that own their state",
    "allgather_partitions": "updated weights are always all-gathered",
    "warmup_type": "the warm-up is always linear",
    "stage3_prefetch_bucket_size": _ONE_AHEAD,
    "stage3_max_live_parameters": _ONE_AHEAD,
    "stage3_max_reuse_distance": _ONE_AHEAD,
    "stage3_param_persistence_threshold": "with parallel.zero=3 norms, biases, embedding and head always stay whole",
    "stage3_model_persistence_threshold": "with parallel.zero=3 norms, biases, embedding and head always stay whole",
    **dict.fromkeys(
        (
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "fsdp_state_dict_type",
            "state_dict_type",
        ),
        "a checkpoint loads in any layout, and `triaxis export` writes whole weights",
    ),
    # FSDP: torch, accelerate
    **{
        f"{prefix}{name}": why
        for prefix in ("", "fsdp_")
        for name, why in {
            "forward_prefetch": _ONE_AHEAD,
            "backward_prefetch": _ONE_AHEAD,
            "limit_all_gathers": _ONE_AHEAD,
            "auto_wrap_policy": _BY_LAYER,
            "transformer_layer_cls_to_wrap": _BY_LAYER,
            "min_num_params": _BY_LAYER,
            "use_orig_params": "a parameter always has one name and one shape",
            "sync_module_states": "ranks always begin with the same weights: train.seed or checkpoint.load decides them",
        }.items()
    },
}
"""Their switches -> what always happens here."""

SHARDING_NOT_BUILT = {
    **dict.fromkeys(
        ("offload_param", "offload_params", "fsdp_offload_params", "enable_cpu_offload"), "weights in host memory"
    ),
    "zero_hpz_partition_size": "ZeRO++'s second copy of the weights inside each node",
    "zero_quantized_weights": "ZeRO++'s gathers of quantized weights",
    "zero_quantized_nontrainable_weights": "ZeRO++'s gathers of quantized weights",
    "zero_quantized_gradients": "ZeRO++'s reductions of quantized gradients",
    "sub_group_size": "an update in groups of parameters",
    "round_robin_gradients": "copies of gradients to host memory",
    "consecutive_hysteresis": "a hysteresis that each step without an overflow refills",
    "warmup_min_lr": "a warm-up that begins above 0",
    "warmup_min_ratio": "a warm-up that begins above 0",
}
"""Their switches -> the features that are not built yet."""
