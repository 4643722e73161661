"""Bugs of the options of a transformer block, planted in ranks under verification (see `planted.py`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import triaxis.models.gpt.qk_norm
from tests.parity.cases import Case
from tests.verify.bug import Bug, anything, is_attention
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.kernels.norms import NormKernel
from triaxis.engine.step import Engine
from triaxis.engine.step_result import BatchLosses
from triaxis.engine.tensor_parallel.norm import Norm
from triaxis.engine.tensor_parallel.qk_norm import _local_squares
from triaxis.models.gpt.block import Block
from triaxis.models.gpt.chunk import GPTChunk
from triaxis.models.gpt.losses import TokenLosses


def later_stages_take_w_for_the_gain() -> None:
    init = GPTChunk.__init__

    def plain(self: GPTChunk, *args: Any) -> None:
        init(self, *args)
        for module in self.modules() if self.embedding is None else ():
            if isinstance(module, Norm):
                module.kernel = NormKernel("rmsnorm", module.kernel.eps, EAGER)

    GPTChunk.__init__ = plain  # type: ignore[method-assign]


def the_sum_is_normalised_after_a_branch() -> None:
    added = Block._added

    def summed(
        self: Block, x: torch.Tensor, branch: torch.Tensor, norm: Norm | None, follows: Norm | None, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if norm is None:
            return added(self, x, branch, norm, follows, *rest)
        y, _ = added(self, x, branch, None, None, *rest)
        return norm(y), None

    Block._added = summed  # type: ignore[method-assign]


def the_mlp_of_a_parallel_block_reads_the_sum() -> None:
    init = Block.__init__

    def sequential(self: Block, context: Any, layer: int) -> None:
        init(self, context, layer)
        self.context = replace(context, model=context.model.model_copy(update={"parallel_block": False}))

    Block.__init__ = sequential  # type: ignore[method-assign]


def the_mlp_is_added_without_its_multiplier() -> None:
    added = Block._added

    def one_sided(
        self: Block, x: torch.Tensor, branch: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _, follows, *_ = rest
        is_mlp = follows is not self.mlp_norm
        return added(self, x, branch / self.context.model.residual_multiplier if is_mlp else branch, *rest)

    Block._added = one_sided  # type: ignore[method-assign]


def z_loss_is_divided_by_each_ranks_own_tokens() -> None:
    run = Engine.forward_backward

    def own(self: Engine, microbatches: Sequence[Any]) -> BatchLosses:
        mine = torch.stack([batch.loss_mask.sum() for batch in microbatches]).sum().double()
        dp = self.topology.axis("dp")
        share = float(dp.all_reduce(mine.clone(), "planted").wait() / (dp.size * mine))
        for module in (module for chunk in self.chunks for module in chunk.modules()):
            if isinstance(module, TokenLosses):
                factor = module.context.model.z_loss * share
                module.options = replace(module.options, z_loss=factor)
        return run(self, microbatches)

    Engine.forward_backward = own  # type: ignore[assignment, method-assign]


def squares_of_heads_are_not_added() -> None:
    def local(q: torch.Tensor, k: torch.Tensor, axis: Axis, replicas: int, fusion: Fusion) -> torch.Tensor:
        return _local_squares(q, k, replicas)

    triaxis.models.gpt.qk_norm.squares = local


def squares_of_replicated_key_heads_are_added_whole() -> None:
    squares = triaxis.models.gpt.qk_norm.squares

    def whole(q: torch.Tensor, k: torch.Tensor, axis: Axis, replicas: int, fusion: Fusion) -> torch.Tensor:
        return squares(q, k, axis, 1, fusion)

    triaxis.models.gpt.qk_norm.squares = whole


def is_mlp(name: str) -> bool:
    return name == "layers.0.mlp"


BUGS = (
    Bug(
        later_stages_take_w_for_the_gain,
        Case("norm 1p", pp=2, num_layers=4),
        "output",
        is_attention(2),
        "pp",
        "vanishes with pp=1",
    ),
    Bug(
        the_sum_is_normalised_after_a_branch,
        Case("norms after", tp=2, num_layers=2),
        "output",
        is_mlp,
        None,
        "stays with tp=1",
    ),
    Bug(
        the_mlp_of_a_parallel_block_reads_the_sum,
        Case("parallel", tp=2, num_layers=2),
        "output",
        is_mlp,
        None,
        "stays with tp=1",
    ),
    Bug(
        the_mlp_is_added_without_its_multiplier,
        Case("residual multiplier", tp=2, num_layers=2),
        "output",
        lambda name: name == "layers.0",
        None,
        "stays with tp=1",
    ),
    Bug(
        z_loss_is_divided_by_each_ranks_own_tokens,
        Case("olmo2", dp=2, num_layers=2),
        "gradient",
        anything,
        "dp",
        "vanishes with dp=1",
    ),
    Bug(
        squares_of_heads_are_not_added,
        Case("olmo2", tp=2, num_layers=2),
        "output",
        is_attention(0),
        "tp",
        "vanishes with tp=1",
    ),
    Bug(
        squares_of_replicated_key_heads_are_added_whole,
        Case("olmo2", tp=4, num_layers=2),
        "output",
        is_attention(0),
        "tp",
        "vanishes with tp=1",
    ),
)
