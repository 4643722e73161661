"""`triaxis evaluate` computes a text's loss and perplexity under a checkpoint's model."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from triaxis.engine.data.corpus.indexed import IndexedTokens
from triaxis.engine.data.corpus.matching import is_recorded
from triaxis.engine.data.corpus.record import read_record
from triaxis.engine.data.corpus.tokenizer import Tokenizer
from triaxis.engine.errors import DataError
from triaxis.engine.storage.state_files import read_text
from triaxis.launch.inference.request import Asked, ask, open_tokenizer, start
from triaxis.launch.inference.request import add_arguments as add_checkpoint_arguments
from triaxis.launch.start.command_line import CommandParser, refuse

EXAMPLES = """examples:
  triaxis evaluate runs/gpt_tiny --text README.md
  triaxis evaluate runs/gpt_tiny --bin data/stdlib/bytes --max-tokens 1000000 --dp 2
  triaxis evaluate runs/gpt_tiny/checkpoints/step_00001000 --text README.md --stride 32 --json

Every token is predicted once, in windows of model.seq_length. A text counts as a document of its own: its first token is
predicted from the end of another document, and no end is expected of it. A corpus is read as it lies there; the ends of its
documents count as tokens and have no bytes. Per byte means per byte of UTF-8, which compares models with different tokenizers.
"""

DEFAULT_BATCH = 8


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "triaxis evaluate CHECKPOINT [section.key=value ...] (--text FILE | --bin PREFIX) [options]"
    parser.epilog = EXAMPLES
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--dp", type=int, metavar="N", help="data-parallel replicas that share the windows (default: 1)"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, metavar="FILE", help="a text file in UTF-8")
    source.add_argument("--bin", metavar="PREFIX", help="a corpus of `triaxis prepare`, in the model's tokens")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="read only the first N tokens")
    parser.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="tokens between the beginnings of two windows (default: model.seq_length; less gives more context, and costs more)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=DEFAULT_BATCH,
        metavar="N",
        help=f"windows per forward (default: {DEFAULT_BATCH})",
    )


def run(args: argparse.Namespace) -> int:
    """Check everything that needs no weights, then start the ranks. Return their exit code."""
    refuse(_problems(args))
    # As many microbatches as stages fill a pipeline; twice that keeps its bubble small.
    num_microbatches = 2 * args.pp if args.pp and args.pp > 1 else 1
    global_batch_size = args.batch_size * (args.dp or 1) * num_microbatches
    asked = ask(args, {"micro_batch_size": args.batch_size, "global_batch_size": global_batch_size})
    asked, tokenizer = open_tokenizer(asked)
    if args.stride is not None and args.stride > asked.config.model.seq_length:
        most = f"at most model.seq_length = {asked.config.model.seq_length}"
        refuse([f"--stride {args.stride}: must be {most}, or tokens between two windows would not be predicted."])
    if args.text is not None:
        _check_text(args.text, tokenizer)
    else:
        _check_corpus(args.bin, asked, tokenizer)
    job = {
        "text": None if args.text is None else str(args.text.resolve()),
        "bin": None if args.bin is None else str(Path(args.bin).resolve()),
        "max_tokens": args.max_tokens,
        "eod_id": tokenizer.eod_id,
        "stride": args.stride,
        "json": args.json,
    }
    return start(asked, "triaxis.launch.inference.evaluate", job)


def _problems(args: argparse.Namespace) -> Iterator[str]:
    for option, given in (
        ("--max-tokens", args.max_tokens),
        ("--stride", args.stride),
        ("--batch-size", args.batch_size),
        ("--pp", args.pp),
        ("--dp", args.dp),
    ):
        if given is not None and given < 1:
            yield f"{option} {given}: must be at least 1, or there is nothing to do."


def _check_text(path: Path, tokenizer: Tokenizer) -> None:
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text in UTF-8: {error}. Give a text file.") from None
    if not tokenizer.encode(text):
        raise DataError(f"{path} holds no text, so there is nothing to predict. Give a text file with some.")


def _check_corpus(prefix: str, asked: Asked, tokenizer: Tokenizer) -> None:
    IndexedTokens(prefix)
    record = read_record(prefix)
    if record is not None and not (record.eod_id == tokenizer.eod_id and is_recorded(tokenizer, record)):
        raise DataError(
            f"{prefix} was prepared with {record.tokenizer} ({record.vocab_size:,} tokens, id {record.eod_id} ends a document); "
            f"the model of {asked.candidate.folder} reads {asked.config.data.tokenizer} ({tokenizer.vocab_size:,} tokens, id "
            f"{tokenizer.eod_id}). The same ids would mean other words. Prepare the text with the model's tokenizer, or give it "
            "with --text."
        )
