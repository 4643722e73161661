"""CUDA's own answer to whether memory is page-locked. torch's `is_pinned` denies it for some registered mappings."""

import ctypes
from pathlib import Path

import torch

HOST = 1
"""`cudaMemoryTypeHost`."""


class PointerAttributes(ctypes.Structure):
    """`cudaPointerAttributes`: type, device, two addresses, reserved words."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 16),
    ]


def is_page_locked(tensor: torch.Tensor) -> bool:
    """Return whether CUDA knows both ends of a host tensor as page-locked memory."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    runtime = ctypes.CDLL(next(line.split()[-1] for line in maps if "libcudart" in line))
    found = PointerAttributes()
    for address in (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes - 1):
        assert runtime.cudaPointerGetAttributes(ctypes.byref(found), ctypes.c_void_p(address)) == 0
        if found.type != HOST:
            return False
    return True
