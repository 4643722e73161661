"""A command's ranks, forked from the server of `tests/harness.py` where torchrun would start them: the same workers, at once.

Each command that starts ranks has a test that really starts them; its other layouts need no launcher.
"""

import importlib
import io
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.launch.command_line import OTHER_LAUNCHERS, Ended
from tests.log_lines import without_times
from tests.offered import require_readable
from triaxis.engine.comm.runtime import Runtime
from triaxis.engine.config.load import ENVIRONMENT
from triaxis.launch.cli import main
from triaxis.launch.start.launcher import Request, make_plan
from triaxis.launch.start.process.ending import exit_code


def fork_ranks_of(monkeypatch: pytest.MonkeyPatch, module: str, change: Callable[[], None] | None = None) -> None:
    """From now on `module` calls this in place of `triaxis.launch.start.launcher.launch`; what rank 0 prints is printed here.

    `change` is called in each rank first.
    """
    stdout = sys.stdout

    def launch(request: Request, variables: Mapping[str, str]) -> int:
        plan = make_plan(request, variables)
        ended = run_ranks(work, plan.world.size, request.worker, plan.worker_arguments, change)
        _, out, err = ended[0]
        stdout.write(out)
        sys.stderr.write(err)
        return max(code for code, *_ in ended)

    monkeypatch.setattr(f"{module}.launch", launch)


def train_in(folder: Path, *words: str) -> Ended:
    """`triaxis train` with these words in `folder`, on the CPU: what it said, with the log of rank 0 in place of its output."""
    with pytest.MonkeyPatch.context() as here, redirect_stdout(io.StringIO()) as out:
        for name in list(os.environ):
            if name.startswith(OTHER_LAUNCHERS) or name in ENVIRONMENT:
                here.delenv(name)
        here.setenv("CUDA_VISIBLE_DEVICES", "")
        fork_ranks_of(here, "triaxis.launch.commands.train", partial(os.chdir, folder))
        with redirect_stderr(io.StringIO()) as err:
            code = main(["train", *words])
    logs = sorted(folder.glob("runs/*/logs/attempt_*/rank_00000.log"), key=lambda path: path.stat().st_mtime_ns)
    said = Ended(code, out.getvalue() + "".join(without_times(log.read_text()) for log in logs[-1:]), err.getvalue())
    require_readable(said.out + said.err)
    return said


def work(rank: int, module: str, words: list[str], change: Callable[[], None] | None = None) -> tuple[int, str, str]:
    """One rank: its exit code and what it said. The harness has joined the process group."""
    import triaxis.launch.rank.join

    if change is not None:
        change()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    for name in ENVIRONMENT:
        os.environ.pop(name, None)
    places = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in places.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    triaxis.launch.rank.join.start = lambda environment, config: Runtime(torch.device("cpu"))
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = exit_code(importlib.import_module(module).main, words)
    return code, out.getvalue(), err.getvalue()
