"""NVIDIA's driver is read from its library where that answers, else from the kernel's files."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness import compiler
from triaxis.engine.device.nvidia_driver import Driver, is_hidden, read_driver

FAKE_NVML = """
#include <string.h>
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) { strncpy(version, "550.54.14", length); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 8; return 0; }
"""


def fake_nvml(folder: Path, init: int = 0) -> str:
    """Compile a library that answers as NVML does on a node with 8 GPUs; `init` is what its start returns."""
    source, library = folder / "nvml.c", folder / f"libnvidia-ml-{init}.so"
    source.write_text(FAKE_NVML)
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", f"-DINIT={init}", "-o", library, source], check=True)
    return str(library)


def write_kernel_files(root: Path, num_gpus: int) -> None:
    (root / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(num_gpus))):
        (root / "dev" / name).touch()
    folder = root / "proc" / "driver" / "nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (builder@host)  Sun Jul 27 2025\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )


@compiler()
def test_the_library_says_version_and_number(tmp_path: Path) -> None:
    assert shutil.which("g++")
    write_kernel_files(tmp_path, 2)
    assert read_driver(fake_nvml(tmp_path), tmp_path) == Driver("550.54.14", 8)
    # NVML_ERROR_LIB_RM_VERSION_MISMATCH: the driver was updated, and the kernel module not loaded anew.
    assert read_driver(fake_nvml(tmp_path, init=18), tmp_path) == Driver("580.65.06", 2)


def test_without_the_library_device_files_count(tmp_path: Path) -> None:
    write_kernel_files(tmp_path, 4)
    assert read_driver("libno-such-thing.so", tmp_path) == Driver("580.65.06", 4)
    (tmp_path / "proc" / "driver" / "nvidia" / "version").unlink()
    assert read_driver("libno-such-thing.so", tmp_path) == Driver("", 4)


def test_a_container_without_gpus_sees_the_hosts_proc_and_has_none(tmp_path: Path) -> None:
    write_kernel_files(tmp_path, 0)
    assert read_driver("libno-such-thing.so", tmp_path) == Driver()


def test_a_driver_runs_all_builds_of_a_cuda_major_version_from_its_first_branch() -> None:
    old = Driver("550.54.14", 1)
    assert [old.runs(major) for major in (11, 12, 13, 99)] == [True, True, False, None]
    assert Driver("580.65.06", 1).runs(13)
    assert Driver("", 1).runs(12) is None


@pytest.mark.parametrize(
    ("value", "hidden"), [(None, False), ("0,1", False), ("", True), ("-1", True), ("NoDevFiles", True)]
)
def test_gpus_that_are_hidden_on_purpose(value: str | None, hidden: bool) -> None:
    assert is_hidden({} if value is None else {"CUDA_VISIBLE_DEVICES": value}) == hidden
