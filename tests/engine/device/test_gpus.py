"""GPUs that torch cannot use are an error, unless the CPU was asked for."""

from typing import Any

import pytest
import torch

from triaxis.engine.config.schema.run import RuntimeConfig
from triaxis.engine.device import gpus
from triaxis.engine.device.gpus import CPU, CUDA, GLOO, NCCL, Gpus, backend_of, device_type, find_gpus, why_unusable
from triaxis.engine.device.nvidia_driver import Driver
from triaxis.engine.errors import TopologyError

OLD = Driver("550.54.14", 8)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set what the driver shows and how many GPUs torch can use."""

    def show(driver: Driver, usable: int, cuda: str | None = "13.0") -> None:
        monkeypatch.setattr(gpus, "read_driver", lambda: driver)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: usable)

    return show


def test_what_torch_can_use_is_counted(node: Any) -> None:
    node(Driver("580.65.06", 8), 8)
    assert find_gpus({}) == Gpus(8)
    node(Driver("580.65.06", 8), 2)  # CUDA_VISIBLE_DEVICES=0,1
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == Gpus(2)
    node(Driver(), 0)
    assert find_gpus({}) == Gpus(0)


def test_a_driver_that_is_too_old_is_no_cpu_run(node: Any) -> None:
    node(OLD, 0)
    found = find_gpus({})
    for words in (
        "8 GPUs with driver 550.54.14",
        "built for CUDA 13.0",
        "needs driver 580 or newer",
        torch.__version__,
    ):
        assert words in found.problem
    for way_out in ("TRIAXIS_PYTHON=", "launch/constraints.txt", "runtime.device=cpu"):
        assert way_out in found.problem
    for device in ("auto", "cuda"):
        with pytest.raises(TopologyError, match=r"needs driver 580"):
            device_type(RuntimeConfig(device=device), found)
    assert device_type(RuntimeConfig(device="cpu"), found) == CPU


def test_torchs_own_reason_is_given(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node(Driver("580.65.06", 8), 0)

    def is_available() -> bool:
        import warnings

        warnings.warn("CUDA initialization: Error 802: system not yet initialized", stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    problem = find_gpus({}).problem
    assert "Error 802: system not yet initialized" in problem
    assert "this driver is new enough, so something else is wrong" in problem


def test_a_cpu_build_and_an_unknown_cuda_are_named() -> None:
    assert "torch 2.13.0+cpu is a CPU build" in why_unusable(Driver("", 1), "2.13.0+cpu", None)
    assert "1 GPU with driver of unknown version" in why_unusable(Driver("", 1), "2.13.0+cpu", None)
    assert "built for CUDA 99.0, which needs a driver for CUDA 99" in why_unusable(OLD, "9.0", "99.0")


def test_a_cpu_build_on_arm_is_not_installed_again() -> None:
    said = why_unusable(Driver("580.65.06", 4), "2.13.0", None, machine="aarch64")
    assert "all that some package indexes have for aarch64" in said
    assert "bootstrap.sh" not in said and "TRIAXIS_PYTHON=<python>" in said
    assert "bootstrap.sh" in why_unusable(Driver("580.65.06", 4), "2.13.0", None, machine="x86_64")
    assert "bootstrap.sh" in why_unusable(Driver("550.54.14", 4), "2.13.0", "13.0", machine="aarch64")


def test_gpus_that_are_hidden_on_purpose_mean_the_cpu(node: Any) -> None:
    node(OLD, 0)
    hidden = find_gpus({"CUDA_VISIBLE_DEVICES": ""})
    assert (hidden.problem, hidden.note) == ("", "CUDA_VISIBLE_DEVICES= hides the GPUs")
    assert device_type(RuntimeConfig(), hidden) == CPU
    with pytest.raises(TopologyError, match="hides the GPUs"):
        device_type(RuntimeConfig(device="cuda"), hidden)


def test_a_rank_asks_torch_also_where_no_driver_is_found(node: Any) -> None:
    node(Driver(), 2)
    assert find_gpus({}) == Gpus(0)
    assert find_gpus({}, ask_torch=True) == Gpus(2)


def test_the_backend_follows_the_device() -> None:
    assert backend_of(RuntimeConfig(), CUDA) == NCCL
    assert backend_of(RuntimeConfig(collectives="gloo"), CUDA) == GLOO
    assert backend_of(RuntimeConfig(), CPU) == GLOO
    with pytest.raises(TopologyError, match=r"collectives = nccl.*runtime\.collectives=auto"):
        backend_of(RuntimeConfig(collectives="nccl"), CPU)


def test_an_installation_without_a_checkout_offers_no_script(monkeypatch: pytest.MonkeyPatch) -> None:

    assert "launch/bootstrap.sh" in why_unusable(OLD, "2.13.0", "13.0")
    monkeypatch.setattr(gpus, "IS_CHECKOUT", False)
    said = why_unusable(OLD, "2.13.0", "13.0")
    assert "bootstrap" not in said and "runtime.device=cpu" in said
