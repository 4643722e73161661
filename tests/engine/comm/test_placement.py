"""Which device and backend a rank takes, and which places of ranks do not fit together."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.comm.placement import Place, judge_places, place
from triaxis.engine.comm.store_agreement import Facts
from triaxis.engine.config.schema.run import RuntimeConfig
from triaxis.engine.device import gpus
from triaxis.engine.device.gpus import BACKEND_VARIABLE, CPU, CUDA, DEVICE_VARIABLE, GLOO, NCCL
from triaxis.engine.device.nvidia_driver import Driver
from triaxis.engine.errors import TopologyError

ON_GPUS = {DEVICE_VARIABLE: CUDA, BACKEND_VARIABLE: NCCL}
ON_THE_CPU = {DEVICE_VARIABLE: CPU, BACKEND_VARIABLE: GLOO}


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set how many GPUs torch finds, and how many the driver shows."""

    def show(usable: int, in_driver: int | None = None) -> None:
        driver = Driver("550.54.14", usable if in_driver is None else in_driver)
        monkeypatch.setattr(gpus, "read_driver", lambda: driver)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: usable)

    return show


def config(**given: Any) -> RuntimeConfig:
    return RuntimeConfig(**given)


def test_a_rank_takes_the_gpu_of_its_number_and_no_rank_is_without(shown: Any) -> None:
    shown(2)
    for variables in ({}, ON_GPUS):
        assert place(config(), 1, variables) == Place(torch.device("cuda", 1), NCCL)
        with pytest.raises(
            TopologyError, match=r"local rank 2 has no GPU: this node shows 2.*runtime\.collectives=gloo"
        ):
            place(config(), 2, variables)
    assert place(config(device="cpu"), 7, {}) == Place(torch.device("cpu"), GLOO)


def test_a_task_that_sees_one_gpu_takes_it_whatever_its_number(shown: Any) -> None:
    shown(1)
    assert place(config(), 3, {}) == Place(torch.device("cuda", 0), NCCL)


@given(count=st.integers(1, 8), local_rank=st.integers(0, 64))
def test_ranks_that_gloo_serves_take_the_gpus_in_turns(count: int, local_rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: count)
        taken = place(config(collectives="gloo"), local_rank, {})
        assert taken == Place(torch.device("cuda", local_rank % count), GLOO)


def test_what_was_asked_for_and_is_not_there_is_an_error(shown: Any) -> None:
    shown(0)
    assert place(config(collectives="gloo"), 3, {}).device == torch.device("cpu")
    with pytest.raises(TopologyError, match="this node shows no GPU"):
        place(config(device="cuda"), 0, {})
    with pytest.raises(TopologyError, match=r"collectives = nccl.*runtime\.collectives=auto"):
        place(config(collectives="nccl"), 0, {})


@pytest.mark.parametrize("variables", [{}, ON_GPUS], ids=["no launcher", "launcher"])
def test_a_gpu_that_torch_cannot_use_is_no_cpu_run(shown: Any, variables: dict[str, str]) -> None:
    shown(0, in_driver=8)
    with pytest.raises(TopologyError, match=r"(?s)8 GPUs with driver 550\.54\.14.*runtime\.device=cpu"):
        place(config(), 0, variables)
    assert place(config(device="cpu"), 0, {}).device == torch.device("cpu")
    assert place(config(), 0, ON_THE_CPU).device == torch.device("cpu")


def test_a_rank_that_has_lost_the_launchers_gpus_is_no_cpu_run(shown: Any) -> None:
    shown(0)
    with pytest.raises(TopologyError, match="this rank sees no GPU, and the launcher decided on cuda"):
        place(config(), 0, ON_GPUS)


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"device": "cpu"}, ON_GPUS),
        ({"device": "cuda"}, ON_THE_CPU),
        ({"collectives": "gloo"}, ON_GPUS),
        ({}, {DEVICE_VARIABLE: "tpu", BACKEND_VARIABLE: GLOO}),
        ({}, {DEVICE_VARIABLE: CPU, BACKEND_VARIABLE: "mpi"}),
    ],
    ids=str,
)
def test_variables_that_contradict_the_config_are_refused(
    shown: Any, fields: dict[str, Any], variables: dict[str, str]
) -> None:
    shown(8)
    with pytest.raises(TopologyError, match=r"contradict runtime\.device"):
        place(config(**fields), 0, variables)


# All ranks ------------------------------------------------------------------------------------------------------------


def on_gpu(uuid: str, host: str = "a") -> Facts:
    return {"host": host, "device": CUDA, "backend": NCCL, "uuid": uuid}


ON_CPU: Facts = {"host": "b", "device": CPU, "backend": GLOO}


def test_places_that_fit_are_fine() -> None:
    assert judge_places([on_gpu("GPU-1"), on_gpu("GPU-2")]) is None
    assert judge_places([ON_CPU, ON_CPU]) is None
    shared: Facts = {"host": "a", "device": CUDA, "backend": GLOO}
    assert judge_places([shared, shared]) is None


def test_one_rank_without_its_device_is_named_with_its_reason() -> None:
    lost: Facts = {"host": "b", "problem": "no GPU at all"}
    assert judge_places([on_gpu("GPU-1"), lost, on_gpu("GPU-2")]) == "rank 1: no GPU at all"
    assert judge_places([lost] * 8) == "ranks 0 to 7: no GPU at all"


def test_two_ranks_on_one_gpu_are_named() -> None:
    problem = judge_places([on_gpu("GPU-1"), on_gpu("GPU-2"), on_gpu("GPU-1")])
    assert (
        problem is not None and "ranks 0 and 2 on a have one GPU (GPU-1)" in problem and "--gpus-per-task=1" in problem
    )


def test_a_mixture_of_devices_is_refused() -> None:
    problem = judge_places([on_gpu("GPU-1"), on_gpu("GPU-2"), ON_CPU])
    assert problem is not None
    assert "cuda with nccl: ranks 0 to 1 (a)" in problem
    assert "cpu with gloo: rank 2 (b)" in problem
