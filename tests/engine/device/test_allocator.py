"""Torch's allocator: its segments grow unless the user's environment sets it up."""

from typing import Any

import pytest
import torch

from triaxis.engine.config.schema.run import RuntimeConfig
from triaxis.engine.device.allocator import ALLOCATOR_VARIABLES, set_up_allocator

CPU = torch.device("cpu")


def config(**given: Any) -> RuntimeConfig:
    return RuntimeConfig(**given)


def test_segments_grow_unless_the_user_has_said_how_memory_is_had() -> None:
    applied: list[str] = []
    set_up_allocator(config(), {"PATH": "/bin", "PYTORCH_ALLOC_CONF": ""}, CPU, applied.append)
    assert applied == ["expandable_segments:True"]
    for name in ALLOCATOR_VARIABLES:
        set_up_allocator(config(), {name: "max_split_size_mb:512"}, CPU, applied.append)
    set_up_allocator(config(expandable_segments=False), {}, CPU, applied.append)
    assert len(applied) == 1


def test_a_node_whose_first_allocation_fails_goes_on_without_such_segments(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("Expected NVML_SUCCESS == nvmlDeviceGetGpuFabricInfoV_(..) to be true\nmore lines")

    def has_no_room(device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    applied: list[str] = []
    set_up_allocator(config(), {}, CPU, applied.append, refuse)
    assert applied == ["expandable_segments:True", "expandable_segments:False"]
    (line,) = capsys.readouterr().err.splitlines()
    assert "failed (Expected NVML_SUCCESS" in line and "runtime.expandable_segments=false" in line
    set_up_allocator(config(), {}, CPU, applied.append, has_no_room)
    assert applied[2:] == ["expandable_segments:True"] and not capsys.readouterr().err


def test_torch_takes_the_words(recwarn: pytest.WarningsRecorder) -> None:
    set_up_allocator(config(), {}, CPU)
    assert not recwarn.list
    assert torch.ones(2).sum() == 2
