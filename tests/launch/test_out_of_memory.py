"""A rank that runs out of memory says which it is, where it was, what holds how much, and what would hold less."""

from pathlib import Path

import pytest
import torch

from engine.errors import OutOfMemoryError
from launch.out_of_memory import explaining_memory
from tests.harness import run_ranks
from tests.launch.command_line import PRETRAIN, ROOT, records, run
from tests.parity.cases import Case
from tests.parity.test_step_properties import build_rank

pytestmark = pytest.mark.distributed

CONFIG = str(ROOT / "configs" / "gpt_tiny.yaml")


def test_a_run_that_needs_too_much_ends_with_a_table(tmp_path: Path) -> None:
    """The scores of one layer are 512 GiB, which no machine hands out; the exit code says that trying again is no use."""
    overrides = ("data.synthetic=true", "model.seq_length=131072", "kernels.attention=explicit", "train.steps=20")
    batch = ("train.global_batch_size=4", "train.micro_batch_size=2")
    silent = ("train.eval_interval=null", "telemetry.sample_tokens=0", "checkpoint.interval=null")
    said = run(tmp_path, *PRETRAIN, CONFIG, *overrides, *batch, *silent, TP="1", PP="2", VPP="1", DP="1")
    assert said.exit_code == 2
    everything = said.out + said.err
    assert "Traceback" not in everything
    for words in (
        "rank 0 (pp 0, dp 0, tp 0) is out of memory at 0F0, forward of microbatch 0 on chunk 0",
        "an allocation of 512.00 GiB failed",
        "kernels.attention=sdpa: ",
        "train.micro_batch_size=1: ",
    ):
        assert words in everything
    rows = {line.split()[0]: line.split() for line in everything.splitlines() if line.startswith("  ") and line.split()}
    assert rows["parameters"][1:3] == rows["parameters"][3:5] == ["1.81", "MiB"]
    assert rows["optimizer"][1:3] == rows["optimizer"][3:5]
    events = records(tmp_path / "runs" / "gpt_tiny" / "events.jsonl")
    assert any(event["kind"] == "failed" and event["error"].startswith("OutOfMemoryError") for event in events)


def out_of_memory_in_a_backward(rank: int, case: Case, error: str) -> str:
    engine, batches = build_rank(rank, case)
    observed = engine.executor

    def fail(instruction: object) -> None:
        if str(instruction) == "0B1":
            raise {"cuda": torch.OutOfMemoryError, "other": RuntimeError}[error](
                "Tried to allocate 2.50 GiB. GPU 0 has ..."
            )

    observed.observer = fail
    try:
        with explaining_memory(engine.config, engine.topology, engine):
            engine.train_step(batches.next_step(), 1e-3)
    except (OutOfMemoryError, RuntimeError) as raised:
        return f"{type(raised).__name__}: {raised}"
    finally:
        batches.close()
    return "nothing"


def test_the_words_of_a_gpu_are_understood_and_other_errors_left_alone() -> None:
    (text,) = run_ranks(out_of_memory_in_a_backward, 1, Case("llama"), "cuda")
    assert text.startswith("OutOfMemoryError: rank 0")
    assert "at 0B1, backward of microbatch 1 on chunk 0: an allocation of 2.50 GiB failed." in text
    (text,) = run_ranks(out_of_memory_in_a_backward, 1, Case("llama"), "other")
    assert text.startswith("RuntimeError: Tried")
