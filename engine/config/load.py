"""Reading a configuration; `write.py` writes it back.

    YAML file  ->  nested mapping  <-  environment  <-  section.key=value      (the right one wins)
                        |
        unknown keys, types, rules: every problem of all three, in one ConfigError      or a Config

A value with the wrong type skips only the rules that need it, so a user can fix all of a file's problems at once.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import TypeAdapter, ValidationError

from triaxis.engine.config.names.earlier import translated
from triaxis.engine.config.names.foreign_names import AND_FIELD, is_foreign, our_value, unknown_key
from triaxis.engine.config.rules.check import problems as broken_rules
from triaxis.engine.config.rules.extension import extension_problem
from triaxis.engine.config.rules.phases import refused_field
from triaxis.engine.config.rules.problem import Rule
from triaxis.engine.config.schema.dotted import get_field, with_fields
from triaxis.engine.config.schema.extension import placed
from triaxis.engine.config.schema.phases import PhaseFields, fields_of
from triaxis.engine.config.schema.section import Section
from triaxis.engine.config.shipped import config_path, nearest_names
from triaxis.engine.config.tree import FORMAT_VERSION, Config
from triaxis.engine.config.type_problems import section_at, type_problems
from triaxis.engine.config.yaml_text import read_yaml
from triaxis.engine.errors import ConfigError, brief, counted
from triaxis.engine.storage.state_files import read_text

ENVIRONMENT = {
    "TP": "parallel.tp",
    "PP": "parallel.pp",
    "VPP": "parallel.vpp",
    "CP": "parallel.cp",
    "DP": "parallel.dp",
    "EP": "parallel.ep",
    "ETP": "parallel.etp",
    "MICRO_BATCH_SIZE": "train.micro_batch_size",
    "GLOBAL_BATCH_SIZE": "train.global_batch_size",
    "RUN_NAME": "runtime.name",
}
"""Environment variables that set a field; an empty one counts as unset."""

MOST_UNKNOWN = 50
"""Maximum number of unknown keys per section that are reported one by one."""

S = TypeVar("S", bound=Section)


@dataclass
class _Reading:
    """A configuration that is being read.

    Attributes:
        tree: nested mapping of the values so far.
        origins: place where a value was given (an environment variable, an override), by dotted name; none for the file's values.
        problems: messages so far.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def set(self, dotted: str, value: object, origin: str) -> None:
        *sections, key = dotted.split(".")
        at = self.tree
        for section in sections:
            inner = at.get(section)
            if not isinstance(inner, dict):
                # A file may leave a section empty; any other non-mapping is reported as a wrong type.
                if inner is not None:
                    return
                inner = at[section] = {}
            at = inner
        at[key] = value
        self.origins[dotted] = origin


def load_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    world_size: int | None = None,
    ranks_per_node: int | None = None,
    more_rules: Sequence[Rule] = (),
) -> Config:
    """Read, check and freeze a configuration: YAML < environment < dotted overrides.

    Args:
        path: a YAML file, or a shipped one's name; None: only the environment and the overrides.
        overrides: `section.key=value`, the value in YAML.
        environment: `os.environ` for the names in `ENVIRONMENT`; None: not read.
        world_size, ranks_per_node: number of ranks in the run and on a node, if known, for the rules that depend on them.
        more_rules: rules that need more than the configuration, such as `triaxis.models.predict.fit.memory_rule`.

    Raises:
        ConfigError: lists every problem at once: the file, unknown keys, types, and every rule that can be evaluated.
    """
    reading = _Reading()
    source = "the configuration" if path is None else str(path)
    if path is not None:
        reading.tree = _read_yaml(config_path(path))
        if reading.tree.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
            reading.tree = translated(reading.tree)
        _place_extension(reading, config_path(path).absolute().parent)
    _apply(reading, overrides, environment or {})
    _place_extension(reading, Path.cwd())
    _check_format(reading)
    for name, field_info in Config.model_fields.items():
        if field_info.is_required():
            reading.tree.setdefault(name, {})  # so a missing section's required fields are reported with the rest
    _refuse_unknown_keys(reading, Config, reading.tree, "")
    try:
        config = Config.model_validate(reading.tree)
    except ValidationError as error:
        config = _valid_part(reading.tree, error)
        reading.problems += type_problems(error, reading.origins)
        # A phase's fields belong to other sections, and some of those are missing.
        config.__dict__.pop("phases", None)
    else:
        config = _complete_phases(reading, config)
    unknown_model = extension_problem(getattr(config, "model", None))
    reading.problems += (
        [unknown_model] if unknown_model else broken_rules(config, world_size, ranks_per_node, more_rules)
    )
    if reading.problems:
        raise ConfigError(reading.problems, source)
    return config


def override(sections: Mapping[str, Any], overrides: Sequence[str], source: str) -> dict[str, Any]:
    """Copy some sections of a configuration and apply dotted overrides to them; other sections may be missing.

    Raises:
        ConfigError: a malformed override, an unknown key, or a value with the wrong type.
    """
    reading = _Reading(tree={name: dict(fields) for name, fields in sections.items()})
    _apply(reading, overrides, {})
    _refuse_unknown_keys(reading, Config, reading.tree, "")
    try:
        Config.model_validate(reading.tree)
    except ValidationError as error:
        reading.problems += type_problems(error, reading.origins, lacking=False)
    if reading.problems:
        raise ConfigError(reading.problems, source)
    return reading.tree


def _place_extension(reading: _Reading, folder: Path) -> None:
    """Make the extension's path in the tree absolute; a relative path starts at `folder`.

    `folder` is the configuration file's folder for a path in that file, the working directory for one in an override.
    """
    model = reading.tree.get("model")
    if isinstance(model, dict) and "extension" in model:
        model["extension"] = placed(model["extension"], folder)


def _complete_phases(reading: _Reading, config: Config) -> Config:
    """Give every phase each field that any phase has; return the config with the fields of phase `train.phase`, or the first."""
    if not config.phases:
        return config
    base = config.model_copy(update={"phases": []})
    own = [_own_fields(reading, base, entry) for entry in config.phases]
    keys = dict.fromkeys(key for fields in own for key in fields)
    reading.problems += [
        f"{key} ({reading.origins[key]}): every phase has a value of its own for it, so this one would have no effect. Change the "
        "phases."
        for key in keys
        if key in reading.origins and all(key in fields for fields in own)
    ]
    completed = []
    for entry, fields in zip(config.phases, own, strict=True):
        values = with_fields(base, fields).model_dump(mode="json")
        completed.append(
            {"name": entry["name"], "until": entry["until"]} | {key: get_field(values, key) for key in keys}
        )
    name = config.train.phase or completed[0]["name"]
    current = next((entry for entry in completed if entry["name"] == name), completed[0])
    return with_fields(base, {**fields_of(current), "phases": completed, "train.phase": name})


def _own_fields(reading: _Reading, base: Config, entry: PhaseFields) -> dict[str, Any]:
    """Collect a phase's fields as given; record a problem for a field that it cannot have or that has the wrong type."""
    known, fields = list(Config.dotted_names()), dict[str, Any]()
    for key, value in fields_of(entry).items():
        if why := refused_field(key, known):
            reading.problems.append(f"phase {entry['name']}: {key}{why}.")
            continue
        try:
            with_fields(base, {**fields, key: value})
        except ValidationError as error:
            reading.problems += [f"phase {entry['name']}: {problem}" for problem in type_problems(error, {})]
        else:
            fields[key] = value
    return fields


def _read_yaml(path: Path) -> dict[str, Any]:
    """Read the file as a mapping with text keys.

    Raises:
        ConfigError: no such file, not text, not YAML, a repeated key, empty, or not a mapping at the top.
    """
    try:
        tree = read_yaml(read_text(path))
    except FileNotFoundError as error:
        there = sorted(path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, [other.name for other in there], n=1, cutoff=0.4)
        near = [str(path.parent / name) for name in near] or nearest_names(path)
        others = "Give the path of a YAML file, or the name of a shipped one, such as gpt_tiny."
        hint = f"Did you mean {' or '.join(near)}?" if near else others
        raise ConfigError([f"there is no such file. {hint}"], str(path)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"it cannot be read as text: {error}. Give the path of a YAML file."], str(path)) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError([f"it is not readable as YAML: {where}{what}."], str(path)) from error
    if tree is None:
        raise ConfigError(["the file is empty: a run needs at least the sections model and train."], str(path))
    if not isinstance(tree, dict):
        kind = type(tree).__name__
        raise ConfigError(
            [f"the file holds a {kind}, not sections: the top level must be a mapping such as `model: {{...}}`."],
            str(path),
        )
    return _text_keys(tree)


def _text_keys(value: Any) -> Any:
    """Convert all keys to text, so that `on` or `1` is refused by name like any unknown key."""
    if isinstance(value, dict):
        return {str(key): _text_keys(inner) for key, inner in value.items()}
    return value


def _apply(reading: _Reading, overrides: Sequence[str], environment: Mapping[str, str]) -> None:
    """Apply the environment, then the overrides; record a problem for a field that both set to different values."""
    for variable, dotted in ENVIRONMENT.items():
        text = environment.get(variable, "")
        if text:
            value = text if dotted == "runtime.name" else _value(reading, text, variable)
            reading.set(dotted, value, f"{variable}={brief(text)} in the environment")
    for override in overrides:
        dotted, equals, text = override.partition("=")
        dotted = dotted.strip()
        if not equals or not all(dotted.split(".")):
            reading.problems.append(
                f"{override!r} is not an override: it must read section.key=value, such as train.steps=100. It would be "
                f"ignored."
            )
            continue
        if (leaf := _leaf_above(dotted)) is not None:
            reading.problems.append(
                f"{override!r}: {leaf} is a value, not a section: nothing lies below it. Set {leaf} itself."
            )
            continue
        for name, value in _flat(dotted, _value(reading, text, override)):
            earlier = reading.origins.get(name)
            if earlier is not None and get_field(reading.tree, name) != value:
                reading.problems.append(
                    f"{name} is given twice with different values: {earlier}, and {brief(override)} on the command line. Which "
                    f"one is meant would be a guess. Remove one of them."
                )
            else:
                reading.set(name, value, f"{brief(override)} on the command line")


def _flat(dotted: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value), for a section's mapping one pair per field, so that `parallel={tp: 2}` overrides only `tp`."""
    if isinstance(value, dict) and value and section_at(dotted) is not None:
        for key, inner in value.items():
            yield from _flat(f"{dotted}.{key}", inner)
    else:
        yield dotted, value


def _leaf_above(dotted: str) -> str | None:
    """Find the field that a dotted name uses as a section: `parallel.tp` in `parallel.tp.x`; None if there is none."""
    parts = dotted.split(".")
    names = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((name for name in names if name in Config.dotted_names() and section_at(name) is None), None)


def _value(reading: _Reading, text: str, given: str) -> Any:
    try:
        return _text_keys(read_yaml(text))
    except yaml.YAMLError as error:
        what = getattr(error, "problem", None) or str(error)
        reading.problems.append(
            f"{given!r}: its value is not readable as YAML: {what}. Quote it, or balance its brackets."
        )
        return text
    except UnicodeError:
        reading.problems.append(
            f"{given!r}: its value is no UTF-8, so no file of the run could hold it. Type it in UTF-8."
        )
        return text


def _check_format(reading: _Reading) -> None:
    """Remove `format_version` and check it; a file that omits it counts as the current version."""
    version = reading.tree.pop("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
        reading.problems.append(
            f"format_version = {version!r}: this Triaxis reads configurations of version 1 to {FORMAT_VERSION}; a key of another "
            f"version could mean something else here. Use the Triaxis that wrote it, or write it again for this one."
        )


def _refuse_unknown_keys(reading: _Reading, section: type[Section], tree: dict[str, Any], prefix: str) -> None:
    """Remove unknown keys, with a problem for each; an empty section becomes an empty mapping."""
    unknown = [key for key in tree if key not in section.model_fields]
    for key in unknown[:MOST_UNKNOWN]:
        value, dotted = tree[key], f"{prefix}{key}"
        # Another engine's section (DeepSpeed's `fp16:`) may hold keys that have names here.
        inside = [f"{dotted}.{name}" for name in value] if isinstance(value, dict) else []
        for each in (dotted, *islice(filter(is_foreign, inside), MOST_UNKNOWN)):
            reading.problems.append(unknown_key(brief(each), reading.origins.get(each)))
    if more := unknown[MOST_UNKNOWN:]:
        place = f"section {prefix[:-1]}" if prefix else "the top level"
        reading.problems.append(
            f"{place}: {counted(len(more), 'more unknown key')}. They would have had no effect. Remove them."
        )
    for key in unknown:
        del tree[key]
    for key in list(tree):
        dotted, inner = f"{prefix}{key}", section.section_type(key)
        if inner is None:
            continue
        if tree[key] is None and not prefix:
            tree[key] = {}
        if isinstance(tree[key], dict):
            _refuse_unknown_keys(reading, inner, tree[key], f"{dotted}.")


def as_overrides(dotted: str, text: str) -> list[str]:
    """Build the overrides that set a field to a value, as typed or translated to our spelling; empty if the field accepts neither.

    Args:
        dotted: the field's dotted name.
        text: the value as typed.
    """
    above, _, name = dotted.rpartition(".")
    section = section_at(above) if above else Config
    if section is None or name not in section.model_fields or section.section_type(name) is not None:
        return []
    adapter, ours = _adapter(section, name), our_value(dotted, text, _choices(section.model_fields[name].annotation))
    for typed in (text, *([ours] if ours else [])):
        typed, *others = typed.split(AND_FIELD)
        try:
            value = read_yaml(typed)
            if section.takes_bool(name) or not isinstance(value, bool):
                adapter.validate_python(value)
                return [f"{dotted}={typed}", *others]
        except (yaml.YAMLError, ValidationError):
            continue
    return []


def _choices(annotation: Any) -> list[str]:
    """List the literal texts in an annotation, including those inside unions."""
    return [text for one in get_args(annotation) for text in ([one] if isinstance(one, str) else _choices(one))]


def _valid_part(tree: Mapping[str, Any], error: ValidationError) -> Config:
    """Build a config with the valid fields only; reading any other field raises AttributeError."""
    wrong = {".".join(str(part) for part in detail["loc"][:2]) for detail in error.errors(include_url=False)}
    sections = {}
    for name in Config.model_fields:
        kind = Config.section_type(name)
        if kind is not None and name not in wrong:
            sections[name] = _construct(
                kind, tree.get(name, {}), {key for key in kind.model_fields if f"{name}.{key}" in wrong}
            )
    return _construct(Config, sections, wrong)


def _construct(kind: type[S], values: Mapping[str, Any], wrong: Set[str]) -> S:
    """Build a section from valid values; the fields in `wrong` are missing in it, without even a default."""
    read = {}
    for name in kind.model_fields:
        if name in values and name not in wrong:
            read[name] = _adapter(kind, name).validate_python(values[name])
    section = kind.model_construct(None, **read)
    assert isinstance(section, kind)
    for name in wrong & kind.model_fields.keys():
        section.__dict__.pop(name, None)
    return section


def _adapter(kind: type[Section], name: str) -> TypeAdapter[Any]:
    """Build a validator for one field in a section."""
    about = kind.model_fields[name]
    # A section has its own settings (pydantic refuses others); a plain field has its section's.
    settings = kind.model_config if kind.section_type(name) is None else None
    return TypeAdapter(Annotated[about.annotation, about], config=settings)  # type: ignore[arg-type]
