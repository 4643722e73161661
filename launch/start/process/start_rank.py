"""Import and run a worker as one rank under torchrun.

    python -m triaxis.launch.start.process.start_rank triaxis.launch.pretrain_gpt config.yaml train.steps=20

The import takes seconds. A rank that Ctrl-C interrupts during the import exits with a code and no traceback.
"""

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str]) -> NoReturn:
    """Import the module in the first word and run its `main` with the other words, as one rank."""
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
