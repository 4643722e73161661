"""Limits that NCCL fails with: read from a process as it is, judged where they matter."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.doctor.test_judge import cluster, with_node
from triaxis.launch.doctor.judge import judge
from triaxis.launch.doctor.limits import read_limits
from triaxis.launch.doctor.records import Examination, Finding, Level, LimitFacts
from triaxis.launch.start.process.named_causes import LOCKED_MEMORY_ADVICE, SHARED_MEMORY_ADVICE

MIB = 2**20
LARGE = LimitFacts(None, 16 * 1024 * MIB, has_infiniband=True)


def found(seen: Examination) -> list[Finding]:
    return [one for one in judge(seen) if one.check == "limits"]


@pytest.mark.parametrize("size", [0, 64 * MIB])
def test_a_node_with_dockers_shared_memory_is_named(size: int) -> None:
    (finding,) = found(with_node(cluster(3), 1, limits=replace(LARGE, shared_bytes=size)))
    assert (finding.level, finding.hosts, finding.advice) == (Level.WARN, ("host1",), SHARED_MEMORY_ADVICE)
    assert f"/dev/shm has {'64' if size else '0.00'} MiB" in finding.text and "--shm-size" in finding.advice
    (other,) = found(with_node(cluster(3), 1, limits=replace(LARGE, shared_bytes=65 * MIB)))
    assert other.level is Level.OK


def test_a_node_that_may_not_lock_memory_is_named_where_it_has_infiniband() -> None:
    (finding,) = found(with_node(cluster(3), 2, limits=replace(LARGE, locked_bytes=64 * 1024)))
    assert (finding.level, finding.hosts, finding.advice) == (Level.WARN, ("host2",), LOCKED_MEMORY_ADVICE)
    assert "0.06 MiB (RLIMIT_MEMLOCK)" in finding.text
    (fine,) = found(with_node(cluster(3), 2, limits=LimitFacts(64 * 1024, 16 * 1024 * MIB, has_infiniband=False)))
    assert fine.level is Level.OK and "0.06 MiB of memory can be locked" in fine.text


def test_gloo_needs_neither() -> None:
    seen = with_node(cluster(2), 0, limits=LimitFacts(64 * 1024, 64 * MIB, has_infiniband=True))
    (finding,) = found(replace(seen, needs=replace(seen.needs, backend="gloo")))
    assert finding.level is Level.OK


def test_both_are_said_of_the_node_that_has_both() -> None:
    seen = with_node(cluster(2), 0, limits=LimitFacts(8 * MIB, 64 * MIB, has_infiniband=True))
    assert [(one.level, one.hosts) for one in found(seen)] == [(Level.WARN, ("host0",))] * 2


def test_limits_are_those_of_the_process(tmp_path: Path) -> None:
    """A child with a limit of its own, without the right to lock as much as it likes."""
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nCapEff:\t00000000a80425fb\n")
    code = (
        "import resource; from pathlib import Path; from triaxis.launch.doctor.limits import read_limits; "
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)); "
        f"print(read_limits(Path('{tmp_path}'), Path('{status}'), Path('{tmp_path / 'none'}')))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "locked_bytes=65536" in said and "has_infiniband=False" in said
    assert "shared_bytes=0" not in said


def test_the_right_to_lock_counts_more_than_the_limit(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text(f"CapEff:\t{1 << 14:016x}\n")
    adapters = tmp_path / "infiniband"
    (adapters / "mlx5_0").mkdir(parents=True)
    limits = read_limits(tmp_path / "no such folder", status, adapters)
    assert limits == LimitFacts(None, 0, has_infiniband=True)
