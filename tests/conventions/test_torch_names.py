"""Private and version-dependent names of torch are all listed, so that they are looked up in each version's wheel."""

import zipfile
from pathlib import Path

import pytest
import torch

from tests.kernel_calls import MAKERS, kernel_calls, schema_at_hand
from tests.torch_versions import NAMES, ROOT, VERSIONS, WORDS, Wheel, missing, names_used, wrong_calls, wrong_choices
from triaxis.launch.start.bootstrap import TORCH_OF_CUDA

SOURCES = sorted(path for room in ("engine", "models", "launch") for path in (ROOT / room).rglob("*.py"))


def test_every_name_is_listed_with_the_file_that_uses_it() -> None:
    found = {str(path.relative_to(ROOT)): names_used(path.read_text()) for path in SOURCES}
    assert {file: sorted(names) for file, names in found.items() if names} == {
        file: sorted(names) for file, names in NAMES.items()
    }, "add to NAMES in tests/torch_versions.py what is new, and run `python -m tests.torch_versions`"


def test_every_word_is_used() -> None:
    for word in WORDS:
        text = (ROOT / word.used_in).read_text()
        assert all(one in text for one in word.one_of), word


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._C._new_thing(torch.ones(2))", {"torch._C._new_thing"}),
        (
            "def f():\n    from torch._C import _distributed_c10d as c\n    c.Store",
            {"torch._C._distributed_c10d.Store"},
        ),
        (
            "import torch.distributed as dist\ndist.distributed_c10d._world.tags",
            {"torch.distributed.distributed_c10d._world.tags"},
        ),
        ("import torch\ntorch.ops.aten.mm.out(torch.ones(2))", {"torch.ops.aten.mm.out"}),
        (
            "import torch.distributed as dist\ndist.ProcessGroupNCCL.Options()",
            {"torch.distributed.ProcessGroupNCCL.Options"},
        ),
        ("from torch.distributed.tensor import DTensor", {"torch.distributed.tensor.DTensor"}),
        ("import torch\nfrom torch import nn\nnn.Linear(2, 2).weight._base\ntorch.__version__\nself._own", set()),
    ],
)
def test_names_are_found_in_source(source: str, names: set[str]) -> None:
    assert names_used(source) == names


def test_this_torch_has_all() -> None:
    assert missing(Wheel(Path(torch.__file__).parents[1])) == []


def test_a_name_that_a_version_lacks_is_reported(tmp_path: Path) -> None:
    wheel = tmp_path / "torch.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "torch/autograd/graph.py", "class GradientEdge: ...\n# _engine_run_backward was here\nfoo(run_it)\n"
        )
        archive.writestr("torch/_C/_distributed_c10d.pyi", "def f(multi_tenant: bool): ...")
        archive.writestr("torchgen/packaged/ATen/native/native_functions.yaml", "- func: addmm.out(Tensor a)\n")
    lacks = missing(Wheel(wheel))
    assert "torch.autograd.graph.GradientEdge (engine/activations/backward.py)" not in lacks
    assert "torch.autograd.graph._engine_run_backward (engine/activations/backward.py)" in lacks
    assert "torch._C._distributed_c10d (engine/comm/runtime.py)" not in lacks
    assert "torch.ops.aten.addmm.dtype_out (engine/kernels/weight_grad.py)" in lacks
    assert "multi_tenant (engine/comm/runtime.py)" not in lacks
    assert "signals_to_handle or _terminate_process_handler (launch/start/process/forward_signals.py)" in lacks


def test_a_call_that_a_version_refuses_is_reported(tmp_path: Path) -> None:
    wheel = tmp_path / "torch.whl"
    schemas = {operator: schema_at_hand(operator) for operator in MAKERS}
    schemas["_flash_attention_forward"] = schemas["_flash_attention_forward"].replace("window_size", "window")
    with zipfile.ZipFile(wheel, "w") as archive:
        text = "".join(f"- func: {schema}\n  variants: function\n" for schema in schemas.values())
        archive.writestr("torchgen/packaged/ATen/native/native_functions.yaml", text)
    (found,) = wrong_calls(Wheel(wheel), kernel_calls())
    assert found.startswith("torch.ops.aten._flash_attention_forward: Unknown keyword argument 'window_size_")


def test_the_versions_are_those_in_range() -> None:
    assert 'torch>=2.9,<2.16"' in (ROOT / "pyproject.toml").read_text()
    assert [version.rpartition(".")[0] for version in VERSIONS] == [f"2.{minor}" for minor in range(9, 16)]


def test_a_build_that_the_bootstrap_takes_wrongly_is_found() -> None:
    cuda_of = {"2.10.0": "12.8.90", "2.11.0": "13.0.2", "2.13.0": "13.0.3"}
    assert wrong_choices(cuda_of, "2.13.0") == []
    assert wrong_choices({**cuda_of, "2.13.0": "14.0.1"}, "2.13.0") == [
        "TESTED_CUDA = 13, and torch 2.13.0 is built for CUDA 14.0.1"
    ]
    newer = wrong_choices({**cuda_of, "2.11.0": "12.9.1"}, "2.13.0")
    assert newer == [f"TORCH_OF_CUDA[12] = {TORCH_OF_CUDA[12]}, and torch 2.11.0 is the newest for it"]
