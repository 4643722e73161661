"""`triaxis new` writes a ready-to-train config, with a reason for each value.

The model comes from one of these sources:

    a shipped config, or one of yours   its model, on your corpus and machine
    config.json, or its folder          a Hugging Face model; with --weights training continues from the folder's weights
    --size 125M                         a model with about that many parameters
    a command line of Megatron-LM       the run that it describes, and what has no counterpart here; --run-script: of a script

A ds_config.json of DeepSpeed, beside a model, gives batch sizes, ZeRO stage, precision, optimizer and schedule.
All checks run before the first weight is copied. Only the YAML is printed on stdout.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.console import Console

from triaxis.engine.config.load import load_config, override
from triaxis.engine.config.quantities.plan import batch_plan
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.shipped import config_path, nearest_names
from triaxis.engine.config.values.counts import count
from triaxis.engine.config.yaml_text import read_yaml
from triaxis.engine.data.corpus.indexed import IndexedTokens
from triaxis.engine.data.corpus.matching import MOST_IDS, Match, match_tokenizer
from triaxis.engine.data.corpus.record import read_record
from triaxis.engine.data.corpus.tokenizers import BYTES, TOKENIZER_JSON
from triaxis.engine.errors import CheckpointError, brief
from triaxis.engine.program import triaxis
from triaxis.engine.storage.elsewhere import why_no_path
from triaxis.engine.telemetry.outlets.format import gigabytes
from triaxis.launch.commands.convert_huggingface import import_source, import_weights
from triaxis.launch.start.command_line import CommandParser, add_ignore, add_json, print_json, refuse, typed
from triaxis.launch.tuning.choose_layout import stage_without_recomputation
from triaxis.launch.tuning.deepspeed_source import of_deepspeed, take_deepspeed
from triaxis.launch.tuning.launch_script import words_of_script
from triaxis.launch.tuning.machine import this_machine, written_machine
from triaxis.launch.tuning.model_of_size import model_of_size
from triaxis.launch.tuning.planned_run import PlannedRun, plan_run, to_commented_yaml
from triaxis.models.interop.huggingface.config import from_hugging_face, passed_over_notes, read_config_json
from triaxis.models.interop.huggingface.families import FAMILIES
from triaxis.models.interop.megatron.command_line.convert import from_command_line
from triaxis.models.predict.fit import memory_line
from triaxis.models.specs import num_parameters

if TYPE_CHECKING:
    from triaxis.models.interop.huggingface.weights import HuggingFaceModel

EXAMPLES = """examples:
  triaxis new --from llama3_8b --data data/corpus/llama3 --tokens 20B --gpus 64x80GB > run.yaml
  triaxis new --size 125M --data data/stdlib/bytes > run.yaml
  triaxis new --from models/Qwen3-0.6B/config.json --data data/corpus/qwen > run.yaml
  triaxis new --from models/Qwen3-0.6B --weights --data data/corpus/qwen --tokens 20B > run.yaml
  triaxis new --from @megatron_args.txt --vocab-size 50257 > run.yaml
  triaxis new --from 'train_gpt3.sh CKPT LOGS' --run-script --vocab-size 50257 > run.yaml
  triaxis new --from ds_config.json --size 1.3B --gpus 8x80GB > run.yaml

A corpus is made by: triaxis prepare --tokenizer FOLDER --input 'TEXT/*.jsonl' --output PREFIX
Without --data the run has random tokens, for speed and memory. Without --tokens it has 20 for each parameter (2203.15556).
"""
IMPORTED = Path("imported")
SENTENCEPIECE = "tokenizer.model"
DEFAULT_SEQ_LENGTH = 8192
"""Maximum sample length if --seq-length is not given; models made for longer texts would need many times the memory."""
SIZE_SEQ_LENGTH = 2048
SIZE_VOCABULARY = 50_257
"""GPT-3's sample length and vocabulary, used by --size if nothing else sets them."""
TOKENS_PER_PARAMETER = 20
HEAD_WIDTH = 118
SHOWN_TOKENS = 24
MOST_PASSES = 4
REPEATED = (
    "text that is read more than four times teaches ever less (2305.16264); more text, or fewer tokens, is better"
)
OWN_SECTIONS = ("model", "kernels")
"""Sections that the model sets and overrides may change; all others follow from corpus, tokens and machine."""

SIZE, CONFIG, HUGGING_FACE, MEGATRON = "--size", "a config", "a Hugging Face model", "a command line of Megatron-LM"
"""Kinds of source for the model."""
USELESS: Mapping[str, tuple[str, ...]] = {
    SIZE: ("weights", "ignore", "vocab_size", "run_script"),
    CONFIG: ("weights", "ignore", "vocab_size"),
    HUGGING_FACE: ("vocab_size",),
    MEGATRON: ("tokens", "gpus", "output", "seq_length", "weights"),
}
"""Options without effect for each kind of source."""


@dataclass
class _Model:
    """Model to write a config for.

    Attributes:
        name: description for people.
        sections: the config's sections `model` and `kernels`, as fields and their values.
        notes: remarks about the model, for people.
        folder: Hugging Face model's folder; None for other sources.
        found: opened folder with its weights; None if no weights are requested.
    """

    name: str
    sections: Mapping[str, Mapping[str, Any]]
    notes: Sequence[str] = field(default_factory=list)
    folder: Path | None = None
    found: "HuggingFaceModel | None" = None


def add_arguments(parser: CommandParser) -> None:
    parser.usage = (
        "triaxis new (--from SOURCE [--weights] | --size N) [--from ds_config.json] [--data PREFIX] [--tokens N] "
        "[--gpus 8x80GB] [options] [section.key=value ...] > run.yaml"
    )
    parser.epilog = EXAMPLES
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="a field of the sections model or kernels"
    )
    parser.add_argument(
        "--from",
        dest="sources",
        action="append",
        default=[],
        metavar="SOURCE",
        help="name or path of a config; a Hugging Face folder or config.json of "
        f"{', '.join(FAMILIES)}; a command line of Megatron-LM in quotes, or @FILE with one; a ds_config.json of DeepSpeed, "
        "beside --size or another --from",
    )
    parser.add_argument("--size", metavar="N", help="a model of about so many parameters, such as 125M or 7B")
    parser.add_argument("--data", metavar="PREFIX", help="the corpus: path of a .bin/.idx pair")
    parser.add_argument("--tokens", metavar="N", help="tokens to train on: 20B, 500M or 1_000_000")
    parser.add_argument(
        "--gpus",
        metavar="8x80GB",
        help="GPUs to choose the layout for, and the memory of each in 10^9 bytes; above 8, nodes of 8 (default: this machine)",
    )
    parser.add_argument(
        "--seq-length",
        type=int,
        metavar="N",
        help=f"tokens in a training sample (default: the model's, at most {DEFAULT_SEQ_LENGTH:,} of a Hugging Face model)",
    )
    parser.add_argument("--weights", action="store_true", help="go on from the weights of a Hugging Face folder")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help=f"with --weights: folder of the import (default: {IMPORTED}/FOLDER's name)",
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="of Megatron's tokenizer, where its words do not say it"
    )
    parser.add_argument(
        "--run-script",
        action="store_true",
        help="SOURCE is a launch script of Megatron-LM, in quotes with its arguments: execute it, with a torchrun and srun "
        "that only record their words",
    )
    add_ignore(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the config. With --weights, first import the weights.

    Raises ConfigError, CheckpointError or DataError if that is impossible.
    """
    deepspeed = take_deepspeed(args)
    kind = _kind(args)
    refuse(_problems(args, kind, has_deepspeed=deepspeed is not None))
    if kind == MEGATRON:
        corpus = [] if args.data is None else ["--data-path", shlex.quote(args.data)]
        line = words_of_script(args.source) if args.run_script else args.source
        _print_config(args, from_command_line([line, *corpus], args.vocab_size, args.ignore))
        return 0
    machine = this_machine(os.environ) if args.gpus is None else written_machine(args.gpus)
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    theirs, of_model = None, args
    if deepspeed is not None:
        theirs, of_model = of_deepspeed(args, deepspeed, machine.num_ranks, is_ignoring=kind == HUGGING_FACE)
    model = {SIZE: _of_size, CONFIG: _of_config, HUGGING_FACE: _of_hugging_face}[kind](of_model)
    described = ModelConfig.model_validate(model.sections["model"])
    num_tokens = (
        TOKENS_PER_PARAMETER * num_parameters(described) if args.tokens is None else _number(args.tokens, "--tokens")
    )
    out = args.output or IMPORTED / (model.folder.resolve().name if model.folder is not None else "model")
    match = None
    if args.data is not None:
        own = tokenizers_of(model.folder) if model.folder is not None else []
        match = match_tokenizer(args.data, own, described.vocab_size, str(model.folder or model.name))
    planned = plan_run(
        model.sections,
        None if match is None else match.corpus,
        tokenizer=None if match is None else _lasting_name(match.name, model, out),
        evidence="" if match is None else match.evidence,
        weights=out if args.weights else None,
        num_tokens=num_tokens,
        machine=machine,
        given=None if theirs is None else theirs.fields,
    )
    notes = [] if theirs is None else theirs.notes
    _show(console, args, [*model.notes, *notes], model.name, match, planned)
    if model.found is not None and model.folder is not None:
        if is_imported(model.found, model.folder, out):
            console.print(f"weights    {out}, imported before")
        else:
            import_weights(model.found, model.folder, out, "source", console)
            console.print(f"weights    {out}")
    _print_config(args, to_commented_yaml(planned, _heading(args, model, planned, notes)))
    if not sys.stdout.isatty():
        console.print(f"train with the YAML on stdout:  {triaxis('train run.yaml')}")
    return 0


def _print_config(args: argparse.Namespace, text: str) -> None:
    print(text, end="", flush=True)
    print_json(args, read_yaml(text))


def _kind(args: argparse.Namespace) -> str:
    if args.size is not None:
        return SIZE
    if args.run_script or args.source.lstrip().startswith(("-", "@")):
        return MEGATRON
    return CONFIG if _path(args).suffix in (".yaml", ".yml") else HUGGING_FACE


def _path(args: argparse.Namespace) -> Path:
    """Path of the source. A folder in the working directory takes precedence over a shipped config with the same name."""
    # Path.is_dir raises for an invalid file name.
    return Path(args.source) if os.path.isdir(args.source) else config_path(args.source)  # noqa: PTH112


def _problems(args: argparse.Namespace, kind: str, *, has_deepspeed: bool) -> list[str]:
    if kind in (CONFIG, HUGGING_FACE) and (why := why_no_path(args.source)):
        return [f"--from {brief(args.source)}: {why}"]
    useless = [name for name in USELESS[kind] if not (has_deepspeed and name == "ignore")]
    problems = [f"{option} with {kind}: it would do nothing. Leave it out." for option in typed(args, *useless)]
    if kind == HUGGING_FACE and args.source.endswith(".sh"):
        problems.append(
            f"--from {args.source}: only running a script shows what it would start. Add --run-script to execute it in an empty "
            "folder, with a torchrun and srun that only record their words."
        )
    if has_deepspeed and kind == MEGATRON:
        problems.append(
            "a DeepSpeed configuration with a command line of Megatron-LM: both say what the batches and the optimizer are. Leave "
            "one out; the model may come from --size, a config or a Hugging Face folder."
        )
    if args.overrides and (kind == MEGATRON or args.weights):
        what = "Megatron's words say all of the run" if kind == MEGATRON else "the weights are of the model as it is"
        problems.append(f"{' '.join(args.overrides)}: {what}. Give it to `triaxis train` instead.")
    else:
        problems += [
            f"{word}: {', '.join(OWN_SECTIONS)} may be given here, and the rest follows from corpus, tokens and machine. "
            "Give it to `triaxis train` instead, or edit the config."
            for word in args.overrides
            if word.partition(".")[0] not in OWN_SECTIONS or "=" not in word
        ]
    if args.output is not None and not args.weights:
        problems.append(
            "--output without --weights: nothing is imported, and the config goes to stdout. Add --weights."
        )
    is_name = kind == HUGGING_FACE and "/" not in args.source and not _path(args).exists()
    if is_name and (names := nearest_names(args.source)):
        problems.append(f"--from {args.source}: there is no such config or folder. Did you mean {' or '.join(names)}?")
    return problems


def _of_size(args: argparse.Namespace) -> _Model:
    vocab_size = SIZE_VOCABULARY if args.data is None else _vocabulary(args.data)
    size = _number(args.size, "--size")
    model = model_of_size(size, vocab_size, args.seq_length or SIZE_SEQ_LENGTH)
    sections = override({"model": model}, args.overrides, "the command line")
    return _Model(f"a model of {args.size}", sections)


def _vocabulary(prefix: str) -> int:
    """Vocabulary size in the corpus's record, or the largest id found + 1 if there is no record."""
    record = read_record(prefix)
    return record.num_embeddings if record is not None else IndexedTokens(prefix).ids(MOST_IDS)[1] + 1


def _of_config(args: argparse.Namespace) -> _Model:
    path = _path(args)
    config = load_config(path)
    own = {name: getattr(config, name).model_dump(mode="json", exclude_defaults=True) for name in OWN_SECTIONS}
    length = [] if args.seq_length is None else [f"model.seq_length={args.seq_length}"]
    sections = override(own, [*args.overrides, *length], "the command line")
    return _Model(f"the model of {path}", {name: fields for name, fields in sections.items() if fields})


def _of_hugging_face(args: argparse.Namespace) -> _Model:
    """Read a folder or a config.json.

    If no sample length is requested, it is the longest that the model allows, but at most DEFAULT_SEQ_LENGTH.
    """
    path = _path(args)
    if args.weights:
        from triaxis.models.interop.huggingface.weights import open_folder  # torch, after the command line is right

        found = open_folder(path, args.seq_length, args.ignore)
        if args.seq_length is None and found.model.seq_length > DEFAULT_SEQ_LENGTH:
            found = open_folder(path, DEFAULT_SEQ_LENGTH, args.ignore)
        return _Model(f"{path}: {found.family}", found.sections, found.notes, path, found)
    is_file = path.suffix == ".json" or path.exists()
    file = path if is_file and not path.is_dir() else path / "config.json"
    keys = read_config_json(file)
    sections = from_hugging_face(keys, args.seq_length, str(file), args.ignore)
    if args.seq_length is None and sections["model"]["seq_length"] > DEFAULT_SEQ_LENGTH:
        sections = from_hugging_face(keys, DEFAULT_SEQ_LENGTH, str(file), args.ignore)
    sections = override(sections, args.overrides, "the command line")
    name = f"{file.parent}: {keys.get('model_type')}"
    return _Model(name, sections, passed_over_notes(keys, args.ignore), file.parent)


def tokenizers_of(folder: Path) -> list[str]:
    """List the names by which `load_tokenizer` opens a Hugging Face folder's tokenizers, the preferred one first."""
    from triaxis.models.interop.huggingface.tokenizer import bytes_tokenizer_json

    names, json_file = [], folder / TOKENIZER_JSON
    if json_file.is_file():
        # The folder's own end-of-document token may differ from the first usual name found in the file.
        names += [str(json_file), str(folder)]
        if json_file.read_bytes() == bytes_tokenizer_json().encode():
            names.append(BYTES)
    if (folder / SENTENCEPIECE).is_file():
        names.append(str(folder / SENTENCEPIECE))
    return names


def is_imported(found: "HuggingFaceModel", source: Path, out: Path) -> bool:
    """Whether `out` already holds an import of `source`.

    The import must be newer than every file in `source`, and made for the same sequence length.
    """
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


def _number(text: str, option: str) -> int:
    """Parse an option's number, and refuse one below 1."""
    try:
        number = count(text)
    except ValueError as error:
        refuse([f"{option} {text}: {error}."])
    refuse([] if number else [f"{option} {text}: must be at least 1; there would be nothing to train."])
    assert isinstance(number, int)
    return number


def _lasting_name(name: str, model: _Model, out: Path) -> str:
    """Return a tokenizer name that is valid from any folder.

    An existing file gets its absolute path. The own tokenizer of a model with imported weights gets its path in `out`. Another name
    is returned unchanged.
    """
    if model.found is not None and model.folder is not None and name == str(model.folder / TOKENIZER_JSON):
        return str((out / TOKENIZER_JSON).absolute())
    return str(Path(name).absolute()) if Path(name).exists() else name


def _heading(args: argparse.Namespace, model: _Model, planned: PlannedRun, notes: Sequence[str]) -> str:
    words = ["triaxis", "new", *(word for source in args.sources for word in ("--from", source))]
    words += ["--size", args.size] if args.size is not None else []
    words += ["--weights"] if args.weights else []
    for option in ("data", "tokens", "gpus", "output", "seq_length"):
        if (value := getattr(args, option)) is not None:
            words += [f"--{option.replace('_', '-')}", str(value)]
    words += [word for key in args.ignore for word in ("--ignore", key)] + args.overrides
    what = f"{model.name}, {num_parameters(planned.config.model):,} parameters."
    return "\n".join(
        [
            f"{'Continues from the weights of ' if args.weights else 'Trains '}{what}",
            f"Made by:  {shlex.join(words)}",
            f"Check it with:  {triaxis('config check run.yaml')}",
            f"Train with:     {triaxis('train run.yaml')}",
            *(
                line
                for note in notes
                for line in wrap(note, HEAD_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
            ),
        ]
    )


def _show(
    console: Console,
    args: argparse.Namespace,
    notes: Sequence[str],
    name: str,
    match: Match | None,
    planned: PlannedRun,
) -> None:
    """Print the model, the corpus and the choices made."""
    config, chosen, sizes = planned.config, planned.chosen, planned.chosen.sizes
    usable = f"{memory_line(chosen.prediction)}; {chosen.usable_bytes / 10**9:,.1f} GB may be used"
    has_steps = "steps" in planned.given.get("train", {})
    warm_up = f"{config.optimizer.warmup_steps:,} steps of warm-up"
    lines = [
        ("model", f"{name}, {num_parameters(config.model):,} parameters"),
        *(("note", note) for note in notes),
        ("samples", f"of {config.model.seq_length:,} tokens (--seq-length)"),
        (
            "tokens",
            f"{planned.num_tokens:,}"
            + ("" if args.tokens or has_steps else f", {TOKENS_PER_PARAMETER} for each parameter (--tokens)"),
        ),
        *_about_corpus(args.data, match, planned),
        ("machine", planned.machine.name),
        ("layout", str(sizes)),
        ("recompute", str(chosen.recompute)),
        ("memory", usable),
        *_about_zero(planned),
        ("batch", str(batch_plan(config, sizes.dp))),
        ("lr", f"{config.optimizer.lr:g} after {warm_up}, {config.optimizer.min_lr:g} at the last step"),
    ]
    for label, value in lines:
        console.print(f"{label:<10} {value}")


def _about_zero(planned: PlannedRun) -> list[tuple[str, str]]:
    """Suggest a ZeRO stage with which dp alone fits, without recomputation. It may be slower, so it is not chosen."""
    found = stage_without_recomputation(planned.chosen, planned.machine)
    if found is None:
        return []
    zero, held = found
    fits = f"parallel.zero={zero} with dp={planned.machine.num_ranks:,} alone fits without recomputation"
    return [("or", f"{fits}, {gigabytes(held.total)}; `triaxis plan` predicts which is faster")]


def _about_corpus(prefix: str | None, match: Match | None, planned: PlannedRun) -> list[tuple[str, str]]:
    if match is None:
        return [("corpus", "none: random tokens (--data PREFIX names one)")]
    size = f"{planned.corpus_tokens:,} tokens in {match.corpus.num_documents:,} documents"
    return [
        ("corpus", f"{prefix}: {size}; the run reads it {planned.passes:,.2f} times"),
        *([("note", REPEATED)] if planned.passes > MOST_PASSES else []),
        ("tokenizer", f"{planned.config.data.tokenizer}: {match.evidence}"),
        ("", f"the first document begins: {_beginning(match)}"),
    ]


def _beginning(match: Match) -> str:
    """The corpus's first tokens as text on one line."""
    corpus: IndexedTokens = match.corpus
    return repr(match.tokenizer.decode(corpus.tokens(0, 0, SHOWN_TOKENS).tolist()))
