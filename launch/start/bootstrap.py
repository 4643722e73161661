"""Find a Python that can run Triaxis, or create one in `.venv`.

These are tried in order:

    TRIAXIS_PYTHON  ->  used as it is; an error if it lacks a requirement
    .venv           ->  used if it is complete
    active Python   ->  used if it has every requirement
    otherwise       ->  .venv is created or completed with `pip install -e .`, pinned by launch/constraints.txt

The torch version is one that this machine's driver runs. This file runs with any Python >= 3.11 and the standard library alone.
Standard output contains only the chosen interpreter.

The next start finishes an interrupted installation, which lacks the file `.venv/installed`. Nothing is installed inside a SLURM job
or under torchrun, because every rank would wait.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, before anything is installed

from triaxis.engine.device.nvidia_driver import FIRST_DRIVERS, Driver, is_hidden, read_driver
from triaxis.engine.errors import ExitCode
from triaxis.engine.storage.files import locked

ROOT = Path(__file__).resolve().parents[2]
"""The checkout that contains this file, which may differ from the one on the path."""

MISSING = 3
"""Exit code of `--check` if requirements are missing; they are printed, one per line."""


TESTED_CUDA = 13
"""CUDA major version that the torch in launch/constraints.txt is built for."""

TORCH_OF_CUDA = {12: "2.10.0"}
"""For older drivers: the newest torch that pyproject.toml allows and that is built for this CUDA major version.

`python -m tests.torch_versions` reads it from the wheels.
"""

X86_ALONE = (12,)
"""CUDA major versions whose builds the package index has for x86_64 alone: its torch 2.10.0 for aarch64 is a CPU build."""

CUDA_GB = 2.7
"""Download size of torch 2.13.0 for CUDA 13 and its libraries, summed from the index on 2026-11-26."""


class BootstrapError(Exception):
    """No usable Python was found or could be created. The message names the remedy."""


@dataclass(frozen=True)
class Checkout:
    """The paths in a checkout that the bootstrap reads and writes."""

    root: Path

    @property
    def pyproject(self) -> Path:
        return self.root / "pyproject.toml"

    @property
    def constraints(self) -> Path:
        return self.root / "launch" / "constraints.txt"

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def installed(self) -> Path:
        """Marker file, written after pip has finished and removed before it starts."""
        return self.venv / "installed"

    @property
    def lock(self) -> Path:
        return self.root / ".venv.lock"


def missing_requirements(pyproject: Path, extras: Sequence[str]) -> dict[str, str]:
    """Find requirements in `pyproject.toml` that this Python lacks, as name -> `name>=1.0 (found 0.9)`.

    A Python that cannot parse requirements lacks all of them.
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    wanted: list[str] = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    requirement_class = _requirement_class()
    if requirement_class is None:
        return {re.split(r"[^\w.-]", text)[0]: text for text in wanted}
    missing = {}
    for requirement in map(requirement_class, wanted):
        found = _installed_version(requirement.name)
        # A container's own build (2.10.0a0+...) counts as the version it precedes.
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            note = f" (found {found})" if found else ""
            missing[requirement.name] = f"{requirement.name}{requirement.specifier}{note}"
    return missing


def _requirement_class() -> Any:
    """Import the class `Requirement` from packaging or pip; None if this Python has neither."""
    for module in ("packaging.requirements", "pip._vendor.packaging.requirements"):
        try:
            return importlib.import_module(module).Requirement
        except ImportError:
            continue
    return None


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check(python: str, extras: Sequence[str]) -> list[str]:
    """Run `--check` in another interpreter and return the missing requirements.

    Raises:
        BootstrapError: the interpreter does not run, or is older than Python 3.11.
    """
    command = [python, str(Path(__file__).resolve()), "--check", *(f"--extra={extra}" for extra in extras)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BootstrapError(f"{python} cannot be started: {error}.") from error
    if result.returncode not in (0, MISSING):
        raise BootstrapError(f"{python} cannot run Triaxis (Python 3.11 or newer is needed):\n{result.stderr.strip()}")
    return result.stdout.splitlines()


def choose(checkout: Checkout, extras: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return the path of the interpreter to use.

    `.venv` is created or completed if no other interpreter has all requirements.

    Raises:
        BootstrapError: TRIAXIS_PYTHON lacks a requirement, or `.venv` is needed and cannot be made here.
        BootstrapError: pyproject.toml has no such extra.
    """
    known = tomllib.loads(checkout.pyproject.read_text())["project"]["optional-dependencies"]
    if unknown := [extra for extra in extras if extra not in known]:
        raise BootstrapError(
            f"pyproject.toml has no extra {' or '.join(unknown)}, so nothing would be installed for it. Give one of "
            f"{', '.join(known)}, or none."
        )
    if given := variables.get("TRIAXIS_PYTHON"):
        if lacking := _check(given, extras):
            raise BootstrapError(
                f"TRIAXIS_PYTHON={given} lacks {', '.join(lacking)}; Triaxis would stop at its first import. "
                f"Install into it:\n  {shlex.join([given, '-m', 'pip', 'install', '-e', _target(checkout, extras)])}\n"
                f"or unset TRIAXIS_PYTHON, and {checkout.venv} is made and used."
            )
        return given
    if _complete(checkout, extras):
        return str(checkout.python)
    missing = missing_requirements(checkout.pyproject, extras)
    if not missing:
        return sys.executable
    if reason := _forbidden(variables):
        raise BootstrapError(
            f"{sys.executable} lacks {', '.join(missing.values())}, and {checkout.venv} is not complete. {reason} "
            f"Run this first, where there is a network:\n"
            f"  {shlex.join(['bash', str(checkout.root / 'launch' / 'bootstrap.sh'), *extras])}"
        )
    with locked(checkout.lock, cache(partial(_say, f"another process is preparing {checkout.venv}; waiting for it"))):
        if not _complete(checkout, extras):  # another process may have made it during the wait
            _make(checkout, extras, missing)
    return str(checkout.python)


def _complete(checkout: Checkout, extras: Sequence[str]) -> bool:
    return checkout.installed.is_file() and not _check(str(checkout.python), extras)


def _target(checkout: Checkout, extras: Sequence[str]) -> str:
    return f"{checkout.root}[{','.join(extras)}]" if extras else str(checkout.root)


def _forbidden(variables: Mapping[str, str]) -> str | None:
    if variables.get("TRIAXIS_BOOTSTRAP") == "0":
        return "TRIAXIS_BOOTSTRAP=0 forbids installing."
    if "SLURM_JOB_ID" in variables:
        return "Nothing is installed inside a SLURM job: every task would wait for it, often without a network."
    if "TORCHELASTIC_RUN_ID" in variables or "RANK" in variables:
        return "Nothing is installed under torchrun: every rank would wait for it."
    return None


def _make(checkout: Checkout, extras: Sequence[str], missing: Mapping[str, str]) -> None:
    """Make `.venv`, or finish an interrupted one. The caller holds the lock."""
    if importlib.util.find_spec("ensurepip") is None:
        raise BootstrapError(
            f"{sys.executable} has no ensurepip, so it cannot make a virtual environment. As root:\n"
            f"  apt-get install python3-venv\nor set TRIAXIS_PYTHON to a Python that has what pyproject.toml asks for."
        )
    torch = None if "torch" in missing else own_torch()
    if not _has_pip(checkout.python):
        _say(f"making {checkout.venv} with {sys.executable}, which lacks {', '.join(missing.values())}")
        _create(checkout, torch)
    checkout.installed.unlink(missing_ok=True)
    target = _target(checkout, extras)
    _say(f"installing {target} into {checkout.venv}; once, and it takes some minutes")
    if torch:
        _say(f"keeping torch {torch.version} of {torch.folder}")
    constraints = checkout.venv / "constraints.txt"
    constraints.write_text(_constraints(checkout, extras, torch))
    # -P: modules in the current folder are not imported.
    command = [str(checkout.python), "-P", "-m", "pip", "install", "--no-input", "--constraint", str(constraints)]
    command += ["--editable", target, *([] if sys.stderr.isatty() else ["--quiet"])]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise BootstrapError(
            f"pip could not install Triaxis into {checkout.venv} (its message is above). Nothing else was changed; the "
            f"next start tries again. Without a network: set TRIAXIS_PYTHON to a Python that has the packages."
        )
    checkout.installed.write_text("pip has finished; without this file the next start installs again\n")
    _say(f"done; from now on {checkout.python} is used at once")


def _constraints(checkout: Checkout, extras: Sequence[str], torch: "OwnTorch | None") -> str:
    """Return pip constraints, one per line.

    Packages that `.venv` lacks are pinned to their tested versions. `torch`, if given, is pinned to its own version.
    """
    tested = {_name(line): line for line in checkout.constraints.read_text().splitlines() if re.match(r"\w", line)}
    lacking = {_name(description) for description in _check(str(checkout.python), extras)}
    if torch:
        # It was built for this machine: a requirement that would replace it must fail instead.
        tested["torch"] = f"torch=={torch.version}"
    elif "torch" in lacking:
        tested["torch"] = torch_requirement(
            read_driver(), tested["torch"].partition("==")[2], os.environ, lambda line: _is_offered(checkout, line)
        )
        _say(tested["torch"])
    return "".join(f"{line}\n" for name, line in tested.items() if name in lacking or (torch and name == "torch"))


def _is_offered(checkout: Checkout, requirement: str) -> bool:
    """Whether pip finds the requirement in the configured indexes."""
    look = ["install", "--dry-run", "--no-deps", "--ignore-installed", "--no-input", "--quiet", requirement]
    found = subprocess.run([str(checkout.python), "-P", "-m", "pip", *look], capture_output=True, check=False)
    return found.returncode == 0


def torch_requirement(
    driver: Driver, tested: str, variables: Mapping[str, str], is_offered: Callable[[str], bool]
) -> str:
    """Return pip's requirement for torch: a CUDA build with a GPU, else a CPU build.

    A CPU build is chosen only if a package index offers one.

    Args:
        driver, tested, variables: see `torch_for`.
        is_offered: function (requirement) -> whether an index offers it.

    Raises:
        BootstrapError: see `torch_for`.
    """
    version = torch_for(driver, tested, variables)
    if driver.num_gpus and not is_hidden(variables):
        # A CPU build has a label after the version. pip prefers it, unless exactly the plain version is asked for.
        exact = f"torch==={version}"
        return exact if is_offered(exact) else f"torch=={version}"
    for_cpu = f"torch=={version}+cpu"
    if is_offered(for_cpu):
        return for_cpu
    _say(f"no configured index has a build of torch for the CPU: the one for CUDA is downloaded, about {CUDA_GB} GB")
    return f"torch=={version}"


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower()


def torch_for(driver: Driver, tested: str, variables: Mapping[str, str], machine: str = platform.machine()) -> str:
    """Choose a torch version that this driver runs.

    Args:
        driver: this machine's GPU driver.
        tested: version in launch/constraints.txt; also used without a GPU or with an unknown driver.
        variables: environment; GPUs that CUDA_VISIBLE_DEVICES hides do not count.
        machine: this machine's processor, such as "x86_64".

    Raises:
        BootstrapError: the driver is older than every build that pyproject.toml allows, or than those for this processor.
    """
    if not driver.num_gpus or is_hidden(variables) or driver.runs(TESTED_CUDA) is not False:
        return tested
    for cuda_major in sorted(TORCH_OF_CUDA, reverse=True):
        if driver.runs(cuda_major) and (machine == "x86_64" or cuda_major not in X86_ALONE):
            return TORCH_OF_CUDA[cuda_major]
    is_any = machine == "x86_64"
    oldest = min(TORCH_OF_CUDA) if is_any else TESTED_CUDA
    which = "torch that Triaxis can use" if is_any else f"torch for CUDA that the package index has for {machine}"
    raise BootstrapError(
        f"the driver of this machine's GPUs is {driver.version}, and every {which} needs driver "
        f"{FIRST_DRIVERS[oldest]} or newer (CUDA {oldest}); it would train on the CPU. Update the driver, or set TRIAXIS_PYTHON "
        f"to a Python whose torch fits it, such as that of NVIDIA's container. To train on the CPU:\n"
        f"  CUDA_VISIBLE_DEVICES= bash {shlex.quote(str(ROOT / 'launch' / 'bootstrap.sh'))}"
    )


@dataclass(frozen=True)
class OwnTorch:
    """A torch installed in the Python that runs this file. `folder` is the site-packages folder that holds it."""

    version: str
    folder: Path


def own_torch() -> OwnTorch | None:
    """Find the torch that this Python has; None if it has none."""
    try:
        distribution = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    return OwnTorch(distribution.version, Path(str(distribution.locate_file(""))).resolve())


def _create(checkout: Checkout, torch: OwnTorch | None) -> None:
    """Create `.venv`. With `torch`, `.venv` also sees the packages of the Python that runs this file."""
    share = ["--system-site-packages"] if torch else []
    made = subprocess.run(
        [sys.executable, "-P", "-m", "venv", *share, str(checkout.venv)], stdout=sys.stderr, check=False
    )
    if made.returncode:
        raise BootstrapError(f"{sys.executable} -m venv {checkout.venv} failed; its message is above.")
    if torch:
        report = "import sys, sysconfig; print(sysconfig.get_paths()['purelib'], *sys.path, sep='\\n')"
        inside = subprocess.run([str(checkout.python), "-P", "-c", report], capture_output=True, text=True, check=True)
        own_packages, *seen = inside.stdout.splitlines()
        if str(torch.folder) not in seen:
            # The active Python is itself a virtual environment: venv shares its base's packages, not its own.
            (Path(own_packages) / "active_python.pth").write_text(f"{torch.folder}\n")


def _has_pip(python: Path) -> bool:
    if not python.exists():
        return False
    return (
        subprocess.run([str(python), "-P", "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    )


def _say(text: str) -> None:
    print(f"triaxis: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the interpreter to use, or with `--check` what this interpreter lacks."""
    parser = argparse.ArgumentParser(description="Find or make a Python that can run Triaxis, and print its path.")
    parser.add_argument("--check", action="store_true", help="only print what this Python lacks")
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml, such as dev")
    args = parser.parse_args(argv)
    checkout = Checkout(ROOT)
    try:
        if args.check:
            missing = missing_requirements(checkout.pyproject, args.extra)
            for description in missing.values():
                print(description)
            return MISSING if missing else 0
        print(choose(checkout, args.extra, os.environ), flush=True)
    except BrokenPipeError:
        # A signal ended the shell that asked; the remaining output goes nowhere at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except BootstrapError as error:
        _say(str(error))
        return ExitCode.MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main())
