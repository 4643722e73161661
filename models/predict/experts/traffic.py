"""Calls and bytes that one expert layer sends in a training step, counted from the configuration alone.

`models/predict/traffic.py` adds these calls to those that a run's communication ledger is compared with. The formulas are derived
from the configuration, not from the engine's code. A microbatch has b samples of s tokens, each h wide, divided over c context-
and t tensor-parallel ranks, so a rank has T = b s / (c t) tokens. Each token goes to k of E experts, and n = e x etp ranks share
a set of experts (e = ep). An element has w bytes in the run's dtype, and a bytes in the accumulation dtype. A rank's calls per
microbatch, with the shapes and bytes per element that they send:

    all_gather   forward    gathers of [T, k] int64, [T, h] w and [T, k] a; a reduce-scatter of [n T, h] w
                 backward   a gather of [T, h] w; reduce-scatters of [n T, h] w and [n T, k] a
    all_to_all   forward    an exchange of counts [E etp] int64; S rows of h w + a bytes out, and R rows of h w bytes back
                 backward   S rows of h w bytes out, and R rows of h w + a bytes back
    sequence loss           a sum of [b, E] a over the cp x tp ranks of a sample
    no SP, t > 1            in each pass, a gather of [T, h] w over tp, since an expert layer slices the tokens

Recomputing the layer repeats all that its forward sends except the sum for the sequence loss, whose fractions are remembered.

S and R are the rows that a rank sends to and gets from other ranks, and follow from the expert choices. If all experts get equally
many rows, S = R = etp k T (n - 1) / n.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triaxis.engine.comm.ledger import EXPERTS
from triaxis.engine.config.quantities.expert_rows import dispatch_of
from triaxis.engine.config.schema.moe import MoEConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.terms import tokens_of_microbatch

Choices = Mapping[int, Sequence[Sequence[int]]]
"""Expert choices by layer index: for each rank that shares the experts, how often its tokens chose each of the E experts."""

INDEX_BYTES = 8
FORWARD, BACKWARD, COUNTS, CHOICE = (f"{EXPERTS} {name}" for name in ("forward", "backward", "counts", "choice"))
FRACTIONS = "fractions"
TOKENS = "tokens"
"""Purpose of an expert layer's gathers over tp, where it has sliced the tokens because sequence parallelism is off."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls that are alike.

    Attributes:
        axis, purpose, op: the calls' labels in the communication ledger (`engine/comm/ledger.py`).
        num_bytes: bytes that the ledger counts for each call.
        calls: number of calls.
    """

    axis: str
    purpose: str
    op: str
    num_bytes: int
    calls: int


class Passes(NamedTuple):
    """How many of a step's microbatches go through a layer forward, backward, and forward again to be recomputed."""

    forward: int
    backward: int
    again: int


ONCE = Passes(1, 1, 0)
"""One microbatch, forward and backward."""


def expert_calls(config: Config, sizes: ParallelSizes, passes: Passes, element: int) -> Iterator[Calls]:
    """Yield those calls of one layer in a step whose sizes do not depend on the expert choices.

    Args:
        passes: the layer's passes in the step.
        element: bytes per element in the run's dtype.
    """
    at = _Sizes.of(config, sizes, element)
    moe, num_ranks = at.moe, sizes.ep * sizes.etp
    forwards, backwards = passes.forward + passes.again, passes.backward
    if moe.balance.sequence_loss:
        fractions = config.train.micro_batch_size * moe.num_experts * at.wide
        yield Calls("sample", FRACTIONS, "all_reduce", fractions, passes.forward)
    if sizes.tp > 1 and not config.parallel.sequence_parallel:
        yield Calls("tp", TOKENS, "all_gather", at.tokens * at.row, forwards + backwards)
    if dispatch_of(config) == "all_to_all":
        yield Calls("experts", COUNTS, "all_to_all", sizes.etp * moe.num_experts * INDEX_BYTES, forwards)
        return
    tokens, slots = at.tokens * at.row, at.tokens * moe.top_k
    yield Calls("experts", CHOICE, "all_gather", slots * INDEX_BYTES, forwards)
    yield Calls("experts", FORWARD, "all_gather", tokens, forwards)
    yield Calls("experts", FORWARD, "all_gather", slots * at.wide, forwards)
    yield Calls("experts", FORWARD, "reduce_scatter", num_ranks * tokens, forwards)
    yield Calls("experts", BACKWARD, "all_gather", tokens, backwards)
    yield Calls("experts", BACKWARD, "reduce_scatter", num_ranks * tokens, backwards)
    yield Calls("experts", BACKWARD, "reduce_scatter", num_ranks * slots * at.wide, backwards)


def row_calls(
    config: Config,
    sizes: ParallelSizes,
    member: int,
    chosen: Sequence[Sequence[int]] | None,
    passes: Passes,
    element: int,
) -> Iterator[tuple[str, int, int]]:
    """Yield the calls whose sizes depend on the expert choices, for one all_to_all layer in a step.

    Each item is (purpose, number of calls, bytes that these calls together send to other ranks).

    Args:
        member: index of the rank among the ranks that share its experts.
        chosen: number of tokens in the whole step that chose an expert, by member and expert; None: equally many for each.
        passes, element: the same as in `expert_calls`.
    """
    at = _Sizes.of(config, sizes, element)
    sent, received = rows_between(at.moe, sizes, member, chosen, passes.forward * at.tokens)
    # A microbatch's choice is the same in all its passes.
    times, times_back = (count // passes.forward for count in (passes.forward + passes.again, passes.backward))
    there, back = sent * (at.row + at.wide) + received * at.row, sent * at.row + received * (at.row + at.wide)
    yield FORWARD, 3 * passes.forward * times, there * times
    yield BACKWARD, 3 * passes.forward * times_back, back * times_back


class _Sizes(NamedTuple):
    """A rank's tokens in a microbatch, the bytes of a token's row, and the bytes per element in the accumulation dtype."""

    moe: MoEConfig
    tokens: int
    row: int
    wide: int

    @classmethod
    def of(cls, config: Config, sizes: ParallelSizes, element: int) -> "_Sizes":
        moe = config.model.moe
        assert moe is not None, "a model with experts says which"
        tokens = tokens_of_microbatch(config) // sizes.tp
        return cls(moe, tokens, config.model.hidden_size * element, max(4, element))


def rows_between(
    moe: MoEConfig, sizes: ParallelSizes, member: int, chosen: Sequence[Sequence[int]] | None, tokens: int
) -> tuple[int, int]:
    """Count the rows (sent to, received from) other ranks. Each expert is cut over etp ranks, which all get its rows.

    Args:
        member, chosen: the same as in `row_calls`.
        tokens: number of the rank's own tokens; read only if `chosen` is None.
    """
    num_ranks = sizes.ep * sizes.etp
    if chosen is None:
        rows = sizes.etp * moe.top_k * tokens * (num_ranks - 1) // num_ranks
        return rows, rows
    num_local = moe.num_experts // sizes.ep
    first = member // sizes.etp * num_local
    mine = [sum(counts[first : first + num_local]) for counts in chosen]
    return sizes.etp * sum(chosen[member]) - mine[member], sum(mine) - mine[member]
