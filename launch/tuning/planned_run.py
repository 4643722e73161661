"""Plan a run for a model and a machine, and write it as commented YAML.

    model, corpus, tokens, machine  ->  recipe (batch, learning rate)  ->  choose_layout  ->  Config  ->  commented YAML

Steps = tokens / (global batch x seq_length), rounded up. The global batch is the recipe's, rounded to fit the layout.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

from triaxis.engine.config.quantities.plan import planned_steps
from triaxis.engine.config.rules.check import require_legal
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.section import Section
from triaxis.engine.config.tree import FORMAT_VERSION, Config
from triaxis.engine.config.write import commented_lines
from triaxis.engine.data.corpus.indexed import IndexedTokens
from triaxis.engine.data.split import split_documents
from triaxis.engine.errors import DataError
from triaxis.engine.telemetry.outlets.format import gigabytes
from triaxis.launch.tuning.choose_layout import MARGIN, ChosenLayout, choose_layout
from triaxis.launch.tuning.machine import Machine
from triaxis.launch.tuning.recipe import (
    LAST_SHARE,
    LEAST_STEPS,
    WARM_UP_SHARE,
    TrainingRecipe,
    last_rate,
    recipe,
    warm_up_steps,
)
from triaxis.models.predict.fit import Devices, memory_line, memory_rule
from triaxis.models.specs import num_parameters

Given = Mapping[str, Mapping[str, tuple[Any, str]]]
"""Section -> field -> (value, where it comes from): values of another engine's configuration that a planned run keeps."""

VALIDATION_SPLIT = (0.99, 0.01, 0.0)
EVAL_STEPS = 4
PARTS = 20
"""Saves, and validations, per run; a long run has more, because they are at most MOST_STEPS_BETWEEN steps apart."""
MOST_STEPS_BETWEEN = 500


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A planned run, from imported weights or from scratch.

    Attributes:
        config: the run's configuration.
        own_fields: values of the fields that the model decides, by section.
        chosen: layout, with its predicted memory.
        recipe: batch and learning rate before a layout rounded the batch.
        machine: machine that the layout is for.
        num_tokens: requested training tokens.
        corpus_tokens: tokens in the training corpus; None: the run has random tokens.
        evidence: evidence that the tokenizer prepared the corpus, in a few words.
        given: values from another engine's configuration, used in place of the recipe's.
    """

    config: Config
    own_fields: Mapping[str, Mapping[str, object]]
    chosen: ChosenLayout
    recipe: TrainingRecipe
    machine: Machine
    num_tokens: int
    corpus_tokens: int | None
    evidence: str
    given: Given = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.global_batch_size * self.config.model.seq_length

    @property
    def num_steps(self) -> int:
        steps = planned_steps(self.config)
        assert steps is not None, "plan_run sets them"
        return steps

    @property
    def passes(self) -> float:
        """Number of times that the run reads its corpus, or 0 without a corpus."""
        return self.num_steps * self.tokens_per_step / self.corpus_tokens if self.corpus_tokens else 0.0


def plan_run(
    sections: Mapping[str, Mapping[str, Any]],
    corpus: IndexedTokens | None,
    *,
    tokenizer: str | None,
    evidence: str,
    weights: Path | None,
    num_tokens: int,
    machine: Machine,
    given: Given | None = None,
) -> PlannedRun:
    """Plan a run for a model.

    Args:
        sections: fields that the model decides, by configuration section; `model` is one of the sections.
        corpus: training corpus; None: random tokens.
        tokenizer: value for `data.tokenizer`; None: the tokenizer that the corpus records.
        evidence: evidence that this tokenizer prepared the corpus, in a few words.
        weights: checkpoint folder to start from; None: the run starts from scratch.
        num_tokens: training tokens; the run trains on them in whole steps, rounded up.
        machine: machine that the layout is for.
        given: values to keep in place of the recipe's; with `train.steps` the run has so many steps.

    Raises:
        ConfigError: no layout fits the machine, or the model breaks a rule.
        DataError: the corpus is shorter than a sample.
    """
    model = ModelConfig.model_validate(sections["model"])
    if corpus is not None and corpus.num_tokens <= model.seq_length:
        raise DataError(
            f"{corpus.prefix} has {corpus.num_tokens:,} tokens, and a sample takes {model.seq_length + 1:,}: there is nothing to "
            "learn from. Prepare a larger corpus, or give a shorter --seq-length."
        )
    given = given or {}
    kept = {name: {key: value for key, (value, _) in fields.items()} for name, fields in given.items()}
    num_steps = kept.get("train", {}).pop("steps", None)
    taken = recipe(num_parameters(model), num_tokens, model.seq_length)
    lr = kept.get("optimizer", {}).get("lr", taken.lr)
    optimizer = {"lr": lr, "min_lr": last_rate(lr)} | kept.pop("optimizer", {})
    wished = Config.model_validate(
        {
            **sections,
            "data": {"synthetic": True}
            if corpus is None
            else {
                "train": str(Path(corpus.prefix).absolute()),
                "split": _split(corpus, model.seq_length),
                "tokenizer": tokenizer,
            },
            "train": {"tokens": num_tokens, "global_batch_size": taken.samples_per_step} | kept.pop("train", {}),
            "optimizer": optimizer,
            "precision": {"dtype": "bf16" if machine.is_gpu else "fp32"} | kept.pop("precision", {}),
            **kept,
            "checkpoint": {} if weights is None else {"load": str(weights.absolute()), "load_what": "weights"},
        }
    )
    chosen = choose_layout(wished, machine, given.get("train", {}))
    corpus_tokens = None if corpus is None else corpus.num_tokens
    final = _with_length(chosen.config, machine, num_steps, "warmup_steps" in optimizer)
    if num_steps is not None:
        num_tokens = num_steps * final.train.global_batch_size * model.seq_length
    return PlannedRun(final, sections, chosen, taken, machine, num_tokens, corpus_tokens, evidence, given)


def _with_length(config: Config, machine: Machine, num_steps: int | None, has_warmup: bool) -> Config:
    """Replace `train.tokens` by `num_steps`; None: by the steps that those tokens need.

    The intervals of saves and validations are set to match. So is the warm-up, unless the run `has_warmup` of its own.

    Raises:
        ConfigError: the configuration breaks a rule, or a rank would exceed the machine's memory.
    """
    num_steps = num_steps or planned_steps(config)
    assert num_steps is not None, "the run has its tokens"
    warmup_steps = config.optimizer.warmup_steps if has_warmup else warm_up_steps(num_steps)
    interval = max(1, min(num_steps // PARTS, MOST_STEPS_BETWEEN))
    validates = config.data.split[1] > 0 and not config.data.synthetic
    final = config.model_copy(
        update={
            "train": config.train.model_copy(update={"steps": num_steps, "tokens": None}),
            "eval": config.eval.model_copy(update={"interval": interval if validates else None, "steps": EVAL_STEPS}),
            "optimizer": config.optimizer.model_copy(update={"warmup_steps": warmup_steps}),
            "checkpoint": config.checkpoint.model_copy(update={"interval": interval}),
        }
    )
    rules = [memory_rule(Devices(machine.memory_bytes, machine.ranks_per_node))] if machine.is_gpu else []
    require_legal(final, "the planned run", machine.num_ranks, machine.ranks_per_node, rules)
    return final


def _split(corpus: IndexedTokens, seq_length: int) -> tuple[float, float, float]:
    """Choose the shares of documents for training, validation and test.

    Validation gets a hundredth of the documents if they hold at least one sample; else training gets all. Test
    gets none.
    """
    if corpus.num_documents * VALIDATION_SPLIT[1] >= 1:
        held_back = split_documents(corpus.num_documents, VALIDATION_SPLIT, corpus.prefix)["valid"]
        if corpus.document_lengths(held_back).sum() > seq_length:
            return VALIDATION_SPLIT
    return 1.0, 0.0, 0.0


def to_commented_yaml(run: PlannedRun, heading: str) -> str:
    """Format the run's configuration as YAML, with the reason for each value as a comment.

    `load_config` reads the same configuration back.

    Args:
        run: run to write.
        heading: text for the comment at the top, without `#`.
    """
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    lines += ["", f"format_version: {FORMAT_VERSION}"]
    for name, own in run.own_fields.items():
        kind = Config.section_type(name)
        assert kind is not None, "a section of the configuration"
        described = {field: kind.model_fields[field].description for field in own}
        lines += _section(run, name, {**described, **(_dispatch(run) if name == "kernels" else {})})
    for name, (fields, *remarks) in _chosen_sections(run).items():
        lines += _section(run, name, {**fields, **_origins(run, name)}, *remarks)
    return "\n".join(lines) + "\n"


def _chosen_sections(run: PlannedRun) -> Mapping[str, tuple[Any, ...]]:
    """Return the sections that corpus, tokens and machine decide.

    Returns:
        By section: a tuple of the fields with their comments, followed by the comment lines above the fields.
    """
    sizes = "tp x pp x ep" if run.config.model.has_experts else "tp x pp"
    has_kernels = bool(_dispatch(run)) and "kernels" not in run.own_fields
    return {
        "data": (_data(run), *_about_data(run)),
        "train": (_train(run),),
        **({"eval": (VALIDATION,)} if run.config.eval.interval is not None else {}),
        "parallel": (
            _parallel(run),
            f"For {run.machine.name}: the smallest {sizes} with which each rank fits {1 - MARGIN:.0%} of its memory,",
            f"{gigabytes(run.chosen.usable_bytes)}.",
            *wrap(f"{memory_line(run.chosen.prediction)}.", 120),
            "`triaxis bench` measures this and other layouts.",
        ),
        **({"kernels": (_dispatch(run),)} if has_kernels else {}),
        "recompute": (_recompute(run),),
        "optimizer": (_optimizer(run), *_about_rates(run)),
        "precision": (_precision(run),),
        "checkpoint": (_checkpoint(run),),
        "runtime": (_runtime(run),),
    }


Fields = Mapping[str, str | None]
"""A section's fields in file order, each with its comment; None: no comment."""

VALIDATION: Fields = {"interval": "steps between validations", "steps": "global batches of a validation"}


def _section(run: PlannedRun, name: str, fields: Fields, *remarks: str) -> Iterator[str]:
    """Yield an empty line, the remarks as comments, and the section's fields."""
    section: Section = getattr(run.config, name)
    plain = section.model_dump(mode="json", include=set(fields))
    yield ""
    yield from (f"# {remark}" for remark in remarks)
    yield f"{name}:"
    for key, comment in fields.items():
        yield from commented_lines(key, plain[key], comment, "  ")


def _origins(run: PlannedRun, name: str) -> Fields:
    """Map a section's fields from another engine's configuration to the origin of each value."""
    return {key: origin for key, (_, origin) in run.given.get(name, {}).items()}


def _about_rates(run: PlannedRun) -> list[str]:
    kept = run.given.get("optimizer", {})
    if "lr_schedule" in kept and "lr" in kept:
        return []
    if "lr" in kept:
        return ["The cosine to a tenth of the peak is GPT-3's; the warm-up is a hundredth of the steps."]
    which = "first in its table that is as large" if run.recipe.is_as_large else "largest in its table"
    peak = f"The peak is that of GPT-3's {run.recipe.row.name}, the {which} (2005.14165, table 2.1)"
    if "lr_schedule" in kept:
        return [f"{peak}."]
    if run.config.checkpoint.load:
        again = "warmed up again and decayed again, as in 2403.08763. A higher peak learns faster and forgets more."
        return [f"{peak},", again]
    return [f"{peak},", "and so is the cosine to a tenth of it; the warm-up is a hundredth of the steps."]


def _about_data(run: PlannedRun) -> Iterator[str]:
    if run.corpus_tokens is None:
        yield "Random tokens, for speed and memory. With --data PREFIX the run has a corpus."
    elif run.config.checkpoint.load:
        yield f"{run.corpus_tokens:,} tokens, which the run reads {run.passes:,.2f} times. With text as in the model's first"
        yield "training as a second entry of `train`, the model forgets less of it (2403.08763)."
    else:
        yield f"{run.corpus_tokens:,} tokens, which the run reads {run.passes:,.2f} times."


def _data(run: PlannedRun) -> Fields:
    if run.corpus_tokens is None:
        return {"synthetic": "random tokens in place of a corpus"}
    held_back = "" if run.config.data.split[1] else " (none held back: too few documents)"
    return {
        "train": "a .bin/.idx pair of `triaxis prepare`",
        "split": f"shares of the documents: train, valid, test{held_back}",
        "tokenizer": run.evidence,
    }


def _train(run: PlannedRun) -> Fields:
    train, dp = run.config.train, run.chosen.sizes.dp
    num_microbatches = train.global_batch_size // (train.micro_batch_size * dp)
    batch = f"about those of GPT-3's {run.recipe.row.name}"
    if run.recipe.row.tokens_per_step > run.num_tokens // LEAST_STEPS:
        batch = f"about 1/{LEAST_STEPS:,} of all"
    return {
        "steps": f"{run.num_tokens:,} tokens / {run.tokens_per_step:,} per step, rounded up",
        "global_batch_size": f"x {run.config.model.seq_length:,} = {run.tokens_per_step:,} tokens per step: {batch}",
        "micro_batch_size": f"samples per forward; forwards of each replica in a step: {num_microbatches:,}",
    }


def _parallel(run: PlannedRun) -> Fields:
    sizes = run.chosen.sizes
    of_experts = {"ep": "ranks that share the experts of a layer"} if run.config.model.has_experts else {}
    return {
        "tp": "ranks of a node that share each matrix",
        "pp": "ranks that share the layers",
        "dp": f"the other ranks: {sizes.world_size:,} / (tp x pp) replicas",
        **of_experts,
        "sequence_parallel": "with tp: norms and residuals on a part of the sequence",
    }


def _dispatch(run: PlannedRun) -> Fields:
    if run.config.kernels.dispatch == "auto":
        return {}
    return {
        "dispatch": "memory follows the load, and was predicted for an even one; all_gather has buffers for the worst"
    }


def _recompute(run: PlannedRun) -> Fields:
    usable = gigabytes(run.chosen.usable_bytes)
    rest = f"{usable} without NCCL's buffers" if run.machine.is_gpu else usable
    return {
        "granularity": f"the least that fits memory_gb; here: {run.chosen.recompute}",
        "memory_gb": f"in 10^9 bytes: {rest}",
    }


def _optimizer(run: PlannedRun) -> Fields:
    return {
        "lr": "peak",
        "min_lr": f"at the last step: 1/{LAST_SHARE} of the peak",
        "lr_schedule": "from peak to min_lr",
        "warmup_steps": f"1/{WARM_UP_SHARE} of the steps: the optimizer's moments start from zero",
        "weight_decay": "on matrices only",
        "clip_grad": "largest global gradient norm",
    }


def _precision(run: PlannedRun) -> Fields:
    return {
        "dtype": "weights and activations; sums and optimizer state are fp32"
        if run.machine.is_gpu
        else "faster than bf16 on most CPUs"
    }


def _checkpoint(run: PlannedRun) -> Fields:
    loaded = {"load": "the imported model", "load_what": "step 0, a fresh optimizer"}
    return (loaded if run.config.checkpoint.load else {}) | {
        "interval": "steps between saves",
        "keep_last": "older ones are removed",
    }


def _runtime(run: PlannedRun) -> Fields:
    return {"ranks_per_node": "GPUs of a node" if run.machine.is_gpu else "a rank for each core"}
