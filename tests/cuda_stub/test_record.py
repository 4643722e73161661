"""The record of device calls: what a step of a dense model asks of the card, and what it does not."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from tests.cuda_stub.one_rank import built
from tests.cuda_stub.values import library


def recorded(run: Callable[[], object], path: Path) -> Counter[str]:
    """Count the device calls of a function by their kinds."""
    library().card_log_start()
    run()
    assert library().card_log_stop(str(path).encode()) == 0
    return Counter(line.split("\t")[0] for line in path.read_text().splitlines())


def test_a_dense_step_neither_waits_nor_allocates(tmp_path: Path) -> None:
    with built(0, "gpt_tiny", ["precision.dtype=bf16"], "cuda") as (engine, batches):
        for _ in range(2):
            engine.train_step(batches.next_step(), 1e-3)
        microbatches, results = batches.next_step(), []
        calls = recorded(
            lambda: results.append(engine.update(engine.forward_backward(microbatches), 1e-3)), tmp_path / "step"
        )
        assert calls["kernel"] > 100 and not calls["wait"] and not calls["allocation"], calls
        read = recorded(results[0].wait, tmp_path / "read")
        assert read["wait"] <= 1, read


def test_a_read_by_the_host_and_new_memory_show(tmp_path: Path) -> None:
    x = torch.ones(8, device="cuda")
    assert recorded(x.sum().item, tmp_path / "item")["wait"] == 1
    assert recorded(lambda: torch.empty(1 << 30, device="cuda"), tmp_path / "memory")["allocation"] == 1
