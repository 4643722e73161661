"""Bugs that FP8 has had in this field, planted at run time (see `planted.py`)."""

from dataclasses import replace
from typing import Any

import torch

import triaxis.engine.kernels.fp8.products
from tests.parity.cases import Case
from tests.verify.bug import Bug, anything, is_attention
from triaxis.engine.config.schema.fp8 import Fp8Config
from triaxis.engine.kernels.fp8.recipes import E4M3, Recipe
from triaxis.engine.linear.fp8_gemms import Fp8Gemms, Scale
from triaxis.engine.linear.products import FusedWeights

FP8 = Case("llama", tp=2, dp=2, sequence_parallel=True, fp8="tensorwise", num_layers=2, global_batch_size=4)


def gradients_are_rounded_as_weights_are() -> None:
    recipe_of = triaxis.engine.kernels.fp8.products.recipe_of

    def with_the_format_of_weights(config: Fp8Config) -> Recipe:
        return replace(recipe_of(config), gradient=E4M3)

    triaxis.engine.kernels.fp8.products.recipe_of = with_the_format_of_weights


def copies_of_weights_are_those_of_the_first_step() -> None:
    FusedWeights.version = lambda self: 0  # type: ignore[method-assign]


def each_tp_rank_has_scales_of_its_own() -> None:
    scale = Fp8Gemms._scale

    def alone(self: Fp8Gemms, *given: Any, over_tp: bool, over_cp: bool) -> Scale:
        return scale(self, *given, over_tp=False, over_cp=over_cp)

    Fp8Gemms._scale = alone  # type: ignore[assignment, method-assign]


def each_shard_is_sent_with_a_scale_of_its_own() -> None:
    input_scale = Fp8Gemms._input_scale

    def alone(self: Fp8Gemms, x: torch.Tensor, *, is_cut: bool) -> Scale:
        return input_scale(self, x, is_cut=self.parts.cuts_inputs)

    Fp8Gemms._input_scale = alone  # type: ignore[method-assign]


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
