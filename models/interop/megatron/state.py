"""Convert a run's progress between Megatron-LM's format and ours.

    common.pt   iteration, args.consumed_train_samples, optimizer.param_groups[..].step, opt_param_scheduler   <->   TrainingState
                optimizer.grad_scaler: scale, growth_tracker, hysteresis_tracker       <->   loss_scale: scale, updates, hysteresis

RNG states and the sample order are not converted.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError

from triaxis.engine.checkpoint.format.manifest import LossScaleRecord, TrainingState
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import CheckpointError, shown
from triaxis.engine.numerics.precision import accumulation_dtype
from triaxis.models.interop.megatron.config import megatron_training_args
from triaxis.models.interop.megatron.files import TorchDist
from triaxis.models.interop.megatron.schedule import schedule_args


def training_state(source: TorchDist) -> TrainingState:
    """Read the training state from which a run continues.

    Its `lr` is the highest of the parameter groups.

    Raises:
        CheckpointError: the iteration, samples, Adam's step or learning rate is missing or invalid; or an fp16 run's loss scale is
            invalid.
    """
    step = _number(source.common.get("iteration"), source, "iteration")
    samples = _number(source.args.get("consumed_train_samples"), source, "args.consumed_train_samples")
    groups, state = _param_groups(source)
    num_updates = next((group["step"] for group in groups if group.get("step") is not None), state.get("common_step"))
    seq_length = _number(source.args.get("seq_length", 0), source, "args.seq_length")
    try:
        return TrainingState(
            step=step,
            consumed_samples=samples,
            consumed_tokens=samples * seq_length,
            num_updates=_number(num_updates, source, "Adam's step"),
            lr=max(_scalar(group.get("lr", 0.0), source, "the learning rate") for group in groups),
            rng={},
            loss_scale=_loss_scale(source),
            data={},
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"{source.folder / 'common.pt'} has {shown(first['input'])} for {first['loc'][0]}: {first['msg']}. No run can have "
            "such a state. Import the weights: --weights-only."
        ) from None


def common_state(state: TrainingState, config: Config) -> dict[str, Any]:
    """Build the content of common.pt, without args, for a run that continues.

    Megatron-LM's distributed optimizer can load it. There are two parameter groups: weights, with weight decay, and norms and
    biases, without it.

    Raises:
        CheckpointError: the optimizer is not AdamW, or the config has `optimizer.groups`.
        ConfigError: an extension provides the learning-rate schedule.
    """
    optimizer = config.optimizer
    if optimizer.name != "adamw":
        raise CheckpointError(
            f"optimizer.name = {optimizer.name}: only AdamW's state is written for Megatron-LM, where the moments of another "
            "optimizer have no place. Export the weights: --weights-only."
        )
    if optimizer.groups:
        raise CheckpointError(
            "optimizer.groups: the updates of some parameters differ, and Megatron-LM's groups are those that decay and those "
            "that do not. Export the weights: --weights-only."
        )
    groups = [
        {
            "wd_mult": wd_mult,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "default_config": True,
            "lr": state.lr,
            "max_lr": optimizer.lr,
            "min_lr": optimizer.min_lr,
            "weight_decay": optimizer.weight_decay * wd_mult,
            "betas": (optimizer.beta1, optimizer.beta2),
            "eps": optimizer.eps,
            "step": state.num_updates,
            # Settings for FusedAdam, then for torch's AdamW; each reads only its own.
            "bias_correction": True,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": True,
        }
        for wd_mult in (1.0, 0.0)
    ]
    samples = config.train.global_batch_size
    schedule = schedule_args(config)
    decay_steps = schedule["lr_decay_iters"] or state.step
    return {
        "checkpoint_version": 3.0,
        "iteration": state.step,
        "optimizer": {
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": "fully_reshardable",
            **_grad_scaler(state),
        },
        "opt_param_scheduler": {
            "max_lr": optimizer.lr,
            "min_lr": optimizer.min_lr,
            "lr_warmup_steps": schedule["lr_warmup_iters"] * samples,
            "lr_decay_steps": decay_steps * samples,
            "lr_decay_style": schedule["lr_decay_style"],
            "num_steps": state.consumed_samples,
            "start_wd": optimizer.weight_decay,
            "end_wd": optimizer.weight_decay,
            "wd_incr_style": "constant",
            "wd_incr_steps": decay_steps,
        },
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        },
    }


def weights_state() -> dict[str, Any]:
    """Build the content of common.pt, without args, for weights alone."""
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return {"checkpoint_version": 3.0, "iteration": 0, "content_metadata": metadata}


def training_args(state: TrainingState, config: Config) -> dict[str, Any]:
    """Build the training arguments that Megatron-LM's loader looks up in a checkpoint."""
    return megatron_training_args(config) | {
        "consumed_train_samples": state.consumed_samples,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
        "use_distributed_optimizer": True,
    }


def _loss_scale(source: TorchDist) -> LossScaleRecord | None:
    """Read the state of Megatron-Core's DynamicGradScaler.

    None if the run is not fp16, has no scaler or has a constant scale.
    """
    held = source.common.get("optimizer")
    scaler = held.get("grad_scaler") if isinstance(held, dict) and source.args.get("fp16") else None
    if scaler is None:
        return None
    if not isinstance(scaler, dict):
        raise _wrong(scaler, source, "the state of a loss scale")
    if "growth_tracker" not in scaler:
        return None
    hysteresis = scaler.get("hysteresis_tracker")
    # Megatron-Core's counter continues below 0, where each overflow halves the scale, as at 0 here.
    below_zero = type(hysteresis) is int and hysteresis < 0
    return LossScaleRecord(
        scale=float(_scalar(scaler.get("scale"), source, "a loss scale")),
        updates=_number(scaler["growth_tracker"], source, "the updates at a loss scale"),
        hysteresis=0 if below_zero else _number(hysteresis, source, "the hysteresis of a loss scale"),
    )


def _grad_scaler(state: TrainingState) -> dict[str, Any]:
    """Build the state of Megatron-Core's DynamicGradScaler, under the key grad_scaler.

    The result is empty if the run has no dynamic loss scale.
    """
    scale = state.loss_scale
    if scale is None:
        return {}
    trackers = {"growth_tracker": scale.updates, "hysteresis_tracker": scale.hysteresis}
    return {"grad_scaler": {"scale": torch.tensor([scale.scale], dtype=accumulation_dtype(torch.float16)), **trackers}}


def _param_groups(source: TorchDist) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
    """Find the optimizer's parameter groups and its `state` in common.pt.

    Raises:
        CheckpointError: there are no parameter groups.
    """
    held = source.common.get("optimizer")
    inner = held.get("optimizer", held) if isinstance(held, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError(
            f"{source.folder / 'common.pt'} has no parameter groups of an optimizer, so neither Adam's step nor the learning rate "
            "is known. Import the weights: --weights-only."
        )
    state = inner.get("state") if isinstance(inner, dict) else None
    return groups, state if isinstance(state, dict) else {}


def _number(value: Any, source: TorchDist, what: str) -> int:
    """Read a count, which may be saved as a float or a one-element tensor."""
    number = _scalar(value, source, what)
    if number != int(number):
        raise _wrong(value, source, what)
    return int(number)


def _scalar(value: Any, source: TorchDist, what: str) -> float:
    """Read a finite number >= 0, which may be saved as a one-element tensor. An int stays an int."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    # math.isfinite raises for integers beyond the largest float.
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise _wrong(value, source, what)
    return value


def _wrong(value: Any, source: TorchDist, what: str) -> CheckpointError:
    return CheckpointError(
        f"{source.folder / 'common.pt'} has {shown(value)} for {what}, so the run could not go on from there. Import the "
        "weights: --weights-only."
    )
