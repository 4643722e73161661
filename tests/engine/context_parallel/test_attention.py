"""Attention over cp: the sums of its gradients, and the choice between its methods."""

import pytest
import torch

from tests.harness import run_ranks
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.context_parallel import MOST_PIECES, exposed_share, heads_of_pieces, method_of
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.attention import ContextParallelRegion, local_gradients, pieces_of
from triaxis.engine.data.sequence_part import SequencePart
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid

CPU = torch.device("cpu")
FINE = 2.0**-9
"""Less than bf16 can add to 1."""


def sums_of_gradients(rank: int) -> dict[bool, float]:
    topology = Topology(RankGrid(ParallelSizes(cp=2)), rank, CPU)
    part = SequencePart.of([[[(0, 2)], [(2, 4)]]], rank, [[4]])
    mine = torch.full((1, 1, 4, 8), 1.0 + FINE if rank == 0 else -1.0)
    found = {}
    for is_wide in (False, True):
        region = ContextParallelRegion(topology.axis("cp"), sums_wide=is_wide)
        k, v = local_gradients(region.sum_of(mine, 2 * mine, part, torch.bfloat16), torch.bfloat16)
        assert k.dtype == v.dtype == torch.bfloat16 and k.shape == v.shape == (1, 1, 2, 8)
        assert torch.equal(2 * k, v) and k.unique().numel() == 1
        found[is_wide] = k.flatten()[0].item()
    return found


@pytest.mark.distributed
def test_gradients_that_nearly_cancel_are_exact_in_the_accumulation_dtype() -> None:
    assert run_ranks(sums_of_gradients, 2) == [{False: 0.0, True: FINE}] * 2


@pytest.mark.parametrize("num_kv_heads", range(1, 20))
def test_pieces_have_all_heads_once_and_differ_by_one_at_most(num_kv_heads: int) -> None:
    counts = heads_of_pieces(num_kv_heads)
    assert sum(counts) == num_kv_heads and len(counts) == min(num_kv_heads, MOST_PIECES)
    assert max(counts) - min(counts) <= 1 and max(counts) == exposed_share(num_kv_heads) * num_kv_heads
    pieces = pieces_of(3 * num_kv_heads, num_kv_heads)
    assert [head for one in pieces for head in range(num_kv_heads)[one.keys]] == list(range(num_kv_heads))
    for one in pieces:
        # Query head i reads key/value head i // 3.
        assert {head // 3 for head in range(3 * num_kv_heads)[one.queries]} == set(range(num_kv_heads)[one.keys])


def config_of(heads: int, kv_heads: int, cp: int, attention: str = "auto", method: str = "auto") -> Config:
    model = {"num_layers": 1, "hidden_size": 8 * heads, "num_attention_heads": heads, "num_kv_heads": kv_heads}
    return Config.model_validate(
        {
            "model": {**model, "seq_length": 64, "vocab_size": 10},
            "data": {"synthetic": True},
            "train": {"steps": 1, "global_batch_size": 1},
            "parallel": {"cp": cp, "cp_method": method},
            "kernels": {"attention": attention},
        }
    )


@pytest.mark.parametrize(
    ("config", "method"),
    [
        # 4 (a + g) / c exposed against 6 g / pieces: 4 (32 + 8) / 8 = 20, 6 x 8 / 4 = 12.
        (config_of(32, 8, 8), "all_gather"),
        (config_of(32, 32, 4), "all_gather"),  # 64 against 48
        (config_of(32, 32, 8), "ulysses"),  # 32 against 48
        (config_of(32, 32, 8, method="all_gather"), "all_gather"),
        (config_of(32, 2, 2), "all_gather"),  # 68 against 6
        (config_of(4, 2, 2, "explicit"), "all_gather"),  # 12 against 8, which has no pieces
        (config_of(8, 8, 8, "explicit"), "ulysses"),  # 8 against 32
        (config_of(32, 8, 16), "all_gather"),  # ranks without a head
        (config_of(32, 8, 4, method="ulysses"), "ulysses"),
    ],
)
def test_auto_takes_the_method_that_exposes_fewer_bytes(config: Config, method: str) -> None:
    assert method_of(config) == method
