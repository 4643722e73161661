"""Typed protocols for the parts that a user's module may provide in place of the built-in ones.

The module assigns an `Extension` to the name `extension`. A part is one class with two jobs: its `specs` lists the parameters,
without a rank and without torch, and an instance computes. `LayerPart` and `NormPart` define the interface; docs/extending.md walks
through an example. All users of parameter specs (predictions, initial values, checkpoints, groups, `triaxis verify`) get a part's
specs together with the built-in ones.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from triaxis.engine.config.values.optimizer_kinds import EMA, KIND_PATTERN, MASTER
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.layout.shard_spec import ParamSpec

if TYPE_CHECKING:  # engine/config/schema/model.py imports this module
    from triaxis.engine.config.schema.model import ModelConfig
    from triaxis.engine.config.schema.training import OptimizerConfig

Weigh = Callable[[Any, Any, Any], Any]
"""Type of the function `weights` that a `LossPart` may have."""

OWN_CORPUS = "extension:"
"""Prefix of corpus paths that an extension opens."""

NOT_MOMENTS = ("start", "gradient", MASTER, EMA, "parameter")
"""Names that a moment cannot have, because checkpoints or `triaxis verify` use them for a parameter's other tensors.

They are in the order in which a step computes those tensors."""


class LayerPart(Protocol):
    """A layer's attention, its MLP or the whole layer, as a `torch.nn.Module` subclass.

    `context` is `triaxis.models.gpt.context.BuildContext`, `name` the part's name (`layers.3.mlp`). Hidden states x are [s/t, b, h]
    with sequence parallelism, else [s, b, h]. Each kind of part has these signatures, and may subclass the built-in class at the
    right.

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
        """Build the part; since an extension gives the class itself, this is its constructor."""


class NormPart(Protocol):
    """The norm over h, used on every branch and before the head: `__init__(context, name)`, forward(x [.., h]) -> [.., h].

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
        """Build the norm; since an extension gives the class itself, this is its constructor."""


class LossPart(Protocol):
    """Each token's loss, on the last stage: a subclass of `triaxis.models.gpt.own_loss.LogitLosses`.

    `logits` is `triaxis.engine.head.vocabulary.VocabularyLogits`: its sums run over the whole vocabulary, which is cut over tp.
    With label smoothing:

        class Smoothed(LogitLosses):
            def of_logits(self, logits, labels):
                mean = logits.sum(logits.columns) / logits.vocab_size
                return logits.log_sum_exp() - 0.9 * logits.at(labels) - 0.1 * mean

    An optional static method `weights(tokens, labels, counted)` gets int64 tokens and labels and bool `counted`, each [b, s] on the
    CPU. It returns nonnegative weights that replace the ones and zeros in `counted`. The trained loss is sum(weight x loss) /
    sum(weight) over the global batch. The weight sum is known before the forward.
    """

    def __call__(self, context: Any) -> Any:
        """Build the loss; since an extension gives the class itself, this is its constructor."""


class Schedule(Protocol):
    """A step's learning rate after the warm-up (`optimizer.warmup_steps` or `warmup_tokens`), as a function of tokens alone.

        def one_cycle(consumed_tokens, step_tokens, optimizer, num_tokens):
            place = consumed_tokens / num_tokens                              # of the run
            rise = min(place / 0.3, 1.0)
            fall = max(0.0, (place - 0.3) / 0.7)
            return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * (rise if rise < 1 else (1 + cos(pi * fall)) / 2)

        def range_test(consumed_tokens, step_tokens, optimizer, num_tokens):  # from min_lr to lr, the same factor in every step
            return optimizer.min_lr * (optimizer.lr / optimizer.min_lr) ** (consumed_tokens / (num_tokens - step_tokens))

    Arguments and result are as in `triaxis.engine.optimizer.lr.learning_rate`.
    """

    def __call__(
        self, consumed_tokens: int, step_tokens: int, optimizer: "OptimizerConfig", num_tokens: int
    ) -> float: ...


class UpdatePart(Protocol):
    """An elementwise update rule, used if `optimizer.name` is `extension`; the class is never instantiated.

        class Lion:                                                               # 2302.06675
            moments = ("exp_avg",)

            @staticmethod
            def factors(optimizer, lr, step):
                return [lr]

            @staticmethod
            def elementwise(master, moments, grad, factors, optimizer, decay):
                (mean,), (lr,) = moments, factors
                direction = torch.sign(mean * optimizer.beta1 + grad * (1 - optimizer.beta1))
                mean = mean * optimizer.beta2 + grad * (1 - optimizer.beta2)
                return master - lr * (direction + decay * master), (mean,)

    Arguments are as in `triaxis.engine.optimizer.updates.Update`. A rank owns a flat part of the parameters, cut anywhere, so
    elements must not depend on each other.

    Attributes:
        moments: names of the state tensors besides the master; each has the parameter's size and starts at zero.
    """

    moments: ClassVar[tuple[str, ...]]

    @staticmethod
    def factors(optimizer: "OptimizerConfig", lr: Any, step: Any) -> list[Any]: ...

    @staticmethod
    def elementwise(
        master: Any, moments: Any, grad: Any, factors: Any, optimizer: "OptimizerConfig", decay: Any
    ) -> tuple[Any, Any]: ...


class DocumentsPart(Protocol):
    """A corpus: each document's token ids, by the document's index. They must be the same on every rank and at every call.

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
        """Count each document's tokens, whole numbers [len]."""

    def __getitem__(self, number: int) -> Any:
        """Read one document's token ids, whole numbers [its length]."""


@dataclass(frozen=True, slots=True)
class OwnMessages:
    """Extra calls in one pass of a layer with an extension's parts, of one kind; negative where it posts fewer than a built-in one.

    Attributes:
        axis, purpose, op: the calls' labels in the communication ledger, with purposes as in `models.predict.traffic`.
        in_backward: the calls are posted in the backward; otherwise in the forward, and again if the layer is recomputed.
        calls: number of calls per layer and microbatch.
        sent: bytes that they send, per token of a rank.
    """

    axis: str
    purpose: str
    op: str
    in_backward: bool
    calls: int
    sent: Fraction


@dataclass(frozen=True, slots=True)
class OwnCosts:
    """The extra cost of a layer with an extension's parts over a built-in layer; negative if it costs less.

    `triaxis.launch.footprint.own_costs` measures it in one layout.

    Attributes:
        kept: bytes that a layer keeps for its backward, per token of a rank (b s / c tokens), if nothing is recomputed.
        weights: number of weights that each token is multiplied with in GEMMs: a layer's forward and backward FLOPs per token / 6.
        sent: bytes that a layer sends over tp in forward and backward, per token of a rank.
        calls: number of collectives over tp that send these bytes, per layer and microbatch.
        messages: all extra calls over tp and cp by kind, as measured; empty if a function of the extension gave the costs.
        unknown: reason why nothing could be measured; "" if the costs were measured.
    """

    kept: Fraction = Fraction(0)
    weights: int = 0
    sent: Fraction = Fraction(0)
    calls: int = 0
    messages: tuple[OwnMessages, ...] = ()
    unknown: str = ""

    @property
    def sent_over_cp(self) -> Fraction:
        """Bytes that a layer sends over cp in forward and backward, per token of a rank."""
        return sum((one.sent for one in self.messages if one.axis == "cp"), Fraction(0))

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
            f"{float(self.sent_over_cp):+,.6g} B over cp per token of a rank" if self.sent_over_cp else "",
        ]
        return f"a layer against one of ours, measured: {', '.join(filter(None, found))}"


NO_COSTS = OwnCosts()
"""No extra cost: nothing was measured yet, or the parts cost as much as the built-in ones."""


@dataclass(frozen=True, slots=True)
class Extension:
    """The parts that a user's module provides; for a part that is None, the built-in one is used.

    Attributes:
        attention: every layer's attention, from a branch's input to its output.
        mlp: MLP in every layer without experts.
        norm: every norm over the hidden size.
        block: a whole layer; a subclass of the built-in `Block` uses the extension's attention and MLP.
        loss: loss per token.
        schedule: learning rate after the warm-up, with `optimizer.lr_schedule: extension`.
        update: update rule, with `optimizer.name: extension`.
        costs: function of (`Config`, sizes) that gives the parts' costs; it replaces the measurement, which not all parts allow.
        meters: functions that build a step meter, each like `triaxis.engine.telemetry.meters.step_meter.StepMeter.of`.
        corpora: functions that open a corpus, by the NAME in its path `extension:NAME` (`data.train`, `data.valid`).
    """

    attention: LayerPart | None = None
    mlp: LayerPart | None = None
    norm: NormPart | None = None
    block: LayerPart | None = None
    loss: LossPart | None = None
    schedule: Schedule | None = None
    update: type[UpdatePart] | None = None
    costs: Callable[[Any, ParallelSizes], OwnCosts] | None = None
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
        """Collect the given parts by name."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name))}

    def with_parameters(self) -> dict[str, Any]:
        """Collect the given parts that list parameters, by name."""
        return {name: given for name, given in self.parts().items() if name in ("attention", "mlp", "norm", "block")}

    @property
    def weigh(self) -> Weigh | None:
        """The loss's function `weights`, which weighs labels; None: each counted label has weight 1."""
        weigh: Weigh | None = getattr(self.loss, "weights", None)
        return weigh


OURS = Extension()
"""No extension: every part is built in."""
