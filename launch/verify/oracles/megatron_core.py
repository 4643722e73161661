"""Run Megatron-Core's GPTModel as an oracle.

The model has Megatron-Core's data-parallel wrapper, distributed optimizer and scheduler.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.layout.shard_spec import ParamSpec
from triaxis.engine.numerics.precision import DTYPES
from triaxis.launch.verify.verdict.records import TensorKind
from triaxis.models.interop.megatron.config import megatron_args
from triaxis.models.interop.megatron.weights import Parameter, parameters
from triaxis.models.specs import model_specs


@dataclass(frozen=True, slots=True)
class MegatronPair:
    """A `model.Pair` of one Megatron-Core parameter and our parameters with the same numbers."""

    parameter: Parameter
    ours: tuple[ParamSpec, ...]
    theirs: tuple[str]

    def to_theirs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self.parameter.to_theirs(tensors)]

    def to_ours(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.parameter.to_ours(tensors[0].reshape(self.parameter.shape))


class MegatronCore:
    """A `model.Oracle` that is usable only inside `megatron_cpu.on_cpu`."""

    def __init__(self, config: Config) -> None:
        self._gpt = gpt_model(config.model, DTYPES[config.precision.dtype], rows=config.model.vocab_size)
        self._named: dict[str, Any] = dict(self._gpt.named_parameters())
        specs = {spec.name: spec for spec in model_specs(config.model)}
        self.pairs = [
            MegatronPair(one, tuple(specs[name] for name, _ in one.ours), (one.key_among(self._named),))
            for one in parameters(config.model)
        ]
        length = config.model.seq_length
        self._mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        # The wrapper's buffers take over the weights, and the optimizer finds them by their place there.
        self._wrapped, self._optimizer = distributed_optimizer(self._gpt, config.optimizer)
        (self._inner,) = self._optimizer.chained_optimizers
        self._scheduler = constant_schedule(self._optimizer, config.optimizer)

    def parameter(self, name: str) -> torch.Tensor:
        return self._named[name]

    def begin_step(self) -> None:
        self._wrapped.zero_grad_buffer()
        self._optimizer.zero_grad()

    def token_losses(self, microbatch: MicroBatch) -> torch.Tensor:
        mask = self._mask
        if microbatch.documents is not None:
            # Megatron's `--reset-attention-mask` masks in the same way.
            numbers = microbatch.documents.numbers
            mask = mask | (numbers[:, None, :, None] != numbers[:, None, None, :])
        losses: torch.Tensor = self._wrapped(microbatch.tokens, microbatch.position_ids, mask, labels=microbatch.labels)
        return losses

    def end_backward(self) -> None:
        self._wrapped.finish_grad_sync()

    def gradient(self, name: str) -> torch.Tensor:
        return self._named[name].main_grad

    def update(self) -> float:
        _, grad_norm, _ = self._optimizer.step()
        self._scheduler.step(increment=1)
        return float(grad_norm)

    def state(self, kind: TensorKind, name: str) -> torch.Tensor:
        group, place = self._inner.model_param_group_index_map[self._named[name]]
        main: torch.Tensor = self._inner.optimizer.param_groups[group]["params"][place]
        return main if kind == "master" else self._inner.optimizer.state[main][kind]


def gpt_model(model: ModelConfig, dtype: torch.dtype, *, rows: int, parallel_output: bool = True) -> Any:
    """Build this rank's part of a GPTModel, initialized by Megatron-Core.

    Args:
        rows: rows of the vocabulary table, padding included.
        parallel_output: keep logits sharded over tp, as Megatron's loss expects them.
    """
    from megatron.core import parallel_state
    from megatron.core.activations import squared_relu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.utils import openai_gelu

    args, functional = megatron_args(model), torch.nn.functional
    functions = {"gelu": functional.gelu, "gelu_tanh": openai_gelu, "silu": functional.silu, "relu2": squared_relu}
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_size,
        ffn_hidden_size=model.ffn_size,
        normalization=model.norm_kind.megatron,
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=model.activation_kind.is_gated,
        activation_func=functions[model.activation_kind.pointwise],
        bias_activation_fusion=False,
        add_bias_linear=model.bias == "all",
        add_qkv_bias=model.bias == "qkv",
        qk_layernorm=bool(model.qk_norm),
        **{
            name: args[name]
            for name in ("softmax_scale", "softmax_type", "window_size", "window_attn_skip_freq", "no_rope_freq")
        },
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=bool(model.qk_norm), normalization=model.norm_kind.megatron),
        vocab_size=rows,
        max_sequence_length=model.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type=model.position_kind.megatron,
        rotary_base=args["rotary_base"],  # annotated int, used as a float
        rotary_percent=args["rotary_percent"],
        seq_len_interpolation_factor=args["rotary_seq_len_interpolation_factor"],
        rope_scaling=args["use_rope_scaling"],
        rope_scaling_factor=args["rope_scaling_factor"],
        parallel_output=parallel_output,
    ).to(dtype)


def distributed_optimizer(gpt: Any, config: OptimizerConfig) -> tuple[Any, Any]:
    """Build Megatron-Core's data-parallel wrapper and distributed AdamW.

    Decay becomes active when the scheduler first steps.

    Returns:
        (wrapped model, optimizer).
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig as TheirConfig
    from megatron.core.optimizer import get_megatron_optimizer

    wrapped = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt)
    settings = TheirConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad or 0.0,
        bf16=gpt.config.bf16,
        use_distributed_optimizer=True,
    )
    return wrapped, get_megatron_optimizer(settings, [wrapped])


def constant_schedule(optimizer: Any, config: OptimizerConfig) -> Any:
    """Build Megatron-Core's scheduler with a constant learning rate and decay."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr,
        max_lr=config.lr,
        min_lr=config.lr,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        lr_decay_style="constant",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
