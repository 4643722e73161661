"""Counted work of a layer's routed experts on a microbatch, and what dispatch sends for it.

A rank has T = b s / (c t) tokens of k experts each, and R rows of its E / e experts, f = ffn_hidden_size / etp wide on it:

    router    [T, h] x [h, E] in the accumulation dtype; where the device's file has no rate for it, at the run's, which is too fast
    experts   E / e products of [R e / E, h] x [h, (1 or 2) f], and of [R e / E, f] x [f, h]: R = load x etp k T
    memory    rows are copied from tokens and added to them; an all_gather's buffer has a fixed number of rows, used or not
    wires     as in `models/predict/experts/traffic.py`; nothing is assumed to run beside them

`load` is the imbalance of the slowest rank's experts: its rows over the mean, 1 where all ranks have as many.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from triaxis.engine.config.moe import buffer_rows, dispatch_of, local_tokens
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.experts.traffic import BACKWARD, ONCE, Calls, expert_calls, row_calls
from triaxis.models.predict.step_time.links import Wire
from triaxis.models.predict.terms import BYTES_PER_ELEMENT, accumulation_bytes
from triaxis.models.predict.traffic import wire_bytes


@dataclass(frozen=True, slots=True)
class GroupedGemm:
    """`count` products [m, k] x [k, n] of the forward in one call."""

    m: float
    n: int
    k: int
    count: int

    @property
    def flops(self) -> float:
        return 2 * self.m * self.n * self.k * self.count


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """The work of the routed experts of one layer.

    Attributes:
        router: its product.
        up, down: products of all local experts.
        moved_bytes: read and written in a forward besides the products; a backward moves twice as many.
        activated_bytes: of these, those of the activation, which recomputation repeats.
        forward, backward: on the wires between the ranks that share experts.
        cut: on the wires over tp in each pass, where tokens are cut without sequence parallelism.
    """

    router: GroupedGemm
    up: GroupedGemm
    down: GroupedGemm
    moved_bytes: float
    activated_bytes: float
    forward: Wire
    backward: Wire
    cut: Wire


def expert_work(config: Config, sizes: ParallelSizes, load: float) -> ExpertWork:
    """Count the work of a layer with experts."""
    model, moe = config.model, config.model.moe
    assert moe is not None, "a model with experts says which"
    w = BYTES_PER_ELEMENT[config.precision.dtype]
    wide, tokens, h = accumulation_bytes(w), local_tokens(config), model.hidden_size
    num_local, f = moe.num_experts // sizes.ep, moe.ffn_hidden_size // sizes.etp
    rows, inputs = load * sizes.etp * moe.top_k * tokens, model.activation_kind.num_inputs
    if dispatch_of(config) == "all_gather":
        copied: float = buffer_rows(moe, tokens, sizes.ep, sizes.etp)
        sums = sizes.expert_ranks * tokens
    else:
        # Into the order of sending, and into that of the experts.
        copied, sums = 2 * rows, tokens
    activated = w * (inputs + 1) * f * rows
    # Rows are read and written, each way; sums of outputs are read and written in the accumulation dtype; logits are read thrice.
    moved = 2 * w * copied * h + wide * (copied + 2 * sums) * h + activated + 2 * w * f * rows
    moved += 3 * wide * tokens * moe.num_experts
    calls = list(expert_calls(config, sizes, ONCE, w))
    forward = [call for call in calls if call.axis == "experts" and call.purpose != BACKWARD]
    backward = [call for call in calls if call.axis == "experts" and call.purpose == BACKWARD]
    wires = [_wire(part, sizes.expert_ranks) for part in (forward, backward)]
    if dispatch_of(config) == "all_to_all":
        for place, (_, count, num_bytes) in enumerate(row_calls(config, sizes, 0, None, ONCE, w)):
            wires[place] += Wire(num_bytes * load, count) if sizes.expert_ranks > 1 else Wire()
    cut = _wire([call for call in calls if call.axis == "tp"], sizes.tp)
    return ExpertWork(
        router=GroupedGemm(tokens, moe.num_experts, h, 1),
        up=GroupedGemm(rows / num_local, inputs * f, h, num_local),
        down=GroupedGemm(rows / num_local, h, f, num_local),
        moved_bytes=moved,
        activated_bytes=activated,
        forward=wires[0],
        backward=wires[1],
        cut=cut.times(0.5),
    )


def _wire(calls: Iterable[Calls], size: int) -> Wire:
    """Add up calls on an axis of so many ranks."""
    total = Wire()
    for call in calls if size > 1 else ():
        total += Wire(call.calls * wire_bytes(call.op, size, call.num_bytes), call.calls)
    return total
