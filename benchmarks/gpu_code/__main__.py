"""GPU code of the engine's fused functions, compiled here for cards that are not: bytes, launches and registers of each.

    python -m benchmarks.gpu_code          minutes, without a GPU; exit code 1 where each configuration of a kernel spills

It needs a torch for CPUs, since one for CUDA asks for a driver, and the triton of that version:

    pip install --no-deps --target FOLDER triton==3.7.1         (of torch 2.13)
    PYTHONPATH=FOLDER python -m benchmarks.gpu_code
"""

import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.gpu_code.cards import CARDS
from benchmarks.gpu_code.compiler import functions_of
from benchmarks.gpu_code.table import mistakes, table


def main() -> int:
    """Compile, print the table and what is wrong; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="triaxis-") as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        by_card = {}
        for card in CARDS:
            # A process for each card: torch keeps what it was told about the first one.
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                by_card[card] = process.submit(functions_of, card).result()
    print(table(by_card))
    wrong = mistakes(by_card)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
