"""Bugs of multi-token prediction, planted at run time in ranks under verification."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tests.parity.cases import Case
from tests.verify.bug import Bug, anything
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.context_parallel.cut import ContextCut
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.layout.shard_spec import Init, ParamSpec
from triaxis.engine.pipeline.executor import Executor
from triaxis.models import specs


def tokens_ahead_are_shifted_in_a_ranks_part() -> None:
    """Plant a roll of labels after rows were cut over cp (LlamaFactory #10474)."""
    cut = ContextCut.__call__

    def rolled(self: ContextCut, whole: MicroBatch) -> MicroBatch:
        part = cut(self, whole)
        if self.size == 1 or part.ahead is None:
            return part
        ahead = part.ahead.clone()
        for distance, row in enumerate(ahead, start=1):
            row[:] = part.labels.roll(-distance, dims=1)
        return replace(part, ahead=ahead)

    ContextCut.__call__ = rolled  # type: ignore[method-assign]


def joining_weights_are_not_summed_over_tp() -> None:
    """Plant a projection whose gradient is that of this rank's part of the sequence."""
    joining = specs._joining

    def whole(model: ModelConfig, name: str, normal: Init) -> Iterator[ParamSpec]:
        for spec in joining(model, name, normal):
            yield replace(spec, grad_is_partial="never") if spec.name.endswith("projection.weight") else spec

    specs._joining = whole


def tokens_ahead_are_divided_by_the_number_of_next_tokens() -> None:
    """Plant one divisor for all, which weighs tokens ahead by the share of counted next tokens that have them."""
    run = Executor.run

    def by_next(self: Executor, *args: Any, output_grad: torch.Tensor, **named: Any) -> list[torch.Tensor]:
        return run(self, *args, output_grad=output_grad[:1].expand(len(output_grad)), **named)

    Executor.run = by_next  # type: ignore[assignment,method-assign]


def is_losses_of_a_token_ahead(name: str) -> bool:
    return name == "layers.2.losses"


def is_projection(name: str) -> bool:
    return name.endswith("mtp.projection.weight")


BUGS = (
    Bug(
        tokens_ahead_are_shifted_in_a_ranks_part,
        Case("ahead two", cp=2, dp=2, global_batch_size=4),
        "output",
        is_losses_of_a_token_ahead,
        "cp",
        "cp",
    ),
    Bug(
        joining_weights_are_not_summed_over_tp,
        Case("ahead two", tp=2, dp=2, sequence_parallel=True, global_batch_size=4),
        "gradient",
        is_projection,
        "tp",
        "tp",
    ),
    Bug(
        tokens_ahead_are_divided_by_the_number_of_next_tokens,
        Case("ahead two", pp=2, dp=2, documents=True, global_batch_size=4),
        "gradient",
        anything,
        None,
        "stays",
    ),
)
