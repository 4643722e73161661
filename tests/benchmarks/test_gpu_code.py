"""GPU code without a GPU: every function that the engine fuses is compiled."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_code.cases import cases
from benchmarks.gpu_code.step import FusedCall, record_step
from benchmarks.gpu_code.table import GpuCode, mistakes, table
from tests.documented import ROOT
from tests.lacking import give_up
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.model_choices import ACTIVATIONS, NORMS
from triaxis.engine.config.values.optimizer_kinds import OPTIMIZERS


@pytest.mark.slow
def test_a_step_in_fp8_has_the_calls_of_one_in_bf16_and_more() -> None:
    """All runs are for the slow tier."""
    plain, rounded = (record_step(config) for _, config in zip(range(2), cases(), strict=False))
    names = {call.name.rpartition(".")[2] for call in plain}
    assert names >= {"_layer_norm", "_sum_of_exp", "_update"} and "round_both_ways" not in names
    of_fp8 = {"round_by", "round_both_ways", "tensor_scale"}
    assert {call.name.rpartition(".")[2] for call in rounded} >= {*names, *of_fp8} - {"_write_gradient"}


@pytest.fixture(scope="module")
def records() -> list[tuple[Config, list[FusedCall]]]:
    return [(config, record_step(config)) for config in cases()]


ELSEWHERE = {"_forward", "_backward", "_joined", "_rotated"}
"""Attention is the CPU's here, of whole rows: golden steps of Gemma 2 and of cp 8 compile these (tests/cuda_stub)."""


@pytest.mark.slow
def test_each_call_of_a_fusion_in_the_engine_is_reached(records: list[tuple[Config, list[FusedCall]]]) -> None:
    """A function that is fused in a place of its own needs a case that goes there."""
    calls = [call for _, record in records for call in record]
    sites = {(str(Path(file).resolve().relative_to(ROOT)), name) for file, name in (call.site for call in calls)}
    named = {call.function.__name__ for call in calls}
    found = list(fusions())
    assert len(found) > 20
    assert not [one for one in found if one[:2] not in sites and one[2] not in ELSEWHERE]
    assert not [one for one in found if one[2] and one[2] not in named | ELSEWHERE]


def fusions() -> Iterator[tuple[str, str, str]]:
    """Yield (file, qualified name of the function around it, name of what is fused or "") of each call of a `fusion`."""
    for path in sorted((ROOT / "engine").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        for name, node in _functions(ast.parse(path.read_text()), ""):
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and _last(call.func) in ("fusion", "_fusion"):
                    fused = call.args[0]
                    yield file, name, fused.id if isinstance(fused, ast.Name) and fused.id.startswith("_") else ""


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@pytest.mark.slow
def test_cases_have_every_activation_norm_and_optimizer(records: list[tuple[Config, list[FusedCall]]]) -> None:
    configs = [config for config, _ in records]
    assert {config.model.activation for config in configs} == set(ACTIVATIONS)
    assert {config.model.norm for config in configs} == set(NORMS)
    # A user's rule has code of its own.
    assert {config.optimizer.name for config in configs} == set(OPTIMIZERS) - {"extension"}


def code(**numbers: Any) -> GpuCode:
    usual = {"name": "f", "key": "f(bf16[8])", "elements": 8, "argument_bytes": 16, "launches": 1, "num_bytes": 32}
    return GpuCode(
        **(usual | {"operators": 0, "configurations": 2, "spilling": 0, "registers": 32, "spills": 0} | numbers)
    )


def test_the_table_has_ranges_and_cards_apart() -> None:
    both = {"sm_90": [code(), code(registers=40), code(name="g")], "sm_80": [code(), code(registers=48)]}
    (head, _, f, g) = table(both).splitlines()
    assert head.split("|")[1].strip() == "function, sm_90 / sm_80"
    assert [cell.strip() for cell in f.split("|")[1:6]] == ["`f`", "2", "4.00", "1", "0"]
    assert "32 to 40 / 32 to 48" in f and g.startswith("| `g`, sm_90 alone ")


def test_a_kernel_that_spills_is_a_mistake_and_so_are_bytes_that_are_not_counted() -> None:
    assert not mistakes({"sm_90": [code()], "sm_80": [code(spilling=1)]})
    spills, moves = mistakes({"sm_90": [code(spilling=2, spills=8)], "sm_80": [code(num_bytes=8)]})
    assert "sm_90: f(bf16[8]) spills 8 bytes" in spills and "sm_80: f(bf16[8]) moves 8 bytes" in moves


TORCH, TRITON = "2.13.0", "3.7.1"
INSTALL_SECONDS = 600
COMPILE_SECONDS = 900


@pytest.mark.slow
@pytest.mark.distributed
def test_no_function_needs_to_spill(tmp_path: Path) -> None:
    """triton comes from pip, 198 MB; code for both cards is written and assembled in processes that pretend to have one."""
    if (version := torch.__version__) != f"{TORCH}+cpu":
        give_up(
            f"a torch for CUDA asks for a driver, and triton fits one torch: needs {TORCH}+cpu, and torch is {version}"
        )
    folder = tmp_path / "triton"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-deps", "--target", str(folder)]
    check = [sys.executable, "-m", "benchmarks.gpu_code"]
    paths = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": paths}
    for command, seconds in (([*install, f"triton=={TRITON}"], INSTALL_SECONDS), (check, COMPILE_SECONDS)):
        said = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=seconds)
        assert said.returncode == 0, (said.stdout + said.stderr)[-8000:]
