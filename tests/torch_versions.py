"""Private and version-dependent names of torch that Triaxis uses, looked up in the wheels of each version.

    python -m tests.torch_versions                  # every version in range, 80 to 140 MB each, one at a time
    python -m tests.torch_versions 2.9.1 2.15.0

A wheel is downloaded with pip, read as text and deleted; nothing is imported, so the versions need no environments. The wheels for
macOS are taken because they are small; the Python files and stubs in them are those of the Linux builds. What a Linux build is made
for (CUDA, NCCL) is read from its metadata.

Calls of operators that our kernels make (`tests/kernel_calls.py`) are bound to each version's schemas, which a wheel has as text.

`tests/conventions/test_torch_names.py` compares `NAMES` with the source: a new private name has to be added here.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.kernel_calls import ATEN, Call, kernel_calls, misfit
from triaxis.launch.start.bootstrap import TESTED_CUDA, TORCH_OF_CUDA

ROOT = Path(__file__).resolve().parents[1]

VERSIONS = ("2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.15.0")
"""One of each minor version that pyproject.toml allows."""

NAMES: Mapping[str, tuple[str, ...]] = {
    "engine/comm/store_agreement.py": (
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed.distributed_c10d._world.pg_names",
    ),
    "engine/activations/backward.py": (
        "torch.autograd.graph.GradientEdge",
        "torch.autograd.graph._engine_run_backward",
    ),
    "engine/activations/recompute.py": ("torch.autograd.graph.Node",),
    "models/gpt/strays.py": ("torch.autograd.graph.Node",),
    "launch/footprint/memory.py": (
        "torch._C._current_autograd_node",
        "torch.autograd._get_sequence_nr",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._pytree.tree_iter",
    ),
    "launch/footprint/own_costs.py": (
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "torch.ops.aten.addmm_",
        "torch.utils.flop_counter.FlopCounterMode",
    ),
    "launch/footprint/run.py": (
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch.testing._internal.distributed.fake_pg.FakeStore",
    ),
    "engine/kernels/attention.py": ("torch.nn.attention.SDPBackend", "torch.nn.attention.sdpa_kernel"),
    "engine/kernels/attention_trials.py": ("torch._subclasses.FakeTensor",),
    "engine/kernels/inductor.py": (
        "torch._dynamo.source.ConstantSource",
        "torch._functorch.config.enable_autograd_cache",
        "torch._guards.TracingContext",
        "torch._guards.tracing",
        "torch._inductor.compile_fx.compile_fx",
        "torch._inductor.compile_fx.compile_fx_inner",
        "torch._subclasses.FakeTensorMode",
        "torch.fx.experimental.proxy_tensor.make_fx",
        "torch.fx.experimental.symbolic_shapes.DimDynamic",
        "torch.fx.experimental.symbolic_shapes.SYMPY_INTERP",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv",
    ),
    "engine/kernels/fp8/products.py": ("torch.ops.aten._scaled_mm",),
    "engine/kernels/activations.py": (
        "torch.ops.aten.gelu_backward.grad_input",
        "torch.ops.aten.silu_backward.grad_input",
    ),
    "engine/kernels/norms.py": (
        "torch.ops.aten._fused_rms_norm",
        "torch.ops.aten._fused_rms_norm_backward",
        "torch.ops.aten.native_layer_norm_backward",
    ),
    "engine/telemetry/trace/layer_ranges.py": (
        "torch.nn.modules.module.register_module_forward_hook",
        "torch.nn.modules.module.register_module_forward_pre_hook",
    ),
    "engine/kernels/cudnn_attention.py": (
        "torch.ops.aten._scaled_dot_product_cudnn_attention",
        "torch.ops.aten._scaled_dot_product_cudnn_attention_backward",
    ),
    "engine/kernels/flash_attention.py": (
        "torch.ops.aten._flash_attention_backward",
        "torch.ops.aten._flash_attention_forward",
    ),
    "engine/kernels/flex_attention.py": (
        "torch._higher_order_ops.flex_attention.flex_attention",
        "torch._higher_order_ops.flex_attention.flex_attention_backward",
        "torch.nn.attention.flex_attention.BlockMask",
    ),
    "engine/kernels/masked_attention.py": (
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "engine/kernels/weight_grad.py": ("torch.ops.aten.addmm.dtype_out",),
    "engine/optimizer/updates.py": ("torch.optim.adamw.adamw", "torch.optim.sgd.sgd"),
    "engine/pipeline/work.py": ("torch.autograd.graph.GradientEdge", "torch.autograd.graph.get_gradient_edge"),
    "engine/comm/runtime.py": ("torch._C._distributed_c10d",),
    "engine/device/allocator.py": ("torch.cuda.memory._set_allocator_settings",),
    "engine/comm/topology.py": ("torch._C._distributed_c10d.ProcessGroupNCCL.Options",),
    "engine/activations/saving_hooks.py": ("torch.autograd.graph.saved_tensors_hooks",),
    "launch/start/process/forward_signals.py": (
        "torch.distributed.elastic.multiprocessing.api.SignalException",
        "torch.distributed.elastic.multiprocessing.api._terminate_process_handler",
    ),
    "launch/start/launcher.py": (
        "torch.distributed.elastic.multiprocessing.api.SignalException",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
    ),
    "launch/rank/memory_snapshot.py": ("torch.cuda.memory._dump_snapshot", "torch.cuda.memory._record_memory_history"),
    "launch/verify/oracles/megatron_cpu.py": ("torch._dynamo.config.disable",),
    "launch/start/rendezvous.py": (
        "torch.distributed.elastic.rendezvous.RendezvousHandler",
        "torch.distributed.elastic.rendezvous.RendezvousInfo",
        "torch.distributed.elastic.rendezvous.RendezvousParameters",
        "torch.distributed.elastic.rendezvous.RendezvousStoreInfo",
        "torch.distributed.elastic.rendezvous.rendezvous_handler_registry",
        "torch.distributed.elastic.rendezvous.utils.parse_rendezvous_endpoint",
    ),
    "launch/start/process/short_end.py": ("torch.distributed.elastic.multiprocessing.PContext",),
    "models/interop/megatron/writer.py": (
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    ),
}
"""Names that `names_used` finds in each of our files."""


@dataclass(frozen=True, slots=True)
class Word:
    """Words that no import shows: arguments, attributes, environment variables, names that are looked up while running.

    Attributes:
        one_of: a version needs one of them; all stand in our file.
        found_in: files of the wheel that may have it, as a pattern.
        used_in: our file.
    """

    one_of: tuple[str, ...]
    found_in: str
    used_in: str


_STUBS = "torch/_C/_distributed_c10d.pyi"
_PYTHON_LIBRARY = "torch/lib/libtorch_python.*"
_C10D = "torch/distributed/distributed_c10d.py"
_TORCHRUN = "torch/distributed/run.py"
_TORCHRUNS_WORDS = (
    *("standalone", "local_addr", "master_addr", "master_port"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_conf", "node_rank"),
)

WORDS = (
    Word(("all_gather_single", "all_gather_into_tensor"), _C10D, "engine/comm/backends.py"),
    Word(("reduce_scatter_single", "reduce_scatter_tensor"), _C10D, "engine/comm/backends.py"),
    Word(("_dump_nccl_trace_json", "_dump_fr_trace_json"), _PYTHON_LIBRARY, "engine/comm/runtime.py"),
    Word(("TORCH_FR_BUFFER_SIZE",), "torch/include/*/c10d/FlightRecorder.hpp", "engine/comm/runtime.py"),
    Word(("TORCHINDUCTOR_COMPILE_THREADS",), "torch/_inductor/config.py", "engine/comm/runtime.py"),
    Word(("TORCHELASTIC_USE_AGENT_STORE",), "torch/distributed/elastic/agent/server/*.py", "engine/comm/runtime.py"),
    Word(("uuid",), "torch/_C/__init__.pyi", "engine/comm/placement.py"),
    Word(("use_local_synchronization",), _C10D, "engine/comm/topology.py"),
    Word(("group_desc",), _C10D, "engine/comm/topology.py"),
    Word(("master_listen_fd",), _PYTHON_LIBRARY, "engine/comm/runtime.py"),
    Word(("multi_tenant",), _STUBS, "engine/comm/runtime.py"),
    *(Word(("found_inf",), f"torch/optim/{name}.py", "engine/optimizer/updates.py") for name in ("adamw", "sgd")),
    Word(("accumulate_grad",), "torch/autograd/__init__.py", "engine/activations/backward.py"),
    Word(("CUDNN_ATTENTION",), "torch/_C/__init__.pyi", "engine/config/values/attention_kernels.py"),
    *(Word((word,), _TORCHRUN, "launch/start/rendezvous.py") for word in _TORCHRUNS_WORDS),
    # torch 2.9 has the second only.
    Word(
        ("signals_to_handle", "_terminate_process_handler"),
        "torch/distributed/*.py",
        "launch/start/process/forward_signals.py",
    ),
)

_STABLE = ("torch", "torch.distributed", "torch.nn", "torch.nn.functional", "torch.profiler", "torch.utils.tensorboard")
"""Modules whose public names are not looked up; torchrun's module is in `WORDS`."""


class _Uses(ast.NodeVisitor):
    """Collects the longest private or version-dependent chains of attributes that start at torch."""

    def __init__(self) -> None:
        self.aliases: dict[str, str] = {}
        self.found: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:  # ast's name
        for one in node.names:
            if one.name.split(".")[0] == "torch":
                self.aliases[one.asname or "torch"] = one.name if one.asname else "torch"
                self._note(one.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] == "torch":
            for one in node.names:
                name = f"{node.module}.{one.name}"
                self.aliases[one.asname or one.name] = name
                if node.module not in _STABLE:
                    self.found.add(name)
                self._note(name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain = self._chain(node)
        if chain is None:
            self.generic_visit(node)
        else:
            self._note(chain)

    def _chain(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            start = self._chain(node.value)
            return None if start is None else f"{start}.{node.attr}"
        return None

    def _note(self, name: str) -> None:
        parts = name.split(".")
        is_private = any(part.startswith("_") and not part.startswith("__") for part in parts)
        if is_private or "ops" in parts or "ProcessGroupNCCL" in parts:
            self.found.add(name)


def names_used(source: str) -> set[str]:
    """Find what a Python file uses of torch that is private, an operator by name, or from a module outside `_STABLE`.

    Imports inside functions count. A name that only leads to a longer one is left out.
    """
    uses = _Uses()
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in imports:
        uses.visit(node)
    uses.visit(tree)
    return {name for name in uses.found if not any(other.startswith(f"{name}.") for other in uses.found)}


class Wheel:
    """The files of one version of torch: a wheel, or a folder in which it is installed."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path) if path.is_file() else None
        self._folder = path
        if self._archive is not None:
            self.files = frozenset(self._archive.namelist())
        else:
            packages = (file for name in ("torch", "torchgen") for file in (path / name).rglob("*") if file.is_file())
            self.files = frozenset(str(file.relative_to(path)) for file in packages)

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes() if self._archive is None else self._archive.read(name)

    def has_word(self, word: str, pattern: str) -> bool:
        """Say if a file that matches the pattern has the word."""
        plain, wanted = word.encode(), re.compile(rb"(?<!\w)" + re.escape(word.encode()) + rb"(?!\w)")
        texts = (self.read(name) for name in self.files if fnmatch(name, pattern))
        # The plain search first: a library has 30 MB.
        return any(plain in text and wanted.search(text) for text in texts)

    def has_name(self, name: str) -> bool:
        """Say if a dotted name is there: an operator in the list of operators, else a module, or words in the module's file."""
        if name.startswith(ATEN):
            return self.schema(name.removeprefix(ATEN)) is not None
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            module = "/".join(parts[:length])
            own = [
                file for end in (".py", ".pyi", "/__init__.py", "/__init__.pyi") if (file := module + end) in self.files
            ]
            if own:
                texts = [self.read(file).decode() for file in own]
                return all(any(_binds(text, part) for text in texts) for part in parts[length:])
        return False

    def schema(self, operator: str) -> str | None:
        """Return the schema of an operator, or of an overload such as "addmm.dtype_out"; None: it has no such operator."""
        listed = self.read("torchgen/packaged/ATen/native/native_functions.yaml").decode()
        found = re.search(rf"^- func: ({re.escape(operator)}\(.*)$", listed, flags=re.MULTILINE)
        return None if found is None else found[1].strip()


def _binds(text: str, name: str) -> bool:
    """Say if a line of Python defines, imports, annotates or assigns the name."""
    word = rf"(?<![\w.]){re.escape(name)}(?!\w)"
    line = rf"^\s*(?:def|class)\s+{word}|^\s*{word}\s*(?:[:=,]|as\b|$)|^\s*(?:from|import)\b.*{word}"
    return re.search(line, text, flags=re.MULTILINE) is not None


def missing(wheel: Wheel) -> list[str]:
    """List what this version lacks, with the file of ours that needs it."""
    lacks = [f"{name} ({file})" for file, names in NAMES.items() for name in names if not wheel.has_name(name)]
    for word in WORDS:
        if not any(wheel.has_word(one, word.found_in) for one in word.one_of):
            lacks.append(f"{' or '.join(word.one_of)} ({word.used_in})")
    return lacks + wrong_calls(wheel, kernel_calls())


def wrong_calls(wheel: Wheel, calls: Sequence[Call]) -> list[str]:
    """List calls of operators that this version would refuse, or take for something else, each with its reason once."""
    found = []
    for operator in dict.fromkeys(call.operator for call in calls):
        if (schema := wheel.schema(operator)) is not None:
            reasons = (misfit(call, schema) for call in calls if call.operator == operator)
            found += [f"{ATEN}{operator}: {reason}" for reason in dict.fromkeys(reasons) if reason]
    return found


def _pip(*words: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        *words,
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        "3.12",
    ]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def download(version: str, folder: Path) -> Wheel:
    """Download the wheel for macOS, which is the smallest."""
    _pip("download", f"torch=={version}", "--platform", "macosx_14_0_arm64", "--dest", str(folder))
    return Wheel(next(folder.glob("torch-*.whl")))


def linux_build(version: str, folder: Path) -> dict[str, str]:
    """Read from the metadata what the index's Linux build of a version is made for: `cuda`, `cudnn` and `nccl`."""
    report = folder / "report.json"
    _pip(
        *("install", f"torch=={version}", "--dry-run", "--ignore-installed", "--platform", "manylinux_2_28_x86_64"),
        *("--target", str(folder / "nowhere"), "--report", str(report)),
    )
    required = " ; ".join(json.loads(report.read_text())["install"][0]["metadata"]["requires_dist"])
    patterns = {
        "cuda": r"(?:cuda-toolkit(?:\[[^]]*\])?|nvidia-cuda-runtime-cu\d+)==([\d.]+)",
        "cudnn": r"nvidia-cudnn-cu\d+==([\d.]+)",
        "nccl": r"nvidia-nccl-cu\d+==([\d.]+)",
    }
    return {name: found[1] if (found := re.search(pattern, required)) else "?" for name, pattern in patterns.items()}


def wrong_choices(cuda_of: Mapping[str, str], tested: str) -> list[str]:
    """Compare what `launch/start/bootstrap.py` takes for a driver with what the builds are made for.

    Args:
        cuda_of: CUDA version of the Linux build, by version of torch, oldest first.
        tested: version of torch in launch/constraints.txt.
    """
    newest = {int(cuda.split(".")[0]): version for version, cuda in cuda_of.items() if cuda != "?"}
    wrong = []
    if tested in cuda_of and cuda_of[tested].split(".")[0] != str(TESTED_CUDA):
        wrong.append(f"TESTED_CUDA = {TESTED_CUDA}, and torch {tested} is built for CUDA {cuda_of[tested]}")
    for major, version in TORCH_OF_CUDA.items():
        if major in newest and newest[major] != version:
            wrong.append(f"TORCH_OF_CUDA[{major}] = {version}, and torch {newest[major]} is the newest for it")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row per version; 1 where a name is missing or the bootstrap would take a wrong build."""
    parser = argparse.ArgumentParser(
        description="Look up the names of torch that Triaxis uses in each version's wheel."
    )
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    versions = parser.parse_args(argv).versions
    number = sum(map(len, NAMES.values())) + len(WORDS)
    table = Table("torch", f"of {number} names missing", "Linux build: CUDA", "cuDNN", "NCCL")
    cuda_of: dict[str, str] = {}
    lacking: dict[str, list[str]] = {}
    for version in versions:
        with tempfile.TemporaryDirectory(prefix="triaxis-torch-") as folder:
            lacking[version] = missing(download(version, Path(folder)))
            build = linux_build(version, Path(folder))
        cuda_of[version] = build["cuda"]
        table.add_row(version, "\n".join(lacking[version]) or "none", build["cuda"], build["cudnn"], build["nccl"])
    Console().print(table)
    constraints = (ROOT / "launch" / "constraints.txt").read_text()
    tested = re.search(r"^torch==(\S+)", constraints, flags=re.MULTILINE)
    assert tested is not None, "a version of torch is tested"
    wrong = wrong_choices(cuda_of, tested[1])
    for line in wrong:
        print(f"launch/start/bootstrap.py: {line}")
    return 1 if wrong or any(lacking.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
