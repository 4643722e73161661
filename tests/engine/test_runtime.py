"""Which device a rank takes, what collectives it joins, and how the allocator is set up before the first tensor."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import RuntimeConfig
from engine.errors import TopologyError
from engine.runtime import ALLOCATOR_VARIABLES, RankEnvironment, choose_device, set_up_allocator, start
from tests.harness import run_ranks


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say how many GPUs torch finds."""

    def say(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return say


def config(**given: Any) -> RuntimeConfig:
    return RuntimeConfig(**given)


def test_a_rank_takes_the_gpu_of_its_number_and_no_rank_is_without(gpus: Any) -> None:
    gpus(2)
    assert choose_device(config(), 1) == torch.device("cuda", 1)
    assert choose_device(config(device="cpu"), 7) == torch.device("cpu")
    with pytest.raises(TopologyError, match=r"local rank 2 has no GPU: this node shows 2.*runtime\.collectives=gloo"):
        choose_device(config(), 2)


@given(count=st.integers(1, 8), local_rank=st.integers(0, 64))
def test_ranks_that_gloo_serves_take_the_gpus_in_turns(count: int, local_rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: count)
        assert choose_device(config(collectives="gloo"), local_rank) == torch.device("cuda", local_rank % count)


def test_what_was_asked_for_and_is_not_there_is_said(gpus: Any) -> None:
    gpus(0)
    assert choose_device(config(collectives="gloo"), 3) == torch.device("cpu")
    with pytest.raises(TopologyError, match="finds no CUDA device"):
        choose_device(config(device="cuda"), 0)
    with pytest.raises(TopologyError, match=r"collectives = nccl.*runtime\.collectives=auto"):
        choose_device(config(collectives="nccl"), 0)


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


def on_the_cpu(rank: int) -> bool:
    import engine.runtime

    engine.runtime.set_up_allocator = None  # type: ignore[assignment] # calling it would fail
    runtime = start(RankEnvironment(), config(device="cpu"))
    return runtime.device.type == "cpu"


@pytest.mark.distributed
def test_nothing_is_set_up_on_the_cpu() -> None:
    assert run_ranks(on_the_cpu, 1) == [True]


# On a card ---------------------------------------------------------------------------------------------------------------


def has_growing_segments(rank: int, variables: dict[str, str]) -> bool:
    import os

    os.environ.update(variables)
    start(RankEnvironment(), config(device="cuda"))
    kept = torch.ones(1 << 20, device="cuda")
    return any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()) and kept.is_cuda


@pytest.mark.gpu
def test_the_first_tensor_of_a_rank_is_in_a_segment_that_grows() -> None:
    assert run_ranks(has_growing_segments, 1, {}) == [True]
    assert run_ranks(has_growing_segments, 1, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}) == [False]
