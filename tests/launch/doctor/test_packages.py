"""Packages and the compiler of a node: found, of which version, usable or why not, and used for what."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.launch.doctor.test_judge import cluster, with_node
from tests.stand_in import stand_in
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.launch.doctor.compiler import ADVICE, read_compiler
from triaxis.launch.doctor.judge import judge
from triaxis.launch.doctor.packages import USES, read_packages
from triaxis.launch.doctor.records import CompilerFacts, Level, PackageFacts
from triaxis.launch.doctor.report import show

CPU = torch.device("cpu")


def here() -> dict[str, str]:
    return {one.name: str(one) for one in read_packages(CPU, torch.float32)}


def install(folder: Path, name: str, version: str, *files: str) -> None:
    """Write a package with its metadata, as pip leaves it."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    for path in (metadata, *(folder / file for file in files)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_packages_are_found_or_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    install(tmp_path, "wandb", "0.30")
    found = here()
    assert found.keys() == USES.keys() and found["wandb"] == "0.30"
    assert [found[name] for name in ("megatron-core", "transformer-engine", "apex")] == ["not found"] * 3


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("apex/optimizers/fused_adam.py", "apex is installed without its CUDA kernels: No module named 'amp_C'"),
        (
            "apex/models.py",
            "the apex that is installed is the package index's, another project of that name, and not NVIDIA's",
        ),
    ],
)
def test_the_apex_that_is_not_nvidias_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, said: str
) -> None:
    install(tmp_path, "apex", "0.9", "apex/__init__.py", file)
    monkeypatch.syspath_prepend(tmp_path)
    assert here()["apex"] == f"0.9, not usable here: {said}"


def test_transformer_engine_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The stand-in computes on a CPU; without its GEMM a package of this name is there and cannot be used."""
    install(tmp_path, "transformer-engine", "2.10")
    monkeypatch.syspath_prepend(tmp_path)
    with stand_in("te"):
        assert here()["transformer-engine"] == "2.10"
    reason = "the package transformer-engine is not installed"
    assert here()["transformer-engine"] == f"2.10, not usable here: {reason}"


def test_the_report_has_each_package_with_its_use() -> None:
    packages = (
        PackageFacts("torch", "2.13.0", "the engine"),
        PackageFacts("apex", "0.9", "an optimizer", "another project of that name"),
        PackageFacts("wandb", "", "metrics"),
    )
    seen = with_node(cluster(1), 0, packages=packages)
    with Console(width=120, record=True, quiet=False) as console:
        show(console, RankGrid(ParallelSizes(dp=2), 2), seen, judge(seen))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "apex 0.9, not usable here: another project of that name an optimizer" in lines
    assert "wandb not found metrics" in lines


def test_a_compiler_and_headers_are_looked_for_where_triton_does(tmp_path: Path) -> None:
    (tmp_path / "clang").touch(mode=0o755)
    (tmp_path / "mine").touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    variables = {"PATH": str(tmp_path)}
    assert read_compiler(variables, tmp_path) == CompilerFacts(str(tmp_path / "clang"), str(tmp_path), True)
    assert read_compiler(variables | {"CC": "mine"}, tmp_path).path == str(tmp_path / "mine")
    lacks = read_compiler(variables | {"CC": "none"}, tmp_path / "include")
    assert lacks.lacking == f"no C compiler (gcc, clang, or what CC names) and no Python.h in {tmp_path / 'include'}"


def test_a_node_without_a_compiler_is_named_where_it_has_gpus() -> None:
    compiler = CompilerFacts("/usr/bin/gcc", "/usr/include/python3.11", has_headers=True)
    seen = with_node(with_node(cluster(2), 0, compiler=compiler), 1, compiler=replace(compiler, has_headers=False))
    (finding,) = (one for one in judge(seen) if one.check == "compiler")
    assert (finding.level, finding.hosts, finding.advice) == (Level.WARN, ("host1",), ADVICE)
    assert "no Python.h in /usr/include/python3.11: triton cannot build kernels" in finding.text
    on_cpus = replace(seen, facts=tuple(replace(one, gpu=None) for one in seen.facts))
    (finding,) = (one for one in judge(on_cpus) if one.check == "compiler")
    assert finding.level is Level.OK and "on a CPU only" in finding.text
    (finding,) = (one for one in judge(with_node(seen, 1, compiler=compiler)) if one.check == "compiler")
    assert (finding.level, finding.text) == (Level.OK, "/usr/bin/gcc and Python.h are there")
