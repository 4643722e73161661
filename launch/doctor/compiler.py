"""Look for the tools that compile a run's kernels on this node, a C compiler and Python's headers.

    inductor       ->  triton  ->  a launcher for each kernel, built by gcc or clang with Python.h

If one is missing, `auto` kernels run operator by operator, several times slower on a GPU.
"""

import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from triaxis.launch.doctor.records import CompilerFacts, Examination, Finding, Level

COMPILERS = ("gcc", "clang")
"""Compilers that triton looks for if CC is not set."""
ADVICE = (
    "Install both (apt-get install gcc python3-dev), or load your site's modules of a compiler and of Python. The headers must be "
    "those of the Python that runs."
)


def read_compiler(variables: Mapping[str, str] = os.environ, headers: Path | None = None) -> CompilerFacts:
    """Look for the tools that triton builds with.

    Args:
        variables: environment; CC and PATH are read.
        headers: folder with Python's headers; None: this Python's.
    """
    headers = headers or Path(sysconfig.get_paths()["include"])
    names = [variables["CC"]] if variables.get("CC") else COMPILERS
    found = (shutil.which(name, path=variables.get("PATH")) for name in names)
    return CompilerFacts(next(filter(None, found), ""), str(headers), (headers / "Python.h").is_file())


def judge_compiler(seen: Examination) -> Iterator[Finding]:
    """Check that triton can build kernels. Without GPUs this is no warning, since only a kernel named `compiled` needs triton."""
    facts = [(one, one.compiler) for one in seen.facts if one.compiler is not None]
    lacking: dict[str, list[str]] = {}
    for one, compiler in facts:
        if what := compiler.lacking:
            lacking.setdefault(what, []).append(one.host)
    for what, hosts in lacking.items():
        named = tuple(dict.fromkeys(hosts))
        if any(one.gpu is not None for one, _ in facts):
            text = f"there is {what}: triton cannot build kernels, so `auto` runs operator by operator"
            yield Finding(Level.WARN, "compiler", text, named, ADVICE)
        else:
            text = f"there is {what}; on a CPU only kernels that a config names `compiled` need that"
            yield Finding(Level.OK, "compiler", text, named)
    if facts and not lacking:
        yield Finding(Level.OK, "compiler", f"{facts[0][1].path} and Python.h are there")
