"""Runs of the benchmarks that train tiny models on the sources of the standard library."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.launch.command_line import ROOT
from triaxis.launch import cli


def rows_of(module: str, folder: Path, options: Sequence[str], settings: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of `benchmarks.<module>` with these options and `section.key=value` words."""
    prefix, results = folder / "bytes", folder / "learns.jsonl"
    assert cli.main(["prepare", "--stdlib", "--output", str(prefix), "--tokenizer", "bytes"]) == 0
    words = [*options, "--json", str(results), f"data.train={prefix}", *settings]
    said = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    rows: list[dict[str, Any]] = json.loads(results.read_text())["rows"]
    return rows
