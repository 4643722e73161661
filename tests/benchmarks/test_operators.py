"""A transformer block of ours dispatches no kernel more than the same block written by hand."""

from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.engine_overhead import config_of, parse
from benchmarks.operators import PLACES, compare, show
from triaxis.engine.config.tree import Config
from triaxis.models.gpt.block import Block

SIZES = {"hidden": 64, "head-dim": 16, "seq": 16, "vocab": 128, "microbatches": 3, "micro-batch-size": 2}


def config(model: str, dtype: str, layers: int = 2) -> Config:
    words = [word for name, value in (SIZES | {"layers": layers}).items() for word in (f"--{name}", str(value))]
    return config_of(parse(words), model, dtype)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("gpt", "fp32"),
        ("llama", "bf16"),
        pytest.param("gpt", "bf16", marks=pytest.mark.slow),
        pytest.param("llama", "fp32", marks=pytest.mark.slow),
    ],
)
def test_blocks_dispatch_no_extra_kernel(model: str, dtype: str) -> None:
    ours, plain = compare(config(model, dtype))
    blocks = ours["blocks"].num_kernels
    assert 0 < blocks <= plain["blocks"].num_kernels
    # What remains per block when the depth grows is a block's: nothing of it is hidden in another place. The first block is
    # alone in that its first norm adds no branch.
    deeper, plain_deeper = compare(config(model, dtype, layers=3))
    deepest, _ = compare(config(model, dtype, layers=4))
    per_block = deeper["blocks"].num_kernels - blocks
    assert deepest["blocks"].num_kernels - deeper["blocks"].num_kernels == per_block
    assert 0 <= blocks - 2 * per_block <= 3, "a cast per microbatch"
    for place in ("embedding", "head and loss"):
        assert deeper[place].num_kernels == ours[place].num_kernels, place
        assert plain_deeper[place].num_kernels == plain[place].num_kernels, place


def test_an_extra_kernel_in_a_block_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy in each of the two branches of two blocks, in three microbatches, forward and backward."""
    before, _ = compare(config("gpt", "fp32"))

    added = Block._added

    def copied(self: Block, x: torch.Tensor, branch: torch.Tensor, *rest: Any) -> Any:
        return added(self, x, branch * 1.0, *rest)

    monkeypatch.setattr(Block, "_added", copied)
    after, _ = compare(config("gpt", "fp32"))
    assert after["blocks"].num_kernels - before["blocks"].num_kernels == 2 * 2 * 3 * 2
    assert {place for place in PLACES if before[place].kernels != after[place].kernels} == {"blocks"}


@pytest.mark.slow
def test_the_table_names_what_differs() -> None:
    ours, plain = compare(config("llama", "bf16"))
    console = Console(record=True, width=100)
    show("llama bf16", ours, plain, console)
    text = console.export_text()
    assert "blocks: kernels" in text and "index_add_" in text and "\u2026" not in text
