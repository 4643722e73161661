"""The machine of a layout: as it is written, or this one."""

import os
from pathlib import Path

import psutil
import pytest

from triaxis.engine.device.host_memory import host_memory_bytes
from triaxis.engine.errors import ConfigError
from triaxis.launch.start.gpu_memory import MIB
from triaxis.launch.tuning.machine import RESIDENT_BYTES, this_machine, written_machine
from triaxis.models.predict.rank_memory import GB


@pytest.mark.parametrize(
    ("text", "num_nodes", "ranks_per_node", "name"),
    [
        ("1x24GB", 1, 1, "1 GPU of 24.0 GB"),
        ("6x80GB", 1, 6, "6 GPUs of 80.0 GB"),
        ("8x80GB", 1, 8, "8 GPUs of 80.0 GB"),
        ("64x141GB", 8, 8, "64 GPUs of 141.0 GB on 8 nodes of 8"),
    ],
)
def test_gpus_as_they_are_written(text: str, num_nodes: int, ranks_per_node: int, name: str) -> None:
    machine = written_machine(text)
    assert (machine.num_nodes, machine.ranks_per_node, machine.name) == (num_nodes, ranks_per_node, name)
    assert machine.is_gpu and machine.num_ranks == num_nodes * ranks_per_node
    assert machine.memory_bytes == int(text.partition("x")[2].removesuffix("GB")) * GB


@pytest.mark.parametrize("text", ["8", "8x80", "8x0GB", "0x80GB", "x80GB", "8 x 80GB", "12x80GB", "99999999x80GB"])
def test_another_spelling_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--gpus {text}: "):
        written_machine(text)


def test_gpus_of_this_machine_are_those_that_nvidia_smi_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81559\necho 81559\necho 40960\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    machine = this_machine({})
    assert (machine.num_ranks, machine.ranks_per_node, machine.is_gpu) == (3, 3, True)
    assert machine.memory_bytes == 40960 * MIB


def test_without_gpus_the_cores_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5})
    machine = this_machine({})
    assert (machine.num_nodes, machine.ranks_per_node, machine.is_gpu) == (1, 3, False)
    assert 3 * (machine.memory_bytes + RESIDENT_BYTES) == pytest.approx(host_memory_bytes(), abs=3)


def test_a_container_has_the_memory_that_it_may_use(tmp_path: Path) -> None:
    limit, total = tmp_path / "memory.max", psutil.virtual_memory().total
    assert host_memory_bytes(limit) == total
    limit.write_text("max\n")
    assert host_memory_bytes(limit) == total
    limit.write_text("123456789\n")
    assert host_memory_bytes(limit) == 123456789
