"""The update of apex's FusedAdam on flat shards, by a stand-in, against torch's; and words where apex is not what is needed."""

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.optimizer.test_compiled_update import updated
from tests.parity.cases import Case
from tests.stand_in import stand_in
from triaxis.engine.config.schema.kernels import KernelsConfig
from triaxis.engine.errors import ConfigError
from triaxis.engine.kernels.apex import open_apex
from triaxis.engine.kernels.attention_trials import AttentionShape
from triaxis.engine.kernels.registry import Choices, device_trials, try_out

BY_APEX = Choices("sdpa", "sdpa", "eager", "separate", "apex")
SHAPE = AttentionShape(4, 2, 16, torch.bfloat16, torch.device("cpu"))
FORMS = {
    "masters are the parameters": Case("gpt", dtype="fp32", num_layers=2),
    "masters beside them": Case("gpt", dtype="bf16", num_layers=2, groups=True),
    "gradients in bf16": Case("gpt", dtype="bf16", bf16_gradients=True, num_layers=2),
    "averaged, in parts frozen": Case("gpt", dtype="bf16", ema=0.9, frozen=("layers.0.*",), num_layers=2),
}


@pytest.fixture
def apex() -> Iterator[None]:
    with stand_in("apex"):
        yield


@pytest.mark.parametrize("form", FORMS)
def test_the_update_is_torchs(form: str, apex: None) -> None:
    case = FORMS[form]
    plain, by_apex = updated(case), updated(replace(case, apex=True))
    assert plain.optimizer.num_updates == by_apex.optimizer.num_updates
    # Bias corrections in fp32 are up to 6e-5 off at first; gradients in bf16 are rounded after they are scaled.
    near = 2e-2 if case.bf16_gradients else 1e-4
    for one, other in zip(plain.optimizer.trained, by_apex.optimizer.trained, strict=True):
        for kind in plain.optimizer.state_kinds:
            wanted, got = one.state.read(kind), other.state.read(kind)
            assert float((got - wanted).norm()) <= near * float(wanted.norm()), kind
        assert torch.equal(other.parameters, other.state.read("master").to(other.parameters.dtype))


def test_one_launch_updates_all_runs_of_a_rule(apex: None) -> None:
    engine = updated(replace(FORMS["masters beside them"], apex=True))
    runs = [rule for owned in engine.optimizer.trained for _, rule in owned.runs(engine.config.optimizer)]
    calls = importlib.import_module("amp_C").calls
    # The last step's; the first call of all was the trial.
    last = calls[-len(set(runs)) :]
    assert sum(last) == len(runs) > len(last)


def refusal() -> str:
    with pytest.raises(ConfigError) as caught:
        try_out(KernelsConfig(optimizer="apex"), BY_APEX, device_trials(SHAPE, torch.float32))
    (problem,) = caught.value.problems
    return str(problem)


def test_without_apex_it_is_refused() -> None:
    assert "kernels.optimizer = apex does not run here, on cpu (apex is not installed)" in refusal()
    assert "github.com/NVIDIA/apex" in refusal() and "kernels.optimizer=compiled" in refusal()


def test_other_packages_of_that_name_are_recognised(tmp_path: Path) -> None:
    index, plain = tmp_path / "index" / "apex", tmp_path / "plain" / "apex"
    (index / "ext").mkdir(parents=True)
    (index / "__init__.py").touch()
    with stand_in("index", tmp_path):
        assert "the package index's, another project of that name, and not NVIDIA's" in refusal()
    (plain / "optimizers").mkdir(parents=True)
    (plain / "__init__.py").touch()
    (plain / "optimizers" / "fused_adam.py").touch()
    with stand_in("plain", tmp_path):
        assert "apex is installed without its CUDA kernels: No module named 'amp_C'" in refusal()


def test_a_kernel_that_is_not_adamw_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "wrong"
    folder.mkdir()
    (folder / "amp_C.py").write_text(
        "def multi_tensor_adam_capturable(*arguments): ...\nmulti_tensor_adam_capturable_master = None\n"
    )
    with stand_in("wrong", tmp_path):
        assert "(its update is not that of AdamW)" in refusal()


def test_a_gpu_s_apex_says_so_on_a_cpu(tmp_path: Path) -> None:
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "amp_C.py").write_text(
        "def multi_tensor_adam_capturable(*arguments):\n    raise RuntimeError('expected input to be on cuda')\n"
        "multi_tensor_adam_capturable_master = None\n"
    )
    with stand_in("cuda", tmp_path):
        assert "(expected input to be on cuda)" in refusal()


@pytest.mark.gpu
def test_the_kernel_of_this_gpu() -> None:
    """Update by the real kernel, if apex is installed beside the GPU."""
    try:
        open_apex()
    except ImportError as error:
        pytest.skip(str(error))
    assert try_out(
        KernelsConfig(optimizer="apex"),
        BY_APEX,
        device_trials(replace(SHAPE, device=torch.device("cuda")), torch.float32),
    ) == (BY_APEX, [])
