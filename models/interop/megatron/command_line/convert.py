"""Convert a Megatron-LM command line to a config with a header comment.

    words -> Parsed -> sections -> Config, checked by all rules -> YAML

The comment lists what was left out. An argument that changes training and has no counterpart here is refused, unless `--ignore`
names it.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from textwrap import wrap
from typing import Any

from pydantic import ValidationError

from triaxis.engine.config.names.megatron_arguments import ARGUMENTS
from triaxis.engine.config.rules.check import problems
from triaxis.engine.config.tree import Config
from triaxis.engine.config.write import commented_lines
from triaxis.engine.errors import ConfigError, shown
from triaxis.models.interop.megatron.command_line.model_args import OF_A_SHAPE, model_fields
from triaxis.models.interop.megatron.command_line.other_args import layout_fields, run_fields
from triaxis.models.interop.megatron.command_line.parse import Parsed, flag, parse, words_of
from triaxis.models.interop.megatron.command_line.training_args import training_fields

SOURCE = "the command line of Megatron-LM"
HEAD_WIDTH = 128
"""Width in columns of the YAML's header comment."""

Sections = dict[str, dict[str, Any]]

REQUIRED: Mapping[str, str] = {
    **dict.fromkeys(OF_A_SHAPE, "the model has no shape without it"),
    "micro_batch_size": "a microbatch has no size",
    "global_batch_size": "it would be the micro batch times the replicas, and their number is open. Give it",
    "lr": "the optimizer has no learning rate",
}
"""Arguments without a default -> what would be lacking."""

EXCLUSIVE = {
    (
        ("train_iters", "train_samples"),
        ("lr_decay_iters", "lr_decay_samples"),
        ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
        ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        ("bf16", "fp16"),
        ("group_query_attention", "multi_latent_attention"),
        (
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "pipeline_model_parallel_layout",
        ),
        ("data_path", "train_data_path", "mock_data"),
    ): "takes one of them. Remove the others",
    tuple(
        (f"{length}_{unit}", f"train_{other}")
        for unit, other in (("samples", "iters"), ("iters", "samples"))
        for length in ("lr_decay", "lr_warmup", "lr_wsd_decay")
    ): "counts the run and its schedule in one unit. Give both in iters or both in samples",
}
"""Groups of arguments, of which one may be given -> Megatron-LM's rule."""


def from_command_line(texts: Sequence[str], vocab_size: int | None = None, ignored: Sequence[str] = ()) -> str:
    """Write the config for the run that a Megatron-LM command line describes.

    The result is YAML text.

    Args:
        texts: command-line words, or texts with several words each; `@path` is replaced with the words in a file.
        vocab_size: number of tokens in the tokenizer; None takes it from --vocab-size.
        ignored: names of given arguments to leave out. An argument is refused that would be read all
            the same.

    Raises:
        ConfigError: the arguments have problems, or no counterpart and are not `ignored`; or the config breaks a rule.
    """
    names = {name.lstrip("-") for name in ignored}
    parsed = parse(words_of(texts), names)
    sections, notes = _sections(parsed, vocab_size)
    left_out = {*parsed.missing, *parsed.swallowed, *chain(*parsed.without_effect.values())}
    found = [
        *parsed.problems,
        *(
            f"--{name}: no counterpart here: {why}. Leave it out, or pass it over: --ignore {name}."
            for name, why in parsed.missing.items()
            if name not in names
        ),
        *(
            f"--ignore {name}: "
            + (
                "it is no argument without a counterpart, and would be read all the same. Remove it."
                if name in parsed.given
                else "not among the arguments that are given. Remove it."
            )
            for name in sorted(names - left_out)
        ),
    ]
    if not found:
        found += _broken(sections)
    if found:
        raise ConfigError(found, SOURCE)
    yaml = chain.from_iterable(commented_lines(name, section, None, "") for name, section in sections.items())
    return "\n".join([*_head(parsed, notes), *yaml]) + "\n"


def _sections(parsed: Parsed, vocab_size: int | None) -> tuple[Sections, list[str]]:
    """Build config sections, and notes for the user as comment texts. Problems are added to `parsed`."""
    notes: list[str] = []
    args = parsed.args
    parsed.problems += [f"{flag(name)} is missing: {why}." for name, why in REQUIRED.items() if args[name] is None]
    parsed.problems += [
        f"{' with '.join(map(flag, given))}: Megatron-LM {rule}."
        for groups, rule in EXCLUSIVE.items()
        for group in groups
        if len(given := [name for name in group if args[name]]) > 1
    ]
    training = training_fields(parsed, notes)
    sections = {"model": model_fields(parsed, vocab_size), **training}
    sections |= layout_fields(parsed, notes) | run_fields(parsed, notes)
    order = ["model", "data", "train", "eval", "parallel", "optimizer", "precision", "recompute"]
    return {name: sections[name] for name in dict.fromkeys([*order, *sections]) if name in sections}, notes


def _broken(sections: Sections) -> list[str]:
    """List the problems that config validation finds in the sections."""
    try:
        config = Config.model_validate(sections)
    except ValidationError as error:
        return [
            f"{'.'.join(map(str, detail['loc']))} = {shown(detail['input'])}, from the arguments: {detail['msg']}."
            for detail in error.errors(include_url=False)
        ]
    return problems(config)


def _head(parsed: Parsed, notes: Sequence[str]) -> Iterator[str]:
    yield "# From a command line of Megatron-LM; defaults of its version 0.16 are written out."
    for name, why in parsed.missing.items():
        yield from _wrapped(f"NO COUNTERPART, left out: --{name}: {why}.")
    for name in sorted({*parsed.swallowed} - parsed.missing.keys()):
        yield from _wrapped(f"{'NOT READ' if name in ARGUMENTS else 'UNKNOWN'}, left out: --{name}.")
    for topic, names in parsed.without_effect.items():
        yield from _wrapped(f"Without effect here ({topic}): {', '.join(names)}.")
    for note in notes:
        yield from _wrapped(f"Note: {note}.")


def _wrapped(text: str) -> list[str]:
    """Wrap the text into comment lines, indented after the first."""
    return wrap(
        text, HEAD_WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
    )
