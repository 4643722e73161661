"""Import and run a worker as one rank under torchrun; the import takes seconds, and Ctrl-C may come before it is done.

    python -m triaxis.launch.start.process.start_rank triaxis.launch.pretrain_gpt config.yaml train.steps=20

A rank that is interrupted before its worker is imported ends with a code and no traceback; its launcher prints the reason.
"""

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str]) -> NoReturn:
    """Import the module that the first word names and run its `main` with the other words, as one rank."""
    try:
        import importlib

        from triaxis.launch.start.process.ending import run_rank

        worker = importlib.import_module(arguments[0]).main
    except KeyboardInterrupt:
        # A half-imported library's threads may hang an ordinary exit.
        import os

        from triaxis.engine.errors import ExitCode

        os._exit(ExitCode.INTERRUPTED)
    run_rank(worker, arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
