"""Make `.venv-cuda`: the CUDA build of the pinned torch, Triton, and the stub in place of NVIDIA's libraries.

Every other package comes from the environment that runs this. Prints the new environment's Python. Ends with UNAVAILABLE if the
package index has no CUDA build, or gives it too slowly.

    python tests/cuda_stub/environment.py
"""

import fcntl
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-cuda"
PYTHON = FOLDER / "bin" / "python"

UNAVAILABLE = 75
"""Exit status: there is no CUDA build of torch here (EX_TEMPFAIL)."""

AT_START = "import os; os.environ.get('CARD_VALUES') and __import__('tests.cuda_stub.start')"
"""A line that each Python of the environment runs when it starts."""

TRIES, SECONDS = 2, 360
"""Tries of an installation, and seconds for all of them."""


def main() -> int:
    # Two test runs may start at once.
    with (ROOT / ".venv-cuda.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (FOLDER / "complete").exists() and not _make():
            return UNAVAILABLE
        subprocess.run([PYTHON, Path(__file__).with_name("build.py")], check=True)
    print(PYTHON)
    return 0


def _make() -> bool:
    """Create the environment. False: torch's CUDA build cannot be had."""
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "launch" / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None, "the constraints pin torch"
    venv.create(FOLDER, clear=True, with_pip=False)
    site = next(FOLDER.glob("lib/python3.*/site-packages"))
    # `==` would also take a build for the CPU, whose version has a suffix.
    if not _installed(f"torch==={pinned[1]}") or not (site / "torch" / "lib" / "libtorch_cuda.so").exists():
        return False
    metadata = next(site.glob("torch-*.dist-info/METADATA")).read_text()
    triton = re.search(r"^Requires-Dist: triton(==\S+);", metadata, re.MULTILINE)
    if triton is None or not _installed(f"triton{triton[1]}"):
        return False
    # Torch is found in the new environment first, all else in the old one.
    (site / "shared.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{AT_START}\n")
    (FOLDER / "complete").touch()
    return True


def _installed(package: str) -> bool:
    pip = (sys.executable, "-m", "pip", "--python", str(PYTHON))
    command = [*pip, "install", "--quiet", "--no-input", "--no-deps", package]
    for _ in range(TRIES):
        try:
            if subprocess.run(command, stdout=sys.stderr, timeout=SECONDS / TRIES, check=False).returncode == 0:
                return True
        except subprocess.TimeoutExpired:
            print(f"installing {package} took too long", file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main())
