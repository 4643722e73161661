"""What a module of the user's may give in place of ours, as typed protocols.

The module assigns an `Extension` to the name `extension`. A part is one class for two things: `specs` lists its parameters, without
a rank and without torch, and an instance computes. `LayerPart` and `NormPart` say how, docs/extending.md goes through an example.
Whatever reads a model reads the specs of its parts with ours: predictions, initial values, checkpoints, groups, `triaxis verify`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from triaxis.engine.config.optimizer_kinds import EMA, KIND_PATTERN, MASTER
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.layout.shard_spec import ParamSpec

if TYPE_CHECKING:  # the model's section has this one
    from triaxis.engine.config.model import ModelConfig
    from triaxis.engine.config.training import OptimizerConfig
    from triaxis.engine.config.tree import Config

Weigh = Callable[[Any, Any, Any], Any]
"""`LossPart`'s `weights`."""

OWN_CORPUS = "extension:"
"""Beginning of the paths of corpora that an extension gives."""

NOT_MOMENTS = ("start", "gradient", MASTER, EMA, "parameter")
"""Names that a moment cannot have: other tensors of a parameter in checkpoints or in `triaxis verify`, in the order of a step."""


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
class OwnCosts:
    """The difference between a layer with an extension's parts and ours in their place; negative where it takes less.

    `triaxis.launch.footprint.own_costs` measures it in one layout.

    Attributes:
        kept: bytes for each of a rank's tokens (b s / c) that a layer keeps for its backward if nothing is recomputed.
        weights: numbers that a token is multiplied with, as of GEMMs: FLOPs of a layer's forward and backward over 6.
        sent: bytes on the wire over tp for each of a rank's tokens, forward and backward.
        calls: of these, for each microbatch.
        unknown: why nothing could be measured; "": it could.
    """

    kept: Fraction = Fraction(0)
    weights: int = 0
    sent: Fraction = Fraction(0)
    calls: int = 0
    unknown: str = ""

    def __str__(self) -> str:
        if self.unknown:
            return (
                "predicted memory and FLOPs are those of our parts in their place, since yours do not run without data: "
                f"{self.unknown}. Extension(costs=..) may give them"
            )
        found = [
            f"{float(self.kept):+,.6g} B kept per token of a rank" if self.kept else "",
            f"{6 * self.weights:+,} FLOPs per token" if self.weights else "",
            f"{float(self.sent):+,.6g} B over tp per token of a rank, in {self.calls:+} calls" if self.sent else "",
        ]
        return f"a layer against one of ours, measured: {', '.join(filter(None, found))}"


NO_COSTS = OwnCosts()
"""Nothing was measured, or it is as ours."""

Measure = Callable[["Config", ParallelSizes], OwnCosts]
"""Measures the costs of an extension's parts in a layout."""


def as_ours(config: "Config", sizes: ParallelSizes) -> OwnCosts:
    """Take parts of an extension for ours."""
    return NO_COSTS


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
        costs: gives the costs of its parts in a layout, where they cannot be measured.
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
    costs: Callable[["Config", ParallelSizes], OwnCosts] | None = None
    meters: Sequence[Callable[[Any], Any]] = ()
    corpora: Mapping[str, Callable[[str], DocumentsPart]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part, given in self.with_parameters().items():
            if not callable(getattr(given, "specs", None)):
                raise TypeError(
                    f"Extension({part}={given!r}): a part is a class with a static method `specs` that lists its parameters"
                )
        if self.costs is not None and not self.with_parameters():
            raise TypeError(
                "Extension(costs=..) without a part of a layer: what ours cost is known, so it would have no effect"
            )
        if hasattr(self.loss, "specs"):
            raise TypeError(f"Extension(loss={self.loss!r}): a loss has no parameters, so `specs` would have no effect")
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
