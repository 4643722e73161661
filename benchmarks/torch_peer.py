"""A PyTorch user's program for the same model and layout: DTensor for tp, FSDP2 for dp, torch.distributed.pipelining for pp.

    tp    parallelize_module: column- and row-wise linear layers, sequence parallelism around them, loss_parallel
    dp    fully_shard of each block and of the rest; parallel.zero says what stays whole between microbatches:
          1: parameters and gradients, reduced with the last one    2: parameters    3: neither
    pp    PipelineStage, Schedule1F1B, or with vpp > 1 ScheduleInterleaved1F1B

A Llama in fp32: RMSNorm, RoPE, SwiGLU, no biases, untied head. Activations are [b, s, h], as in all of torch's examples.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.plain_gpt import adamw, rotate, rotation
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes


class Attention(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        h, self.head_dim = model.hidden_size, model.head_size
        self.q = nn.Linear(h, model.num_attention_heads * self.head_dim, bias=False)
        self.k = nn.Linear(h, model.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(h, model.kv_heads * self.head_dim, bias=False)
        self.proj = nn.Linear(model.num_attention_heads * self.head_dim, h, bias=False)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (part(x).view(b, s, -1, self.head_dim).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotate(q, *rope), rotate(k, *rope)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return cast(torch.Tensor, self.proj(mixed.transpose(1, 2).reshape(b, s, -1)))


class MLP(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.up = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.down = nn.Linear(model.ffn_size, model.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.attention = Attention(model)
        self.mlp_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.mlp = MLP(model)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        return x + cast(torch.Tensor, self.mlp(self.mlp_norm(x)))


class Stage(nn.Module):
    """The layers of one stage; ids int64 [b, s] into the first, logits [b, s, V] out of the last."""

    def __init__(self, model: ModelConfig, layers: Sequence[int], first: bool, last: bool) -> None:
        super().__init__()
        self.model = model
        self.word = nn.Embedding(model.padded_vocab_size, model.hidden_size) if first else None
        self.layers = nn.ModuleDict({str(layer): Block(model) for layer in layers})
        self.final_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps) if last else None
        self.head = nn.Linear(model.hidden_size, model.padded_vocab_size, bias=False) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.word is not None:
            x = self.word(x)
        positions = torch.arange(self.model.seq_length).unsqueeze(0)
        rope = rotation(positions, self.model, x.dtype)
        for block in self.layers.values():
            x = block(x, rope)
        if self.final_norm is not None and self.head is not None:
            x = self.head(self.final_norm(x))
        return x


class TorchPeer:
    """One rank's training in the given layout, from the given weights; every rank of the world makes one.

    Args:
        config: a Llama in fp32.
        sizes: of the axes; tp > 1 means sequence parallelism too.
        weights: the whole model's, by the names of `models/specs.py`.
    """

    def __init__(self, config: Config, sizes: ParallelSizes, weights: Mapping[str, torch.Tensor]) -> None:
        self.config, self.sizes = config, sizes
        self.mesh = init_device_mesh("cpu", (sizes.pp, sizes.dp, sizes.tp), mesh_dim_names=("pp", "dp", "tp"))
        pp_rank = self.mesh.get_local_rank("pp")
        num_stages, layers = sizes.pp * sizes.vpp, config.model.num_layers
        assert layers % num_stages == 0, (
            f"{layers} layers over {num_stages} stages: torch's user would cut them evenly too"
        )
        per_stage = layers // num_stages
        self.stages = []
        for number in range(pp_rank, num_stages, sizes.pp):
            first, last = number == 0, number == num_stages - 1
            stage = Stage(config.model, range(number * per_stage, (number + 1) * per_stage), first, last)
            load(stage, weights)
            self.stages.append(self._parallel(stage))
        self.parameters = [parameter for stage in self.stages for parameter in stage.parameters()]
        self.optimizer = adamw(self.parameters, config.optimizer)
        self.schedule: Any = None
        if sizes.pp > 1:
            wrapped = [
                PipelineStage(stage, number, num_stages, torch.device("cpu"), group=self.mesh.get_group("pp"))
                for number, stage in zip(range(pp_rank, num_stages, sizes.pp), self.stages, strict=True)
            ]
            count = config.train.global_batch_size // config.train.micro_batch_size // sizes.dp
            make: Callable[..., Any] = Schedule1F1B if sizes.vpp == 1 else ScheduleInterleaved1F1B
            given = wrapped[0] if sizes.vpp == 1 else wrapped
            self.schedule = make(given, n_microbatches=count, loss_fn=self._loss, scale_grads=False)
        self.is_first, self.is_last = pp_rank == 0, pp_rank == sizes.pp - 1

    def _parallel(self, stage: Stage) -> Stage:
        if self.sizes.tp > 1:
            apply_tensor_parallel(stage, self.mesh["tp"])
        if self.sizes.dp > 1:
            for part in [*stage.layers.values(), stage]:
                # torch's own default for the outermost module: its parameters stay whole until the backward.
                reshard = self.config.parallel.zero == 3 and part is not stage
                fully_shard(part, mesh=self.mesh["dp"], reshard_after_forward=reshard)
                cast(FSDPModule, part).set_gradient_divide_factor(1.0)
                cast(FSDPModule, part).set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        return stage

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        tokens = self.config.train.global_batch_size * self.config.model.seq_length
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens

    def step(self, tokens: torch.Tensor, labels: torch.Tensor, lr: float) -> float:
        """One optimizer step on this data-parallel rank's samples, int64 [samples, s]; returns the loss per token."""
        with loss_parallel() if self.sizes.tp > 1 else nullcontext():
            losses = self._pipelined(tokens, labels) if self.schedule is not None else self._plain(tokens, labels)
        loss = torch.stack([part.detach() for part in losses]).sum() if losses else torch.zeros(())
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        dist.all_reduce(loss)
        self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss) / self.sizes.tp

    def _plain(self, tokens: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        (stage,) = self.stages
        losses = []
        size = self.config.train.micro_batch_size
        parts = list(zip(tokens.split(size), labels.split(size), strict=True))
        for number, (ids, targets) in enumerate(parts):
            if self.sizes.dp > 1:
                is_last, zero = number == len(parts) - 1, self.config.parallel.zero
                cast(FSDPModule, stage).set_requires_gradient_sync(is_last or zero > 1)
                cast(FSDPModule, stage).set_reshard_after_backward(is_last or zero > 2)
            loss = self._loss(stage(ids), targets)
            loss.backward()
            losses.append(loss)
        return losses

    def _pipelined(self, tokens: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        inputs = (tokens,) if self.is_first else ()
        if self.is_last:
            self.schedule.step(*inputs, target=labels, losses=losses)
        else:
            self.schedule.step(*inputs)
        return losses

    def _clip(self) -> None:
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        total = torch.nn.utils.get_total_norm(grads)
        if isinstance(total, DTensor):
            total = total.full_tensor()
        if self.sizes.pp > 1:
            square = total**2
            dist.all_reduce(square, group=self.mesh.get_group("pp"))
            total = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.optimizer.clip_grad or torch.inf, total)


def apply_tensor_parallel(stage: Stage, mesh: DeviceMesh) -> None:
    """torch's own recipe for a Llama with sequence parallelism."""
    if stage.word is not None:
        parallelize_module(stage.word, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)))
    if stage.final_norm is not None and stage.head is not None:
        parallelize_module(stage.final_norm, mesh, SequenceParallel())
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(stage.head, mesh, head)
    for block in stage.layers.values():
        gather_x = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        gather = {"input_layouts": (Shard(1), None), "desired_input_layouts": (Replicate(), None)}
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(**gather),
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.proj": RowwiseParallel(output_layouts=Shard(1)),
            "mlp_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(**gather_x),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)


@torch.no_grad()
def load(stage: Stage, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy our weights into a stage that is not parallel yet; the vocabulary needs no padding."""
    for name, parameter in stage.named_parameters():
        if name == "word.weight":
            value = weights["embedding.word.weight"]
        elif name.endswith((".k.weight", ".v.weight")):
            layer = name.split(".")[1]
            value = weights[f"layers.{layer}.attention.kv.weight"][0 if ".k." in name else 1]
        elif name.endswith((".gate.weight", "mlp.up.weight")):
            layer = name.split(".")[1]
            value = weights[f"layers.{layer}.mlp.gate_up.weight"][0 if ".gate." in name else 1]
        else:
            value = weights[name.replace("attention_norm", "attention.norm").replace("mlp_norm", "mlp.norm")]
        parameter.copy_(value.reshape(parameter.shape))
