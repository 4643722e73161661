"""Megatron-Core on the CPU in the same layout: its tensor parallelism, 1F1B, data-parallel wrapper and distributed optimizer.

Through the patches of `launch/verify/oracles/megatron_cpu.py`. What it asks of a GPU for speed (Transformer Engine, fused kernels,
apex) is not there: this is its plain PyTorch code, as ours is.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.numerics.precision import DTYPES
from triaxis.launch.verify.oracles.megatron_core import constant_schedule, distributed_optimizer, gpt_model
from triaxis.launch.verify.oracles.megatron_cpu import on_cpu
from triaxis.models.interop.megatron.weights import parameters

_LAYERS = "decoder.layers."


class MegatronSteps:
    """Steps of Megatron-Core: its schedule over microbatches, its optimizer, its learning rate's schedule.

    Args:
        config: of the run.
        wrapped: the model in its data-parallel wrapper.
        optimizer: of it.
        mask: of attention, True where nothing is seen; None: attention is causal by itself.
    """

    def __init__(self, config: Config, wrapped: Any, optimizer: Any, mask: torch.Tensor | None) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.optimizer = optimizer
        self._config, self._wrapped, self._mask = config, wrapped, mask
        self._scheduler = constant_schedule(optimizer, config.optimizer)
        wrapped.module.config.finalize_model_grads_func = finalize_model_grads
        self._forward_backward = get_forward_backward_func()

    def step(self, microbatches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Run one optimizer step; return the mean loss of each microbatch on the last stage, nothing on the others."""
        losses = self.forward_backward(microbatches)
        self.update()
        return losses

    def forward_backward(self, microbatches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        self._wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._forward_backward(
            forward_step_func=self._forward,
            data_iterator=iter(microbatches),
            model=[self._wrapped],
            num_microbatches=len(microbatches),
            seq_length=self._config.model.seq_length,
            micro_batch_size=self._config.train.micro_batch_size,
            forward_only=False,
        )
        return [loss["loss"] for loss in losses]

    def update(self) -> None:
        self.optimizer.step()
        self._scheduler.step(increment=1)

    def _forward(self, microbatches: Iterator[MicroBatch], gpt: Any) -> tuple[torch.Tensor, Any]:
        microbatch = next(microbatches)
        output = gpt(microbatch.tokens, microbatch.position_ids, self._mask, labels=microbatch.labels)
        return output, _mean_loss


def causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """Build the mask of local attention, bool [1, 1, s, s]."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]


class MegatronPeer:
    """One rank's training in the given layout, from the given weights; every rank of the world makes one.

    Its groups are globals of the process: one that was made before is good for nothing afterwards.

    Args:
        config: a Llama in fp32 or bf16, untied.
        sizes: of the axes, vpp = 1. Without sequence parallelism: its norms of plain PyTorch refuse it.
        weights: the whole model's, by the names of `models/specs.py`.
    """

    def __init__(self, config: Config, sizes: ParallelSizes, weights: Mapping[str, torch.Tensor]) -> None:
        assert sizes.vpp == 1, "its interleaved schedule was not tried"
        self.config, self.sizes = config, sizes
        model = config.model
        from megatron.core import parallel_state

        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        with on_cpu(sizes.tp, sizes.pp):
            dtype = DTYPES[config.precision.dtype]
            gpt = gpt_model(model, dtype, rows=model.vocab_size)
            first_layer = parallel_state.get_pipeline_model_parallel_rank() * (model.num_layers // sizes.pp)
            self._load(gpt, weights, first_layer, parallel_state.get_tensor_model_parallel_rank())
            wrapped, optimizer = distributed_optimizer(gpt, config.optimizer)
            mask = causal_mask(model.seq_length, torch.device("cpu"))
            self._steps = MegatronSteps(config, wrapped, optimizer, mask)
        make_on_cpu()

    def _load(self, gpt: Any, weights: Mapping[str, torch.Tensor], first_layer: int, tp_rank: int) -> None:
        """Load this rank's part of each weight. Their stages number their own layers from zero."""
        named = {_globally(name, first_layer): parameter for name, parameter in gpt.named_parameters()}
        for one in parameters(self.config.model):
            names = [name for name in named if one.layer is None or name.startswith(f"{_LAYERS}{one.layer[0]}.")]
            try:
                key = one.key_among(names)
            except StopIteration:
                continue  # of another stage
            whole = one.to_theirs([weights[name] for name, _ in one.ours])
            parameter = named[key]
            if getattr(parameter, "tensor_model_parallel", False):
                # A gate and its up are cut each, and stand one on the other on every rank.
                members = whole.chunk(2) if one.short == "mlp.gate_up.weight" else [whole]
                dim = parameter.partition_dim
                whole = torch.cat([member.chunk(self.sizes.tp, dim)[tp_rank] for member in members])
            with torch.no_grad():
                parameter.copy_(whole)

    def step(self, microbatches: Sequence[MicroBatch]) -> float:
        """Run one optimizer step on this data-parallel rank's microbatches; return the loss per token."""
        losses = self._steps.step(microbatches)
        total = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(total)
        return float(total) / (self.sizes.tp * self.sizes.dp)


class _Torch:
    """The torch module for Megatron-Core's: what it makes on CUDA is made on the CPU."""

    def __init__(self) -> None:
        for name in ("zeros", "ones", "empty", "full", "tensor"):
            setattr(self, name, partial(_on_cpu, getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def make_on_cpu() -> None:
    """For steps: `on_cpu` would look at each of torch's calls, which takes time that is not Megatron-Core's."""
    stand_in = _Torch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = stand_in  # type: ignore[attr-defined]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _on_cpu(make: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    if str(kwargs.get("device", "cpu")).startswith("cuda"):
        kwargs["device"] = "cpu"
    return make(*args, **kwargs)


def _mean_loss(token_losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = token_losses.float().mean()
    return loss, {"loss": loss.detach().clone()}  # its schedule divides the loss in place


def _globally(name: str, first_layer: int) -> str:
    if not name.startswith(_LAYERS):
        return name
    number, rest = name.removeprefix(_LAYERS).split(".", 1)
    return f"{_LAYERS}{int(number) + first_layer}.{rest}"
