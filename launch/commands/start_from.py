"""`triaxis start-from`: from a Hugging Face folder and a corpus to a config that trains.

    FOLDER  --its tokenizer is the corpus'?-->  a layout that fits  --import-->  DIR/step_00000000/ (weights)
                                                                          `---->  commented YAML on stdout

Everything that can be refused is refused before the first weight is copied. All but the YAML is printed on stderr.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from triaxis.engine.config.counts import count
from triaxis.engine.config.plan import batch_plan
from triaxis.engine.data.corpus.indexed import IndexedTokens
from triaxis.engine.data.corpus.matching import Match, match_tokenizer
from triaxis.engine.data.corpus.tokenizers import BYTES, TOKENIZER_JSON
from triaxis.engine.errors import CheckpointError
from triaxis.engine.program import triaxis
from triaxis.launch.commands.convert_huggingface import import_source, import_weights
from triaxis.launch.start.command_line import CommandParser, add_ignore, refuse
from triaxis.launch.tuning.continued_run import ContinuedRun, plan_run, to_commented_yaml
from triaxis.launch.tuning.machine import this_machine, written_machine
from triaxis.models.predict.fit import memory_line
from triaxis.models.specs import num_parameters

if TYPE_CHECKING:
    from triaxis.models.interop.huggingface.weights import HuggingFaceModel

EXAMPLES = """examples:
  triaxis start-from models/Qwen3-0.6B --data data/corpus/qwen --tokens 20B > run.yaml
  triaxis start-from models/Llama-3.1-8B --data data/corpus/llama3 --tokens 20B --gpus 64x80GB --seq-length 8192 > run.yaml

The corpus is one of the model's own tokenizer, made by: triaxis prepare --tokenizer FOLDER --input 'TEXT/*.jsonl' --output PREFIX
"""
IMPORTED = Path("imported")
SENTENCEPIECE = "tokenizer.model"
DEFAULT_SEQ_LENGTH = 8192
"""Longest samples where none are asked for: those of models made for more would need many times the memory."""
SHOWN_TOKENS = 24
MOST_PASSES = 4
REPEATED = (
    "text that is read more than four times teaches ever less (2305.16264); more text, or fewer tokens, is better"
)


def add_arguments(parser: CommandParser) -> None:
    parser.usage = (
        "triaxis start-from FOLDER --data PREFIX --tokens N [--gpus 8x80GB] [--out DIR] [--seq-length N] > run.yaml"
    )
    parser.epilog = EXAMPLES
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a Hugging Face model: config.json, safetensors")
    parser.add_argument("--data", required=True, metavar="PREFIX", help="the corpus: path of a .bin/.idx pair")
    parser.add_argument("--tokens", required=True, metavar="N", help="tokens to train on: 20B, 500M or 1_000_000")
    parser.add_argument(
        "--gpus",
        metavar="8x80GB",
        help="GPUs to choose the layout for, and the memory of each in 10^9 bytes; above 8, nodes of 8 (default: this machine)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"folder for the imported weights (default: {IMPORTED}/FOLDER's name)"
    )
    parser.add_argument(
        "--seq-length",
        type=int,
        metavar="N",
        help=f"tokens in a training sample (default: the longest of the model, at most {DEFAULT_SEQ_LENGTH:,})",
    )
    add_ignore(parser)


def run(args: argparse.Namespace) -> int:
    """Import the weights and print the config; ConfigError, CheckpointError or DataError where that is impossible."""
    num_tokens = _tokens(args.tokens)
    machine = this_machine(os.environ) if args.gpus is None else written_machine(args.gpus)
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    out = args.out or IMPORTED / args.folder.resolve().name
    found = _open(args)
    match = match_tokenizer(args.data, tokenizers_of(args.folder), found.model.vocab_size, str(args.folder))
    planned = plan_run(
        found.sections,
        match.corpus,
        tokenizer=_lasting_name(match.name, args.folder, out),
        evidence=match.evidence,
        weights=out,
        num_tokens=num_tokens,
        machine=machine,
    )
    _show(console, args, found, match, planned)
    if is_imported(found, args.folder, out):
        console.print(f"weights    {out}, imported before")
    else:
        import_weights(found, args.folder, out, "source", console)
        console.print(f"weights    {out}")
    print(to_commented_yaml(planned, _heading(args, found)), end="", flush=True)
    if not sys.stdout.isatty():
        console.print(f"train with the YAML on stdout:  {triaxis('train run.yaml')}")
    return 0


def _open(args: argparse.Namespace) -> "HuggingFaceModel":
    """Open the folder with samples of the asked length, or of the model's, at most DEFAULT_SEQ_LENGTH."""
    from triaxis.models.interop.huggingface.weights import open_folder  # torch, after the command line is right

    found = open_folder(args.folder, args.seq_length, args.ignore)
    if args.seq_length is None and found.model.seq_length > DEFAULT_SEQ_LENGTH:
        return open_folder(args.folder, DEFAULT_SEQ_LENGTH, args.ignore)
    return found


def tokenizers_of(folder: Path) -> list[str]:
    """Return the names of a Hugging Face folder's tokenizers for `load_tokenizer`, the preferred one first."""
    from triaxis.models.interop.huggingface.tokenizer import bytes_tokenizer_json

    names, json_file = [], folder / TOKENIZER_JSON
    if json_file.is_file():
        # The folder's own end of documents may be another than the first usual name in the file.
        names += [str(json_file), str(folder)]
        if json_file.read_bytes() == bytes_tokenizer_json().encode():
            names.append(BYTES)
    if (folder / SENTENCEPIECE).is_file():
        names.append(str(folder / SENTENCEPIECE))
    return names


def is_imported(found: "HuggingFaceModel", source: Path, out: Path) -> bool:
    """Return whether `out` holds an import of this very folder and sequence length, newer than all of its files."""
    from triaxis.engine.checkpoint.directory import find
    from triaxis.engine.checkpoint.format.manifest import MANIFEST

    if not out.is_dir():
        return False
    try:
        candidate = find(out)
    except CheckpointError:
        return False
    manifest = candidate.manifest
    newest = max(path.stat().st_mtime_ns for path in (source.iterdir() if source.is_dir() else [source]))
    return (
        manifest.content == "weights"
        and manifest.run == import_source(found.family, source)
        and manifest.config["model"] == found.model.model_dump(mode="json")
        and (candidate.folder / MANIFEST).stat().st_mtime_ns > newest
    )


def _tokens(text: str) -> int:
    """Return the number that --tokens is written for."""
    try:
        number = count(text)
    except ValueError as error:
        refuse([f"--tokens {text}: {error}."])
    refuse([] if number else [f"--tokens {text}: must be at least 1; there would be nothing to train."])
    assert isinstance(number, int)
    return number


def _lasting_name(name: str, folder: Path, out: Path) -> str:
    """Return the tokenizer's name for the config: the import's own copy, or a path that holds in any folder."""
    if name == str(folder / TOKENIZER_JSON):
        return str((out / TOKENIZER_JSON).absolute())
    return str(Path(name).absolute()) if Path(name).exists() else name


def _heading(args: argparse.Namespace, found: "HuggingFaceModel") -> str:
    words = ["triaxis", "start-from", str(args.folder), "--data", args.data, "--tokens", args.tokens]
    for option in ("gpus", "out", "seq_length"):
        if (value := getattr(args, option)) is not None:
            words += [f"--{option.replace('_', '-')}", str(value)]
    words += [word for key in args.ignore for word in ("--ignore", key)]
    return "\n".join(
        [
            f"Continues from the weights of {args.folder}: {found.family}, {num_parameters(found.model):,} parameters.",
            f"Made by:  {shlex.join(words)}",
            f"Check it with:  {triaxis('config check run.yaml')}",
            f"Train with:     {triaxis('train run.yaml')}",
        ]
    )


def _show(
    console: Console, args: argparse.Namespace, found: "HuggingFaceModel", match: Match, planned: ContinuedRun
) -> None:
    """Print the model, the corpus and what was chosen."""
    config, chosen, sizes = planned.config, planned.chosen, planned.chosen.sizes
    usable = f"{memory_line(chosen.prediction)}; {chosen.usable_bytes / 10**9:,.1f} GB may be used"
    warm_up = f"{config.optimizer.warmup_steps:,} steps of warm-up"
    size = f"{planned.corpus_tokens:,} tokens in {match.corpus.num_documents:,} documents"
    lines = [
        ("model", f"{found.family}, {num_parameters(found.model):,} parameters, from {args.folder}"),
        *(("note", note) for note in found.notes),
        ("samples", f"of {config.model.seq_length:,} tokens (--seq-length)"),
        ("corpus", f"{args.data}: {size}; the run reads it {planned.passes:,.2f} times"),
        *([("note", REPEATED)] if planned.passes > MOST_PASSES else []),
        ("tokenizer", f"{config.data.tokenizer}: {match.evidence}"),
        ("", f"the first document begins: {_beginning(match)}"),
        ("machine", planned.machine.name),
        ("layout", str(sizes)),
        ("recompute", str(chosen.recompute)),
        ("memory", usable),
        ("batch", str(batch_plan(config, sizes.dp))),
        ("lr", f"{config.optimizer.lr:g} after {warm_up}, {config.optimizer.min_lr:g} at the last step"),
    ]
    for name, value in lines:
        console.print(f"{name:<10} {value}")


def _beginning(match: Match) -> str:
    """Return the first tokens of the corpus as text on one line, so that a person sees that they are words."""
    corpus: IndexedTokens = match.corpus
    return repr(match.tokenizer.decode(corpus.tokens(0, 0, SHOWN_TOKENS).tolist()))
