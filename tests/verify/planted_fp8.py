"""Bugs that FP8 has had in this field, planted at run time (see `planted.py`)."""

from dataclasses import replace

import torch

from tests.parity.cases import Case
from tests.verify.bug import Bug, anything, is_attention
from triaxis.engine.kernels.fp8.products import Fp8
from triaxis.engine.kernels.fp8.recipes import E4M3, Quantised
from triaxis.engine.linear.fp8_gemms import Fp8Gemms
from triaxis.engine.linear.products import FusedWeights

FP8 = Case("llama", tp=2, dp=2, sequence_parallel=True, fp8="tensorwise", num_layers=2, global_batch_size=4)


def gradients_are_rounded_as_weights_are() -> None:
    gradient = Fp8.gradient

    def with_the_format_of_weights(self: Fp8, grad: torch.Tensor, largest: torch.Tensor | None) -> Quantised:
        return gradient(replace(self, recipe=replace(self.recipe, gradient=E4M3)), grad, largest)

    Fp8.gradient = with_the_format_of_weights  # type: ignore[method-assign]


def copies_of_weights_are_those_of_the_first_step() -> None:
    FusedWeights.version = lambda self: 0  # type: ignore[method-assign]


def each_tp_rank_has_scales_of_its_own() -> None:
    largest = Fp8Gemms._largest

    def alone(
        self: Fp8Gemms, parts: list[torch.Tensor], what: str, *, over_tp: bool, over_cp: bool
    ) -> torch.Tensor | None:
        return largest(self, parts, what, over_tp=False, over_cp=over_cp)

    Fp8Gemms._largest = alone  # type: ignore[assignment, method-assign]


def each_shard_is_sent_with_a_scale_of_its_own() -> None:
    largest = Fp8Gemms._largest

    def alone(
        self: Fp8Gemms, parts: list[torch.Tensor], what: str, *, over_tp: bool, over_cp: bool
    ) -> torch.Tensor | None:
        return largest(
            self, parts, what, over_tp=over_tp and (what != "input" or self.parts.cuts_inputs), over_cp=over_cp
        )

    Fp8Gemms._largest = alone  # type: ignore[assignment, method-assign]


BUGS = (
    Bug(gradients_are_rounded_as_weights_are, FP8, "gradient", anything, None, "stays with tp=1"),
    Bug(copies_of_weights_are_those_of_the_first_step, FP8, "loss", anything, None, "stays with tp=1"),
    Bug(
        each_shard_is_sent_with_a_scale_of_its_own,
        replace(FP8, fp8_gather=True),
        "output",
        is_attention(0),
        "tp",
        "with sp=false",
    ),
    Bug(each_tp_rank_has_scales_of_its_own, FP8, "output", is_attention(0), "tp", "vanishes with tp=1"),
)
