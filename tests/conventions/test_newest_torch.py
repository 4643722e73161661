"""The newest torch in pyproject's range: an environment with it is made, and a part of the CI tier runs there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torch_versions import ROOT, VERSIONS

NEWEST = VERSIONS[-1]

TESTS = (
    "tests/parity/test_parity.py",
    "tests/engine/comm/test_collectives.py",
    "tests/engine/comm/test_topology.py",
    "tests/engine/kernels/test_attention.py",
    "tests/engine/kernels/test_elementwise.py",
    "tests/engine/activations/test_saved_tensors.py",
    "tests/engine/comm/test_on_fake_nccl.py",
    "tests/engine/optimizer",
    "tests/engine/pipeline/test_first_contact.py",
    "tests/engine/tensor_parallel",
    "tests/checkpoint/test_resume.py",
    "tests/launch/start/process/test_forward_signals.py",
    "tests/launch/start/test_world.py",
)
"""All that communicates, uses a private name of torch, or is started by torchrun, at least once."""

INSTALL_SECONDS = 1200
RUN_SECONDS = 900


@pytest.mark.slow
@pytest.mark.distributed
def test_a_part_of_the_ci_tier_passes_on_it(tmp_path: Path) -> None:
    environment = tmp_path / "newest"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=120)
    python = environment / "bin" / "python"
    # Its CUDA packages are several GB: pip's temporary files lie beside the environment, not in a small /tmp.
    installing = {**os.environ, "TMPDIR": str(tmp_path)}
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-input", f"torch=={NEWEST}", "--editable", ".[dev]"]
    installed = subprocess.run(
        install, cwd=ROOT, env=installing, capture_output=True, text=True, timeout=INSTALL_SECONDS
    )
    assert installed.returncode == 0, installed.stderr[-4000:]

    # Ranks meet at sockets in the temporary folder, whose paths must be short (108 bytes).
    variables = {**os.environ, "TRIAXIS_PYTHON": str(python), "PATH": f"{python.parent}:{os.environ['PATH']}"}
    report = f"--basetemp={tmp_path / 'tests'}"
    run = ["bash", "tests/run.sh", "-q", "-p", "no:cacheprovider", report, "-m", "not slow and not gpu", *TESTS]
    ran = subprocess.run(run, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert ran.returncode == 0, ran.stdout[-8000:]

    version = [str(python), "-c", "import torch; print(torch.__version__)"]
    said = subprocess.run(version, cwd=ROOT, env=variables, check=True, capture_output=True, text=True, timeout=120)
    assert said.stdout.startswith(NEWEST)
