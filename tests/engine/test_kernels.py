"""The registry of kernels: what is chosen is tried, said and used; what does not run here is refused, all of it at once."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import KernelsConfig
from engine.errors import ConfigError
from engine.kernels.attention import AttentionShape
from engine.kernels.fusion import EAGER, Fusion
from engine.kernels.registry import describe, resolve
from models.gpt import GPTChunk
from tests.harness import compiler
from tests.parity.cases import Case
from tests.parity.test_step_properties import build_rank

SHAPE = AttentionShape(4, 2, 16, torch.bfloat16, torch.device("cpu"))


def test_every_problem_is_reported_at_once() -> None:
    asked = KernelsConfig(attention="cudnn", weight_grad="fused")
    with pytest.raises(ConfigError) as caught:
        resolve(asked, SHAPE, torch.float32)
    assert [problem.split(" does")[0] for problem in caught.value.problems] == [
        "kernels.attention = cudnn",
        "kernels.weight_grad = fused",
    ]


def test_the_banner_names_every_choice() -> None:
    said = describe(KernelsConfig(weight_grad="fused", elementwise="compiled"), SHAPE)
    assert said.startswith("attention: sdpa, of which torch takes ")
    assert said.endswith("; elementwise: compiled; weight grad: fused; optimizer: torch")
    assert len(said.split("; ")) == len(KernelsConfig.model_fields)


@compiler()
def test_modules_use_what_was_chosen_and_decoding_compiles_nothing() -> None:
    engine, batches = build_rank(0, Case("qwen", compiled=True))
    batches.close()
    (chunk,) = engine.chunks
    assert isinstance(chunk, GPTChunk)
    fusions = {id(module.fusion): module.fusion for module in chunk.modules() if hasattr(module, "fusion")}
    assert [fusion.form for fusion in fusions.values()] == ["compiled"], (
        "one for all modules: each function is compiled once"
    )
    assert {module.fusion for module in chunk.for_decoding().modules() if hasattr(module, "fusion")} == {EAGER}


def test_eager_is_the_function_itself() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    assert Fusion("eager")(function) is function


@compiler()
def test_a_function_is_compiled_once_and_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Callable[..., Any]] = []

    def compile_nothing(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        assert options["fullgraph"]
        made.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compile_nothing)
    fusion = Fusion("compiled")
    weight = torch.nn.Parameter(torch.ones(3))
    for _ in range(3):
        assert not fusion(torch.neg)(weight).requires_grad, "the compiler sees no leaf"
    assert made == [torch.neg]


@pytest.mark.slow
def test_without_a_compiler_the_choice_is_refused(tmp_path: Path) -> None:
    program = (
        "import torch; from engine.kernels.fusion import require_compiler; from engine.errors import ConfigError\n"
        "try: require_compiler(torch.device('cpu'))\n"
        "except ConfigError as error: print(error)\n"
    )
    environment = os.environ | {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert "apt-get install g++ python3-dev" in done.stdout and "kernels.elementwise=eager" in done.stdout
