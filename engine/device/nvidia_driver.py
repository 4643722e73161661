"""Reads the version and the number of GPUs from NVIDIA's driver on this node.

    libnvidia-ml.so.1             version and number of GPUs, as `nvidia-smi` prints them
    if that library fails         /proc/driver/nvidia/version, and the device files /dev/nvidia0, /dev/nvidia1, ...

Only the standard library is imported, because `launch/start/bootstrap.py` runs before anything is installed.
"""

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NVML = "libnvidia-ml.so.1"
"""NVIDIA's management library; it comes with the driver."""

FIRST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Oldest driver branch that runs every build for a CUDA major version, by that major version.

Source: NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1.
"""

HIDING = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs, set by users or SLURM."""

_VERSION_BYTES = 80
"""NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE in nvml.h."""

_NUMBERED = re.compile(r"nvidia\d+")
_VERSION = re.compile(r"\b(\d+\.\d+(?:\.\d+)?)\b")


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver on this node.

    Attributes:
        version: version such as 580.65.06; "" if unknown.
        num_gpus: number of GPUs that this process may see; CUDA_VISIBLE_DEVICES is ignored.
    """

    version: str = ""
    num_gpus: int = 0

    @property
    def branch(self) -> int | None:
        """The number before the first dot; None if the version is unknown."""
        return int(self.version.partition(".")[0]) if self.version else None

    def runs(self, cuda_major: int) -> bool | None:
        """Whether the driver runs builds for this CUDA major version; None if unknown.

        Use the answer only in explanations: with NVIDIA's `cuda-compat`, a data-centre card also runs newer builds.
        """
        first = FIRST_DRIVERS.get(cuda_major)
        return None if first is None or self.branch is None else self.branch >= first


def read_driver(library: str = NVML, root: Path = Path("/")) -> Driver:
    """Read the driver; `Driver()` if this node shows none.

    Args:
        library: name or path of NVML.
        root: folder that holds `dev` and `proc`; tests pass another one.
    """
    return _ask_nvml(library) or _read_files(root)


def is_hidden(variables: Mapping[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides all GPUs."""
    return variables.get("CUDA_VISIBLE_DEVICES", "all").strip() in HIDING


def _ask_nvml(library: str) -> Driver | None:
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        version, num_gpus = ctypes.create_string_buffer(_VERSION_BYTES), ctypes.c_uint()
        if nvml.nvmlSystemGetDriverVersion(version, _VERSION_BYTES) != 0:
            return None
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(num_gpus)) != 0:
            return None
        return Driver(version.value.decode(), num_gpus.value)
    finally:
        nvml.nvmlShutdown()


def _read_files(root: Path) -> Driver:
    """Read the kernel module's files. GPUs are counted by device files, because a container may see the host's /proc."""
    num_gpus = sum(1 for path in (root / "dev").glob("nvidia*") if _NUMBERED.fullmatch(path.name))
    path = root / "proc" / "driver" / "nvidia" / "version"
    found = _VERSION.search(path.read_text()) if num_gpus and path.is_file() else None
    return Driver(found[1] if found else "", num_gpus)
