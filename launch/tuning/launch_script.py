"""Run a launch script of Megatron-LM, and read the command line that it would start.

    bash script.sh  ->  torchrun .. pretrain_gpt.py --num-layers 24 ..  ->  the words, recorded in a file; nothing is trained

The script is code, and runs with the rights of the user. It runs in an empty folder, with `PATH` and `HOME` as its only variables.
Its torchrun and srun only record their words.
"""

import os
import shlex
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from triaxis.engine.errors import ConfigError, brief
from triaxis.models.interop.megatron.command_line.parse import words_of

LAUNCHERS = ("torchrun", "srun")
MOST_SECONDS = 60
_RECORDER = """#!/bin/sh
printf '%s\\0' "$@" > "$(mktemp {calls}/XXXXXXXX)"
"""


def words_of_script(source: str) -> str:
    """Run a script, and return the words of the one command that it starts, as a line of shell.

    Args:
        source: the script's path, and its arguments after it, as a line of shell.

    Raises:
        ConfigError: there is no such script, or it starts no command or several, or takes more than `MOST_SECONDS`; or a quote is
            open.
    """
    script, *arguments = words_of([source]) or [""]
    if not os.path.isfile(script):  # noqa: PTH113 - Path.is_file raises for an invalid name
        raise ConfigError(
            [f"--run-script with --from {brief(source)}: there is no such file to run. Give the path of a script."]
        )
    with TemporaryDirectory() as root:
        programs, calls, empty = (Path(root) / name for name in ("programs", "calls", "empty"))
        for folder in (programs, calls, empty):
            folder.mkdir()
        for launcher in LAUNCHERS:
            (programs / launcher).write_text(_RECORDER.format(calls=shlex.quote(str(calls))))
            (programs / launcher).chmod(0o755)
        # `timeout` also ends what the script has started.
        ran = subprocess.run(
            ["timeout", "-s", "KILL", str(MOST_SECONDS), "bash", str(Path(script).absolute()), *arguments],
            cwd=empty,
            env={"PATH": f"{programs}:{os.defpath}", "HOME": str(empty)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        found = {call.read_bytes() for call in calls.iterdir()}
    if len(found) != 1:
        last = os.fsdecode(ran.stderr).strip().rpartition("\n")[2]
        raise ConfigError(
            [
                f"{brief(script)} started {len(found)} different commands with {' or '.join(LAUNCHERS)}, and a run is one. Its "
                f"exit code is {ran.returncode}, and its last message: {brief(last or 'none')}. Set in the script what it takes "
                "from variables, or give its arguments in the quotes of --from."
            ]
        )
    words = os.fsdecode(found.pop()).split("\0")[:-1]
    # The command is one word in `srun bash -c LINE`.
    options = (place for place, word in enumerate(words[:-1]) if word == "-c" and words[place - 1].endswith("sh"))
    return next((words[place + 1] for place in options), shlex.join(words))
