"""`triaxis convert`: models from other libraries' formats into a checkpoint, and out of one; one process, no process group.

    HF_DIR/config.json, *.safetensors  --hf-import-->  OUT_DIR/step_00000000/ (weights), OUT_DIR/train.yaml
    checkpoint of any layout           --hf-export-->  OUT_DIR/config.json, *.safetensors, tokenizer.json

Both write a folder that is there whole or not at all, and hold a tensor or a few of them in memory at a time. Each verb's parser
names its function in `convert`; Megatron's verbs are in `convert_megatron.py`.
"""

import argparse
import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from engine.checkpoint.directory import Candidate
from engine.checkpoint.inspect.recorded import recorded_tokenizer
from engine.checkpoint.inspect.weights import check_weights
from engine.config.model import ModelConfig
from engine.data.corpus.tokenizers import check_tokenizer, load_tokenizer, split_name
from engine.errors import CheckpointError, DataError
from engine.program import triaxis
from engine.storage.files import sha256_of_file
from launch.commands import convert_megatron
from launch.start.command_line import CommandParser, add_checkpoint, add_ignore, add_weights
from models.interop.huggingface.config import family_of, to_hugging_face
from models.interop.huggingface.families import FAMILIES
from models.interop.huggingface.record import GENERATION_CONFIG, RECORD, ImportRecord, read_record
from models.specs import num_parameters

if TYPE_CHECKING:
    from models.interop.huggingface.weights import HuggingFaceModel

IMPORT_EXAMPLES = """examples:
  triaxis convert hf-import models/Qwen3-0.6B checkpoints/qwen3
  triaxis convert hf-import models/gpt2 checkpoints/gpt2 --seq-length 512 --dtype fp32
"""
EXPORT_EXAMPLES = """examples:
  triaxis convert hf-export runs/gpt_tiny exported/gpt_tiny
  triaxis convert hf-export runs/llama/checkpoints/step_00001000 exported/llama --dtype bf16 --tokenizer tokenizer.json
"""
DTYPES = ("source", "bf16", "fp32")
"""What `--dtype` may be."""

TRAIN_CONFIG = "train.yaml"
TOKENIZER = "tokenizer.json"


def add_arguments(parser: CommandParser) -> None:
    summary = f"turn a Hugging Face folder ({', '.join(FAMILIES)}) into weights to start from, and a config"
    words = "HF_DIR OUT_DIR [--seq-length N] [--dtype DTYPE] [--ignore KEY]"
    bring = parser.add_verb("hf-import", summary, words, IMPORT_EXAMPLES)
    bring.add_argument("source", type=Path, metavar="HF_DIR", help="folder with config.json and safetensors")
    bring.add_argument("out", type=Path, metavar="OUT_DIR", help="folder of checkpoints to make; it must not exist")
    bring.add_argument(
        "--seq-length",
        type=int,
        metavar="N",
        help="tokens in a training sample (default: the longest of the model)",
    )
    _add_dtype(bring, "of the weights in the checkpoint (default: source, as they are in the files)")
    add_ignore(bring)
    bring.set_defaults(convert=hf_import)

    summary = "turn a checkpoint of any layout into a folder that transformers loads"
    words = "CHECKPOINT OUT_DIR [--family NAME] [--dtype DTYPE] [--tokenizer PATH] [options]"
    take = parser.add_verb("hf-export", summary, words, EXPORT_EXAMPLES)
    add_checkpoint(take, "source")
    take.add_argument("out", type=Path, metavar="OUT_DIR", help="folder to make; it must not exist")
    take.add_argument(
        "--family", choices=list(FAMILIES), help="architecture to write (default: the first that can express the model)"
    )
    _add_dtype(take, "of the weights in the files (default: source, as they were saved: fp32 masters)")
    take.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="`bytes`, a tokenizer.json to copy, or `none` (default: what the checkpoint's config names)",
    )
    take.add_argument(
        "--max-shard-gb", type=float, default=5.0, metavar="N", help="largest file, in units of 10^9 bytes (default: 5)"
    )
    add_weights(take)
    take.set_defaults(convert=hf_export)
    convert_megatron.add_verbs(parser)


def run(args: argparse.Namespace) -> int:
    """Run the chosen verb; CheckpointError, ConfigError or DataError where a conversion is impossible."""
    convert: Callable[[argparse.Namespace], None] = args.convert
    convert(args)
    return 0


def hf_import(args: argparse.Namespace) -> None:
    """Write the weights of a Hugging Face folder as our checkpoint, with a config for training."""
    from models.interop.huggingface.weights import open_folder

    console = Console(highlight=False, soft_wrap=True, markup=False)
    found = open_folder(args.source, args.seq_length, args.ignore)
    import_weights(found, args.source, args.out, args.dtype, console)
    console.print(f"model      {found.family}, {num_parameters(found.model):,} parameters, from {args.source}")
    for note in found.notes:
        console.print(f"note       {note}")
    console.print(f"weights    {args.out}")
    if (args.source / TOKENIZER).is_file():
        console.print(f"tokenizer  {args.out / TOKENIZER}")
    else:
        console.print(
            f"tokenizer  {args.source} has no {TOKENIZER}: put the model's own at {args.out / TOKENIZER} (transformers' "
            "AutoTokenizer writes one when it is saved); with another one, ids would mean other words"
        )
    console.print("train from these weights, at step 0 with a fresh optimizer:")
    console.print("  " + triaxis(f"train {shlex.quote(str(args.out / TRAIN_CONFIG))} 'data.train=[[1.0, PREFIX]]'"))
    console.print("in a config of your own: its model section, and")
    console.print(f"  checkpoint.load={args.out} checkpoint.load_what=weights")


def import_weights(found: "HuggingFaceModel", source: Path, out: Path, dtype: str, console: Console) -> None:
    """Write a Hugging Face model as a folder of checkpoints, with its tokenizer and a config for training.

    Args:
        found: the folder `source`, opened.
        source: with config.json and the weights.
        out: the folder to make; it must not exist.
        dtype: of DTYPES.
        console: where a bar shows the progress.

    Raises:
        CheckpointError: `out` exists or cannot be written, or a weight is not finite.
        DataError: the folder's tokenizer is unreadable or of another model.
    """
    from engine.checkpoint.format.manifest import TrainingState
    from engine.checkpoint.import_weights import write_checkpoint
    from models.interop.huggingface.files import copy_file, whole_folder, write_text

    tokenizer = source / TOKENIZER
    if tokenizer.is_file():
        check_tokenizer(tokenizer, found.model.vocab_size)
    config = {**found.sections, "data": {"tokenizer": str((out / TOKENIZER).absolute())}}
    with whole_folder(out) as partial:
        with _progress(console, "import", found.num_bytes) as advance:
            write_checkpoint(
                partial,
                found.shards(_torch_dtype(dtype), advance),
                TrainingState.at_start(),
                # Every field, as a run's own checkpoint has it: what is absent would count as changed.
                # The tokenizer's path is relative to the checkpoint's folder, so that both can be moved.
                config={
                    **config,
                    "model": found.model.model_dump(mode="json"),
                    "data": {"tokenizer": f"../{TOKENIZER}"},
                },
                source=import_source(found.family, source),
            )
        if tokenizer.is_file():
            copy_file(tokenizer, partial / TOKENIZER)
        write_text(partial / RECORD, found.record.to_text())
        write_text(partial / TRAIN_CONFIG, _train_config(found.family, config, out))


def import_source(family: str, source: Path) -> str:
    """Return the origin that the checkpoint of an import records."""
    return f"hf-import of a {family}: {source}"


def hf_export(args: argparse.Namespace) -> None:
    """Write a checkpoint's weights as a folder that transformers loads."""
    from engine.checkpoint.directory import find
    from models.interop.huggingface.files import copy_file, whole_folder, write_text, write_weights
    from models.interop.huggingface.tokenizer import bytes_tokenizer_json
    from models.interop.huggingface.weights import plan_export

    console = Console(highlight=False, soft_wrap=True, markup=False)
    if not args.max_shard_gb > 0:
        raise CheckpointError(
            f"--max-shard-gb {args.max_shard_gb}: a file has more than 0 bytes. Give a positive number."
        )
    candidate = find(args.source)
    check_weights(candidate, args.weights)
    try:
        model = ModelConfig.model_validate(candidate.manifest.config.get("model", {}))
    except ValidationError as error:
        raise CheckpointError(
            f"{candidate.folder} does not say what model it is: model.{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}. "
            "Its tensors could not be named. Make the checkpoint again."
        ) from None
    tokenizer, end_of_document, notes = _tokenizer(args.tokenizer, candidate, model.vocab_size)
    record = _import_record(candidate, tokenizer)
    family = family_of(model, args.family)
    export = plan_export(candidate, family, model, _torch_dtype(args.dtype))
    keys, more = to_hugging_face(
        model,
        family,
        dtype=export.dtype,
        end_of_document=end_of_document,
        special_ids=None if record is None else record.special_ids,
    )
    num_bytes = sum(plan.num_bytes for plan in export.plans)
    with whole_folder(args.out) as partial:
        with _progress(console, "export", num_bytes) as advance:
            files = write_weights(
                partial, export.plans, export.tensors(advance, args.weights), int(args.max_shard_gb * 1e9)
            )
        write_text(partial / "config.json", json.dumps(keys, indent=2) + "\n")
        if record is not None and record.generation_config is not None:
            write_text(partial / GENERATION_CONFIG, record.generation_config)
        if tokenizer == "bytes":
            write_text(partial / TOKENIZER, bytes_tokenizer_json())
        elif tokenizer is not None:
            copy_file(Path(tokenizer), partial / TOKENIZER)
        if tokenizer is not None:
            # Without it transformers would rebuild the tokenizer by the family's own rules instead of reading the file.
            write_text(partial / "tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast"}\n')
            if family == "qwen2":
                notes.append(
                    "transformers' AutoTokenizer splits text by Qwen's rules in any qwen2 folder; unless this tokenizer is Qwen's "
                    "own, load it with PreTrainedTokenizerFast.from_pretrained"
                )
    average = ", the moving average of its weights" if args.weights == "ema" else ""
    console.print(f"checkpoint {candidate.folder}, step {candidate.manifest.state.step:,}{average}")
    console.print(
        f"model      {keys['architectures'][0]}, {candidate.manifest.num_parameters:,} parameters, {export.dtype}"
    )
    console.print(
        f"files      {args.out}: {', '.join(file.name for file in files[:3])}{', ..' if len(files) > 3 else ''}"
    )
    console.print(f"tokenizer  {'none was written' if tokenizer is None else args.out / TOKENIZER}")
    for note in (*notes, *more):
        console.print(f"note       {note}")


def _add_dtype(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="source", help=meaning)


def _torch_dtype(name: str) -> Any:
    """Return torch's dtype, or None for `source`."""
    from engine.numerics.precision import DTYPES as TORCH_DTYPES

    return None if name == "source" else TORCH_DTYPES[name]


def _tokenizer(given: str | None, candidate: Candidate, vocab_size: int) -> tuple[str | None, int | None, list[str]]:
    """Return (`bytes` or a file to copy, id that ends a document, notes).

    Raises:
        DataError: the one that was asked for is not there, is none, or is of another model; or the checkpoint's own is not there.
    """
    if given == "none":
        return None, None, ["no tokenizer was asked for"]
    named = given or recorded_tokenizer(candidate)
    if named is None:
        return None, None, ["the checkpoint names no tokenizer; give one with --tokenizer"]
    # Synthetic data have no tokenizer, and an import without one names the place where it belongs.
    is_in_use = candidate.manifest.content == "training" and not candidate.manifest.config["data"].get("synthetic")
    if given is None and named != "bytes" and not split_name(named)[0].exists() and is_in_use:
        raise DataError(
            f"{candidate.folder} names the tokenizer {named}, which is not there: the export would lack it. Say where it is now "
            "with --tokenizer PATH, or --tokenizer none to export without one."
        )
    try:
        tokenizer = load_tokenizer(named)
        if tokenizer.vocab_size > vocab_size:
            raise DataError(
                f"the tokenizer {named} has ids up to {tokenizer.vocab_size - 1:,}, and the model {vocab_size:,} tokens: some of "
                "its words would have no embedding. Give the tokenizer that the model was trained with by --tokenizer."
            )
    except DataError as error:
        if given is not None:
            raise
        return None, None, [f"no tokenizer was written: {error}"]
    if named == "bytes":
        return named, tokenizer.eod_id, []
    if tokenizer.json_file is None:
        note = f"no tokenizer was written: {named} is no {TOKENIZER}, which transformers reads; copy its file to the folder"
        return None, tokenizer.eod_id, [note]
    return str(tokenizer.json_file), tokenizer.eod_id, []


def _import_record(candidate: Candidate, tokenizer: str | None) -> ImportRecord | None:
    """Return the record of the Hugging Face model that a checkpoint came from, if its tokenizer is the exported one.

    It is in the folder of the import's checkpoint, to which a run's lineage leads, and in that of its tokenizer.
    """
    folders = [candidate.folder, *(Path(ancestor.path) for ancestor in reversed(candidate.manifest.lineage))]
    places = [folder.parent / RECORD for folder in folders]
    if tokenizer is not None and tokenizer != "bytes":
        places.append(Path(tokenizer).with_name(RECORD))
    for path in places:
        if path.is_file():
            record = read_record(path)
            mine = sha256_of_file(Path(tokenizer)) if tokenizer not in (None, "bytes") else None
            return record if tokenizer is None or record.tokenizer_sha256 == mine else None
    return None


def _train_config(family: str, config: dict[str, Any], out: Path) -> str:
    """Build a config that continues from the imported weights, complete but for the corpus."""
    model = yaml.safe_dump({"model": config["model"]}, sort_keys=False)
    kernels = yaml.safe_dump({"kernels": config["kernels"]}, sort_keys=False) + "\n" if "kernels" in config else ""
    tokenizer = config["data"]["tokenizer"]
    rest = yaml.safe_dump({"load": str(out.absolute()), "load_what": "weights"}, sort_keys=False)
    prepare = triaxis(f"prepare --tokenizer {shlex.quote(tokenizer)} --input 'TEXT/*.txt' --output PREFIX")
    return f"""# Training that starts from the weights of an imported {family}: give data.train, and make the rest your own.
# Make a corpus with:  {prepare}

{model}
{kernels}data:
  {yaml.safe_dump({"tokenizer": tokenizer}).strip()}  # the model's own: with another one, ids would mean other words

train:
  steps: 1000                  # optimizer steps
  global_batch_size: 64        # samples per step over all ranks
  micro_batch_size: 1          # samples per forward

optimizer:
  lr: 3.0e-5                   # well below the peak that the model was pretrained with
  warmup_steps: 50             # the optimizer's moments start from zero

checkpoint:
  interval: 100                # steps between saves
  {rest.strip().replace(chr(10), chr(10) + "  ")}
"""


@contextmanager
def _progress(console: Console, what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, nothing in a log file; yield the function that receives the bytes done."""
    if not console.is_terminal:
        yield lambda num_bytes: None
        return
    with Progress(TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)
