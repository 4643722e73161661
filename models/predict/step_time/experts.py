"""Work of a layer's routed experts on a microbatch, and the traffic that dispatch adds.

A microbatch has b samples of s tokens, each h wide, on c context- and t tensor-parallel ranks. So a rank has T = b s / (c t)
tokens, each sent to k of E experts. The rank has E / e of the experts (e = ep), each f = ffn_hidden_size / etp wide there. All of
them together get R = load x etp k T rows:

    router    [T, h] x [h, E] in fp32; if the device's file has no fp32 rate, its rate for the run's dtype is used, so the predicted
              time is too short
    experts   E / e products [R e / E, h] x [h, f or 2 f], and as many [R e / E, f] x [f, h]
    memory    rows are copied from tokens, and results are added to tokens; an all_gather's buffer counts whole, used or not
    wires     traffic as in `models/predict/experts/traffic.py`; no computation is assumed to run at the same time

`load` is the slowest rank's rows over the mean rank's: 1 if all ranks have equally many.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from triaxis.engine.config.quantities.expert_rows import buffer_rows, dispatch_of, local_tokens
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.experts.traffic import BACKWARD, ONCE, Calls, expert_calls, row_calls
from triaxis.models.predict.layer_calls import wire_bytes
from triaxis.models.predict.step_time.links import Wire
from triaxis.models.predict.terms import BYTES_PER_ELEMENT, accumulation_bytes


@dataclass(frozen=True, slots=True)
class GroupedGemm:
    """A forward call that computes `count` products [m, k] x [k, n]."""

    m: float
    n: int
    k: int
    count: int

    @property
    def flops(self) -> float:
        return 2 * self.m * self.n * self.k * self.count


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """Work of one layer's routed experts.

    Attributes:
        router: the router's product.
        up, down: all local experts' products.
        moved_bytes: bytes that a forward reads and writes besides the products; a backward moves twice as many.
        activated_bytes: the activation's part of `moved_bytes`, which recomputation repeats.
        forward, backward: traffic of each pass between the ranks that share experts.
        cut: traffic of each pass over tp, if sequence parallelism is off: the layer then slices the tokens and gathers results.
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
    """Count the work of one layer's routed experts on a microbatch. `load`: the slowest rank's rows over the mean rank's."""
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
        # Rows are copied into send order, and into expert order.
        copied, sums = 2 * rows, tokens
    activated = w * (inputs + 1) * f * rows
    # Rows are read and written each way, output sums too in the accumulation dtype. Logits are read three times.
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
    """Sum the calls' bytes on the wire and count the calls, for an axis with `size` ranks; nothing for one rank."""
    total = Wire()
    for call in calls if size > 1 else ():
        total += Wire(call.calls * wire_bytes(call.op, size, call.num_bytes), call.calls)
    return total
