"""Megatron-Core on a CPU, as far as checkpoints need it: models, its distributed optimizer, and saves in any tp x pp.

How it runs on a CPU is the oracle's knowledge (`launch/verify/oracles/megatron_cpu.py`); here its checkpoint writer is made to use
threads where it would fork: a rank of a test is a daemon and may have no children. Everything runs in ranks of
`tests/harness.py`, never in the test process: Megatron-Core's groups are globals.
"""

import argparse
import multiprocessing.dummy
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.launch.verify.oracles.megatron_core import constant_schedule, distributed_optimizer, gpt_model
from triaxis.launch.verify.oracles.megatron_cpu import on_cpu

ITERATION, SAMPLES, BATCH = 3, 24, 8
ROWS_MULTIPLE = 44
"""Megatron pads the vocabulary to a multiple of this here."""

SCALER: dict[str, Any] = {
    "initial_scale": 4096.0,
    "min_scale": 1.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 3,
    "hysteresis": 2,
}
OVERFLOWS = (False, True, False, True, True, False)
NEXT_OVERFLOWS = (False, False, True, True, True)
"""Which updates of its loss scale found a gradient that is not finite: before a checkpoint, and after it."""

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 32,
        "ffn_hidden_size": 128,
        "seq_length": 12,
        "vocab_size": 43,
        "position": "learned",
    },
    "llama": {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden_size": 64,
        "seq_length": 12,
        "vocab_size": 43,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": "none",
        "tie_embeddings": False,
        "rope_base": 5000.0,
    },
}
"""Sizes of which every rank's part of a tensor is a multiple of 64 elements at tp=2: for others, Megatron-Core 0.16 says itself
that what it saves of the optimizer may be corrupt (its buffers align each parameter to 64 and end unaligned)."""
MODELS["qwen"] = MODELS["llama"] | {"bias": "qkv", "qk_norm": True, "tie_embeddings": True, "norm_eps": 1e-6}
MODELS["kinds"] = MODELS["llama"] | {
    "attention_scale": 0.3,
    "rotary_share": 0.5,
    "rope_scaling": {
        "type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "layers": ["near*2", "still", "far"],
    "layer_kinds": {"near": {"window": 4}, "still": {"position": "none", "window": 4}, "far": {}},
}
MODELS["sinks"] = MODELS["llama"] | {
    "window": 5,
    "sinks": True,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "activation": "relu2",
    "num_attention_heads": 64,
    "num_kv_heads": 32,
    "head_dim": 2,
}
MODELS["ahead"] = MODELS["gpt"] | {
    "position": "rope",
    "vocab_size": ROWS_MULTIPLE,  # its loss would count the padding
    "tie_embeddings": False,  # Megatron-Core 0.16 saves no tied ends of several stages with such layers
    "mtp": {"num_layers": 2, "loss_weight": 0.7},
}
MODELS["gpt_tanh"] = MODELS["gpt"] | {"activation": "gelu_tanh", "num_kv_heads": 1, "position": "rope"}


def padded_rows(model: ModelConfig) -> int:
    return -(-model.vocab_size // ROWS_MULTIPLE) * ROWS_MULTIPLE


def tokens_of(model: ModelConfig, seed: int) -> torch.Tensor:
    """Two samples of random tokens with one more for the labels, int64 [2, s + 1]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.vocab_size, (2, model.seq_length + 1), generator=generator)


@contextmanager
def patched(tp: int = 1, pp: int = 1) -> Iterator[None]:
    """A process in which Megatron-Core runs on the CPU, with its groups of tp x pp."""
    with on_cpu(tp, pp):
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        filesystem_async.mp = types.SimpleNamespace(get_context=lambda _: multiprocessing.dummy)
        yield


def build(model: ModelConfig, *, dtype: torch.dtype = torch.float32) -> Any:
    """This rank's part of a GPTModel, with random weights that do not depend on the layout (see `fill`)."""
    gpt = gpt_model(model.model_copy(update={"mtp": None}), dtype, rows=padded_rows(model), parallel_output=False)
    return gpt if model.mtp is None else with_mtp(gpt, model).to(dtype)


def with_mtp(gpt: Any, model: ModelConfig) -> Any:
    """The same part of a GPTModel with its layers of tokens ahead; the loss of each is a sum, as that of the next tokens."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec

    config = gpt.config
    config.mtp_num_layers, config.mtp_loss_scaling_factor = model.mtp.num_layers, model.mtp.loss_weight
    config.calculate_per_token_loss = True
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    return GPTModel(
        config,
        spec,
        vocab_size=padded_rows(model),
        max_sequence_length=model.seq_length,
        pre_process=gpt.pre_process,
        post_process=gpt.post_process,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rope_base,
        parallel_output=True,  # its loss wants logits that are cut over tp
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )


def arguments(model: ModelConfig, **more: Any) -> argparse.Namespace:
    """What Megatron-LM keeps in common.pt of its command line: more than a reader asks for, enums of its own too."""
    from megatron.core.transformer.enums import AttnBackend

    return argparse.Namespace(
        **{
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "num_attention_heads": model.num_attention_heads,
            "group_query_attention": model.kv_heads != model.num_attention_heads,
            "num_query_groups": model.kv_heads,
            "kv_channels": model.head_size,
            "ffn_hidden_size": model.ffn_size,
            "seq_length": model.seq_length,
            "max_position_embeddings": model.seq_length,
            "position_embedding_type": "learned_absolute" if model.position == "learned" else "rope",
            "rotary_base": int(model.rope_base),
            "rotary_percent": 1.0,
            "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
            "norm_epsilon": model.norm_eps,
            "swiglu": model.activation == "swiglu",
            "bias_gelu_fusion": model.activation == "gelu_tanh",
            "add_bias_linear": model.bias == "all",
            "add_qkv_bias": model.bias == "qkv",
            "qk_layernorm": model.qk_norm,
            "untie_embeddings_and_output_weights": not model.tie_embeddings,
            "padded_vocab_size": padded_rows(model),
            "vocab_size": model.vocab_size,
            "mtp_num_layers": model.num_mtp_layers or None,
            "mtp_loss_scaling_factor": 0.1 if model.mtp is None else model.mtp.loss_weight,
            "calculate_per_token_loss": model.mtp is not None,
            "params_dtype": torch.bfloat16,
            "attention_backend": AttnBackend.auto,
            "load": Path("somewhere"),
            "train_iters": 100,
            "global_batch_size": BATCH,
            "micro_batch_size": 1,
            "lr": 1e-2,
            "min_lr": 1e-3,
            "lr_decay_style": "cosine",
            "lr_decay_iters": 80,
            "lr_warmup_iters": 2,
            "weight_decay": 0.1,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_eps": 1e-8,
            "clip_grad": 1.0,
            "consumed_train_samples": SAMPLES,
            "bf16": False,
            **more,
        }
    )


def fill(named: Mapping[str, torch.Tensor]) -> None:
    """Random values, a function of the name and the whole shape: norm gains around 1, nothing zero."""
    for name, tensor in named.items():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        noise = 0.1 * torch.randn(tensor.shape, generator=generator)
        with torch.no_grad():
            tensor.copy_(1 + noise if "norm" in name and name.endswith("weight") else noise)


def logits(gpt: Any, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
    """[b, s, rows]; with labels the losses [b, s]."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    ones = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool)
    return gpt(tokens, positions, ones.triu(1)[None, None], labels=labels)


@contextmanager
def next_token_alone(gpt: Any) -> Iterator[None]:
    """Let a GPTModel compute logits, which its layers of tokens ahead need labels for."""
    held = gpt.mtp_process, gpt.config.mtp_num_layers
    gpt.mtp_process, gpt.config.mtp_num_layers = False, None
    yield
    gpt.mtp_process, gpt.config.mtp_num_layers = held


def losses_ahead() -> tuple[float, ...]:
    """The loss per token at each distance, summed over the steps since the last call; () without such layers."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    values = MTPLossLoggingHelper.tracker.pop("values", torch.zeros(0))
    return tuple(values.tolist())


def optimizer_of(gpt: Any) -> tuple[Any, Any]:
    """(the model in Megatron's data-parallel wrapper, its distributed AdamW, with its decay as the scheduler sets it)."""
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=1.0)
    wrapped, optimizer = distributed_optimizer(gpt, config)
    constant_schedule(optimizer, config)
    return wrapped, optimizer


def expecting(optimizer: Any) -> Any:
    """The optimizer, ready to load a state. With torch's AdamW (no Transformer Engine) Megatron-Core needs help: the state must
    be there already; each parameter's step, which is loaded with the groups, is asked for once more; and it is one tensor that
    all parameters would count up together."""
    (inner,) = optimizer.chained_optimizers
    inner._init_optimizer_states_with_dummy_values()
    put = inner._set_main_param_and_optimizer_states

    def put_with_step(parameter: Any, tensors: dict[str, Any]) -> None:
        group, order = inner.model_param_group_index_map[parameter]
        state = inner.optimizer.state[inner.optimizer.param_groups[group]["params"][order]]
        state["step"] = state["step"].clone()
        put(parameter, {**tensors, "step": state["step"]})

    inner._set_main_param_and_optimizer_states = put_with_step
    return optimizer


def grad_scaler() -> Any:
    """Megatron-Core's loss scale of an fp16 run."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    return DynamicGradScaler(**SCALER)


def step(wrapped: Any, optimizer: Any, model: ModelConfig, seed: int) -> float:
    """One update on the batch of `seed`; returns its loss."""
    tokens = tokens_of(model, seed)
    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    if model.mtp is not None:
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        losses = logits(wrapped, tokens[:, :-1], tokens[:, 1:])
        # The gradient of tokens ahead joins the backward with this factor, which Megatron-LM's schedule sets.
        MTPLossAutoScaler.set_loss_scale(torch.tensor(1 / losses.numel()))
        loss = losses.mean()
    else:
        columns = logits(wrapped, tokens[:, :-1])[..., : model.vocab_size]
        loss = torch.nn.functional.cross_entropy(columns.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    wrapped.finish_grad_sync()
    optimizer.step()
    return float(loss)


def state_dict(gpt: Any, optimizer: Any, model: ModelConfig, metadata: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What Megatron-LM hands to dist_checkpointing."""
    sharded = {
        "args": arguments(model, **more),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "model": gpt.sharded_state_dict(metadata=metadata),
    }
    if optimizer is not None:
        sharded["optimizer"] = optimizer.sharded_state_dict(sharded["model"], metadata=metadata)
        sharded["content_metadata"] = dict(metadata)
    return sharded


def save(directory: Path, sharded: dict[str, Any]) -> None:
    """As Megatron-LM does: iter_0000003/ and the tracker file; every rank calls it."""
    from megatron.core import dist_checkpointing

    folder = directory / f"iter_{ITERATION:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(sharded, str(folder))
    (directory / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def load(directory: Path, gpt: Any, optimizer: Any, metadata: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Load model and optimizer as Megatron-LM does; returns every tensor that this rank read."""
    from megatron.core import dist_checkpointing

    sharded = {"model": gpt.sharded_state_dict(metadata=metadata)}
    sharded["optimizer"] = optimizer.sharded_state_dict(sharded["model"], is_loading=True, metadata=metadata)
    # Python 3.11.0 to 3.11.3 pickle a member of an enumeration as getattr(class, name), which torch.load refuses.
    with torch.serialization.safe_globals([getattr]):
        state = dist_checkpointing.load(sharded, str(directory / f"iter_{ITERATION:07d}"))
    read = {f"model.{key}": value.clone() for key, value in state["model"].items() if torch.is_tensor(value)}
    for index, kinds in state["optimizer"]["param_state"].items():
        read |= {f"optimizer.{index}.{kind}": value.clone() for kind, value in kinds.items() if torch.is_tensor(value)}
    gpt.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return read
