"""GPU code of the engine's fused functions: a table of the committed numbers, or the numbers anew, which needs triton and no GPU.

python -m benchmarks.gpu_code                                  the table
pip install --no-deps --target FOLDER triton==VERSION          the version of the committed file
python -m benchmarks.gpu_code --check --triton FOLDER          compile everything and compare; exit code 1 where it differs
python -m benchmarks.gpu_code --write --triton FOLDER          compile everything and write the file
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_code.cards import CARDS
from benchmarks.gpu_code.golden import PATH, Function, Golden, GpuCode, committed, differences
from benchmarks.gpu_code.table import table

ROOT = Path(__file__).resolve().parents[2]


def compile_everything(triton: Path | None) -> Golden:
    """Compile every function for every card, each card in a process of its own, and count the models' steps.

    Args:
        triton: the folder in which triton is installed; None: where Python finds it.
    """
    # torch and the engine, where they are needed: the table needs neither.
    import torch

    from benchmarks.gpu_code.work import model_steps

    by_card = {card: _compile_for(card, triton) for card in CARDS}
    first = next(iter(by_card.values()))
    functions = {
        key: Function(key, part, elements, {card: rows[key][2] for card, rows in by_card.items() if key in rows})
        for key, (part, elements, _) in first.items()
    }
    version = torch.__version__.partition("+")[0]
    return Golden(version, _triton_version(triton), functions, model_steps())


def _environment(triton: Path | None) -> dict[str, str]:
    paths = [str(ROOT), *([str(triton)] if triton is not None else []), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _triton_version(triton: Path | None) -> str:
    words = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    found = subprocess.run(words, env=_environment(triton), check=True, capture_output=True, text=True)
    return found.stdout.strip()


def _compile_for(card: str, triton: Path | None) -> dict[str, tuple[str, int, GpuCode]]:
    with tempfile.TemporaryDirectory(prefix="triaxis-") as folder:
        result = Path(folder, "result.json")
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        words = [sys.executable, "-m", "benchmarks.gpu_code.worker", card, str(result)]
        subprocess.run(words, cwd=ROOT, env=_environment(triton) | caches, check=True)
        rows = json.loads(result.read_text())
    return {
        key: (part, elements, GpuCode(**code | {"operators": tuple(code["operators"])}))
        for key, part, elements, code in rows
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_code", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compile everything and compare it with the committed file")
    what.add_argument("--write", action="store_true", help="compile everything, and write the committed file")
    parser.add_argument(
        "--triton", type=Path, metavar="FOLDER", help="where triton is installed; default: as Python finds it"
    )
    options = parser.parse_args(argv)
    if not (options.check or options.write):
        print(table(committed()))
        return 0
    found = compile_everything(options.triton)
    if options.write:
        PATH.write_text(found.text())
        print(f"{PATH}: {len(found.functions)} functions, torch {found.torch}, triton {found.triton}")
        return 0
    lines = differences(found, committed())
    print("\n".join(lines) or f"all {len(found.functions)} functions and {len(found.steps)} steps are as committed")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
