"""Keys of DeepSpeed's configuration that no field here takes over: without effect, left out, or refused.

A key that would change training is refused unless `--ignore` names it. All others are listed in the config's head.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from triaxis.engine.config.names.foreign_names import NOT_BUILT

CONTAINERS = (
    "zero_optimization",
    "optimizer",
    "optimizer.params",
    "scheduler",
    "scheduler.params",
    "fp16",
    "bf16",
    "data_types",
)
"""Mappings whose keys are looked at one by one; any other mapping is one key."""

_FILE_KEYS = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "zero_optimization",
        "fp16",
        "bf16",
    }
)

_ZERO_TUNING = (
    "overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size allgather_bucket_size allgather_partitions "
    "use_multi_rank_bucket_allreduce round_robin_gradients sub_group_size memory_efficient_linear parameter_alignment "
    "ignore_unused_parameters legacy_stage1 load_from_fp32_weights elastic_checkpoint compute_grad_norm leaf_module "
    "override_module_apply pipeline_loading_checkpoint log_trace_cache_warnings enable_sanity_checks "
    "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold "
    "stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save "
    "stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params "
    "stage3_allgather_sequential cpu_offload_use_pin_memory"
)

WITHOUT_EFFECT: Mapping[str, str] = {
    name: topic
    for topic, names in {
        "logging and profiling": "steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level comms_logger "
        "flops_profiler tensorboard wandb csv_monitor comet timers",
        "buffers and communication": " ".join(f"zero_optimization.{name}" for name in _ZERO_TUNING.split())
        + " prescale_gradients gradient_predivide_factor communication_data_type seq_parallel_communication_data_type "
        "disable_allgather sparse_gradients",
        "recomputation, chosen here from memory": "activation_checkpointing",
        "checkpoints and files": "checkpoint aio nebula datastates dataloader_drop_last",
        "DeepSpeed's own parts": "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer optimizer.legacy_fusion "
        "optimizer.params.torch_adam optimizer.params.fused optimizer.params.foreach fp16.auto_cast "
        "bf16.immediate_grad_update compile autotuning hybrid_engine disable_python_gc vocabulary_size pipeline "
        "managed_gradient_accumulation use_data_before_expert_parallelism scheduler.params.last_batch_iteration",
    }.items()
    for name in names.split()
}
"""Key -> its topic, in the config's head."""

_WEIGHTS_STAY = f"{NOT_BUILT['offload_param']} are not built: they stay on the device, cut by parallel.zero=3"

LEFT_OUT: Mapping[str, str] = {
    "zero_optimization.offload_param": _WEIGHTS_STAY,
    "zero_optimization.cpu_offload_param": _WEIGHTS_STAY,
    "zero_optimization.zero_hpz_partition_size": f"{NOT_BUILT['zero_hpz_partition_size']} is not built",
    "zero_optimization.mics_shard_size": "set parallel.dp_replicas to dp / shard size",
    "zero_optimization.mics_hierarchical_params_gather": "gathers have one level",
    "bf16.check_overflow": "set resilience.on_nonfinite=skip to leave such updates out",
}
"""Key -> why memory or speed differs without it; the trained weights do not depend on it."""

_HALF_STATE = (
    "weights and their sums are kept in at least fp32; precision.masters and precision.moments make them smaller"
)
_OF_LAYOUT = "the layout is chosen here, and DeepSpeed's batch rule counts every GPU as a replica"

REFUSED: Mapping[str, str] = {
    **{
        f"zero_optimization.{name}": f"{why} are not built"
        for name, why in NOT_BUILT.items()
        if "zero_quantized" in name
    },
    "zero_optimization.zenflow": "each update waits for all of its gradients",
    "fp16.consecutive_hysteresis": f"{NOT_BUILT['consecutive_hysteresis']} is not built",
    "fp16.fp16_master_weights_and_grads": _HALF_STATE,
    "bf16.bf16_master_weights_and_grads": _HALF_STATE,
    "bf16.bf16_optimizer_states": _HALF_STATE,
    "optimizer.params.amsgrad": "AMSGrad is not built",
    "optimizer.params.max_grad_norm": "DeepSpeed itself refuses it: give gradient_clipping",
    "gradient_allreduce_op": "gradients are averaged, so that the learning rate is that of any number of GPUs",
    "amp": "apex's mixed precision is not built: precision.dtype is bf16 or fp16",
    "torch_autocast": "autocast is not built: precision.dtype is bf16 or fp16",
    "elasticity": "its batch sizes follow from the number of GPUs: give them as numbers",
    "data_efficiency": "curricula and random token dropping are not built",
    "curriculum_learning": "curricula are not built; phases change the sample length at given tokens",
    "progressive_layer_drop": "every layer is in every step",
    "compression_training": "pruning and quantized training are not built",
    "quantize_training": "quantized training is not built",
    "weight_quantization": "quantized weights are not built",
    "sparse_attention": "sparse attention is not built; model.window bounds what a query sees",
    "eigenvalue": "it serves quantized training, which is not built",
    "tensor_parallel": _OF_LAYOUT,
    "sequence_parallel_size": _OF_LAYOUT,
    "expert_parallel": _OF_LAYOUT,
}
"""Key -> why it would train another model."""


def is_deepspeed(keys: Mapping[str, Any]) -> bool:
    """Whether a JSON mapping is a configuration of DeepSpeed, by its keys; a model's config.json has a `model_type`."""
    return "model_type" not in keys and not _FILE_KEYS.isdisjoint(keys)


def entries(keys: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key's dotted name and value. A mapping is one value, unless its name is in `CONTAINERS`."""
    for key, value in keys.items():
        # Older files say bfloat16 for bf16.
        name = "bf16" if f"{prefix}{key}" == "bfloat16" else f"{prefix}{key}"
        if name in CONTAINERS and isinstance(value, Mapping):
            yield from entries(value, f"{name}.")
        else:
            yield name, value


def is_on(value: object) -> bool:
    """Whether a key's value asks for its feature. A mapping asks with `enabled` or `device`, or else with any value."""
    if isinstance(value, Mapping):
        switches = [value[name] for name in ("enabled", "device") if name in value]
        return any(map(is_on, switches or value.values()))
    # 1 and -1 are sizes that cut nothing.
    return value is True or value not in (None, False, 0, 1, -1, "none", "auto", "mean", "")
