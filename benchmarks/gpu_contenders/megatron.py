"""Megatron-Core's GPTModel on one rank: its data-parallel wrapper, its distributed optimizer, its schedule over microbatches.

    local layers         its own PyTorch code: attention unfused, whose probabilities are kept unless they are recomputed
    Transformer Engine   its fused layers, where the package is installed; in FP8 with one scale per tensor, but for the head

Its fusions by torch.compile are on, as in its own scripts. On a CPU it runs through the patches of
`launch/verify/oracles/megatron_cpu.py`, with them off.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.gpu_contenders.records import Job, Run
from benchmarks.gpu_contenders.shapes import resolve, write_config
from benchmarks.gpu_contenders.timed_loop import peak_memory_bytes, train, write_corpus
from benchmarks.megatron_peer import MegatronSteps, causal_mask, make_on_cpu
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.numerics.precision import DTYPES
from triaxis.launch.verify.oracles.megatron_cpu import on_cpu


def run(job: Job, folder: Path, *, transformer_engine: bool, selective: bool, fp8: bool = False) -> Run:
    """Train it."""
    device = torch.device(job.device)
    path = write_config(
        folder,
        job.sizes,
        corpus=write_corpus(folder, job),
        micro_batch_size=job.micro_batch_size,
        num_steps=job.warm_up + job.steps + 1,
        dtype=job.dtype,
        device=job.device,
    )
    config = resolve(path, [])
    trainer = MegatronTrainer(config, device, transformer_engine=transformer_engine, selective=selective, fp8=fp8)
    seconds, losses = train(trainer, config, job, folder)
    return Run(
        step_seconds=seconds,
        first_loss=losses[0],
        last_loss=losses[-1],
        peak_memory_bytes=peak_memory_bytes(device),
        recompute=RecomputeConfig(granularity="selective" if selective else "none"),
        settings={
            "parameters": trainer.num_parameters,
            "layers": "Transformer Engine" if transformer_engine else "local",
            "optimizer": trainer.optimizer_name,
            "gradients": "fp32",
            "fp8": str(trainer.fp8_recipe) if fp8 else "",
        },
    )


class MegatronTrainer:
    """A trainer (`timed_loop.Trainer`). Its groups are globals of the process."""

    def __init__(
        self, config: Config, device: torch.device, *, transformer_engine: bool, selective: bool, fp8: bool
    ) -> None:
        with _groups(device):
            theirs = transformer_config(
                config, device, transformer_engine=transformer_engine, selective=selective, fp8=fp8
            )
            gpt = gpt_model(theirs, config, device, transformer_engine=transformer_engine)
            self.fp8_recipe = theirs.fp8_recipe
            self.num_parameters = sum(parameter.numel() for parameter in gpt.parameters())
            # Transformer Engine's attention is causal by itself; the local one hides what the mask says.
            mask = None if transformer_engine else causal_mask(config.model.seq_length, device)
            self._steps = MegatronSteps(config, *with_optimizer(gpt, config), mask)
        if device.type == "cpu":
            make_on_cpu()

    @property
    def optimizer_name(self) -> str:
        inner = self._steps.optimizer.chained_optimizers[0].optimizer
        return f"{type(inner).__module__}.{type(inner).__name__}"

    def step(self, microbatches: Sequence[MicroBatch]) -> torch.Tensor:
        """Run one optimizer step; every token counts."""
        return torch.stack(self._steps.step(microbatches)).mean()


def _groups(device: torch.device) -> AbstractContextManager[None]:
    """Create its groups of one rank; on a CPU with the patches that it needs there."""
    if device.type == "cpu":
        return on_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.cuda.set_device(torch.cuda.current_device())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    # Gloo's groups are for checkpoints, and want a host name that resolves.
    parallel_state.initialize_model_parallel(1, 1, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    return nullcontext()


def transformer_config(
    config: Config, device: torch.device, *, transformer_engine: bool, selective: bool, fp8: bool
) -> Any:
    """Return its `TransformerConfig` of a model."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.utils import openai_gelu

    model, dtype = config.model, DTYPES[config.precision.dtype]
    fused = device.type == "cuda"
    # Its fused GELU is the tanh form, and is asked for by the name of the other.
    activations: dict[str, Callable[..., torch.Tensor]] = {
        "gelu_tanh": F.gelu if fused else openai_gelu,
        "swiglu": F.silu,
    }
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_size,
        ffn_hidden_size=model.ffn_size,
        normalization={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm],
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=model.activation == "swiglu",
        activation_func=activations[model.activation],
        add_bias_linear=model.bias == "all",
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        cross_entropy_loss_fusion=fused,
        apply_rope_fusion=transformer_engine and model.position == "rope",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not fused,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=config.parallel.tp,
        recompute_granularity="selective" if selective else None,
        # Its names of e4m3 operands with gradients in e5m2, and of scales from the tensor itself.
        fp8="hybrid" if fp8 else None,
        fp8_recipe="tensorwise" if fp8 else "delayed",
    )


def gpt_model(
    theirs: Any, config: Config, device: torch.device, *, transformer_engine: bool, attention: type | None = None
) -> Any:
    """Build its model; `attention` replaces the attention of local layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    model = config.model
    spec = (
        specs.get_gpt_layer_with_transformer_engine_spec()
        if transformer_engine
        else specs.get_gpt_layer_local_spec(normalization=theirs.normalization)
    )
    if attention is not None:
        spec.submodules.self_attention.submodules.core_attention = attention
    return GPTModel(
        theirs,
        spec,
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.seq_length,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="learned_absolute" if model.position == "learned" else "rope",
        rotary_base=model.rope_base,  # it says int, and takes its powers
    ).to(device, theirs.params_dtype)


def with_optimizer(gpt: Any, config: Config) -> tuple[Any, Any]:
    """Return (the model in its data-parallel wrapper with fp32 gradients, its distributed Adam)."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(gpt.config, settings, gpt)
    options = config.optimizer
    adam = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.beta1,
        adam_beta2=options.beta2,
        adam_eps=options.eps,
        clip_grad=options.clip_grad or 0.0,
        bf16=gpt.config.bf16,
        use_distributed_optimizer=True,
    )
    return wrapped, get_megatron_optimizer(adam, [wrapped], use_gloo_process_groups=False)
