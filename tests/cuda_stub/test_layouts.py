"""Ranks on cards of their own talk over NCCL; loss and norm of the gradient are those of one rank on such a card."""

from functools import cache

import pytest
import torch

from tests.cuda_stub.in_order import LAYOUTS, layout
from tests.cuda_stub.one_rank import Numbers, numbers_of_steps
from tests.harness import run_ranks
from triaxis.engine.comm.runtime import RankEnvironment, start
from triaxis.engine.config.schema.run import RuntimeConfig

LOSSES, NORMS = 1e-6, 2e-6
"""Largest relative differences in fp32, where sums over ranks have another order."""

FP32 = "precision.dtype=fp32"

LONGEST = 400
"""Seconds for a layout: each rank compiles its functions, on a machine that may be busy."""


def on_cards(size: int, name: str, settings: list[str], num_steps: int = 3) -> list[Numbers]:
    return run_ranks(numbers_of_steps, size, name, settings, "cuda", num_steps, device="cuda", timeout_seconds=LONGEST)


CASES = {name: LAYOUTS[name] for name in ("tp", "pp", "cp", "ep")} | {
    "dp": (2, "gpt_tiny", layout(dp=2)),
    "tp pp": (4, "gpt_tiny", layout(tp=2, pp=2)),
    "zbv, offload": (2, "gpt_tiny", [*LAYOUTS["zbv"][2], "offload.num_layers=1", "offload.min_bytes=1"]),
}

OTHERS = {"cp": {"attention": "blocks"}, "ep": {"dispatch": "all_to_all"}}
"""Kernels of a layout that are others than those of one rank."""


@cache
def alone(name: str, settings: tuple[str, ...]) -> Numbers:
    return numbers_of_steps(0, name, [*settings, "parallel.ep=1"], "cuda")


# In the slow tier, what others have: a layout, or experts on unequal batches.
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("tp pp", "pp", "cp", "ep") else name for name in CASES],
)
def test_a_layout_trains_as_one_rank(case: str) -> None:
    size, name, settings = CASES[case]
    expected, kernels = alone(name, (FP32,))
    for found, choices in on_cards(size, name, [FP32, *settings]):
        assert choices == kernels | OTHERS.get(case, {})
        assert found[::2] == pytest.approx(expected[::2], rel=LOSSES)
        assert found[1::2] == pytest.approx(expected[1::2], rel=NORMS)


def test_experts_train_with_the_cards_own_kernels_on_unequal_batches() -> None:
    settings = ["precision.dtype=bf16", *layout(dp=2, ep=2), "kernels.dispatch=all_to_all"]
    (found, choices), other = on_cards(2, "moe_tiny", settings, 12)
    assert other == (found, choices)
    assert choices["experts"] == "grouped" and choices["elementwise"] == "compiled"
    expected, _ = numbers_of_steps(0, "moe_tiny", ["precision.dtype=bf16", "parallel.ep=1"], "cuda", 12)
    assert found[0] == pytest.approx(expected[0], rel=1e-3) and found[-2] < found[0]


def current_card(rank: int) -> int:
    start(RankEnvironment(local_rank=3), RuntimeConfig(device="cuda"))
    return torch.cuda.current_device()


def test_a_ranks_card_is_the_current_one() -> None:
    assert run_ranks(current_card, 1) == [3]
