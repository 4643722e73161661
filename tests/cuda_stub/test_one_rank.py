"""One rank trains with the kernels that its card gets; loss and norm of the gradient are those of a rank on the CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.cuda_stub.one_rank import numbers_of_steps

HOPPER = {
    "attention": "cudnn",
    "decoding": "flash",
    "elementwise": "compiled",
    "weight_grad": "fused",
    "optimizer": "compiled",
    "linear": "torch",
    "graphs": "off",
}
"""Kernels on an H100 in bf16, where nothing stands against the fastest."""

IN_FP32 = (1e-6, 1e-6)
"""Largest relative differences: in the first step, where weights are equal, and later."""

IN_BF16 = (2e-3, 2e-3)
"""The same between kernels that round in other places: half of bf16's epsilon."""

COARSE = (6e-3, 2e-2)
"""The same, where a rounding moves a token to another expert, or a number to the next one in FP8."""

BF16 = "precision.dtype=bf16"

CASES = {
    "fp32": (
        "gpt_tiny",
        ["precision.dtype=fp32"],
        HOPPER | {"attention": "sdpa", "decoding": "math", "weight_grad": "separate"},
        IN_FP32,
    ),
    "bf16": ("gpt_tiny", [BF16], HOPPER, IN_BF16),
    "fp16": ("gpt_tiny", ["precision.dtype=fp16"], HOPPER, IN_BF16),
    "flash": ("gpt_tiny", [BF16, "kernels.attention=flash"], HOPPER | {"attention": "flash"}, IN_BF16),
    "documents": (
        "gpt_tiny",
        [BF16, "data.attention=within", "data.synthetic_document_length=48"],
        HOPPER | {"attention": "varlen"},
        IN_BF16,
    ),
    "experts": ("moe_tiny", [BF16, "parallel.ep=1"], HOPPER | {"experts": "grouped", "dispatch": "all_gather"}, COARSE),
    "fp8 by tensors": ("gpt_tiny", [BF16, "precision.fp8.recipe=tensorwise"], HOPPER, COARSE),
    "fp8 by blocks": ("gpt_tiny", [BF16, "precision.fp8.recipe=blockwise"], HOPPER, COARSE),
    "offload": ("gpt_tiny", [BF16, "offload.num_layers=2", "offload.min_bytes=1"], HOPPER, IN_BF16),
    "recomputed": ("gpt_tiny", [BF16, "recompute.granularity=full"], HOPPER, IN_BF16),
    "capped, in graphs": (
        "gpt_tiny",
        [BF16, "model.attention_softcap=2.0", "model.window=90", "recompute.granularity=full", "kernels.graphs=on"],
        HOPPER | {"attention": "flex", "decoding": "blocks", "graphs": "on"},
        IN_BF16,
    ),
    "state on the host": ("gpt_tiny", [BF16, "optimizer.offload=cpu"], HOPPER, IN_BF16),
}


def compare(found: Sequence[float], expected: Sequence[float], tolerance: tuple[float, float]) -> None:
    """Compare losses and norms, those of the first step by the first tolerance."""
    first, later = tolerance
    assert found[:2] == pytest.approx(expected[:2], rel=first)
    assert found[2:] == pytest.approx(expected[2:], rel=later)


MORE = ("fp16", "experts", "fp8 by blocks", "flash", "recomputed", "offload", "state on the host")
"""Cases of the slow tier: layouts and other cases have most of what they do."""


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] if name in MORE else []) for name in CASES]
)
def test_a_rank_trains_as_on_the_cpu(case: str) -> None:
    name, settings, kernels, tolerance = CASES[case]
    found, choices = numbers_of_steps(0, name, settings, "cuda")
    assert choices == kernels, "another kernel ran than the card gets"
    on_cpu = [word for word in settings if not word.startswith("kernels.")]
    expected, _ = numbers_of_steps(0, name, on_cpu, "cpu")
    compare(found, expected, tolerance)


OTHER_CARDS = {
    ("A100", "bf16"): HOPPER | {"attention": "flash"},
    ("B200", "mxfp8"): HOPPER,
}
"""Kernels on other cards. cuDNN's attention needs a Hopper, FP8 by blocks of 32 a Blackwell."""


@pytest.mark.slow
@pytest.mark.parametrize(("card", "precision"), OTHER_CARDS)
def test_another_card_gets_its_own_kernels(card: str, precision: str) -> None:
    settings = [BF16] + (["precision.fp8.recipe=mxfp8"] if precision == "mxfp8" else [])
    command = [sys.executable, "-m", "tests.cuda_stub.one_rank", "gpt_tiny", *settings]
    done = subprocess.run(command, env={**os.environ, "CARD": card}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, choices = json.loads(done.stdout.splitlines()[-1])
    assert choices == OTHER_CARDS[card, precision]
    expected, _ = numbers_of_steps(0, "gpt_tiny", settings, "cpu")
    compare(found, expected, COARSE)
