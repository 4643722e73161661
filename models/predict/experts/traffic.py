"""Calls and bytes of one layer with experts in a training step, counted from the configuration alone.

This is a part of the expected side of the ledger (`models/predict/traffic.py`), written without looking at the engine. A rank has
T = b s / (c t) tokens, of k experts each out of E, and n = e x etp ranks share a set of experts. An element has w bytes in the
run's dtype, and a in the accumulation dtype. Per microbatch:

    all_gather   forward    gathers of [T, k] int64, [T, h] w and [T, k] a; a reduce-scatter of [n T, h] w
                 backward   a gather of [T, h] w; reduce-scatters of [n T, h] w and [n T, k] a
    all_to_all   forward    an exchange of counts [E etp] int64; S rows to other ranks of h w + a, and R rows back of h w
                 backward   S rows of h w, and R rows back of h w + a
    sequence loss           a sum of [b, E] a over the cp x tp ranks of a sample
    no SP, t > 1            a gather of [T, h] w over tp forward, and one backward: layers with experts cut the tokens

Recomputing the layer repeats what its forward sends; the choice of experts is remembered, and so are the fractions of the loss.

S and R follow from the choices. Where all experts get equally many, S = R = etp k T (n - 1) / n.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triaxis.engine.comm.ledger import EXPERTS
from triaxis.engine.config.moe import MoEConfig, dispatch_of
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.terms import tokens_of_microbatch

Choices = Mapping[int, Sequence[Sequence[int]]]
"""Of each layer with experts, by its number: for each rank that shares the experts, how often its tokens chose each of the E."""

INDEX_BYTES = 8
FORWARD, BACKWARD, COUNTS, CHOICE = (f"{EXPERTS} {name}" for name in ("forward", "backward", "counts", "choice"))
FRACTIONS = "fractions"
TOKENS = "tokens"
"""Of what a layer without sequence parallelism gathers over tp, because it has cut the tokens."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Equal calls, and the bytes of each as the ledger counts them."""

    axis: str
    purpose: str
    op: str
    num_bytes: int
    calls: int


class Passes(NamedTuple):
    """Microbatches of a step that go through a layer: forward, back, and forward once more in its backward."""

    forward: int
    backward: int
    again: int


ONCE = Passes(1, 1, 0)
"""A microbatch, forward and back."""


def expert_calls(config: Config, sizes: ParallelSizes, passes: Passes, element: int) -> Iterator[Calls]:
    """Yield the calls of one layer in a step whose sizes do not depend on the choices.

    Args:
        passes: of the layer.
        element: bytes of an element of the run's dtype.
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
    """Yield (purpose, calls, bytes to other ranks in all of them) of what one layer with all_to_all sends in a step.

    Args:
        member: place of the rank among those that share its experts.
        chosen: how often the tokens of each member chose each expert in the whole step; None: equally often.
        passes, element: as of `expert_calls`.
    """
    at = _Sizes.of(config, sizes, element)
    sent, received = rows_between(at.moe, sizes, member, chosen, passes.forward * at.tokens)
    # The choice of a microbatch is the same in all of its passes.
    times, times_back = (count // passes.forward for count in (passes.forward + passes.again, passes.backward))
    there, back = sent * (at.row + at.wide) + received * at.row, sent * at.row + received * (at.row + at.wide)
    yield FORWARD, 3 * passes.forward * times, there * times
    yield BACKWARD, 3 * passes.forward * times_back, back * times_back


class _Sizes(NamedTuple):
    """Tokens of one rank in a microbatch, bytes of the row of one, and of an element of the accumulation dtype."""

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
    """Return the rows that a rank sends to other ranks for `tokens` of its tokens, and those that it gets from them.

    Arguments otherwise as of `row_calls`; each expert is on etp ranks, which all get its rows.
    """
    num_ranks = sizes.ep * sizes.etp
    if chosen is None:
        rows = sizes.etp * moe.top_k * tokens * (num_ranks - 1) // num_ranks
        return rows, rows
    num_local = moe.num_experts // sizes.ep
    first = member // sizes.etp * num_local
    mine = [sum(counts[first : first + num_local]) for counts in chosen]
    return sizes.etp * sum(chosen[member]) - mine[member], sum(mine) - mine[member]
