"""The `model.extension` section: a module of the user's that replaces parts of the model (no torch here).

    model:
      extension: scaled_mlp.py       a file, a package's folder, or a name that Python finds; from the folder of the configuration

The module assigns an `Extension` to the name `extension`. A part is one class for two things: `specs` lists its parameters, without
a rank and without torch, and an instance computes. `LayerPart` and `NormPart` say how, docs/your-model.md goes through an example.
Whatever reads a model reads the specs of its parts with ours: predictions, initial values, checkpoints, groups, `triaxis verify`.

The digest of the sources is a field of its own, in every copy of the configuration. So ranks compare it, a resume with another one
must be accepted, and a configuration with the digest of other sources is refused.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from pydantic import Field, model_validator

from triaxis.engine.config.optimizer_kinds import EMA, KIND_PATTERN, MASTER
from triaxis.engine.config.places import LocalPath, local_path
from triaxis.engine.config.section import LAYOUT, MEANT, OnResume, Problem, Rule, Section, Subject
from triaxis.engine.layout.shard_spec import ParamSpec
from triaxis.engine.storage.user_module import UserModuleError, available_source, find_sources, is_path, load

if TYPE_CHECKING:  # the model's section has this one
    from triaxis.engine.config.model import ModelConfig
    from triaxis.engine.config.training import OptimizerConfig

Weigh = Callable[[Any, Any, Any], Any]
"""`LossPart`'s `weights`."""

OWN_CORPUS = "extension:"
"""Beginning of the paths of corpora that an extension gives."""

NOT_MOMENTS = ("start", "gradient", MASTER, EMA, "parameter")
"""Names that a moment cannot have: other tensors of a parameter in checkpoints or in `triaxis verify`, in the order of a step."""

NAME = "extension"
"""The variable of the module that holds its `Extension`."""


class LayerPart(Protocol):
    """The attention, the MLP or all of a layer: a subclass of `torch.nn.Module`.

    `context` is `triaxis.models.gpt.context.BuildContext`, `name` the part's (`layers.3.mlp`). Hidden states x are [s/t, b, h] with
    sequence parallelism, else [s, b, h]. The calls of each part, of which each may subclass ours:

        mlp         __init__(context, name)          forward(x) -> x's shape            triaxis.models.gpt.mlp.MLP
        attention   __init__(context, name, kind)    forward(x, positions, keys)        triaxis.models.gpt.attention.Attention
        block       __init__(context, layer)         forward(x, positions, keys)        triaxis.models.gpt.block.Block

    An MLP whose output has a learned scale:

        class ScaledMLP(MLP):
            @staticmethod
            def specs(model, layer):
                yield from mlp_specs(model, layer)                       # triaxis.models.specs
                yield ParamSpec("scale", (model.hidden_size,), Init("ones"), decay=False, grad_is_partial="sequence")

            def __init__(self, context, name):
                super().__init__(context, name)
                self.scale = context.parameter(f"{name}.scale")

            def forward(self, x):
                return super().forward(x) * self.scale.tracked()
    """

    @staticmethod
    def specs(model: "ModelConfig", layer: int) -> Iterable[ParamSpec]:
        """List the part's parameters in forward order by their names inside it (`scale`)."""

    def __call__(self, context: Any, *place: Any) -> Any:
        """Build the part: the class itself."""


class NormPart(Protocol):
    """The norm over h of every branch and before the head: `__init__(context, name)`, and forward(x [.., h]) -> [.., h].

    class Centred(nn.Module):
        @staticmethod
        def specs(model):
            yield ParamSpec("bias", (model.hidden_size,), Init("zeros"), decay=False, grad_is_partial="sequence")

        def __init__(self, context, name):
            super().__init__()
            self.bias = context.parameter(f"{name}.bias")

        def forward(self, x):
            return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) + self.bias.tracked()
    """

    @staticmethod
    def specs(model: "ModelConfig") -> Iterable[ParamSpec]:
        """List the norm's parameters by their names inside it (`bias`)."""

    def __call__(self, context: Any, name: str) -> Any:
        """Build the norm: the class itself."""


class LossPart(Protocol):
    """The loss of each token, on the last stage: a subclass of `triaxis.models.gpt.own_loss.LogitLosses`.

    `logits` is `triaxis.engine.head.vocabulary.VocabularyLogits`: its sums run over the whole vocabulary, which is cut over tp.
    With label smoothing:

        class Smoothed(LogitLosses):
            def of_logits(self, logits, labels):
                mean = logits.sum(logits.columns) / logits.vocab_size
                return logits.log_sum_exp() - 0.9 * logits.at(labels) - 0.1 * mean

    A static method `weights(tokens, labels, counted)`, int64 and bool [b, s] on the CPU, may return weights of at least 0 in place
    of the ones and zeros of `counted`. The trained loss is the sum of weight x loss over the global batch, divided by the sum of
    the weights, which is known before the forward.
    """

    def __call__(self, context: Any) -> Any:
        """Build the loss: the class itself."""


class Schedule(Protocol):
    """The learning rate of a step, after the warm-up of `optimizer.warmup_steps`: a function of tokens alone.

        def one_cycle(consumed_tokens, step_tokens, optimizer, num_tokens):
            place = consumed_tokens / num_tokens                              # of the run
            rise = min(place / 0.3, 1.0)
            fall = max(0.0, (place - 0.3) / 0.7)
            return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * (rise if rise < 1 else (1 + cos(pi * fall)) / 2)

        def range_test(consumed_tokens, step_tokens, optimizer, num_tokens):  # from min_lr to lr, the same factor in every step
            return optimizer.min_lr * (optimizer.lr / optimizer.min_lr) ** (consumed_tokens / (num_tokens - step_tokens))

    Arguments and result are those of `triaxis.engine.optimizer.lr.learning_rate`.
    """

    def __call__(
        self, consumed_tokens: int, step_tokens: int, optimizer: "OptimizerConfig", num_tokens: int
    ) -> float: ...


class UpdatePart(Protocol):
    """The update of each element by its own gradient and state, with `optimizer.name: extension`: a class that is never built.

        class Lion:                                                               # 2302.06675
            moments = ("exp_avg",)

            @staticmethod
            def factors(optimizer, lr, step):
                return [torch.full_like(step, lr)]

            @staticmethod
            def elementwise(master, moments, grad, factors, optimizer, decay):
                (mean,), (lr,) = moments, factors
                direction = torch.sign(mean * optimizer.beta1 + grad * (1 - optimizer.beta1))
                mean = mean * optimizer.beta2 + grad * (1 - optimizer.beta2)
                return master - lr * (direction + decay * master), (mean,)

    Arguments are those of `triaxis.engine.optimizer.updates.Update`. A rank owns a flat part of the parameters, cut anywhere, so an
    element may depend on no other. `step` counts from 1; a factor is the same for all elements with one learning rate.

    Attributes:
        moments: names of the state beside the master, each of the parameter's size, from zero.
    """

    moments: ClassVar[tuple[str, ...]]

    @staticmethod
    def factors(optimizer: "OptimizerConfig", lr: float, step: Any) -> list[Any]: ...

    @staticmethod
    def elementwise(
        master: Any, moments: Any, grad: Any, factors: Any, optimizer: "OptimizerConfig", decay: Any
    ) -> tuple[Any, Any]: ...


class DocumentsPart(Protocol):
    """The documents of a corpus, as lists of token ids by number: the same on every rank, at every call.

    With this as `Extension(corpora={"memmap": Memmap})`, a run reads `data.train=extension:memmap:tokens.npy`:

        class Memmap:
            def __init__(self, path):                                    # the text after the name
                self.tokens = np.load(path, mmap_mode="r")

            def __len__(self):
                return len(self.tokens) // 1024

            def lengths(self):
                return np.full(len(self), 1024)

            def __getitem__(self, number):
                return self.tokens[1024 * number : 1024 * (number + 1)]
    """

    def __len__(self) -> int: ...
    def lengths(self) -> Any:
        """Return the number of tokens of each document, whole numbers [len]."""

    def __getitem__(self, number: int) -> Any:
        """Return the ids of a document, whole numbers [its length]."""


@dataclass(frozen=True, slots=True)
class Extension:
    """The parts that a module of the user's gives; None: ours.

    Attributes:
        attention: of every layer, from a branch's input to its output.
        mlp: of every layer without experts.
        norm: every norm over the hidden size.
        block: a whole layer; a subclass of our `Block` has the extension's attention and MLP.
        loss: of each token.
        schedule: the learning rate behind the warm-up, with `optimizer.lr_schedule: extension`.
        update: the optimizer's rule, with `optimizer.name: extension`.
        meters: what make the measurements of a step, `of` of a `triaxis.engine.telemetry.meters.step_meter.StepMeter`.
        corpora: by name, what opens the documents of `extension:NAME` in `data.train` and `data.valid`.
    """

    attention: LayerPart | None = None
    mlp: LayerPart | None = None
    norm: NormPart | None = None
    block: LayerPart | None = None
    loss: LossPart | None = None
    schedule: Schedule | None = None
    update: type[UpdatePart] | None = None
    meters: Sequence[Callable[[Any], Any]] = ()
    corpora: Mapping[str, Callable[[str], DocumentsPart]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part, given in self.with_parameters().items():
            if not callable(getattr(given, "specs", None)):
                raise TypeError(
                    f"Extension({part}={given!r}): a part is a class with a static method `specs` that lists its parameters"
                )
        for name in ("moments", "factors", "elementwise") if self.update is not None else ():
            if not hasattr(self.update, name):
                raise TypeError(f"Extension(update={self.update!r}): an update rule is a class with {name}")
        moments = [] if self.update is None else list(self.update.moments)
        for name in moments:
            if not re.fullmatch(KIND_PATTERN, name) or moments.count(name) > 1 or name in NOT_MOMENTS:
                raise TypeError(
                    f"Extension(update={self.update!r}): a moment named {name!r}: checkpoints need small letters, each name once, "
                    f"and none of {', '.join(NOT_MOMENTS)}"
                )

    def parts(self) -> dict[str, Any]:
        """Return the given parts by name."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name))}

    def with_parameters(self) -> dict[str, Any]:
        """Return the given parts that list parameters, by name."""
        return {name: given for name, given in self.parts().items() if name in ("attention", "mlp", "norm", "block")}

    @property
    def weigh(self) -> Weigh | None:
        """Return the function that makes weights of the counted labels; None: each counts once."""
        weigh: Weigh | None = getattr(self.loss, "weights", None)
        return weigh


OURS = Extension()
"""No extension: every part is ours."""


class ExtensionConfig(Section):
    """A module of the user's that replaces parts of the model."""

    on_resume = MEANT

    source: Annotated[LocalPath, LAYOUT] = Field(
        min_length=1, description="Python file, folder of a package, or name of a module with an `Extension`"
    )
    digest: str = Field(
        "", description="SHA-256 of the module's .py files, filled in when it is read; other sources are refused"
    )
    moments: Annotated[tuple[str, ...], OnResume("never")] = Field(
        (), description="state of its update rule beside the master, filled in when it is read"
    )

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: object) -> object:
        """Take a source alone, and fill in the digest of sources that can be read."""
        tree = {"source": given} if isinstance(given, str) else given
        if not isinstance(tree, Mapping) or tree.get("digest") or not isinstance(tree.get("source"), str):
            return tree
        try:
            tree = {**tree, "digest": find_sources(tree["source"]).digest()}
            rule = given_by(tree["source"], tree["digest"]).update
            return {**tree, "moments": () if rule is None else rule.moments}
        except UserModuleError:
            return tree  # `extension_problem` says why

    @property
    def lines(self) -> list[str]:
        """Return what it gives, and what no prediction knows of that."""
        rows = [str(self)]
        if self.read().with_parameters():
            rows.append("predicted memory and FLOPs are those of our parts in their place; footprint counts yours")
        return rows

    def __str__(self) -> str:
        given = ", ".join(f"{part} {_name(each)}" for part, each in self.read().parts().items())
        return f"{self.source} ({self.digest[:8]}): {given}"

    def read(self) -> Extension:
        """Return what the module gives; raise UserModuleError as `given_by`."""
        return given_by(self.source, self.digest or find_sources(self.source).digest())


def given_by(source: str, digest: str) -> Extension:
    """Return the extension of a module.

    Raises:
        UserModuleError: it cannot be found, read or run, its sources are others, or it gives no part.
    """
    given = getattr(load(source, digest), NAME, None)
    if not isinstance(given, Extension):
        raise UserModuleError(f"it assigns no Extension to the name `{NAME}`: {NAME} = Extension(mlp=ScaledMLP), say")
    if not given.parts():
        raise UserModuleError(f"its Extension gives no part, so it would have no effect. It may give {_names()}")
    return given


def _name(given: Any) -> str:
    """Return the name of a given part, or the names of several."""
    if isinstance(given, Sequence):
        return " ".join(getattr(each, "__qualname__", type(each).__name__) for each in given)
    return " ".join(given) if isinstance(given, Mapping) else str(given.__name__)


def _names() -> str:
    return ", ".join(one.name for one in fields(Extension))


def placed(section: object, folder: Path) -> object:
    """Return the section that a file of `folder` has, with an absolute path; of changed sources, with the copy that a run keeps."""
    if isinstance(section, dict):
        source, digest = placed(section.get("source"), folder), section.get("digest")
        if isinstance(source, str) and isinstance(digest, str):
            source = available_source(source, digest, folder)
        return {**section, "source": source}
    if isinstance(section, str) and is_path(section):
        with suppress(ValueError):  # of a path that the field refuses
            return os.path.normpath(folder / local_path(section))
    return section


def extension_problem(model: "ModelConfig | None") -> str | None:
    """Return why a model's extension cannot be read. What the model is is then unknown, so no rule can judge it."""
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
    """Yield a problem for the first parameter of each part that no layout could hold, and for one that tp cannot cut."""
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
    """Return what is wrong with a parameter of a part; "": nothing."""
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


def loss_is_the_whole_loss(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each field that only our loss reads."""
    config = subject.config
    if config.model.own.loss is None:
        return
    for key, value, without in (
        ("model.z_loss", config.model.z_loss, 0.0),
        ("recompute.head_tokens", config.recompute.head_tokens, None),
    ):
        if value != without:
            rule = "is read by the engine's own loss, and model.extension gives another one: it would have no effect"
            yield subject.problem(key, rule, {key: [without]})


CHOSEN = (("schedule", "lr_schedule", "cosine"), ("update", "name", "adamw"))
"""What an extension gives to the optimizer, the field that asks for it, and a value without it."""


def chosen_is_given(subject: Subject) -> Iterator[Problem]:
    """Yield a problem where the configuration asks for a schedule or an update of the extension, and there is none."""
    for part, field_name, other in CHOSEN:
        key, chosen = f"optimizer.{field_name}", getattr(subject.config.optimizer, field_name)
        if chosen == "extension" and getattr(subject.config.model.own, part) is None:
            yield subject.problem(
                key, f"needs an Extension({part}=..) in model.extension: there is none", {key: [other]}
            )


def given_is_chosen(subject: Subject) -> Iterator[Problem]:
    """Yield a problem where a run would not use the schedule or update of its extension. Who only reads the model has neither."""
    for part, field_name, _ in CHOSEN:
        key, chosen = f"optimizer.{field_name}", getattr(subject.config.optimizer, field_name)
        if chosen != "extension" and getattr(subject.config.model.own, part) is not None:
            rule = f"is not the {part} of model.extension, which would have no effect"
            yield subject.problem(key, rule, {key: ["extension"]})


def corpora_are_given(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each path of a corpus that the extension does not give."""
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
    loss_is_the_whole_loss,
    chosen_is_given,
    corpora_are_given,
)
