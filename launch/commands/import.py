# ruff: noqa: N999  (a command's module has its name, and is imported by name only)
"""`triaxis import`: a model of Hugging Face or Megatron-Core as a checkpoint to start from, and a config that trains it."""

import argparse
from pathlib import Path
from typing import Any

from triaxis.engine.errors import CheckpointError
from triaxis.launch.commands.convert_huggingface import import_huggingface
from triaxis.launch.commands.convert_megatron import import_megatron
from triaxis.launch.start.command_line import CommandParser, add_ignore, refuse

EXAMPLES = """examples:
  triaxis import models/Qwen3-0.6B checkpoints/qwen3
  triaxis import models/gpt2 checkpoints/gpt2 --seq-length 512 --dtype fp32
  triaxis import megatron/checkpoints imported --vocab-size 50257
  triaxis import megatron/checkpoints/iter_0100000 imported --config mine.yaml

SOURCE is a folder with config.json and safetensors, or a .gguf file. Or it is what Megatron's --save named (torch_dist), or one
iteration in it; the optimizer's state comes along then, so that the run can be resumed.
"""
OF_HUGGING_FACE: dict[str, Any] = {"seq_length": None, "dtype": None, "ignore": []}
OF_MEGATRON: dict[str, Any] = {"config": None, "vocab_size": None, "weights_only": False}
"""Options of one kind of source alone, and their values where they are not given."""

SIGNS_OF_MEGATRON = ("latest_checkpointed_iteration.txt", "iter_[0-9]*", "metadata.json", "common.pt", ".metadata")
SIGNS_OF_A_MODEL = ("config.json", "*.safetensors", "*.gguf", "*.bin")


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "triaxis import SOURCE OUT_DIR [options]"
    parser.epilog = EXAMPLES
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the model: a folder, or a .gguf file")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="folder of checkpoints to make; it must not exist")
    theirs = parser.add_argument_group("of a Hugging Face model")
    theirs.add_argument(
        "--seq-length", type=int, metavar="N", help="tokens in a training sample (default: the longest of the model)"
    )
    theirs.add_argument(
        "--dtype", choices=("source", "bf16", "fp32"), help="of the weights (default: source, as they are in the files)"
    )
    add_ignore(theirs)
    megatron = parser.add_argument_group("of a Megatron-Core checkpoint")
    whose = megatron.add_mutually_exclusive_group()
    whose.add_argument(
        "--config", type=Path, metavar="YAML", help="config of ours for the model (default: from Megatron's arguments)"
    )
    whose.add_argument(
        "--vocab-size", type=int, metavar="N", help="tokens of the tokenizer: rows beyond are padding and are dropped"
    )
    megatron.add_argument(
        "--weights-only", action="store_true", help="leave the optimizer's state and the iteration behind"
    )


def run(args: argparse.Namespace) -> int:
    """Import the model; CheckpointError, ConfigError or DataError where that is impossible."""
    is_megatron = any(any(args.source.glob(name)) for name in SIGNS_OF_MEGATRON)
    if args.source.is_dir() and not is_megatron and not any(any(args.source.glob(name)) for name in SIGNS_OF_A_MODEL):
        raise CheckpointError(
            f"{args.source} has neither config.json (Hugging Face) nor latest_checkpointed_iteration.txt or metadata.json "
            "(Megatron-Core), so there is no model to import. Give the folder that has one of them, or a .gguf file."
        )
    kind, useless = ("Megatron-Core", OF_HUGGING_FACE) if is_megatron else ("Hugging Face", OF_MEGATRON)
    refuse(
        f"--{name.replace('_', '-')}: {args.source} is a checkpoint of {kind}, and the option says nothing of it. Leave it out."
        for name, absent in useless.items()
        if getattr(args, name) != absent
    )
    args.dtype = args.dtype or "source"
    import_megatron(args) if is_megatron else import_huggingface(args)
    return 0
