"""torch's own parallelism around the layers of Hugging Face's Llama: DTensor for tp, FSDP2 for dp, pipelining's 1F1B for pp.

    triaxis verify configs/llama3_8b.yaml --subject examples/subjects/torch_fsdp2.py

The sequence is cut between the linear layers of tp. It needs torch >= 2.11 and transformers >= 5.
"""

import logging

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as cuts
from transformers import AutoConfig
from transformers.models.llama import modeling_llama
from triaxis_subject import Job

AXES = ("tp", "pp", "dp")

job = Job()
dist.init_process_group("gloo")
torch.set_default_dtype(job.dtype)
logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # a sum over two axes is two messages, it warns
axes = ("pp", "dp", "tp")
mesh = init_device_mesh("cpu", tuple(job.layout[axis] for axis in axes), mesh_dim_names=axes)
at = {axis: mesh.get_local_rank(axis) for axis in AXES}
assert job.model["model_type"] == "llama" and not job.model.get("rope_scaling"), "this adapter builds a plain Llama"
modeling_llama.LlamaRMSNorm = nn.RMSNorm  # theirs computes in fp32, whatever the dtype

BLOCK = {
    "input_layernorm": cuts.SequenceParallel(),
    "self_attn": cuts.PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    ),
    **{f"self_attn.{name}_proj": cuts.ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": cuts.RowwiseParallel(output_layouts=Shard(1)),
    "post_attention_layernorm": cuts.SequenceParallel(),
    "mlp": cuts.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "mlp.gate_proj": cuts.ColwiseParallel(),
    "mlp.up_proj": cuts.ColwiseParallel(),
    "mlp.down_proj": cuts.RowwiseParallel(output_layouts=Shard(1)),
}
ENDS = {
    "model.embed_tokens": cuts.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "model.norm": cuts.SequenceParallel(),
    "lm_head": cuts.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


def frequencies():
    """RoPE's; theirs are of fp32, too."""
    d = job.model["head_dim"]
    return job.model["rope_theta"] ** -(torch.arange(0, d, 2) / d)


class Stage(nn.Module):
    """This stage's layers, by their names in the whole model."""

    def __init__(self, seq_length):
        super().__init__()
        gpt = modeling_llama.LlamaForCausalLM(AutoConfig.for_model(**job.model))
        gpt.load_state_dict(job.weights())
        count = len(gpt.model.layers) // job.layout["pp"]
        mine = range(at["pp"] * count, (at["pp"] + 1) * count)
        self.model, self.lm_head = gpt.model, gpt.lm_head
        self.model.layers = nn.ModuleDict({str(i): gpt.model.layers[i] for i in mine})
        self.angles = torch.arange(seq_length).outer(frequencies()).repeat(1, 2).unsqueeze(0)
        if at["pp"] > 0:
            self.model.embed_tokens = nn.Identity()
        if at["pp"] < job.layout["pp"] - 1:
            self.model.norm, self.lm_head = nn.Identity(), nn.Identity()

    def forward(self, x):
        x = self.model.embed_tokens(x)
        rope = self.angles.cos(), self.angles.sin()
        for layer in self.model.layers.values():
            x = layer(x, position_embeddings=rope)
        return self.lm_head(self.model.norm(x))


def whole(tensors):
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in tensors.items()}


def mine(step):
    """This dp rank's tokens, and its labels where they count."""
    own = job.microbatches(step)[at["dp"] :: job.layout["dp"]]
    labels = torch.cat([one.labels.masked_fill(~one.counted, -100) for one in own])
    return torch.cat([one.tokens for one in own]), labels, len(own)


tokens, _, num_microbatches = mine(0)
stage = Stage(tokens.shape[1])
ends = {name: style for name, style in ENDS.items() if not isinstance(stage.get_submodule(name), nn.Identity)}
cuts.parallelize_module(stage, mesh["tp"], ends)
for layer in stage.model.layers.values():
    cuts.parallelize_module(layer, mesh["tp"], BLOCK)
    fully_shard(layer, mesh=mesh["dp"])
fully_shard(stage, mesh=mesh["dp"])
for part in [*stage.model.layers.values(), stage]:
    part.set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of the global batch
    part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
weights = dict(stage.named_parameters())
optimizer = job.adamw(weights)
schedule = Schedule1F1B(
    PipelineStage(stage, at["pp"], job.layout["pp"], torch.device("cpu"), group=mesh.get_group("pp")),
    n_microbatches=num_microbatches,
    loss_fn=lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted,
    scale_grads=False,
)
for step in range(job.num_steps):
    counted = job.num_counted(step)
    tokens, labels, _ = mine(step)
    losses = []
    with cuts.loss_parallel():
        inputs = (tokens,) if at["pp"] == 0 else ()
        schedule.step(*inputs, target=labels, losses=losses)
    loss = sum((one.detach() for one in whole(dict(enumerate(losses))).values()), torch.zeros(()))
    job.gradients(step, whole({name: weight.grad for name, weight in weights.items()}))
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights.values()])
    square = whole({"": norm})[""] ** 2
    dist.all_reduce(loss, group=mesh.get_group("dp"))
    dist.all_reduce(loss, group=mesh.get_group("pp"))
    dist.all_reduce(square, group=mesh.get_group("pp"))
    torch.nn.utils.clip_grads_with_norm_(weights.values(), job.optimizer["max_norm"], square.sqrt())
    optimizer.step()
    optimizer.zero_grad()
    job.done(step, loss, square.sqrt(), whole(weights))
job.close(**at)
