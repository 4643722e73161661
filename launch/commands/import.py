# ruff: noqa: N999  (a command's module has its name, and is imported by name only)
"""`triaxis import` turns a Hugging Face or Megatron-Core model into a checkpoint and a training config."""

import argparse
from pathlib import Path

from triaxis.engine.errors import CheckpointError
from triaxis.launch.commands.convert_huggingface import import_huggingface
from triaxis.launch.commands.convert_megatron import import_megatron
from triaxis.launch.start.command_line import (
    CommandParser,
    add_ignore,
    add_json,
    add_weights_only,
    print_json,
    refuse,
    typed,
)

EXAMPLES = """examples:
  triaxis import models/Qwen3-0.6B checkpoints/qwen3
  triaxis import models/gpt2 checkpoints/gpt2 --seq-length 512 --dtype fp32
  triaxis import megatron/checkpoints imported --vocab-size 50257
  triaxis import megatron/checkpoints/iter_0100000 imported --config mine.yaml

SOURCE is a folder with config.json and safetensors, or a .gguf file. Or it is what Megatron's --save named (torch_dist), or one
iteration in it; the optimizer's state comes along then, so that the run can be resumed.
"""
OF_HUGGING_FACE = ("seq_length", "dtype", "ignore")
OF_MEGATRON = ("config", "vocab_size", "weights_only")
"""Options that apply to only one kind of source."""

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
    add_weights_only(megatron)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Import the model. Raises CheckpointError, ConfigError or DataError if that is impossible."""
    from triaxis.models.interop.megatron.files import is_megatron_checkpoint  # torch, after the command line is right

    is_megatron = is_megatron_checkpoint(args.source)
    if args.source.is_dir() and not is_megatron and not any(any(args.source.glob(name)) for name in SIGNS_OF_A_MODEL):
        raise CheckpointError(
            f"{args.source} has neither config.json (Hugging Face) nor latest_checkpointed_iteration.txt or metadata.json "
            "(Megatron-Core), so there is no model to import. Give the folder that has one of them, or a .gguf file."
        )
    kind, useless = ("Megatron-Core", OF_HUGGING_FACE) if is_megatron else ("Hugging Face", OF_MEGATRON)
    refuse(
        f"{option}: {args.source} is a model of {kind}, and the option says nothing of it. Leave it out."
        for option in typed(args, *useless)
    )
    args.dtype = args.dtype or "source"
    import_megatron(args) if is_megatron else import_huggingface(args)
    print_json(args, {"folder": str(args.out)})
    return 0
