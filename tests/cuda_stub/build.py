"""Build the stub: one library with our functions, and one under the name of each library of NVIDIA's that torch is linked with.

    c/*.c       functions that do something
    missing.c   generated: every other function that torch needs or cuda.h declares ends the process with its name, but CUPTI's
    libcard.so  both, compiled
    libcard_allocator.so  what listens to torch's allocator, in C++
    libcudart.so.13, libcuda.so.1, ..  empty; they carry the versions that torch asks for, and load libcard.so

The libraries are written beside torch's own, in an environment of their own (`.venv-cuda`), where torch's run path looks.

    python tests/cuda_stub/build.py
"""

import hashlib
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
SITE = Path(sysconfig.get_paths()["purelib"])
LIBRARIES = SITE / "torch" / "lib"
HEADERS = SITE / "triton" / "backends" / "nvidia" / "include"
OURS, LISTENER = "libcard.so", "libcard_allocator.so"

LOADED_BY_NAME = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries that torch, Triton or NVML's callers load while they run."""

_NEEDED = re.compile(r"\(NEEDED\).*\[((?:libcu|libnv|libnccl)[^]]*)\]")
_VERSION = re.compile(r"Version: \S+\s+File: (\S+)|Name: (\S+)\s+Flags")
_FUNCTION = re.compile(r"^(?:cu|nccl|nv)\w+$")
_DECLARED = re.compile(r"CUDAAPI\s+(cu\w+)\s*\(")


def variables() -> dict[str, str]:
    """Return what a process needs: Triton looks for the driver by itself; kernels that it and inductor compile are kept here.

    A process compiles by itself. Workers would import torch again, outlive it, and their threads would count as the host's.
    """
    return {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRITON_LIBCUDA_PATH": str(LIBRARIES),
        "TRITON_CACHE_DIR": f"{sys.prefix}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{sys.prefix}/inductor",
        "CARD_DEVICES": "8",
    }


def build() -> None:
    """Write the libraries, unless those that are there are of the same sources and the same torch."""
    sources = sorted((HERE / "c").glob("*.[ch]*"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [*sources, Path(__file__)])).hexdigest()
    stamp = LIBRARIES / "libcard.sha256"
    if stamp.exists() and stamp.read_text() == digest:
        return
    versions = _versions()
    with TemporaryDirectory() as folder:
        work = Path(folder)
        for path in sources:
            if path.suffix == ".c":
                _compile(path, work / f"{path.stem}.o")
        defined = set(_names("--defined-only", *work.glob("*.o")))
        missing = work / "missing.c"
        missing.write_text(_missing(defined))
        _compile(missing, work / "missing.o")
        _link(LIBRARIES / OURS, *work.glob("*.o"), "-ldl", "-lpthread", "-lrt")
        listener = ["-std=c++20", "-O1", "-fPIC", f"-I{SITE / 'torch' / 'include'}", "-isystem", HEADERS]
        loads = [f"-L{LIBRARIES}", "-Wl,-rpath,$ORIGIN", f"-l:{OURS}", "-lc10_cuda", "-lc10"]
        _link(LIBRARIES / LISTENER, *listener, HERE / "c" / "allocator.cpp", *loads, compiler="g++")
        # Those that others load come first.
        for name in [*LOADED_BY_NAME, *sorted(versions.keys() - {*LOADED_BY_NAME})]:
            script = work / "versions.map"
            script.write_text("".join(f"{version} {{}};\n" for version in sorted(versions.get(name, ()))))
            extra = [f"-Wl,--version-script={script}"] if versions.get(name) else []
            others = [f"-l:{each}" for each in LOADED_BY_NAME] if name.startswith("libcudart") else []
            loads = [f"-L{LIBRARIES}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", f"-l:{OURS}", *others]
            _link(LIBRARIES / name, f"-Wl,-soname,{name}", *extra, *loads)
        # Triton links its launchers with -lcuda.
        (LIBRARIES / "libcuda.so").unlink(missing_ok=True)
        (LIBRARIES / "libcuda.so").symlink_to("libcuda.so.1")
    stamp.write_text(digest)


def _compile(source: Path, to: Path) -> None:
    # A function of ours may have fewer parameters than its declaration, or none, where it reads none.
    flags = ["-O1", "-g", "-fPIC", "-Wall", "-Wno-unused-parameter", "-Wno-unused-variable"]
    subprocess.run(["gcc", *flags, "-isystem", str(HEADERS), "-c", str(source), "-o", str(to)], check=True)


def _link(to: Path, *words: object, compiler: str = "gcc") -> None:
    # A process that runs has the old file mapped.
    new = to.with_suffix(".new")
    subprocess.run([compiler, "-shared", "-o", str(new), *map(str, words)], check=True)
    new.replace(to)


def _torch() -> list[Path]:
    return [path for path in LIBRARIES.glob("lib*.so") if re.search("torch|c10|caffe2", path.name)]


def _versions() -> dict[str, set[str]]:
    """Return each library of NVIDIA's that torch needs, with the versions of symbols that torch asks it for."""
    found: dict[str, set[str]] = {}
    for path in _torch():
        for name in _NEEDED.findall(_output("readelf", "-dW", path)):
            found.setdefault(name, set())
        file = ""
        for library, version in _VERSION.findall(_output("readelf", "-VW", path)):
            file = library or file
            if version and file in found:
                found[file].add(version)
    return found


def _names(kind: str, *paths: Path) -> Iterator[str]:
    """Yield the names of functions in libraries or objects, without versions."""
    for line in _output("nm", *(["-D"] if kind == "--undefined-only" else []), kind, *paths).splitlines():
        name = line.split()[-1].split("@")[0] if line.strip() else ""
        if _FUNCTION.match(name) or name.startswith("__cuda"):
            yield name


def _missing(defined: set[str]) -> str:
    """Write functions that end the process, for every name but those that are `defined`."""
    text = (HEADERS / "cuda.h").read_text()
    renamed = re.findall(r"#define\s+(cu\w+)\s+(cu\w+)$", text, re.MULTILINE)
    wanted = {
        *_names("--undefined-only", *_torch()),
        *_DECLARED.findall(text),
        *(name for pair in renamed for name in pair),
    }
    # CUPTI is the profiler's: it has no records of this card.
    bodies = (
        f"int {name}(void) {{ return 0; }}\n"
        if name.startswith("cupti")
        else f'void {name}(void) {{ card_end("not implemented", "{name}"); }}\n'
        for name in sorted(wanted - defined)
    )
    return "void card_end(const char *what, const char *name);\n" + "".join(bodies)


def _output(*words: object) -> str:
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    build()
