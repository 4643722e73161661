"""`triaxis export` writes a checkpoint of any layout as a Hugging Face folder or Megatron-Core checkpoint."""

import argparse
from pathlib import Path

from triaxis.launch.commands.convert_huggingface import export_huggingface
from triaxis.launch.commands.convert_megatron import export_megatron
from triaxis.launch.start.command_line import (
    CommandParser,
    add_checkpoint,
    add_json,
    add_weights,
    add_weights_only,
    print_json,
    refuse,
    typed,
)
from triaxis.models.interop.huggingface.families import FAMILIES

EXAMPLES = """examples:
  triaxis export runs/gpt_tiny exported/gpt_tiny
  triaxis export runs/llama/checkpoints/step_00001000 exported/llama --dtype bf16 --tokenizer tokenizer.json
  triaxis export runs/gpt_tiny exported --to megatron
  triaxis export runs/llama/checkpoints/step_00001000 exported --to megatron --weights-only --dtype bf16
"""
HF, MEGATRON = "hf", "megatron"
OF_HF = ("family", "tokenizer", "max_shard_gb")
OF_MEGATRON = ("weights_only",)
"""Options that apply to only one output format."""

SHARD_GB = 5.0


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "triaxis export CHECKPOINT OUT_DIR [--to hf|megatron] [options]"
    parser.epilog = EXAMPLES
    add_checkpoint(parser, "source")
    parser.add_argument(
        "out", type=Path, metavar="OUT_DIR", help="hf: folder to make; megatron: for --load; iterations in it are kept"
    )
    parser.add_argument(
        "--to",
        choices=(HF, MEGATRON),
        default=HF,
        help="hf (default): a folder that transformers loads; megatron: torch_dist, for any layout of Megatron-Core",
    )
    parser.add_argument(
        "--dtype",
        choices=("source", "bf16", "fp16", "fp32"),
        help="of the weights; source: as they were saved, fp32 masters (default: hf: source; megatron: the run's)",
    )
    add_weights(parser)
    hf = parser.add_argument_group("to Hugging Face")
    hf.add_argument(
        "--family",
        choices=list(FAMILIES),
        metavar="NAME",
        help=f"architecture to write: {', '.join(FAMILIES)} (default: the first that can express the model)",
    )
    hf.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="`bytes`, a tokenizer.json or its folder, or `none` (default: what the checkpoint's config names)",
    )
    hf.add_argument(
        "--max-shard-gb", type=float, metavar="N", help=f"largest file, in 10^9 bytes (default: {SHARD_GB:g})"
    )
    add_weights_only(parser.add_argument_group("to Megatron-Core"))
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Export the checkpoint. Raises CheckpointError, ConfigError or DataError if that is impossible."""
    other, useless = (HF, OF_HF) if args.to == MEGATRON else (MEGATRON, OF_MEGATRON)
    problems = [
        f"{option} with --to {args.to}: it is for --to {other}, and would do nothing. Leave it out."
        for option in typed(args, *useless)
    ]
    if args.to == HF and args.dtype == "fp16":
        problems.append(
            "--dtype fp16 with --to hf: fp16 ends at 65,504, and larger weights would be lost. Take bf16 or fp32."
        )
    refuse(problems)
    if args.to == MEGATRON:
        export_megatron(args)
    else:
        args.dtype = args.dtype or "source"
        args.max_shard_gb = SHARD_GB if args.max_shard_gb is None else args.max_shard_gb
        export_huggingface(args)
    print_json(args, {"folder": str(args.out)})
    return 0
