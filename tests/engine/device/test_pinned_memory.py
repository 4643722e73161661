"""Page-locked memory: exact in bytes, locked once, unlocked before it is unmapped. A recording driver stands for CUDA's."""

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.page_locked import is_page_locked
from triaxis.engine.device import pinned_memory
from triaxis.engine.device.pinned_memory import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    VECTOR_ALIGNMENT,
    CudaPageLock,
    Pageable,
    PinnedBuffer,
    PinnedPool,
    Purpose,
    VectorSize,
    aligned_buffer,
    page_lock_of,
)
from triaxis.engine.errors import OutOfMemoryError

PURPOSE = Purpose("a test's copies", "test less")

sizes = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64])),
    max_size=8,
)


class RecordingDriver:
    """Driver that records the calls of a page lock in order, and answers registrations with `code`."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple[str, int, int]] = []

    def register(self, address: int, num_bytes: int) -> int:
        self.calls.append(("register", address, num_bytes))
        return self.code

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", address, 0))
        return 0

    def error_text(self, code: int) -> str:
        return f"error text of {code}"

    def synchronize(self) -> None:
        self.calls.append(("synchronize", 0, 0))


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE_BYTES, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 1])
def test_buffers_begin_at_a_page_and_large_ones_at_a_huge_page(num_bytes: int) -> None:
    buffer = aligned_buffer(num_bytes)
    assert buffer.data_ptr() % (PAGE_BYTES if num_bytes < HUGE_PAGE_BYTES - PAGE_BYTES else HUGE_PAGE_BYTES) == 0
    assert max(num_bytes, 1) <= len(buffer) < num_bytes + PAGE_BYTES + (num_bytes == 0)
    assert len(buffer) % PAGE_BYTES == 0


def test_a_fork_leaves_the_memory_to_this_process() -> None:
    """Otherwise its pages would be copied on the next write, and the device would go on with the ones that are locked."""
    buffer = aligned_buffer(PAGE_BYTES)
    address, is_mine = buffer.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, stop = (int(word, 16) for word in first.split("-"))
            is_mine = start <= address < stop
        elif is_mine and first == "VmFlags:":
            assert "dc" in line.split()
            return
    raise AssertionError("the kernel lists no such mapping")


@given(sizes)
def test_vectors_are_exact_and_share_no_byte(sizes: list[VectorSize]) -> None:
    driver = RecordingDriver()
    buffer = PinnedBuffer(sizes, CudaPageLock(driver), PURPOSE)
    assert [(len(vector), vector.dtype) for vector in buffer.vectors] == sizes
    assert all(vector.data_ptr() % VECTOR_ALIGNMENT == 0 for vector in buffer.vectors if len(vector))
    for number, vector in enumerate(buffer.vectors):
        vector.fill_(number)
    assert all((vector == number).all() for number, vector in enumerate(buffer.vectors))
    ((call, address, num_bytes),) = driver.calls
    assert call == "register" and address % PAGE_BYTES == 0 and num_bytes == buffer.num_bytes
    exact = sum(numel * dtype.itemsize for numel, dtype in sizes)
    assert exact <= num_bytes < exact + PAGE_BYTES + VECTOR_ALIGNMENT * len(sizes) + (exact == 0)
    assert all(
        address <= vector.data_ptr() and vector.data_ptr() + vector.nbytes <= address + num_bytes
        for vector in buffer.vectors
        if len(vector)
    )
    buffer.close()


def test_memory_is_unlocked_once_after_the_device_is_done() -> None:
    driver = RecordingDriver()
    buffer = PinnedBuffer([(10, torch.float32)], CudaPageLock(driver), PURPOSE)
    address = buffer.vectors[0].data_ptr()
    buffer.close()
    buffer.close()
    assert driver.calls == [("register", address, PAGE_BYTES), ("synchronize", 0, 0), ("unregister", address, 0)]
    buffer.vectors[0].fill_(3)
    assert buffer.vectors[0].tolist() == [3] * 10, "it is still mapped"


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


def test_locked_pages_stay_mapped_when_nobody_holds_them_and_the_device_is_not_waited_for() -> None:
    driver = RecordingDriver()
    page_lock = CudaPageLock(driver)
    addresses = [PinnedBuffer([(10, torch.float32)], page_lock, PURPOSE).vectors[0].data_ptr() for _ in range(3)]
    closed = PinnedBuffer([(10, torch.float32)], page_lock, PURPOSE)
    closed.close()
    address = closed.vectors[0].data_ptr()
    del page_lock, closed
    gc.collect()
    assert all(map(is_mapped, addresses)) and len(set(addresses)) == 3
    assert not is_mapped(address)
    assert [call for call, _, _ in driver.calls] == ["register"] * 4 + ["synchronize", "unregister"]


def test_what_the_driver_refuses_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the job's cgroup, and not `ulimit -l`, is what cudaHostRegister is bound by."""
    monkeypatch.setattr(pinned_memory, "host_memory_bytes", lambda: 3 * 2**30)
    driver = RecordingDriver(code=2)
    with pytest.raises(OutOfMemoryError) as raised:
        PinnedBuffer([(3 * 2**18, torch.float32)], CudaPageLock(driver), PURPOSE)
    text = str(raised.value)
    for words in (
        "3,145,728 bytes (0.0 GiB) of host memory for a test's copies could not be page-locked",
        "cudaHostRegister: error text of 2 (2)",
        "container or cgroup may hold (3.0 GiB)",
        "SLURM: --mem=0",
        "or test less",
    ):
        assert words in text
    gc.collect()
    assert [call for call, _, _ in driver.calls] == ["register"], "nothing was locked, so nothing is unlocked"


def test_memory_that_cannot_be_mapped_is_explained() -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"1,152,921,504,606,846,976 bytes .* could not be mapped: .*or test less"
    ):
        PinnedBuffer([(2**60, torch.uint8)], Pageable(), PURPOSE)


def test_a_pool_reuses_vectors_of_one_length_and_dtype() -> None:
    driver = RecordingDriver()
    pool = PinnedPool(CudaPageLock(driver), PURPOSE)
    first = pool.take(100, torch.float32)
    other = pool.take(100, torch.bfloat16)
    pool.give(first)
    pool.give(other)
    assert pool.num_free == 2
    assert pool.take(100, torch.float32) is first and pool.take(100, torch.bfloat16) is other
    assert pool.take(100, torch.float32) is not first, "it is in use"
    assert pool.num_bytes == 400 + 200 + 400 and pool.num_free == 0
    pool.close()
    assert [call for call, _, _ in driver.calls].count("register") == 3
    assert [call for call, _, _ in driver.calls].count("unregister") == 3


class Reached:
    """Event of a stream that is reached when it is set."""

    def __init__(self) -> None:
        self.is_set = False

    def query(self) -> bool:
        return self.is_set


def test_a_pool_waits_for_no_copy_and_reuses_no_memory_that_one_reads() -> None:
    pool = PinnedPool(Pageable(), PURPOSE)
    vector, events = pool.take(8, torch.float32), (Reached(), Reached())
    pool.give(vector, events)  # type: ignore[arg-type]
    events[0].is_set = True
    assert pool.take(8, torch.float32) is not vector
    events[1].is_set = True
    assert pool.take(8, torch.float32) is vector


def test_a_cpu_locks_nothing() -> None:
    assert isinstance(page_lock_of(torch.device("cpu")), Pageable)


@pytest.mark.gpu
@pytest.mark.card
def test_a_gpu_copies_to_locked_memory_while_the_host_goes_on() -> None:
    device = torch.device("cuda")
    buffer = PinnedBuffer([(2**20, torch.float32), (3, torch.bfloat16)], page_lock_of(device), PURPOSE)
    vector = buffer.vectors[0]
    assert all(is_page_locked(vector) for vector in buffer.vectors)
    source = torch.full((2**20,), 7.0, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    vector.copy_(source, non_blocking=True)
    done = torch.cuda.current_stream().record_event()
    assert not done.query(), "the host did not wait for the sleeping stream"
    done.synchronize()
    assert (vector == 7).all()
    buffer.close()
    assert not is_page_locked(vector)
    assert vector.sum() == 7 * 2**20, "it is still mapped"
