"""Convert between Megatron-Core's `torch_dist` checkpoints and ours in one process.

MEGATRON_DIR/iter_0000100  --import-->  OUT_DIR/step_00000100/ (weights, moments), OUT_DIR/train.yaml
checkpoint of any layout   --export-->  OUT_DIR/iter_0000100/, OUT_DIR/latest_checkpointed_iteration.txt
"""

import argparse
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from rich.console import Console

from triaxis.engine.checkpoint.inspect.recorded import recorded_config
from triaxis.engine.config.load import load_config
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.section import Section
from triaxis.engine.config.schema.training import OptimizerConfig, PrecisionConfig, TrainConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.optimizer_kinds import EMA, MASTER
from triaxis.engine.errors import CheckpointError, ConfigError, shown
from triaxis.engine.program import triaxis
from triaxis.launch.start.command_line import refuse
from triaxis.models.interop.megatron.config import differences, megatron_args, model_section, training_sections
from triaxis.models.interop.megatron.schedule import export_notes, schedule_args
from triaxis.models.interop.own_parts import refuse_own_parts
from triaxis.models.interop.sections import recorded_section
from triaxis.models.specs import num_parameters

TRAIN_CONFIG = "train.yaml"


def import_megatron(args: argparse.Namespace) -> None:
    """Write Megatron-Core's weights as our checkpoint with a config.

    The optimizer state is imported too if there is one, unless --weights-only is given.
    """
    from triaxis.engine.checkpoint.format.manifest import TrainingState
    from triaxis.engine.checkpoint.import_weights import write_checkpoint
    from triaxis.models.interop.huggingface.files import whole_folder, write_text
    from triaxis.models.interop.megatron.files import open_checkpoint
    from triaxis.models.interop.megatron.state import training_state
    from triaxis.models.interop.megatron.weights import (
        TRAINING,
        WEIGHTS,
        check,
        check_optimizer,
        dropped_rows,
        import_shards,
        optimizer_format,
    )

    console = Console(highlight=False, soft_wrap=True)
    source = open_checkpoint(args.source)
    model, config, notes = _model(args, source.args, str(source.folder / "common.pt"))
    stored = optimizer_format(source)
    has_moments = stored is not None and not args.weights_only
    if has_moments:
        check_optimizer(source)
        notes.append("from here on, samples come in Triaxis's order: Megatron's own order is not replayed")
    prefixes = TRAINING if has_moments else WEIGHTS
    check(source, model, prefixes)
    state = training_state(source) if has_moments else TrainingState.at_start()
    notes += [
        f"{rows:,} rows of {key} are beyond the model and were dropped"
        for key, rows in dropped_rows(source, model).items()
    ]
    batch = config.get("train", {}).get("global_batch_size")
    if has_moments and batch and state.step * batch != state.consumed_samples:
        notes.append(
            f"{state.step:,} steps x {batch:,} samples are not the {state.consumed_samples:,} that were consumed: the next step "
            "is the one that the consumed samples make"
        )
    with whole_folder(args.out) as partial:
        written = write_checkpoint(
            partial,
            import_shards(source, model, prefixes),
            state,
            config=config,
            source=f"megatron-import: {source.folder}",
            has_moments=has_moments,
        )
        write_text(partial / TRAIN_CONFIG, _train_config(config, args.out, has_moments=has_moments))
    console.print(f"model      {num_parameters(model):,} parameters, from {source.folder}")
    what = f"weights and Adam's moments at step {state.step:,} ({stored})" if has_moments else "weights"
    console.print(f"checkpoint {args.out / written.name}: {what}")
    for note in notes:
        console.print(f"note       {note}")
    console.print("go on from there:" if has_moments else "train from these weights, at step 0 with a fresh optimizer:")
    if args.config is None:
        config_path = args.out / TRAIN_CONFIG
        line = triaxis(f"train {shlex.quote(str(config_path))} data.train=PREFIX data.tokenizer=TOKENIZER")
    else:
        what = "all" if has_moments else "weights"
        load = shlex.quote(f"checkpoint.load={args.out}")
        line = triaxis(f"train {shlex.quote(str(args.config))} {load} checkpoint.load_what={what}")
    console.print(f"  {line}")


def export_megatron(args: argparse.Namespace) -> None:
    """Write our checkpoint in Megatron-Core's format.

    The optimizer state is exported too if there is one, unless --weights-only is given.
    """
    from triaxis.engine.checkpoint.directory import find
    from triaxis.engine.checkpoint.import_weights import read_tensor, read_weights
    from triaxis.engine.checkpoint.inspect.weights import check_weights
    from triaxis.engine.numerics.precision import DTYPES as TORCH_DTYPES
    from triaxis.models.interop.megatron.state import common_state, training_args, weights_state
    from triaxis.models.interop.megatron.weights import empty_objects, export_chunks
    from triaxis.models.interop.megatron.writer import write_checkpoint

    candidate = find(args.source)
    check_weights(candidate, args.weights)
    if args.weights == "ema" and not args.weights_only:
        refuse(
            ["--weights ema: the optimizer's state is that of the trained weights. Export them alone: --weights-only."]
        )
    manifest, saved = candidate.manifest, recorded_config(candidate)
    has_moments = manifest.content == "training" and not args.weights_only
    model = recorded_section(ModelConfig, saved.get("model"), candidate.folder)
    refuse_own_parts(model, "Megatron-Core")
    theirs, common, dtype = megatron_args(model), weights_state(), args.dtype
    notes: list[str] = []
    resume = "--no-load-optim --no-load-rng"
    theirs |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "no_save_rng": True}
    if manifest.content == "training":
        dtype = dtype or saved.get("precision", {}).get("dtype")
    if has_moments:
        run = recorded_section(Config, saved, candidate.folder)
        theirs |= training_args(manifest.state, run)
        notes = export_notes(theirs, run)
        if EMA in manifest.kinds:
            notes.append("the moving average of the weights is left behind: Megatron-Core has no place for it")
        rates = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in schedule_args(run).items())
        resume = f"--use-distributed-optimizer --override-opt-param-scheduler --lr {run.optimizer.lr} {rates}"
        common = common_state(manifest.state, run)
    written = write_checkpoint(
        args.out,
        manifest.state.step if has_moments else None,
        export_chunks(
            lambda name, kind: (
                read_weights(candidate, name, args.weights)
                if kind == MASTER
                else read_tensor(candidate.folder, manifest, name, kind)
            ),
            model,
            dtype=None if dtype in (None, "source") else TORCH_DTYPES[dtype],
            has_moments=has_moments,
        ),
        empty_objects(model),
        common,
        theirs,
    )
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"checkpoint {candidate.folder}, step {manifest.state.step:,}")
    average = "the moving average of the weights" if args.weights == "ema" else "weights"
    what = "weights and the distributed optimizer's state" if has_moments else average
    console.print(f"written    {written}: {what}")
    for note in notes:
        console.print(f"note       {note}")
    console.print("load it in Megatron-LM with the model's own arguments, any tp and pp, and:")
    console.print(f"  --ckpt-format torch_dist --load {args.out} {resume}")


def _model(
    args: argparse.Namespace, theirs: Mapping[str, Any], source: str
) -> tuple[ModelConfig, dict[str, Any], list[str]]:
    """Return the model, all known config sections (the model's too), and notes for the user.

    The source is --config if given, otherwise Megatron's arguments.

    Raises:
        ConfigError: --config contradicts Megatron's arguments, or the arguments cannot be read.
        CheckpointError: neither --config nor Megatron's arguments exist.
    """
    if args.config is not None:
        config = load_config(args.config, [], os.environ)
        if theirs:
            wrong = differences(model_section(theirs, config.model.vocab_size, source), config.model)
            refuse(wrong, f"{args.config} with {source}")
        known = config.model_dump(mode="json")
        if config.optimizer.ema is not None:
            # Megatron-Core has no moving average, so a run with one initializes it from these weights.
            del known["optimizer"]["ema"]
        return config.model, known, []
    if not theirs:
        raise CheckpointError(
            f"{source} holds no Megatron arguments, so the number of heads is unknown. Give a Triaxis config with the "
            "model section: --config YAML."
        )
    model = ModelConfig.model_validate(model_section(theirs, args.vocab_size, source))
    try:
        sections, notes = training_sections(theirs)
        known = _known(sections)
    except (ValidationError, TypeError, ArithmeticError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        what = f"{first['loc'][-1]} = {shown(first['input'])}: {first['msg']}" if first else str(error)
        raise ConfigError(
            [f"{what}. The run's own settings cannot be read. Give a config of ours: --config YAML."], source
        ) from None
    return model, {"model": model.model_dump(mode="json"), **known}, notes


def _known(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Fill in defaults and validate the sections from Megatron-LM's arguments. `train` is omitted if it has no batch size."""
    kinds: dict[str, type[Section]] = {"train": TrainConfig, "optimizer": OptimizerConfig, "precision": PrecisionConfig}
    return {
        name: kinds[name].model_validate(values).model_dump(mode="json")
        for name, values in sections.items()
        if name != "train" or "global_batch_size" in values
    }


def _train_config(config: Mapping[str, Any], out: Path, *, has_moments: bool) -> str:
    """Build a training config that loads the converted checkpoint in `out`. It lacks only the corpus."""
    known = {name: config[name] for name in ("model", "train", "optimizer", "precision") if name in config}
    known = {
        name: {key: value for key, value in section.items() if value is not None} for name, section in known.items()
    }
    known["checkpoint"] = {"load": str(out), "load_what": "all" if has_moments else "weights", "interval": 100}
    text = yaml.safe_dump(known, sort_keys=False)
    return f"# From Megatron's arguments: give data.train and data.tokenizer, and look over the rest.\n{text}"
