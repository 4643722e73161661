"""Signatures that are called of Transformer Engine, compared with the Python sources in its wheel without libraries."""

import ast
import inspect
import subprocess
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import pytest

from engine.kernels.te import FIRST_VERSION, GeneralGemm
from tests.stand_in import stand_in

GEMM = ("transformer_engine/pytorch/cpp_extensions/gemm.py", "general_gemm")
STORAGE = ("transformer_engine/pytorch/tensor/storage/float8_tensor_storage.py", "Float8TensorStorage.__new__")
ATTENTION = (
    "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py",
    "DotProductAttention.{}",
)
VERSIONS = (f"{FIRST_VERSION}.0", "2.20.2")
"""The first that fits, and the one that the stand-in is of."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheels")
    found = {}
    for version in VERSIONS:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--dest", str(folder)]
        got = subprocess.run(
            [*pip, f"transformer-engine=={version}"], capture_output=True, text=True, timeout=120, check=False
        )
        assert got.returncode == 0, got.stderr[-2000:]
        found[version] = zipfile.ZipFile(next(folder.glob(f"*-{version}-*.whl")))
    return found


def parameters(wheel: zipfile.ZipFile, path: str, name: str) -> dict[str, str]:
    """Return the source of the default of each parameter of a function; "" for one without."""
    found: Any = ast.parse(wheel.read(path).decode())
    for part in name.split("."):
        found = next(node for node in found.body if getattr(node, "name", None) == part)
    arguments = found.args
    named = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(named) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(named, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return {argument.arg: "" if default is None else ast.unparse(default) for argument, default in pairs}


def ours(function: Callable[..., Any]) -> dict[str, str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name: "" if parameter.default is parameter.empty else repr(parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in kinds
    }


@pytest.mark.distributed
def test_the_stand_in_has_its_signatures(wheels: dict[str, zipfile.ZipFile]) -> None:
    with stand_in("te"):
        from transformer_engine.pytorch.attention import DotProductAttention
        from transformer_engine.pytorch.cpp_extensions import general_gemm
        from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
    wheel = wheels[VERSIONS[-1]]
    assert (
        parameters(wheel, ATTENTION[0], ATTENTION[1].format("__init__")).keys()
        == ours(DotProductAttention.__init__).keys()
    )
    assert parameters(wheel, *GEMM) == ours(general_gemm)
    assert parameters(wheel, *STORAGE) == ours(Float8TensorStorage.__new__)


@pytest.mark.distributed
@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_takes_what_is_passed(wheels: dict[str, zipfile.ZipFile], version: str) -> None:
    theirs, passed = parameters(wheels[version], *GEMM), ours(GeneralGemm.__call__)
    assert [name for name, default in theirs.items() if not default] == ["A", "B"]
    assert {name: theirs.get(name) for name in passed if name not in ("self", "A", "B")} == {
        name: default for name, default in passed.items() if default
    }
    storage = parameters(wheels[version], *STORAGE)
    assert {"data", "fp8_scale_inv", "fp8_dtype"} == {name for name, default in storage.items() if not default} - {
        "cls"
    }
    attention = parameters(wheels[version], ATTENTION[0], ATTENTION[1].format("__init__"))
    assert list(attention)[1:3] == ["num_attention_heads", "kv_channels"]
    passed = {"num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type", "window_size", "softmax_scale"}
    assert passed <= attention.keys()
    forward = list(parameters(wheels[version], ATTENTION[0], ATTENTION[1].format("forward")))
    assert forward[1:4] == ["query_layer", "key_layer", "value_layer"]
    # The names of the formats are the compiled half's.
    assert b"tex.DType.kFloat8E4M3" in wheels[version].read("transformer_engine/pytorch/constants.py")


@pytest.mark.distributed
def test_outputs_are_in_the_order_that_is_read(wheels: dict[str, zipfile.ZipFile]) -> None:
    for wheel in wheels.values():
        source = wheel.read(GEMM[0]).decode()
        assert "out, bias_grad, gelu_input, extra_output = tex.generic_gemm(" in source
        assert "return out, bias_grad, gelu_input, extra_output" in source
