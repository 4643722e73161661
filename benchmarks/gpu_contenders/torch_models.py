"""Contenders in plain PyTorch: another library's model, autograd, fused AdamW, a loop as a good engineer would write it.

    masters      bf16 weights; each microbatch's gradients go to fp32 ones at once; AdamW on fp32 masters, copied back
    autocast     fp32 weights, their own masters; autograd casts them for each microbatch and adds fp32 gradients up
    FP8          torchao's linear layers, as torchtitan's recipe has them: one scale per tensor, all but the head

The vocabulary is padded as ours is. Attention is torch's, cuDNN's kernel first on CUDA: the fastest on Hopper.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_contenders.records import Job, Run
from benchmarks.gpu_contenders.shapes import resolve, write_config
from benchmarks.gpu_contenders.timed_loop import peak_memory_bytes, train, write_corpus
from benchmarks.plain_gpt import PlainGPT, Weights
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.numerics.precision import DTYPES, accumulation_dtype

HEADS = ("head", "output")
"""Names of the models' last linear layers, which stay in bf16, as ours does."""

LossOf = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens, labels, position ids), int64 [b, s] each -> the mean loss of a microbatch."""

ATTENTION_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


@dataclass(frozen=True, slots=True)
class Form:
    """How a model runs: under torch.compile, with FP8 linear layers."""

    compiled: bool = False
    fp8: bool = False


def run(job: Job, folder: Path, *, model: str, masters: bool, compiled: bool, fp8: bool = False) -> Run:
    """Train `model`: plain, transformers or torchtitan."""
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
    dtype = DTYPES[job.dtype]
    torch.manual_seed(1)
    with torch.device(device):
        module, loss_of = MODELS[model](padded(config.model), Form(compiled, fp8))
    held = dtype if masters else accumulation_dtype(dtype)
    for parameter in module.parameters():
        # Not `module.to`: it would cut the imaginary part off a complex table of rotations.
        parameter.data = parameter.data.to(held)
    order = sdpa_kernel(ATTENTION_ORDER, set_priority=True) if device.type == "cuda" else nullcontext()
    with order:
        trainer = TorchTrainer(module, loss_of, config, None if held == dtype else dtype)
        seconds, losses = train(trainer, config, job, folder)
    return Run(
        step_seconds=seconds,
        first_loss=losses[0],
        last_loss=losses[-1],
        peak_memory_bytes=peak_memory_bytes(device),
        recompute=RecomputeConfig(),
        settings={
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "weights": str(held).removeprefix("torch."),
            "masters": str(accumulation_dtype(dtype)).removeprefix("torch."),
            "compiled": compiled,
            "fp8_linears": sum(type(one).__name__ == "Float8Linear" for one in module.modules()),
            "attention": "torch's, cuDNN first" if device.type == "cuda" else "torch's",
        },
    )


def padded(model: ModelConfig) -> ModelConfig:
    """Pad the vocabulary of the model."""
    return model.model_copy(update={"vocab_size": model.padded_vocab_size})


def with_fp8(module: nn.Module, form: Form) -> nn.Module:
    """Put torchao's linear layers into a model in place, before it is compiled; nothing where the form has no FP8."""
    if form.fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            module,
            config=Float8LinearConfig(),  # one scale per tensor, from the tensor itself; gradients in e5m2
            module_filter_fn=lambda _, name: name.rpartition(".")[2] not in HEADS,
        )
    return module


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the cross-entropy of logits [b, s, V] in the accumulation dtype."""
    wide = logits.flatten(0, 1).to(accumulation_dtype(logits.dtype))
    return F.cross_entropy(wide, labels.flatten())


def plain(model: ModelConfig, form: Form) -> tuple[nn.Module, LossOf]:
    module = with_fp8(PlainGPT(model), form)
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=model.init_std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)

    def loss_of(tokens: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return mean_loss(module(tokens, position_ids), labels)

    return module, torch.compile(loss_of, dynamic=False) if form.compiled else loss_of


def transformers_model(model: ModelConfig, form: Form) -> tuple[nn.Module, LossOf]:
    """Build a Llama for RoPE, GPT-2 for learned positions."""
    assert not form.fp8, "no contender has this model in FP8"
    import transformers

    shared: dict[str, Any] = {"vocab_size": model.vocab_size, "use_cache": False, "attn_implementation": "sdpa"}
    module: nn.Module
    if model.position == "rope":
        module = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **shared,
                hidden_size=model.hidden_size,
                intermediate_size=model.ffn_size,
                num_hidden_layers=model.num_layers,
                num_attention_heads=model.num_attention_heads,
                num_key_value_heads=model.kv_heads,
                max_position_embeddings=model.seq_length,
                rms_norm_eps=model.norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": model.rope_base},
                tie_word_embeddings=model.tie_embeddings,
            )
        )
    else:
        module = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                **shared,
                n_embd=model.hidden_size,
                n_layer=model.num_layers,
                n_head=model.num_attention_heads,
                n_positions=model.seq_length,
                n_inner=model.ffn_size,
                activation_function="gelu_new",
                layer_norm_epsilon=model.norm_eps,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
    module.train()

    def loss_of(tokens: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        # Given positions it would look for packed documents and make a mask, with which fused causal attention is not taken.
        return mean_loss(module(input_ids=tokens).logits, labels)

    return module, torch.compile(loss_of, dynamic=False) if form.compiled else loss_of


def torchtitan_model(model: ModelConfig, form: Form) -> tuple[nn.Module, LossOf]:
    """Build torchtitan's Llama 3 (0.2), each block compiled by itself as its `apply_compile` does."""
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs

    module = Transformer(
        TransformerModelArgs(
            dim=model.hidden_size,
            n_layers=model.num_layers,
            n_heads=model.num_attention_heads,
            n_kv_heads=model.kv_heads,
            vocab_size=model.vocab_size,
            # It rounds 8/3 of the width, times the multiplier, up: less than the width that is wanted becomes that.
            multiple_of=model.ffn_size,
            ffn_dim_multiplier=0.9 * model.ffn_size / (8 * model.hidden_size / 3),
            norm_eps=model.norm_eps,
            rope_theta=model.rope_base,
            max_seq_len=model.seq_length,
        )
    )
    module.init_weights()
    with_fp8(module, form)
    loss = torch.compile(mean_loss, dynamic=False) if form.compiled else mean_loss
    if form.compiled:
        for name, block in module.layers.named_children():
            module.layers.register_module(name, torch.compile(block, fullgraph=True))

    def loss_of(tokens: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return loss(module(tokens), labels)

    return module, loss_of


MODELS: dict[str, Callable[[ModelConfig, Form], tuple[nn.Module, LossOf]]] = {
    "plain": plain,
    "transformers": transformers_model,
    "torchtitan": torchtitan_model,
}


class TorchTrainer:
    """A trainer (`timed_loop.Trainer`).

    Args:
        module: whose parameters are trained, in the dtype that they are held in.
        loss_of: of a microbatch.
        config: optimizer and clipping.
        autocast: the dtype to compute in; None: that of the parameters.
    """

    def __init__(self, module: nn.Module, loss_of: LossOf, config: Config, autocast: torch.dtype | None) -> None:
        self.loss_of, self.autocast_dtype = loss_of, autocast
        self.weights = Weights(module, config.optimizer)
        self.device_type = self.weights.parameters[0].device.type

    def step(self, microbatches: Sequence[MicroBatch]) -> torch.Tensor:
        """One optimizer step; every token counts."""
        total: torch.Tensor | None = None
        for microbatch in microbatches:
            with torch.autocast(self.device_type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
                loss = self.loss_of(microbatch.tokens, microbatch.labels, microbatch.position_ids)
            loss = loss / len(microbatches)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        self.weights.update(self.weights.options.lr)
        assert total is not None, "a step has a microbatch"
        return total
