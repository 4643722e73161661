"""Find a DeepSpeed configuration among the sources of `triaxis new`, and read it apart from the model's source."""

import argparse
import os
from pathlib import Path
from typing import Any

from triaxis.engine.errors import brief
from triaxis.launch.start.command_line import refuse
from triaxis.models.interop.deepspeed.convert import DeepSpeedRun, from_deepspeed
from triaxis.models.interop.deepspeed.keys import entries, is_deepspeed
from triaxis.models.interop.huggingface.config import read_config_json

DeepSpeedSource = tuple[str, dict[str, Any]]
"""A DeepSpeed configuration: its path, and its content."""


def take_deepspeed(args: argparse.Namespace) -> DeepSpeedSource | None:
    """Find DeepSpeed's configuration in `args.sources`. Set `args.source` to the model's source, or to None for --size.

    Raises:
        ConfigError: the sources do not describe one model, or a file is not JSON.
    """
    read = [(source, _deepspeed_keys(source)) for source in args.sources]
    found = [(source, keys) for source, keys in read if keys is not None]
    others = [source for source, keys in read if keys is None]
    models = [f"--from {brief(source)}" for source in others] + ([] if args.size is None else [f"--size {args.size}"])
    problems = []
    if len(found) > 1:
        problems.append(
            f"{' and '.join(source for source, _ in found)}: a run has one DeepSpeed configuration. Leave one out."
        )
    if len(models) > 1:
        problems.append(f"{' and '.join(models)}: each describes a model, and a run has one. Leave the others out.")
    if not models:
        what = f"--from {found[0][0]}: a DeepSpeed configuration has no model" if found else "neither --from nor --size"
        problems.append(
            f"{what}: there would be nothing to train. Add a model: --size 125M, or --from with a config or a Hugging Face folder."
        )
    refuse(problems)
    args.source = others[0] if others else None
    return found[0] if found else None


def _deepspeed_keys(source: str) -> dict[str, Any] | None:
    """Read a source that is a configuration of DeepSpeed; None for any other source."""
    if not source.endswith(".json") or not os.path.isfile(source):  # noqa: PTH113 - Path.is_file raises for an invalid name
        return None
    keys = read_config_json(Path(source))
    return keys if is_deepspeed(keys) else None


def of_deepspeed(
    args: argparse.Namespace, deepspeed: DeepSpeedSource, num_ranks: int, *, is_ignoring: bool
) -> tuple[DeepSpeedRun, argparse.Namespace]:
    """Read DeepSpeed's configuration, and copy `args` for the model's source.

    The copy keeps only `--ignore` keys that DeepSpeed's configuration lacks. The other keys are ignored in that configuration.

    Args:
        is_ignoring: whether the model's source reads `--ignore` too. If not, the copy keeps none.
    """
    path, keys = deepspeed
    own = {name.partition(".")[0] for name, _ in entries(keys)}
    of_model = [name for name in args.ignore if is_ignoring and name.partition(".")[0] not in own]
    theirs = from_deepspeed(keys, num_ranks, path, [name for name in args.ignore if name not in of_model])
    if args.tokens is not None:
        theirs.fields.get("train", {}).pop("steps", None)
    return theirs, argparse.Namespace(**{**vars(args), "ignore": of_model})
