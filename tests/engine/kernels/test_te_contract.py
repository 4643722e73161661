"""Signatures that are called of Transformer Engine, compared with the Python sources in its wheel without libraries."""

import ast
import inspect
import math
import subprocess
import sys
import zipfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.stand_in import stand_in
from triaxis.engine.kernels.fp8.recipes import E4M3, RECIPES, quantise
from triaxis.engine.kernels.te import FIRST_VERSION, GeneralGemm
from triaxis.engine.kernels.te_storage import Storages

GEMM = ("transformer_engine/pytorch/cpp_extensions/gemm.py", "general_gemm")
FOLDER = "transformer_engine/pytorch/tensor/storage/"
STORAGE = (f"{FOLDER}float8_tensor_storage.py", "Float8TensorStorage.__new__")
BLOCKS = (f"{FOLDER}float8_blockwise_tensor_storage.py", "Float8BlockwiseQTensorStorage.__new__")
MX = (f"{FOLDER}mxfp8_tensor_storage.py", "MXFP8TensorStorage.__new__")
OF_ROWS = {
    "rowwise_data",
    "rowwise_scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
    "fp8_dtype",
    "quantizer",
}
"""Arguments of the storages with scales of blocks."""
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
        from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
            Float8BlockwiseQTensorStorage,
        )
        from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
        from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
    wheel = wheels[VERSIONS[-1]]
    assert (
        parameters(wheel, ATTENTION[0], ATTENTION[1].format("__init__")).keys()
        == ours(DotProductAttention.__init__).keys()
    )
    assert parameters(wheel, *GEMM) == ours(general_gemm)
    assert parameters(wheel, *STORAGE) == ours(Float8TensorStorage.__new__)
    assert parameters(wheel, *BLOCKS) == ours(Float8BlockwiseQTensorStorage.__new__)
    assert parameters(wheel, *MX) == ours(MXFP8TensorStorage.__new__)


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
    # Arguments that a release lacks are swallowed, as long as it takes others.
    for place, more in ((BLOCKS, {"is_2D_scaled", "data_format"}), (MX, {"with_gemm_swizzled_scales"})):
        required = {name for name, default in parameters(wheels[version], *place).items() if not default} - {"cls"}
        assert required >= OF_ROWS and required <= OF_ROWS | more
        tree = ast.parse(wheels[version].read(place[0]).decode())
        made = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__new__")
        assert made.args.kwarg is not None
    if "data_format" in parameters(wheels[version], *BLOCKS):
        assert b"tex.Float8BlockScaleTensorFormat.GEMM_READY" in wheels[version].read(GEMM[0])
    attention = parameters(wheels[version], ATTENTION[0], ATTENTION[1].format("__init__"))
    assert list(attention)[1:3] == ["num_attention_heads", "kv_channels"]
    passed = {"num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type", "window_size", "softmax_scale"}
    assert passed <= attention.keys()
    forward = list(parameters(wheels[version], ATTENTION[0], ATTENTION[1].format("forward")))
    assert forward[1:4] == ["query_layer", "key_layer", "value_layer"]
    # The names of the formats are the compiled half's.
    assert b"tex.DType.kFloat8E4M3" in wheels[version].read("transformer_engine/pytorch/constants.py")


@pytest.mark.distributed
def test_scales_have_the_shapes_of_its_quantisers(wheels: dict[str, zipfile.ZipFile]) -> None:
    """The shapes are TE's own methods, run on their sources; ours are those of the storages that are made."""
    storages = Storages(tensor=dict, blocks=dict, mx=dict, dtypes={torch.float8_e4m3fn: "e4m3"})
    of_blocks = "float8_blockwise_tensor.py", "Float8BlockQuantizer", {"block_len": 128, "all_gather_usage": False}
    # The first version has no such method of the other quantiser.
    of_mx = "mxfp8_tensor.py", "MXFP8Quantizer", {}
    for version, recipe, (path, name, more) in (
        (VERSIONS[0], "blockwise", of_blocks),
        (VERSIONS[1], "blockwise", of_blocks),
        (VERSIONS[1], "mxfp8", of_mx),
    ):
        shape_of = their_shapes(wheels[version].read(f"transformer_engine/pytorch/tensor/{path}").decode(), name)
        for rows, columns in ((128, 128), (384, 640), (256, 1152)):
            for block in (RECIPES[recipe].activation_block, RECIPES[recipe].weight_block):
                matrix = quantise(torch.ones(rows, columns), E4M3, block, has_powers=True)
                made = storages.stored(matrix, is_tensorwise=False)
                dim = 2 if made.get("is_2D_scaled") else 1
                theirs = shape_of(SimpleNamespace(**more, block_scaling_dim=dim), (rows, columns), columnwise=False)
                assert tuple(made["rowwise_scale_inv"].shape) == theirs


def their_shapes(source: str, name: str) -> Callable[..., tuple[int, int]]:
    """Return `get_scale_shape` of a class, without its module: that imports compiled libraries."""
    found = next(node for node in ast.parse(source).body if getattr(node, "name", None) == name)
    function = next(node for node in found.body if getattr(node, "name", None) == "get_scale_shape")
    function.decorator_list, function.returns = [], None
    for argument in function.args.args:
        argument.annotation = None
    places: dict[str, Any] = {
        "math": math,
        "round_up_to_nearest_multiple": lambda size, multiple: -(-size // multiple) * multiple,
        "MXFP8_BLOCK_SCALING_SIZE": 32,
        "Float8BlockScaleTensorFormat": SimpleNamespace(GEMM_READY=0),
    }
    exec(compile(ast.Module([function], []), name, "exec"), places)
    return places["get_scale_shape"]


@pytest.mark.distributed
def test_outputs_are_in_the_order_that_is_read(wheels: dict[str, zipfile.ZipFile]) -> None:
    for wheel in wheels.values():
        source = wheel.read(GEMM[0]).decode()
        assert "out, bias_grad, gelu_input, extra_output = tex.generic_gemm(" in source
        assert "return out, bias_grad, gelu_input, extra_output" in source
