"""Bugs that a small size shows only if it keeps which layers a stage has, planted in ranks under verification."""

from collections.abc import Sequence
from typing import Any

import torch

import triaxis.models.gpt.block
from triaxis.engine.activations.offload import HostMemory, OffloadedStorage
from triaxis.engine.config.quantities.update_settings import UpdateRule
from triaxis.engine.device.copy_lane import Mark
from triaxis.engine.expert_parallel.balance import ExpertLoad
from triaxis.engine.optimizer import distributed
from triaxis.engine.step import Engine
from triaxis.models.gpt.moe import MoE


def rates_are_those_of_a_stages_own_numbers() -> None:
    init = triaxis.models.gpt.block.Block.__init__
    seen: list[int] = []

    def noted(self: Any, context: Any, layer: int) -> None:
        seen.append(layer)
        init(self, context, layer)

    triaxis.models.gpt.block.Block.__init__ = noted  # type: ignore[method-assign]
    rule = distributed.update_rule

    def by_own_number(name: str, *args: Any, **options: Any) -> UpdateRule:
        head, *rest = name.split(".", 2)
        own = ".".join([head, str(int(rest[0]) - seen[0]), rest[1]]) if head == "layers" else name
        return rule(own, *args, **options)

    distributed.update_rule = by_own_number  # type: ignore[attr-defined]


def host_buffers_are_free_before_they_are_read() -> None:
    let_go = HostMemory.let_go

    def too_early(self: HostMemory, moved: Sequence[OffloadedStorage], mark: Mark) -> None:
        let_go(self, moved, mark)
        for each in moved:
            assert each.buffer is not None
            self.pool.give(each.buffer)

    def fetch(self: HostMemory, moved: Sequence[OffloadedStorage]) -> Mark:
        copies = []
        for each in moved:
            assert each.buffer is not None
            each.tensor = torch.empty(each.buffer.shape, dtype=each.buffer.dtype, device=self.device)
            copies.append((each.tensor, each.buffer))
            each.buffer = None
        return self.lane.post(copies)

    HostMemory.let_go, HostMemory.fetch = too_early, fetch  # type: ignore[method-assign]


def rows_without_room_are_not_counted() -> None:
    ExpertLoad.add_overflow = lambda self, rows: None  # type: ignore[method-assign]


def choices_of_a_layer_ahead_move_on_a_rank() -> None:
    plain = MoE.chosen

    def moved(self: MoE, *args: Any) -> torch.Tensor:
        experts = plain(self, *args)
        is_wrong = self.layer >= self.context.model.num_layers and self.context.region.axis.index == 1
        return (experts + 1) % self.experts.router.moe.num_experts if is_wrong else experts

    MoE.chosen = moved  # type: ignore[method-assign]


def gradients_of_a_rank_are_not_finite() -> None:
    plain = Engine.forward_backward

    def broken(self: Engine, microbatches: Any) -> Any:
        counts = plain(self, microbatches)
        if self.topology.coordinates.tp == 1:
            self.parameters["layers.0.mlp.down.weight"].main_grad.fill_(torch.nan)
        return counts

    Engine.forward_backward = broken  # type: ignore[method-assign]
