"""The cause that a library tells in its own words, named with what to do."""

import signal
from pathlib import Path

import pytest

from tests.launch.start.process.test_failure import START_SECONDS, failure, write_log
from triaxis.engine.device.host_memory import kernel_kills
from triaxis.launch.start.process.failure import describe
from triaxis.launch.start.process.named_causes import (
    BUS_ERROR,
    LOCKED_MEMORY_ADVICE,
    OUT_OF_HOST_MEMORY,
    SHARED_MEMORY_ADVICE,
    named_causes,
)

SHARED = [
    "node7:93:181 [0] misc/shmutils.cc:88 NCCL WARN Error: failed to extend /dev/shm/nccl-AbCdEf to 33030532 bytes",
    "Last error:\nError while creating shared memory segment /dev/shm/nccl-AbCdEf (size 9637888)",
    "[1] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",
    "RuntimeError: unable to allocate shared memory(shm) for file </torch_77_1>: Resource temporarily unavailable (11)",
    "OSError: [Errno 28] No space left on device: '/dev/shm/triaxis-0-0123/rank_00003'",
]
LOCKED = [
    "misc/ibvwrap.cc:190 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
    "Last error:\nCall to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
    "misc/ibvwrap.cc:262 (wrap_ibv_create_cq) NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory errno 12",
    "NCCL WARN Call to ibv_create_qp failed with error Unknown error -12",
]
OTHERS = [
    "NCCL WARN Call to ibv_modify_qp failed with error No such device",
    "NCCL WARN Error while attaching to shared memory segment /dev/shm/nccl-AbCdEf, error: No such file or directory (2)",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "OSError: [Errno 28] No space left on device: 'runs/gpt/checkpoints/step_00000100.attempt_00'",
    "",
]


@pytest.mark.parametrize("text", SHARED)
def test_shared_memory_that_is_full_is_named(text: str) -> None:
    (cause,) = named_causes(f"before\n{text}\nafter", 1)
    assert "/dev/shm" in cause and cause.endswith(SHARED_MEMORY_ADVICE)


@pytest.mark.parametrize("text", LOCKED)
def test_memory_that_may_not_be_locked_is_named(text: str) -> None:
    (cause,) = named_causes(f"before\n{text}\nafter", 1)
    assert "RLIMIT_MEMLOCK" in cause and cause.endswith(LOCKED_MEMORY_ADVICE)


@pytest.mark.parametrize("text", OTHERS)
def test_what_has_other_causes_is_not(text: str) -> None:
    assert named_causes(text, 1) == []


def test_a_bus_error_has_a_cause_where_the_log_names_none() -> None:
    assert named_causes("", -signal.SIGBUS) == [BUS_ERROR]
    assert named_causes(SHARED[0], -signal.SIGBUS) == named_causes(SHARED[0], 1)
    assert named_causes("", -signal.SIGSEGV) == []


def test_a_rank_that_the_kernel_killed_is_short_of_host_memory(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("oom_kill_disable 9\noom_kill 3\nnr_free_pages 4\n")
    assert kernel_kills(counters) == 3 and kernel_kills(tmp_path / "none") == 0
    text = describe(failure(3, -signal.SIGKILL), tmp_path, START_SECONDS, kernel_killed=True)
    assert text.endswith(f"  cause: {OUT_OF_HOST_MEMORY}")
    assert named_causes("", -signal.SIGKILL) == named_causes("", -signal.SIGTERM, kernel_killed=True) == []


@pytest.mark.parametrize("rank", [0, 3])
def test_the_launcher_says_the_cause_below_the_log(rank: int, tmp_path: Path) -> None:
    """The line may stand far above the end: a traceback follows it."""
    log = write_log(tmp_path, rank, 5.0, text=SHARED[0] + "\n" + "more\n" * 100)
    text = describe(failure(rank, 1), tmp_path, START_SECONDS)
    assert str(log) in text and text.splitlines()[-1] == f"  cause: {named_causes(SHARED[0], 1)[0]}"
