"""`triaxis data` inspects, checks, joins and splits corpora, without encoding tokens again.

which     shows the documents that a step of a run has read (`launch/reads/data_which.py`)
repeats   shows tokens that a run has read twice or left out (`launch/reads/data_repeats.py`)
inspect   shows documents, tokens, lengths, document ends and the first text
check     compares every byte with the record's hashes, and every id with the tokenizer
merge     writes the documents of several corpora, in the given order, as one corpus
split     cuts one corpus by documents into any number of contiguous parts

A corpus is named by its prefix, the path without ending of the .bin/.idx pair that `triaxis prepare` or Megatron's tools wrote.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from itertools import accumulate

from rich.console import Console

from triaxis.engine.data.corpus.indexed import IndexedTokens
from triaxis.engine.data.corpus.matching import find_recorded
from triaxis.engine.data.corpus.record import CorpusRecord, read_record
from triaxis.engine.data.corpus.tokenizer import Tokenizer
from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.engine.errors import DataError
from triaxis.launch.prepare.check import check
from triaxis.launch.prepare.combine import bounds_of_shares, merge, split
from triaxis.launch.prepare.describe import describe
from triaxis.launch.reads import data_repeats, data_which
from triaxis.launch.start.command_line import CommandParser, print_json, refuse

INSPECT_EXAMPLES = """examples:
  triaxis data inspect data/web
  triaxis data inspect data/from_megatron --tokenizer tokenizer.json --json
"""
CHECK_EXAMPLES = """examples:
  triaxis data check data/web data/books
  triaxis data check data/from_megatron --tokenizer tokenizer.json
"""
MERGE_EXAMPLES = """examples:
  triaxis data merge data/web data/books --output data/all
"""
SPLIT_EXAMPLES = """examples:
  triaxis data split data/all --parts 0.99,0.01 --output data/train data/valid
  triaxis data split data/all --documents 100000 --output data/first data/rest
"""
SHOWN_CHARACTERS = 300
SHOWN_TOKENS = 100
"""Excerpt length for the first document: decoded tokens, and shown characters above."""


def add_arguments(parser: CommandParser) -> None:
    data_which.add_arguments(parser)
    data_repeats.add_arguments(parser)
    look = parser.add_verb("inspect", "print what a corpus holds", "PREFIX [options]", INSPECT_EXAMPLES)
    look.set_defaults(verb_function=inspect)
    look.add_argument("prefix", metavar="PREFIX", help="path of the corpus, without an ending")
    look.add_argument("--tokenizer", metavar="TOKENIZER", help="to show text with (default: what its record names)")
    look.add_argument(
        "--eod-token", metavar="TOKEN", help="token that ends a document (default: what its record names)"
    )

    whole = parser.add_verb(
        "check", "compare all bytes of corpora with their records", "PREFIX ... [options]", CHECK_EXAMPLES
    )
    whole.set_defaults(verb_function=check_corpora)
    whole.add_argument("prefixes", nargs="+", metavar="PREFIX", help="paths of corpora, without an ending")
    whole.add_argument("--tokenizer", metavar="TOKENIZER", help="that made them (default: what their records name)")
    whole.add_argument("--eod-token", metavar="TOKEN", help="token that ends a document (default: the tokenizer's)")

    summary = "join corpora of one tokenizer"
    join = parser.add_verb("merge", summary, "PREFIX PREFIX ... --output PREFIX [--force]", MERGE_EXAMPLES)
    join.set_defaults(verb_function=merge_corpora)
    join.add_argument("prefixes", nargs="+", metavar="PREFIX", help="corpora, in the order of their documents")
    join.add_argument("--output", required=True, metavar="PREFIX", help="the new corpus")
    _add_force(join)

    summary = "cut a corpus by documents into contiguous parts"
    cut = parser.add_verb(
        "split", summary, "PREFIX (--parts X,Y | --documents N) --output PREFIX PREFIX", SPLIT_EXAMPLES
    )
    cut.set_defaults(verb_function=split_corpus)
    cut.add_argument("prefix", metavar="PREFIX", help="the corpus to cut")
    how = cut.add_mutually_exclusive_group(required=True)
    how.add_argument("--parts", metavar="X,Y,..", help="share of each part in the documents, relative to their sum")
    how.add_argument("--documents", metavar="N,..", help="documents of each part but the last, which gets the rest")
    cut.add_argument(
        "--output", required=True, nargs="+", metavar="PREFIX", help="the parts, in the order of their documents"
    )
    _add_force(cut)


def _add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="replace a corpus of that name")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action, such as `merge`. Raises DataError if corpora are missing, damaged or use different tokenizers."""
    function: Callable[[argparse.Namespace], int] = args.verb_function
    return function(args)


def inspect(args: argparse.Namespace) -> int:
    """Print a corpus's counts and first text; if no tokenizer is known, its first ids."""
    corpus, record = IndexedTokens(args.prefix), read_record(args.prefix)
    tokenizer = _tokenizer(args, args.prefix, record)
    is_asked = record is None or args.tokenizer is not None or args.eod_token is not None
    eod_id = tokenizer.eod_id if tokenizer and is_asked else record.eod_id if record else None
    found = describe(corpus, eod_id)
    first = corpus.tokens(0, 0, SHOWN_TOKENS).tolist()
    text = tokenizer.decode(first)[:SHOWN_CHARACTERS] if tokenizer else None
    console = Console(highlight=False, soft_wrap=True, markup=False)
    sequences = "" if found.sequences == found.documents else f" in {found.sequences:,} sequences"
    seen = "" if found.looked_at == found.documents else f" (of {found.looked_at:,} documents, evenly spaced)"
    lengths = ", ".join(f"{share} {length:,}" for share, length in found.quantiles.items())
    rows = [
        ("documents", f"{found.documents:,}{sequences}"),
        ("tokens", f"{found.tokens:,} as {found.dtype}"),
        ("length", f"{found.mean_length:,.1f} tokens per document; quantiles{seen}: {lengths}"),
        ("ends", _ends(found.without_end, found.looked_at - found.without_tokens, eod_id, found.mean_length) + seen),
        ("tokenizer", _described(record)),
        *(
            (("unknown", f"{record.num_unknown_tokens:,} tokens stand for what the tokenizer does not know"),)
            if record and record.num_unknown_tokens
            else ()
        ),
        *((("empty", f"{found.without_tokens:,} documents without any token{seen}"),) if found.without_tokens else ()),
        *(
            ("left out", f"{left['count']:,} x {kind}: {'; '.join(left['places'])}")
            for kind, left in (record.left_out if record else {}).items()
        ),
        (
            "first",
            repr(text) if text is not None else f"ids {', '.join(map(str, first[:20]))} .. (--tokenizer shows text)",
        ),
    ]
    for name, value in rows:
        console.print(f"{name:<10} {value}")
    own = None if record is None else asdict(record)
    print_json(args, {**asdict(found), "eod_id": eod_id, "record": own, "first_tokens": first, "first_text": text})
    return 0


def check_corpora(args: argparse.Namespace) -> int:
    """Print where corpora contradict their records or tokenizers. The exit code is 1 if they do. Every byte is read."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    results, is_bad = [], False
    for prefix in args.prefixes:
        corpus, record = IndexedTokens(prefix), read_record(prefix)
        tokenizer = _tokenizer(args, prefix, record)
        found = check(corpus)
        known = tokenizer or record
        vocab_size, eod_id = (known.vocab_size, known.eod_id) if known else (None, None)
        if record is not None:
            eod_id = record.eod_id if record.append_eod else None
        problems = found.problems(prefix, record, vocab_size, eod_id)
        is_bad |= bool(problems)
        against = "as its record has it" if record else "without a record to compare with"
        verdict = "\n".join(problems) or f"{prefix}: {corpus.num_tokens:,} tokens, {against}"
        console.print(verdict)
        ends = ", ".join(f"{count:,} documents end with id {token}" for token, count in found.ends)
        chosen = "" if record is None or record.append_eod else ": it was prepared without an end of documents"
        console.print(f"  ids {found.smallest_id:,} to {found.largest_id:,}; {ends}{chosen}")
        results.append({"prefix": prefix, "problems": problems, **asdict(found)})
    print_json(args, results)
    return int(is_bad)


def _tokenizer(args: argparse.Namespace, prefix: str, record: CorpusRecord | None) -> Tokenizer | None:
    """Open the tokenizer that --tokenizer names, or else the one that the corpus's record names.

    The result is None if neither names one. It is also None if the recorded tokenizer is missing or has changed.
    """
    if args.tokenizer is not None:
        return load_tokenizer(args.tokenizer, args.eod_token)
    if record is None:
        return None
    try:
        return load_tokenizer(find_recorded(prefix, record), args.eod_token)
    except DataError:
        return None


def _ends(without_end: int | None, num_documents: int, eod_id: int | None, mean_length: float) -> str:
    if without_end is None:
        return "unknown: the corpus has no record that names the id which ends a document; --tokenizer does"
    ended = num_documents - without_end
    share = ended / max(num_documents, 1) / mean_length
    warning = f"; {without_end:,} do not, so each runs into the next one" if without_end else ""
    return f"{ended:,} of {num_documents:,} documents end with id {eod_id}, {share:.2%} of all tokens{warning}"


def _described(record: CorpusRecord | None) -> str:
    if record is None:
        return "unknown: there is no record of `triaxis prepare`"
    identity = f", sha256 {record.tokenizer_identity[:16]}" if record.tokenizer_identity else ""
    return f"{record.tokenizer}, {record.vocab_size:,} tokens{identity}"


def merge_corpora(args: argparse.Namespace) -> int:
    """Join corpora into one, and print the new corpus's size."""
    record = merge(args.prefixes, args.output, force=args.force)
    print_json(args, [_show_written(args.output, record)])
    return 0


def split_corpus(args: argparse.Namespace) -> int:
    """Split a corpus at document boundaries into parts, and print each part's size."""
    num_documents = IndexedTokens(args.prefix).num_documents
    if args.parts is not None:
        shares = _numbers("--parts", args.parts)
        bounds = bounds_of_shares(num_documents, shares)
    else:
        counts = _numbers("--documents", args.documents)
        if parts := [count for count in counts if count != int(count)]:
            refuse(
                [
                    f"--documents {args.documents}: {parts[0]:g} is no whole number; a document cannot be cut. Correct it."
                ]
            )
        bounds = [0, *accumulate(map(int, counts)), num_documents]
    records = split(args.prefix, args.output, bounds, force=args.force)
    print_json(args, [_show_written(output, record) for output, record in zip(args.output, records, strict=True)])
    return 0


def _numbers(option: str, text: str) -> list[float]:
    """Parse comma-separated finite numbers above 0. Raises ConfigError for anything else."""
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        refuse(
            [
                f"{option} {text}: must be numbers above 0 with commas between them, such as 0.99,0.01; a part would be empty."
            ]
        )
    return numbers


def _show_written(prefix: str, record: CorpusRecord | None) -> dict[str, object]:
    corpus = IndexedTokens(prefix)
    note = "" if record else "; no record, since a corpus that was read has none"
    Console(highlight=False, soft_wrap=True, markup=False).print(
        f"{prefix}: {corpus.num_documents:,} documents, {corpus.num_tokens:,} tokens as {corpus.dtype}{note}"
    )
    return {"prefix": prefix, "documents": corpus.num_documents, "tokens": corpus.num_tokens}
