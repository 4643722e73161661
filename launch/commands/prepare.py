"""`triaxis prepare`: text files -> one corpus in Megatron's .bin/.idx format, with a progress bar.

text/*.txt, more.jsonl, or --stdlib  -->  PREFIX.bin, PREFIX.idx (tokens)  +  PREFIX.json (what it is, its hashes)
"""

import argparse
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from engine.data.corpus.indexed import bin_path, idx_path
from engine.data.corpus.prepare import Prepared, PrepareRequest, find_inputs, prepare
from engine.data.corpus.record import record_path
from engine.data.corpus.stdlib import STDLIB_BYTES, stdlib_files
from engine.errors import DataError

EXAMPLES = """examples:
  triaxis prepare --stdlib --tokenizer bytes --output data/stdlib
  triaxis prepare --input 'books/*.txt' --tokenizer bytes --output data/books --workers 4
  triaxis prepare --input web.jsonl --json-key text --tokenizer tokenizer.json --output data/web
"""
MOST_DEFAULT_WORKERS = 8
SECONDS_BETWEEN_LINES = 30.0


class DocumentsPerSecond(ProgressColumn):
    """Column of a progress bar: the speed at which documents are written."""

    def render(self, task: Task) -> Text:
        documents = task.fields["documents"]
        rate = documents / task.elapsed if task.elapsed else 0.0
        return Text(f"{documents:,} documents, {rate:,.0f}/s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "triaxis prepare (--input GLOB ... | --stdlib) --output PREFIX [--tokenizer TOKENIZER] [options]"
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--input",
        action="extend",
        nargs="+",
        default=[],
        metavar="GLOB",
        help="text files, one document each, or .jsonl files, one document per line; in quotes, '**' enters folders; repeatable",
    )
    parser.add_argument(
        "--stdlib", action="store_true", help="the sources of Python's standard library, in place of --input"
    )
    parser.add_argument(
        "--tokenizer", default="bytes", help="`bytes` (default), or the path of a Hugging Face tokenizer.json"
    )
    parser.add_argument("--output", required=True, metavar="PREFIX", help="path of the corpus, without an ending")
    parser.add_argument(
        "--workers",
        type=int,
        default=min(len(os.sched_getaffinity(0)), MOST_DEFAULT_WORKERS),
        metavar="N",
        help=f"processes (default: one per usable core, at most {MOST_DEFAULT_WORKERS}); the corpus is the same for any number",
    )
    parser.add_argument("--json-key", default="text", metavar="KEY", help="field of a .jsonl line (default: text)")
    parser.add_argument(
        "--eod-token", metavar="TOKEN", help="token of a tokenizer.json that ends a document (default: usual names)"
    )
    parser.add_argument(
        "--max-bytes",
        type=int,
        metavar="N",
        help=f"with --stdlib: bytes of sources at most (default: {STDLIB_BYTES:,})",
    )
    parser.add_argument("--force", action="store_true", help="prepare again, and replace another corpus of that name")


def run(args: argparse.Namespace) -> int:
    """Prepare the corpus and describe it; 0 when it is there at the end. DataError for the user's mistakes."""
    if bool(args.input) == args.stdlib:
        raise DataError(
            "give either --input with files, or --stdlib for the sources of Python's standard library. Without text there "
            "is no corpus, and both together are not built. Example: triaxis prepare --stdlib --output data/stdlib"
        )
    if args.max_bytes is not None and not args.stdlib:
        raise DataError(
            "--max-bytes belongs to --stdlib; files of --input are read whole. Leave it out, or name fewer files."
        )
    if args.stdlib:
        files = stdlib_files(STDLIB_BYTES if args.max_bytes is None else args.max_bytes)
    else:
        files = find_inputs(args.input)
    request = PrepareRequest(files, args.tokenizer, args.output, args.json_key, args.eod_token)
    console = Console(highlight=False, soft_wrap=True)
    with progress_shown(console, request.input_bytes) as progress:
        prepared = prepare(request, num_workers=args.workers, force=args.force, progress=progress)
    show_prepared(console, args.output, prepared)
    return 0


@contextmanager
def progress_shown(console: Console, total_bytes: int) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal, or a line now and then in a log file."""
    if not console.is_terminal:
        yield LogLines(console, total_bytes)
        return
    columns = (TextColumn("prepare"), BarColumn(), DownloadColumn(), DocumentsPerSecond(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total_bytes, documents=0)
        yield lambda done_bytes, documents: bar.update(task, completed=done_bytes, documents=documents)


class LogLines:
    """Progress as lines of a log, at most one in SECONDS_BETWEEN_LINES."""

    def __init__(self, console: Console, total_bytes: int) -> None:
        self.console, self.total_bytes = console, total_bytes
        self.start_seconds = self.printed_seconds = time.monotonic()

    def __call__(self, done_bytes: int, documents: int) -> None:
        now = time.monotonic()
        if now - self.printed_seconds >= SECONDS_BETWEEN_LINES:
            self.printed_seconds = now
            left_seconds = (now - self.start_seconds) * (self.total_bytes / done_bytes - 1)
            self.console.print(
                f"prepare: {done_bytes / self.total_bytes:4.0%} of {self.total_bytes:,} bytes, {documents:,} documents, "
                f"{left_seconds:,.0f} s left"
            )


def show_prepared(console: Console, prefix: str, prepared: Prepared) -> None:
    """Print what is on disk now, and the command that trains on it."""
    record = prepared.record
    if prepared.already_there:
        console.print(
            f"{prefix} is already prepared from these inputs and whole; nothing to do (--force prepares it again)."
        )
    skipped = f", {record.num_skipped_documents:,} without text left out" if record.num_skipped_documents else ""
    for name, value in (
        ("corpus", f"{bin_path(prefix)}, {idx_path(prefix).name}, {record_path(prefix).name}"),
        ("text", f"{record.num_input_files:,} files, {record.input_bytes:,} bytes"),
        ("documents", f"{record.num_documents:,}{skipped}"),
        ("tokens", f"{record.num_tokens:,} as {record.dtype}, {record.bin_bytes:,} bytes"),
        ("tokenizer", f"{record.tokenizer}, {record.vocab_size:,} tokens, id {record.eod_id} ends a document"),
        ("sha256", f"{record.bin_sha256} (.bin)"),
        ("", f"{record.idx_sha256} (.idx)"),
    ):
        console.print(f"{name:<10} {value}")
    overrides = [
        f'data.train=[[1.0,"{prefix}"]]',
        f"data.tokenizer={record.tokenizer}",
        f"model.vocab_size={record.vocab_size}",
    ]
    console.print("train on it:")
    console.print(f"  bash launch/pretrain_gpt.sh configs/gpt_tiny.yaml {shlex.join(overrides)}")
