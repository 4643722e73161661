"""`triaxis prepare` converts text, or other tools' token files, to a Megatron .bin/.idx corpus.

texts/, web.jsonl.zst, books/*.parquet, or --stdlib  -->  PREFIX.bin, PREFIX.idx (tokens)  +  PREFIX.json (its content and hashes)
"""

import argparse
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from triaxis.engine.config.write import in_yaml
from triaxis.engine.data.corpus.indexed import bin_path, idx_path
from triaxis.engine.data.corpus.pieces import AS_NAMED, ReadOptions
from triaxis.engine.data.corpus.record import record_path
from triaxis.engine.data.corpus.stdlib import STDLIB_BYTES, stdlib_files
from triaxis.engine.errors import DataError, counted
from triaxis.engine.program import triaxis
from triaxis.launch.prepare.inputs import Inputs, find_inputs
from triaxis.launch.prepare.parts import Done
from triaxis.launch.prepare.prepare import Prepared, PrepareRequest, prepare
from triaxis.launch.prepare.readers import FORMATS, reader_of
from triaxis.launch.prepare.train_bpe import TRAINING_BYTES, size_to_train
from triaxis.launch.start.command_line import add_json, print_json

EXAMPLES = """examples:
  triaxis prepare --stdlib --tokenizer bytes --output data/stdlib
  triaxis prepare --input books/ 'web/*.jsonl.zst' --tokenizer tokenizer.json --output data/web
  triaxis prepare --input 'crawl/*.parquet' --text-key content --tokenizer train-bpe:32000 --output data/crawl
  triaxis prepare --input 'a/*.parquet' b/ --text-key 'a/*.parquet=content' b/=text --tokenizer gpt2/ --output data/both
  triaxis prepare --input TinyStories.txt --separator '<|endoftext|>' --tokenizer gpt2/ --output data/stories
  triaxis prepare --input 'fineweb10B/*.bin' --tokenizer gpt2/ --output data/fineweb
  triaxis prepare --input books/ --tokenizer ranks.tiktoken --pattern cl100k_base --output data/books --on-bad skip
"""
SECONDS_BETWEEN_LINES = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "triaxis prepare (--input PATH ... | --stdlib) --output PREFIX [--tokenizer TOKENIZER] [options]"
    parser.epilog = EXAMPLES
    _add_inputs(parser)
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        help="`bytes` (default), a tokenizer.json, a folder of transformers, a sentencepiece .model, ranks of tiktoken, or "
        "train-bpe:N, which is trained on the input; only the end of a document is added, no beginning of text",
    )
    parser.add_argument(
        "--pattern",
        help="with ranks of tiktoken: how they cut text, by name (cl100k_base, gpt2, ..) or as a regular expression",
    )
    parser.add_argument("--eod-token", metavar="TOKEN", help="token that ends a document (default: the tokenizer's)")
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with that token (default); without it a model cannot see where one ends and the next begins",
    )
    parser.add_argument("--output", required=True, metavar="PREFIX", help="path of the corpus, without an ending")
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes (default: one per usable core); the corpus is the same for any number",
    )
    add_json(parser)
    parser.add_argument("--quiet", action="store_true", help="print progress alone, no description of the corpus")
    parser.add_argument("--force", action="store_true", help="prepare again, and replace another corpus of that name")


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        action="extend",
        nargs="+",
        default=[],
        metavar="PATH",
        help="files, folders, or globs in quotes ('**' enters folders): .jsonl, .parquet, .txt, .gz and .zst of them; tokens that "
        "another tool made (.npy, .bin of nanoGPT or llm.c, lists of ids as a field or column); any other name is text; repeatable",
    )
    parser.add_argument(
        "--stdlib", action="store_true", help="the sources of Python's standard library, in place of --input"
    )
    parser.add_argument(
        "--max-bytes",
        type=int,
        metavar="N",
        help=f"with --stdlib: bytes of sources at most (default: {STDLIB_BYTES:,})",
    )
    parser.add_argument(
        "--text-key",
        "--json-key",
        action="extend",
        nargs="+",
        default=[],
        metavar="[PATH=]KEY",
        help="field of a JSON line or column of a .parquet with the document (default: text); data.text enters what is nested; "
        "PATH=KEY holds for that PATH of --input",
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="read all input as this format (default: by the endings of the names)"
    )
    parser.add_argument(
        "--separator", metavar="TEXT", help="what stands between the documents of a text, such as '<|endoftext|>'"
    )
    parser.add_argument(
        "--max-document-bytes",
        type=int,
        default=AS_NAMED.max_document_bytes,
        metavar="N",
        help=f"a longer document is bad input (default: {AS_NAMED.max_document_bytes:,})",
    )
    parser.add_argument(
        "--on-bad",
        choices=("stop", "skip"),
        default="stop",
        help="bad input (no UTF-8, no JSON, no such field, a truncated file, ..): stop and name its place (default), or leave it "
        "out and count it",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare the corpus and describe it. Raises DataError for the user's mistakes."""
    if bool(args.input) == args.stdlib:
        raise DataError(
            "give either --input with files, or --stdlib for the sources of Python's standard library. Without text there "
            "is no corpus, and both together are not built. Example:  "
            + triaxis("prepare --stdlib --output data/stdlib")
        )
    if args.max_bytes is not None and not args.stdlib:
        raise DataError(
            "--max-bytes belongs to --stdlib; files of --input are read whole. Leave it out, or name fewer files."
        )
    if args.stdlib:
        inputs = Inputs(stdlib_files(STDLIB_BYTES if args.max_bytes is None else args.max_bytes))
    else:
        inputs = find_inputs(args.input, args.on_bad)
    keys = dict(_keyed(word, args.input) for word in args.text_key)
    key = keys.get(None, AS_NAMED.text_key)
    request = PrepareRequest(
        inputs.files,
        args.tokenizer if args.pattern is None else f"{args.tokenizer}:{args.pattern}",
        args.output,
        options=ReadOptions(key, args.format, args.separator or None, args.max_document_bytes),
        text_keys=tuple(keys.get(pattern, key) for pattern in inputs.patterns),
        eod_token=args.eod_token,
        append_eod=args.append_eod,
        on_bad=args.on_bad,
    )
    console = Console(highlight=False, soft_wrap=True)
    if inputs.passed_over:
        counts = ", ".join(f"{count:,} {ending}" for ending, count in sorted(inputs.passed_over.items()))
        console.print(f"not read   {counts}: files in folders are read by their endings; name others with a pattern")
    if inputs.num_links:
        console.print(f"read once  {counted(inputs.num_links, 'name')} more of the same files, by links")
    if size_to_train(request.tokenizer) is not None:
        console.print(
            f"tokenizer  {request.trained_tokenizer} is trained first, on at most {TRAINING_BYTES:,} bytes of text"
        )
    with progress_shown(console, request.input_bytes) as progress:
        prepared = prepare(request, num_workers=args.workers, force=args.force, progress=progress)
    if not args.quiet:
        show_prepared(console, request, prepared)
    print_json(args, asdict(prepared.record))
    return 0


def _keyed(word: str, patterns: Sequence[str]) -> tuple[str | None, str]:
    """Split a --text-key word into (path in --input, key). The path is None for a key that applies to all paths."""
    path, equals, key = word.rpartition("=")
    return (path, key) if equals and path in patterns else (None, word)


@contextmanager
def progress_shown(console: Console, total_bytes: int) -> Iterator[Callable[[Done], None]]:
    """Show a progress bar on a terminal, or an occasional line in a log file. Yields the function that updates it."""
    if console.is_terminal:
        columns = (TextColumn("prepare"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as bar:
            task = bar.add_task("", total=total_bytes)
            yield lambda done: bar.update(task, completed=done.num_bytes, description=describe(done))
        return
    printed_seconds = time.monotonic()

    def log(done: Done) -> None:
        nonlocal printed_seconds
        if time.monotonic() - printed_seconds >= SECONDS_BETWEEN_LINES:
            printed_seconds = time.monotonic()
            console.print(f"prepare: {done.num_bytes / total_bytes:.0%} of {total_bytes:,} bytes, {describe(done)}")

    yield log


def describe(done: Done) -> str:
    """Describe the work that is done, with the part that an earlier start did."""
    found = f", {done.found_bytes:,} bytes from an earlier start" if done.found_bytes else ""
    return f"{counted(done.num_documents, 'document')}, {counted(done.num_tokens, 'token')}{found}"


def show_prepared(console: Console, request: PrepareRequest, prepared: Prepared) -> None:
    """Print the corpus that is now on disk, and the command that trains on it."""
    record, prefix = prepared.record, request.output
    titles = Counter(reader_of(path, request.options).title for path in request.files)
    read_as = ", ".join(f"{count:,} as {title}" for title, count in titles.items())
    unknown = (
        f"; {record.num_unknown_tokens / record.num_tokens:.2%} are unknown to it" if record.num_unknown_tokens else ""
    )
    if prepared.already_there:
        console.print(
            f"{prefix} is already prepared from these inputs and whole; nothing to do (--force prepares it again)."
        )
    skipped = f", {record.num_skipped_documents:,} without text left out" if record.num_skipped_documents else ""
    ends = (
        f"id {record.eod_id} ends each document"
        if record.append_eod
        else "NO token between documents: a model cannot see where one ends, and never writes an end"
    )
    for name, value in (
        ("corpus", f"{bin_path(prefix)}, {idx_path(prefix).name}, {record_path(prefix).name}"),
        ("text", f"{counted(record.num_input_files, 'file')} ({read_as}), {record.input_bytes:,} bytes"),
        ("documents", f"{record.num_documents:,}{skipped}"),
        ("tokens", f"{record.num_tokens:,} as {record.dtype}, {record.bin_bytes:,} bytes{unknown}"),
        ("tokenizer", f"{record.tokenizer}, {record.vocab_size:,} tokens, {ends}"),
        ("sha256", f"{record.bin_sha256} (.bin)"),
        ("", f"{record.idx_sha256} (.idx)"),
    ):
        console.print(f"{name:<10} {value}")
    for kind, found in record.left_out.items():
        console.print(f"left out   {found['count']:,} x {kind}: {'; '.join(found['places'])}", markup=False)
    overrides = [
        f"data.train={in_yaml(prefix)}",
        f"data.tokenizer={record.tokenizer}",
        f"model.vocab_size={record.vocab_size}",
    ]
    console.print("train on it:")
    console.print("  " + triaxis(f"train {shlex.join(overrides)}"))
