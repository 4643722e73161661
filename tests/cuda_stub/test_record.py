"""The record of device calls: what a step of a dense model asks of the card, and what it does not."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cuda_stub.in_order import OFFLOAD, layout
from tests.cuda_stub.one_rank import built
from tests.cuda_stub.values import library
from tests.harness import run_ranks
from triaxis.engine.checkpoint.writer import RankWriter
from triaxis.launch.rank.join import connect_exchanges


def recorded(run: Callable[[], object], path: Path) -> Counter[str]:
    """Count the device calls of a function by their kinds."""
    library().card_log_start()
    run()
    assert library().card_log_stop(str(path).encode()) == 0
    return Counter(line.split("\t")[0] for line in path.read_text().splitlines())


@pytest.mark.parametrize("settings", [[], [*OFFLOAD, "optimizer.offload=cpu"]], ids=["", "offload"])
def test_a_dense_step_neither_waits_nor_allocates(settings: list[str], tmp_path: Path) -> None:
    with built(0, "gpt_tiny", ["precision.dtype=bf16", *settings], "cuda") as (engine, batches):
        for _ in range(2):
            engine.train_step(batches.next_step(), 1e-3)
        microbatches, results = batches.next_step(), []
        calls = recorded(
            lambda: results.append(engine.update(engine.forward_backward(microbatches), 1e-3)), tmp_path / "step"
        )
        assert calls["kernel"] > 100 and not calls["wait"] and not calls["allocation"], calls
        read = recorded(results[0].wait, tmp_path / "read")
        assert read["wait"] <= 1, read
        writer = RankWriter(engine.optimizer, 0, in_background=True, on_retry=print)
        saved = recorded(lambda: writer.save(tmp_path), tmp_path / "save")
        writer.close()
        assert saved["wait"] == 1, saved


def test_a_read_by_the_host_and_new_memory_show(tmp_path: Path) -> None:
    x = torch.ones(8, device="cuda")
    assert recorded(x.sum().item, tmp_path / "item")["wait"] == 1
    assert recorded(lambda: torch.empty(1 << 30, device="cuda"), tmp_path / "memory")["allocation"] == 1


def sends_to_connect(rank: int, folder: Path) -> int:
    settings = [*layout(dp=2, ep=2), "kernels.dispatch=all_to_all"]
    with built(rank, "moe_tiny", settings, "cuda") as (engine, _):
        recorded(lambda: connect_exchanges(engine.config, engine.topology), folder / str(rank))
    return (folder / str(rank)).read_text().count("message\tsend\t")


def test_ranks_that_exchange_rows_are_connected_before_a_step(tmp_path: Path) -> None:
    assert run_ranks(sends_to_connect, 2, tmp_path, device="cuda") == [2, 2]
