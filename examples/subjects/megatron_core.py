"""Megatron-Core's GPTModel in tensor, sequence and pipeline parallel, with its data-parallel wrapper and distributed optimizer.

    triaxis verify configs/llama3_8b.yaml --subject examples/subjects/megatron_core.py

A Llama, tied or not. It needs megatron-core 0.16, or a fork of it on PYTHONPATH. Two modules of triaxis replace its calls to CUDA,
and make float64 where it asks for fp32.
"""

from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch.nn import functional
from triaxis_subject import Job, gathered

from triaxis.launch.verify.oracles.in_float64 import InFloat64
from triaxis.launch.verify.oracles.megatron_cpu import on_cpu

AXES = ("tp", "pp", "dp")

job = Job()
tp, pp, dp = (job.layout[axis] for axis in AXES)
dist.init_process_group("gloo")
patches = ExitStack()
if job.dtype == torch.float64:
    patches.enter_context(InFloat64())
patches.enter_context(on_cpu(tp, pp))

from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

group = {"tp": mpu.get_tensor_model_parallel_group(), "pp": mpu.get_pipeline_model_parallel_group()}
group["dp"] = mpu.get_data_parallel_group()
at = {axis: dist.get_rank(group[axis]) for axis in AXES}
model, settings = job.model, job.optimizer
assert model["model_type"] == "llama" and not model.get("rope_scaling"), "this adapter builds a plain Llama"
h, heads, kv_heads, is_tied = (
    model[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "tie_word_embeddings")
)
first_layer = at["pp"] * (per_stage := model["num_hidden_layers"] // pp)
b, s = job.microbatches(0)[0].tokens.shape
PARTS = {  # its weights: the parts by Hugging Face's names, and the dimension that tp cuts
    "embedding.word_embeddings": (["model.embed_tokens"], 0),
    "input_layernorm": (["input_layernorm"], None),
    "self_attention.linear_qkv": (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], 0),
    "self_attention.linear_proj": (["self_attn.o_proj"], 1),
    "pre_mlp_layernorm": (["post_attention_layernorm"], None),
    "mlp.linear_fc1": (["mlp.gate_proj", "mlp.up_proj"], 0),
    "mlp.linear_fc2": (["mlp.down_proj"], 1),
    "decoder.final_layernorm": (["model.norm"], None),
    "output_layer": (["model.embed_tokens" if is_tied else "lm_head"], 0),
}


class Norm(torch.nn.RMSNorm):
    """In place of its own in plain torch, which refuses sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


def parts_of(name):
    """Hugging Face's names of a weight, and the dimension that is cut; a stage numbers its layers from zero."""
    prefix, short = "", name.removesuffix(".weight")
    if short.startswith("decoder.layers."):
        number, short = short.removeprefix("decoder.layers.").split(".", 1)
        prefix = f"model.layers.{int(number) + first_layer}."
    parts, dim = PARTS[short]
    return [f"{prefix}{part}.weight" for part in parts], dim


def joined(name, parts):
    """One weight of this rank's parts: q, k and v group by group, the gate above up."""
    if "linear_qkv" in name:
        return torch.cat([part.reshape(kv_heads // tp, -1, h) for part in parts], 1).flatten(0, 1)
    return torch.cat(parts)


def split(name, tensor):
    """The inverse of `joined`."""
    if "linear_qkv" in name:
        d = h // heads
        return [part.flatten(0, 1) for part in tensor.view(kv_heads // tp, -1, h).tensor_split((-2 * d, -d), 1)]
    return tensor.chunk(len(parts_of(name)[0]))


def whole(read):
    """Weights or gradients of this stage by Hugging Face's names."""
    found = {}
    for name, weight in gpt.named_parameters():
        names, dim = parts_of(name)
        for part, tensor in zip(names, split(name, read(weight)), strict=True):
            found[part] = tensor if dim is None else gathered(tensor, dim, group["tp"])
    return found


def forward(microbatches, gpt):
    one = next(microbatches)
    mask = torch.ones(s, s, dtype=torch.bool).triu(1)[None, None]

    def loss(losses):
        total = (losses * one.counted).sum()
        return total, one.counted.sum().int(), {"loss": total.detach().clone()}

    return gpt(one.tokens, torch.arange(s).expand(b, s), mask, labels=one.labels), loss


told = {"num_layers": model["num_hidden_layers"], "hidden_size": h, "ffn_hidden_size": model["intermediate_size"]}
told |= {
    "num_attention_heads": heads,
    "num_query_groups": kv_heads,
    "gated_linear_unit": True,
    "add_bias_linear": False,
}
told |= {"normalization": "RMSNorm", "layernorm_epsilon": model["rms_norm_eps"], "activation_func": functional.silu}
told |= {"bias_activation_fusion": False, "hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": job.dtype}
told |= {"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1, "pipeline_model_parallel_size": pp}
told |= {"pipeline_dtype": job.dtype, "batch_p2p_comm": False, "use_cpu_initialization": True}
told |= {"calculate_per_token_loss": True}  # the schedule divides gradients by the counted labels of the global batch
config = TransformerConfig(**told, finalize_model_grads_func=finalize_model_grads)
layer = get_gpt_layer_local_spec(normalization="RMSNorm")
layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
told = {"pre_process": mpu.is_pipeline_first_stage(), "post_process": mpu.is_pipeline_last_stage()}
told |= {"vocab_size": model["vocab_size"], "max_sequence_length": s, "share_embeddings_and_output_weights": is_tied}
told |= {"position_embedding_type": "rope", "rotary_base": model["rope_theta"]}
gpt = GPTModel(config, TransformerBlockSubmodules([layer] * per_stage, Norm), **told).to(job.dtype)
weights = job.weights()
with torch.no_grad():
    for name, weight in gpt.named_parameters():
        names, dim = parts_of(name)
        parts = [weights[part] if dim is None else weights[part].chunk(tp, dim)[at["tp"]] for part in names]
        weight.copy_(joined(name, parts))
wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt)
told = {"lr": settings["lr"], "weight_decay": settings["weight_decay"], "clip_grad": settings["max_norm"]}
told |= {"adam_beta1": settings["betas"][0], "adam_beta2": settings["betas"][1], "adam_eps": settings["eps"]}
optimizer = get_megatron_optimizer(OptimizerConfig(use_distributed_optimizer=True, **told), [wrapped])
for one in optimizer.param_groups:
    one["weight_decay"] = settings["weight_decay"] * one["wd_mult"]  # as its scheduler does
for step in range(job.num_steps):
    mine = job.microbatches(step)[at["dp"] :: dp]
    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    told = {"num_microbatches": len(mine), "micro_batch_size": b, "seq_length": s, "forward_only": False}
    run = get_forward_backward_func()
    losses = run(forward_step_func=forward, data_iterator=iter(mine), model=[wrapped], **told)
    loss = sum((one["loss"] for one in losses), torch.zeros((), dtype=job.dtype))
    dist.all_reduce(loss, group=group["pp"])
    dist.all_reduce(loss, group=group["dp"])
    for bucket in (bucket for buffer in wrapped.buffers for bucket in buffer.buckets):
        # Each dp rank has summed the part that it owns.
        bucket.grad_data.copy_(gathered(bucket.grad_data.chunk(dp)[at["dp"]], 0, group["dp"]))
    job.gradients(step, whole(lambda weight: weight.main_grad))
    _, norm, _ = optimizer.step()
    job.done(step, loss / job.num_counted(step), norm, whole(lambda weight: weight))
patches.close()
job.close(**at)
