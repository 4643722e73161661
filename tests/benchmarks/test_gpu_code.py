"""GPU code without a GPU: the committed numbers are those of the functions that the engine fuses, and of their code today."""

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.gpu_code.cards import CARDS
from benchmarks.gpu_code.cases import Case, cases, run_of
from benchmarks.gpu_code.eager import Product, is_work, moved_bytes, product_of, tensor_bytes
from benchmarks.gpu_code.golden import PATH, committed, differences, parse
from benchmarks.gpu_code.step import StepRecord, TensorSpec, record_step
from benchmarks.gpu_code.work import added_up, whole
from benchmarks.roofline import step_gemms
from tests.documented import ROOT
from tests.lacking import give_up
from triaxis.engine.config.layer_kinds import ACTIVATIONS, NORMS
from triaxis.engine.config.optimizer_kinds import OPTIMIZERS

GOLDEN = committed()
REGENERATE = "benchmarks/README.md says how the file is written anew"


def test_the_functions_of_two_runs_are_in_the_table() -> None:
    """All runs are for the slow tier."""
    for case in cases():
        if case.name in ("gpt-1.3b, fp8", "norm of all heads, experts"):
            fused = {call.key for call in record_step(case.config).calls}
            assert fused and fused <= GOLDEN.functions.keys(), REGENERATE


@pytest.fixture(scope="module")
def records() -> list[tuple[Case, StepRecord]]:
    return [(case, record_step(case.config)) for case in cases()]


@pytest.mark.slow
def test_each_function_that_is_fused_is_in_the_table(records: list[tuple[Case, StepRecord]]) -> None:
    fused = {call.key for _, record in records for call in record.calls}
    new, gone = sorted(fused - GOLDEN.functions.keys()), sorted(GOLDEN.functions.keys() - fused)
    assert not new and not gone, f"{REGENERATE}: not in it {new}, no longer called {gone}"


@pytest.mark.slow
def test_no_function_moves_less_than_its_arguments(records: list[tuple[Case, StepRecord]]) -> None:
    calls = {call.key: call for _, record in records for call in record.calls if call.lengths == "fixed"}
    assert len(calls) > 40
    for key in calls.keys() & GOLDEN.functions.keys():
        call = calls[key]
        given = sum(tensor_bytes(each.empty()) for each in tree_iter(call.arguments) if isinstance(each, TensorSpec))
        for card, code in GOLDEN.functions[key].code.items():
            assert given <= code.num_bytes, (card, key)


def test_each_function_of_a_step_is_in_the_table() -> None:
    for name, step in GOLDEN.steps.items():
        assert step.calls.keys() == step.elements.keys() <= GOLDEN.functions.keys(), name


@pytest.mark.slow
def test_each_call_of_a_fusion_in_the_engine_is_reached(records: list[tuple[Case, StepRecord]]) -> None:
    """A function that is fused in a place of its own needs a case that goes there."""
    calls = [call for _, record in records for call in record.calls]
    sites = {(str(Path(file).resolve().relative_to(ROOT)), name) for file, name in (call.site for call in calls)}
    named = {call.function.__name__ for call in calls}
    found = list(fusions())
    assert len(found) > 20
    assert not [one for one in found if one[:2] not in sites]
    assert not [one for one in found if one[2] and one[2] not in named]


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
def test_cases_have_every_activation_norm_and_optimizer(records: list[tuple[Case, StepRecord]]) -> None:
    configs = [case.config for case, _ in records]
    assert {config.model.activation for config in configs} == set(ACTIVATIONS)
    assert {config.model.norm for config in configs} == set(NORMS)
    assert {config.optimizer.name for config in configs} == set(OPTIMIZERS) - {
        "extension"
    }  # a user's rule has code of its own


def test_each_kernel_can_do_without_spills_and_each_card_has_every_function() -> None:
    for function in GOLDEN.functions.values():
        assert set(function.code) >= {card for card in CARDS if CARDS[card].has_fp8} == {"sm_90"}
        assert len(function.code) == len(CARDS) or "fp8" in function.key, "only FP8 is not for every card"
        for code in function.code.values():
            assert code.launches >= code.kernels > 0 and code.configurations >= code.kernels
            assert code.spills == 0 and code.spilling < code.configurations, function.key


def test_the_committed_file_is_as_it_is_written() -> None:
    assert GOLDEN.text() == PATH.read_text()
    assert not differences(parse(GOLDEN.text()), GOLDEN)


@pytest.mark.slow
def test_a_difference_is_a_line() -> None:
    first, *_ = GOLDEN.functions
    other = parse(PATH.read_text().replace('"spills": 0', '"spills": 8', 1))
    (line,) = differences(other, GOLDEN)
    assert line.startswith(f"{first}: ") and "spills=8" in line and "spills=0" in line
    fewer = parse(PATH.read_text().replace(GOLDEN.triton, "0.0"))
    assert differences(fewer, GOLDEN) == [f"triton 0.0, committed {GOLDEN.triton}"]


@pytest.mark.slow
def test_a_long_step_is_added_up_from_short_ones() -> None:
    def run(layers: int, microbatches: int) -> Any:
        return run_of("tiny-llama", 2, num_layers=layers, num_microbatches=microbatches)

    assert added_up(run, 4, 4) == whole(record_step(run(4, 4)))


@pytest.mark.slow
def test_products_of_a_step_are_those_that_predictions_count() -> None:
    config = run_of("tiny-llama", 2, num_layers=2, num_microbatches=2)
    ran = sum(product.flops * count for product, count in record_step(config).products.items())
    assert ran == 2 * 3 * sum(gemm.flops for gemm in step_gemms(config))


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.moved: list[int | Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_work(func):
            self.moved.append(product_of(func, args) or moved_bytes(func, args, kwargs or {}, result))
        return result


X, Y, ROW, SQUARE = torch.ones(8, 16), torch.ones(8, 16), torch.ones(16), torch.ones(16, 16)
IDS = torch.tensor([1, 2, 3])
TABLE = torch.ones(100, 16)

EAGER: dict[str, tuple[Callable[[], Any], list[int | Product]]] = {
    "a sum": (lambda: X + Y, [3 * 512]),
    "a tensor twice": (lambda: X * X, [2 * 512]),
    "an expanded row": (lambda: X + ROW.expand(8, 16), [2 * 512 + 64]),
    "in place": (lambda: X.clone().add_(Y), [2 * 512, 3 * 512]),
    "a copy": (lambda: X.copy_(Y), [2 * 512]),
    "into another tensor": (lambda: torch.mul(X, Y, out=torch.empty(8, 16)), [3 * 512]),
    "a narrower copy": (lambda: X.to(torch.bfloat16), [512 + 256]),
    "filled": (lambda: torch.empty(8, 16).zero_(), [512]),
    "a view": (lambda: X.t()[0].unsqueeze(-1), []),
    "rows of a table": (lambda: TABLE[IDS], [24 + 2 * 192]),
    "rows added to a table": (lambda: TABLE.clone().index_add_(0, IDS, X[:3]), [2 * 6400, 24 + 3 * 192]),
    "a product": (lambda: X @ Y.t(), [Product(8, 8, 16)]),
    "a product with a bias": (lambda: torch.addmm(ROW, X, SQUARE), [Product(8, 16, 16)]),
    "products": (lambda: torch.bmm(X.view(2, 4, 16), Y.view(2, 16, 4)), [Product(4, 4, 16, 2)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EAGER)
def test_bytes_of_an_operator(name: str) -> None:
    run, wanted = EAGER[name]
    with _Watch() as watch:
        run()
    assert watch.moved == wanted, name


INSTALL_SECONDS = 600
COMPILE_SECONDS = 900


@pytest.mark.slow
@pytest.mark.distributed
def test_inductor_and_ptxas_give_the_committed_numbers(tmp_path: Path) -> None:
    """triton comes from pip, 198 MB; code for both cards is written and assembled in processes that pretend to have one."""
    if (version := torch.__version__.partition("+")[0]) != GOLDEN.torch:
        give_up(f"code of torch {GOLDEN.torch} is compared, and torch is {version}: pip install torch=={GOLDEN.torch}")
    folder = tmp_path / "triton"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-deps", "--target", str(folder)]
    installing = {**os.environ, "TMPDIR": str(tmp_path)}
    installed = subprocess.run(
        [*install, f"triton=={GOLDEN.triton}"],
        env=installing,
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
    )
    assert installed.returncode == 0, installed.stderr[-4000:]
    check = [sys.executable, "-m", "benchmarks.gpu_code", "--check", "--triton", str(folder)]
    checked = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    assert checked.returncode == 0, (checked.stdout + checked.stderr)[-8000:]
