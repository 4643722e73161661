"""Torch's allocator: its segments grow unless the user's environment sets it up."""

from typing import Any

import pytest
import torch

from triaxis.engine.config.run import RuntimeConfig
from triaxis.engine.device.allocator import ALLOCATOR_VARIABLES, set_up_allocator


def config(**given: Any) -> RuntimeConfig:
    return RuntimeConfig(**given)


def test_segments_grow_unless_the_user_has_said_how_memory_is_had() -> None:
    applied: list[str] = []
    set_up_allocator(config(), {"PATH": "/bin", "PYTORCH_ALLOC_CONF": ""}, applied.append)
    assert applied == ["expandable_segments:True"]
    for name in ALLOCATOR_VARIABLES:
        set_up_allocator(config(), {name: "max_split_size_mb:512"}, applied.append)
    set_up_allocator(config(expandable_segments=False), {}, applied.append)
    assert len(applied) == 1


def test_torch_takes_the_words(recwarn: pytest.WarningsRecorder) -> None:
    set_up_allocator(config(), {})
    assert not recwarn.list
    assert torch.ones(2).sum() == 2
