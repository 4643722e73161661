"""Rules about what a user's module provides (`model.extension`)."""

from collections.abc import Iterator

from triaxis.engine.config.rules.problem import Problem, Rule, Subject
from triaxis.engine.config.schema.extension import NAME
from triaxis.engine.config.schema.extension_parts import OWN_CORPUS
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.layout.shard_spec import ParamSpec
from triaxis.engine.storage.user_module import UserModuleError


def extension_problem(model: ModelConfig | None) -> str | None:
    """Explain why a model's extension cannot be read; None if it can, or if the model has none.

    If it cannot be read, the model's parts are unknown, so rules cannot check the config.
    """
    extension = getattr(model, NAME, None)
    if extension is None:
        return None
    try:
        extension.read()
    except UserModuleError as error:
        return (
            f"model.extension.source = {extension.source}: {error}. The model would be another one. "
            "Mend it, or leave model.extension out."
        )
    return None


def parts_list_their_parameters(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each part's first parameter that no layout could hold, or that tp cannot cut."""
    model = subject.config.model
    if model.extension is None:
        return
    for part, given in model.own.with_parameters().items():
        arguments = (model,) if part == "norm" else (model, 0)
        try:
            specs = list(given.specs(*arguments))
        except Exception as error:
            yield subject.problem("model.extension.source", f"{part}.specs raises {type(error).__name__}: {error}")
            continue
        names: set[str] = set()
        for spec in specs:
            if why := _unfit(spec, names, subject.config.parallel.tp):
                yield subject.problem("model.extension.source", f"{part}.specs lists {why}")
                break
            names.add(spec.name)


def _unfit(spec: object, names: set[str], tp: int) -> str:
    """Describe what is wrong with a parameter in a part's `specs`; "" if nothing is. `names`: the parameters listed before it."""
    if not isinstance(spec, ParamSpec):
        return f"{spec!r}, which is no ParamSpec"
    if not spec.name or spec.name in names:
        return (
            f"the name {spec.name!r} twice: one of the two tensors would be in no checkpoint"
            if spec.name
            else "no name"
        )
    if any(not isinstance(size, int) or size < 1 for size in spec.shape):
        return f"{spec.name} with the shape {spec.shape}, whose sizes must be whole numbers above 0"
    if spec.ep_dim is not None:
        return f"{spec.name} with ep_dim: only the parameters of experts are cut over ep"
    if spec.tp_dim is None:
        return ""
    if not 0 <= spec.tp_dim < len(spec.shape):
        return f"{spec.name} with tp_dim {spec.tp_dim}, and its shape {spec.shape} has no such dim"
    size = spec.shape[spec.tp_dim]
    if size % tp and tp % size:
        return f"{spec.name} whose dim {spec.tp_dim} of {size} cannot be cut evenly over parallel.tp = {tp}"
    return ""


def given_is_chosen(subject: Subject) -> Iterator[Problem]:
    """Yield a problem if a run would not use its extension's schedule or update.

    Only runs are checked (`models/run_rules.py`), because tools that only read the model use neither.
    """
    for part, field_name in (("schedule", "lr_schedule"), ("update", "name")):
        key, chosen = f"optimizer.{field_name}", getattr(subject.config.optimizer, field_name)
        if chosen != "extension" and getattr(subject.config.model.own, part) is not None:
            rule = f"is not the {part} of model.extension, which would have no effect"
            yield subject.problem(key, rule, {key: ["extension"]})


def corpora_are_given(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each corpus path that the extension does not provide."""
    config = subject.config
    for key, sources in (("data.train", config.data.train), ("data.valid", config.data.valid or ())):
        for path in (source.path for source in sources if source.path.startswith(OWN_CORPUS)):
            if (name := path.removeprefix(OWN_CORPUS).partition(":")[0]) not in config.model.own.corpora:
                given = ", ".join(config.model.own.corpora) or "none"
                yield Problem(
                    key,
                    path,
                    f"names the corpus {name!r} of model.extension, which gives {given}: there is nothing to read",
                )


EXTENSION_RULES: tuple[Rule, ...] = (
    parts_list_their_parameters,
    corpora_are_given,
)
