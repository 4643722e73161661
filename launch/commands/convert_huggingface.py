"""Convert between Hugging Face folders and our checkpoints in one process.

    HF_DIR/config.json, *.safetensors  --import-->  OUT_DIR/step_00000000/ (weights), OUT_DIR/train.yaml
    checkpoint of any layout           --export-->  OUT_DIR/config.json, *.safetensors, tokenizer.json

Import and export create the output folder atomically, and hold only one or a few tensors in memory at a time.
"""

import argparse
import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from triaxis.engine.checkpoint.inspect.recorded import recorded_config
from triaxis.engine.checkpoint.inspect.weights import check_weights
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.data.corpus.tokenizers import SENTENCEPIECE, TOKENIZER_JSON, check_tokenizer
from triaxis.engine.errors import CheckpointError
from triaxis.engine.program import triaxis
from triaxis.launch.tuning.report import git_commit
from triaxis.models.interop.huggingface.config import family_of, to_hugging_face
from triaxis.models.interop.huggingface.model_card import README, model_card
from triaxis.models.interop.huggingface.record import (
    GENERATION_CONFIG,
    RECORD,
    generation_config,
    record_of_checkpoint,
)
from triaxis.models.interop.huggingface.tokenizer import (
    ExportedTokenizer,
    export_tokenizer,
    name_in_folder,
    tokenizer_file,
    tokenizer_files,
    tokenizer_of,
)
from triaxis.models.interop.own_parts import refuse_own_parts
from triaxis.models.interop.sections import recorded_section
from triaxis.models.specs import num_parameters

if TYPE_CHECKING:
    from triaxis.models.interop.huggingface.weights import HuggingFaceModel

TRAIN_CONFIG = "train.yaml"


def import_huggingface(args: argparse.Namespace) -> None:
    """Write a Hugging Face folder's weights as our checkpoint, with a config for training."""
    from triaxis.models.interop.huggingface.weights import open_folder

    console = Console(highlight=False, soft_wrap=True, markup=False)
    found = open_folder(args.source, args.seq_length, args.ignore)
    import_weights(found, args.source, args.out, args.dtype, console)
    console.print(f"model      {found.family}, {num_parameters(found.model):,} parameters, from {args.source}")
    for note in found.notes:
        console.print(f"note       {note}")
    console.print(f"weights    {args.out}")
    own = next((args.out / name for name in (TOKENIZER_JSON, SENTENCEPIECE) if (args.out / name).is_file()), None)
    if own is not None:
        console.print(f"tokenizer  {own}")
    else:
        console.print(
            f"tokenizer  {args.source} has no {TOKENIZER_JSON}: put the model's own at {args.out / TOKENIZER_JSON} (transformers' "
            "AutoTokenizer writes one when it is saved); with another one, ids would mean other words"
        )
    console.print("train from these weights, at step 0 with a fresh optimizer:")
    console.print("  " + triaxis(f"train {shlex.quote(str(args.out / TRAIN_CONFIG))} data.train=PREFIX"))
    console.print("in a config of your own: its model section, and")
    console.print(f"  checkpoint.load={args.out} checkpoint.load_what=weights")


def import_weights(found: "HuggingFaceModel", source: Path, out: Path, dtype: str, console: Console) -> None:
    """Write a Hugging Face model as a folder of checkpoints, with its tokenizer and a config for training.

    Args:
        found: Hugging Face model in `source`, opened.
        source: folder with config.json and the weights.
        out: folder to create; it must not exist.
        dtype: `source`, or one of `triaxis.engine.numerics.precision.DTYPES`.

    Raises:
        CheckpointError: `out` exists or cannot be written, or a weight is not finite.
        DataError: the folder's tokenizer is unreadable or does not fit the model.
    """
    from triaxis.engine.checkpoint.format.manifest import TrainingState
    from triaxis.engine.checkpoint.import_weights import write_checkpoint
    from triaxis.models.interop.huggingface.files import whole_folder, write_bytes, write_text

    files = tokenizer_files(source)
    if TOKENIZER_JSON in files and (note := check_tokenizer(source / TOKENIZER_JSON, found.model.vocab_size)):
        console.print(f"note       {note}")
    name = name_in_folder(files)
    config = {**found.sections, "data": {"tokenizer": str((out / name).absolute())}}
    with whole_folder(out) as partial:
        with _progress(console, "import", found.num_bytes) as advance:
            write_checkpoint(
                partial,
                found.shards(_torch_dtype(dtype), advance),
                TrainingState.at_start(),
                # List every field, as a run's own checkpoint does: an absent field would count as changed.
                # The tokenizer's path is relative to the checkpoint's folder, so that both can be moved.
                config={
                    **config,
                    "model": found.model.model_dump(mode="json"),
                    "data": {"tokenizer": str(Path("..", name))},
                },
                source=import_source(found.family, source),
            )
        for path, content in files.items():
            write_bytes(partial / path, content)
        write_text(partial / RECORD, found.record.to_text())
        write_text(partial / TRAIN_CONFIG, _train_config(found.family, config, out))


def import_source(family: str, source: Path) -> str:
    """Text stored as an imported checkpoint's origin, with the model family and source folder."""
    return f"hf-import of a {family}: {source}"


def export_huggingface(args: argparse.Namespace) -> None:
    """Write a checkpoint's weights as a folder that transformers loads, with tokenizer and model card."""
    from triaxis.engine.checkpoint.directory import find
    from triaxis.models.interop.huggingface.files import whole_folder, write_bytes, write_text, write_weights
    from triaxis.models.interop.huggingface.weights import plan_export

    console = Console(highlight=False, soft_wrap=True, markup=False)
    if not args.max_shard_gb > 0:
        raise CheckpointError(
            f"--max-shard-gb {args.max_shard_gb}: a file has more than 0 bytes. Give a positive number."
        )
    candidate = find(args.source)
    check_weights(candidate, args.weights)
    model = recorded_section(ModelConfig, recorded_config(candidate).get("model"), candidate.folder)
    refuse_own_parts(model, "transformers")
    name, tokenizer, notes = tokenizer_of(candidate, args.tokenizer, model.vocab_size)
    record = record_of_checkpoint(candidate, None if name is None else tokenizer_file(name), name)
    if record is not None and tokenizer is not None and not record.ends_with(tokenizer.eod_id):
        # Training used another end-of-document token than the import, whose ids and files would stop at the wrong token.
        record = record if candidate.manifest.content == "weights" else None
    exported = ExportedTokenizer()
    if name is not None and tokenizer is not None:
        exported = export_tokenizer(name, tokenizer, max_length=model.seq_length, is_import=record is not None)
    family = family_of(model, args.family)
    export = plan_export(candidate, family, model, _torch_dtype(args.dtype))
    special_ids = exported.ids_of_model if record is None else record.special_ids
    keys, more = to_hugging_face(model, family, dtype=export.dtype, special_ids=special_ids)
    card = model_card(
        candidate,
        model,
        name=args.out.resolve().name,
        keys=keys,
        weights=args.weights,
        commit=git_commit(),
        reads_text=bool(exported.files),
    )
    num_bytes = sum(plan.num_bytes for plan in export.plans)
    with whole_folder(args.out) as partial:
        with _progress(console, "export", num_bytes) as advance:
            files = write_weights(
                partial, export.plans, export.tensors(advance, args.weights), int(args.max_shard_gb * 1e9)
            )
        write_text(partial / "config.json", json.dumps(keys, indent=2) + "\n")
        write_text(partial / GENERATION_CONFIG, generation_config(exported.ids, record))
        write_text(partial / README, card)
        for path, content in exported.files.items():
            write_bytes(partial / path, content)
    notes += exported.notes
    if exported.files and family == "qwen2":
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
    own = next(
        (args.out / path for path in (TOKENIZER_JSON, SENTENCEPIECE) if path in exported.files), "none was written"
    )
    console.print(f"tokenizer  {own}")
    console.print(f"use        {args.out / README} has the lines that load it in transformers")
    for note in (*notes, *more):
        console.print(f"note       {note}")


def _torch_dtype(name: str) -> Any:
    """torch dtype for a name; None for `source`, which keeps the saved dtype."""
    from triaxis.engine.numerics.precision import DTYPES as TORCH_DTYPES

    return None if name == "source" else TORCH_DTYPES[name]


def _train_config(family: str, config: dict[str, Any], out: Path) -> str:
    """Build a config that continues from the imported weights and lacks only the corpus."""
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
    """Show a progress bar on a terminal, and nothing in a log file. Yields a function (bytes done)."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)
