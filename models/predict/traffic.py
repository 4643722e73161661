"""Count the calls and bytes that a rank sends in one training step, from the configuration alone.

`triaxis footprint` compares them with the engine's communication ledger. So the formulas come from the papers (2104.04473 section
3.2, 2205.05198 section 4.2.2, 1910.02054 section 7), not from the engine's code. With N bytes in the whole tensor and n ranks, a
ring sends per rank: all-reduce 2 (n-1)/n N; all-gather, reduce-scatter and all-to-all (n-1)/n N. A send costs its bytes.

A microbatch has b samples of s tokens, each h wide, with w bytes per element. The right column lists a layer's calls per
microbatch; "recomputed" applies if the whole layer is recomputed:

    layer, no SP      over tp: 2 all-reduces forward, 2 backward (2 more recomputed), each of w b s h bytes
    layer, SP         over tp: 2 all-gathers and 2 reduce-scatters in each pass (2 and 2 more recomputed); 2 all-gathers of inputs
                      in the backward unless `recompute.gathered_inputs` is keep; 2 all-gathers with deferred weight gradients
    layer, latents    attention's input is sent in two calls instead of one of width h: the queries' latent (or x), r_q wide, and
                      the key/value latent with the rotated key, r_kv + dr wide; the backward does not gather the second again
    layer, QK-norm    over all heads: an all-reduce of [s, b, 2] squares in the accumulation dtype forward, and one backward
    layer, cp         all_gather: a gather of k and v forward (1 more recomputed), one backward unless `recompute.gathered_kv` is
                      keep, and a reduce-scatter of their gradients; each in pieces of some heads
                      latents: a gather forward (1 more recomputed), a reduce-scatter of gradients; r_kv + dr elements per token
                      ulysses: an all-to-all of q, k and v and one of the output, in each pass (2 more recomputed)
    FP8               with one scale per tensor, all-reduces of a tensor's largest magnitude, 4 bytes: for a product's input and
                      its output's gradient over cp, and over tp if the tensor is cut there, never repeated by recomputation; for
                      a weight over tp, once a step. With `precision.fp8.gather` = fp8, linear layers gather 1 byte per element
    MTP layer         a layer's calls, and the embedding's and head's once more; one more number in each of the step's two
                      all-reduces over the world (the counted labels, and the numbers on which all ranks agree)
    frozen            gradients as for other parameters; no all-gather, since frozen parameters do not change
    layer, experts    an MLP's calls only for shared experts, and the calls in `models/predict/experts/traffic.py`
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from triaxis.engine.comm.agreement import NUM_NUMBERS
from triaxis.engine.comm.ledger import (
    CROSS_ENTROPY,
    EXPERTS,
    FP8_SCALES,
    HEADS,
    KEYS_AND_VALUES,
    LABELS,
    QK_NORM,
    REPLICA_GRADIENTS,
    Event,
)
from triaxis.engine.config.quantities.expert_rows import dispatch_of
from triaxis.engine.config.quantities.fp8_layers import fp8_layers
from triaxis.engine.config.quantities.head_pieces import head_tokens
from triaxis.engine.config.quantities.layer_products import layer_products
from triaxis.engine.config.quantities.plan import batch_plan, local_seq_length, part_length
from triaxis.engine.config.quantities.state_plan import ITEMSIZE, layout_of, main_grad_dtype
from triaxis.engine.config.schema.fp8 import BLOCKS
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.gather_order import GatherOrder
from triaxis.engine.layout.param_layout import BufferLayout
from triaxis.engine.layout.rank_grid import Coordinates, ParallelSizes
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Kind
from triaxis.models.predict.experts.traffic import TOKENS, Choices, Passes, expert_calls, row_calls
from triaxis.models.predict.layer_calls import context_parallel_calls, tensor_parallel_calls, wire_bytes
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.predict.state_memory import held_records
from triaxis.models.predict.terms import (
    BYTES_PER_ELEMENT,
    accumulation_bytes,
    recomputed_layers,
    tokens_of_microbatch,
)
from triaxis.models.specs import HEAD, WORD_EMBEDDING, StageContents

COUNT_BYTES = 8
"""Bytes of a count of choices."""

HAND_OVER = "hand-over"
"""All messages between stages: activations, and their gradients."""


@dataclass(frozen=True, slots=True, order=True)
class Flow:
    """A key for calls that are counted together: their axis, purpose and operation, as in the communication ledger."""

    axis: str
    purpose: str
    op: str


@dataclass(frozen=True, slots=True)
class Volume:
    """Number of calls, and the bytes that one rank sends in them."""

    calls: int
    wire_bytes: int


class _Tally:
    def __init__(self) -> None:
        self.calls: Counter[Flow] = Counter()
        self.bytes: Counter[Flow] = Counter()

    def add(self, axis: str, purpose: str, op: str, size: int, num_bytes: int, calls: int = 1) -> None:
        """Add `calls` calls, each with `num_bytes` in the ledger (see `wire_bytes`); an axis with one rank adds nothing."""
        if size > 1 and calls > 0:
            flow = Flow(axis, purpose, op)
            self.calls[flow] += calls
            self.bytes[flow] += calls * wire_bytes(op, size, num_bytes)

    def add_uneven(self, axis: str, purpose: str, op: str, size: int, num_bytes: int, calls: int) -> None:
        """Add `calls` calls in which the rank sends `num_bytes` in total; an axis with one rank adds nothing."""
        if size > 1:
            flow = Flow(axis, purpose, op)
            self.calls[flow] += calls
            self.bytes[flow] += num_bytes

    def volumes(self) -> dict[Flow, Volume]:
        return {flow: Volume(self.calls[flow], self.bytes[flow]) for flow in sorted(self.calls) if self.calls[flow]}


def expected_traffic(
    config: Config,
    sizes: ParallelSizes,
    at: Coordinates,
    stages: Sequence[StageContents],
    choices: Choices | None = None,
) -> dict[Flow, Volume]:
    """Compute the traffic of one training step on the rank at these coordinates.

    Args:
        at: the rank's index on each axis.
        stages: contents of all pipeline stages, in order. The rank holds every `sizes.pp`-th of them; in a V-shaped schedule, the
            stages at distance `at.pp` from both ends.
        choices: the step's expert choices, on which all-to-all dispatch depends; None: all experts get equally many tokens.
    """
    config = resolve_recompute(config, sizes)
    tally = _Tally()
    num_stages = len(stages)
    mine = [at.pp, num_stages - 1 - at.pp] if sizes.is_v else range(at.pp, num_stages, sizes.pp)
    for stage in mine:
        _tensor_parallel(tally, config, sizes, stage, stages[stage])
        _context_parallel(tally, config, sizes, stages[stage])
        _fp8_scales(tally, config, sizes, stages[stage])
        _own_messages(tally, config, stages[stage], batch_plan(config, sizes.dp).num_microbatches)
        _pipeline(tally, config, sizes, stage, num_stages)
        _experts(tally, config, sizes, at, stages[stage], choices)
    _data_parallel(tally, config, sizes, at, [stages[stage] for stage in mine])
    ahead = config.model.num_mtp_layers
    for purpose, numbers in ((LABELS, 1 + ahead), ("step", NUM_NUMBERS + ahead)):
        tally.add("world", purpose, "all_reduce", sizes.world_size, numbers * BYTES_PER_ELEMENT["float64"])
    if config.model.moe is not None:
        load = len(config.model.expert_layers) * config.model.moe.num_experts * COUNT_BYTES
        tally.add("world", f"{EXPERTS} load", "all_reduce", sizes.world_size, load)
    return tally.volumes()


def _activation_bytes(config: Config, seq_length: int) -> int:
    element = BYTES_PER_ELEMENT[config.precision.dtype]
    return element * config.train.micro_batch_size * seq_length * config.model.hidden_size


def _deferred_microbatches(config: Config, sizes: ParallelSizes, stage: int) -> int:
    """Count a step's microbatches with deferred weight gradients on a stage: all or none, unless a file gives the schedule."""
    if config.schedule.file is None:
        return batch_plan(config, sizes.dp).num_microbatches * config.schedule.defers_weight_gradients
    schedule = schedules.of_step(config, sizes)
    placement = schedule.placement
    row, chunk = schedule.actions[placement.rank_of(stage)], placement.chunk_of(stage)
    return sum(action.kind is Kind.W and action.chunk == chunk for action in row)


def _tensor_parallel(tally: _Tally, config: Config, sizes: ParallelSizes, number: int, stage: StageContents) -> None:
    """Add a stage's calls over tp, in the forward, recomputation and backward; `number` is the stage's index."""
    t, m = sizes.tp, batch_plan(config, sizes.dp).num_microbatches
    layers, recomputed = stage.layers, recomputed_layers(config, stage)
    times = dict.fromkeys(("entering", "regathered", "leaving"), m)
    times["deferred"] = _deferred_microbatches(config, sizes, number)
    for place, layer in enumerate(layers):
        times["forward"] = m * (1 + (place < recomputed))
        for call in tensor_parallel_calls(config, sizes, layer):
            tally.add("tp", call.purpose, call.op, t, call.num_bytes, times[call.moment])
    embeddings, heads = stage.has_embedding + stage.num_mtp, stage.has_head + stage.num_mtp
    is_cut, whole = config.parallel.sequence_parallel, _activation_bytes(config, part_length(config))
    # A head in pieces is done with its input in the forward.
    at_a_time, regathers = head_tokens(config), config.recompute.gathered_inputs != "keep"
    gathers = is_cut * m * (embeddings + (1 + (regathers and at_a_time is None)) * heads)
    tally.add("tp", "activations", "all_gather", t, whole // t, gathers)
    tally.add("tp", "activations", "reduce_scatter" if is_cut else "all_reduce", t, whole, m * (embeddings + heads))
    one, tokens = accumulation_bytes(BYTES_PER_ELEMENT[config.precision.dtype]), tokens_of_microbatch(config)
    numbers = one * tokens
    if config.model.qk_norm == "all_heads":
        # Squares of q and k forward, again where the layer is recomputed, and their gradients backward.
        tally.add("tp", QK_NORM, "all_reduce", t, 2 * numbers, m * (2 * len(layers) + recomputed))
    # The largest logit of each token, then its sum of exponentials and target logit together.
    pieces, last = divmod(tokens, at_a_time or tokens)
    for count in (1, 2):
        tally.add("tp", CROSS_ENTROPY, "all_reduce", t, count * one * (at_a_time or tokens), m * heads * pieces)
        tally.add("tp", CROSS_ENTROPY, "all_reduce", t, count * one * last, m * heads * bool(last))


def _context_parallel(tally: _Tally, config: Config, sizes: ParallelSizes, stage: StageContents) -> None:
    """Add attention's calls over cp, in the forward, in the recomputation of whole layers, and in the backward."""
    m, num_layers = batch_plan(config, sizes.dp).num_microbatches, len(stage.layers)
    passes = {"forward": num_layers + recomputed_layers(config, stage), "backward": num_layers}
    for call in context_parallel_calls(config, sizes):
        tally.add("cp", call.purpose, call.op, sizes.cp, call.num_bytes, m * passes[call.moment])


def _fp8_scales(tally: _Tally, config: Config, sizes: ParallelSizes, stage: StageContents) -> None:
    """Add the all-reduces over tp and cp that find each tensor's maximum, from which its FP8 scale is computed."""
    fp8 = config.precision.fp8
    if fp8 is None or fp8.recipe in BLOCKS:
        return
    m, num_bytes = batch_plan(config, sizes.dp).num_microbatches, BYTES_PER_ELEMENT["fp32"]
    for layer in set(stage.layers).intersection(fp8_layers(config)):
        # A column-parallel product's output is cut over tp, a row-parallel one's input. The latents' weight is on every tp rank,
        # and with sequence parallelism its input and output are cut. What is sent in FP8 is cut when its scale is made.
        each = layer_products(config.model, config.model.layer_kind(layer))
        kinds = [product.kind for product in each if product.may_be_fp8]
        products, passes = len(kinds), 2 * m
        cut = (
            products
            if fp8.gather == "fp8"
            else kinds.count("row") + kinds.count("own") * config.parallel.sequence_parallel
        )
        over_tp = passes * cut + products
        tally.add("tp", FP8_SCALES, "all_reduce", sizes.tp, num_bytes, over_tp)
        tally.add("cp", FP8_SCALES, "all_reduce", sizes.cp, num_bytes, products * passes)


def _own_messages(tally: _Tally, config: Config, stage: StageContents, m: int) -> None:
    """Add the calls that an extension's parts post beyond the built-in ones, in `m` microbatches; fewer calls are taken off."""
    num_layers, tokens = len(stage.layers), tokens_of_microbatch(config)
    for one in config.model.own_costs.messages:
        passes = m * (num_layers if one.in_backward else num_layers + recomputed_layers(config, stage))
        flow = Flow(one.axis, one.purpose, one.op)
        tally.calls[flow] += passes * one.calls
        tally.bytes[flow] += round(passes * one.sent * tokens)


def _experts(
    tally: _Tally,
    config: Config,
    sizes: ParallelSizes,
    at: Coordinates,
    stage: StageContents,
    choices: Choices | None,
) -> None:
    """Add expert layers' calls: dispatched tokens, returned outputs, and each sample's fractions for the sequence loss."""
    again = stage.layers[: recomputed_layers(config, stage)]
    member = ((at.dp * sizes.cp + at.cp) * sizes.tp + at.tp) % (sizes.ep * sizes.etp)
    axis_sizes = {"experts": sizes.ep * sizes.etp, "sample": sizes.cp * sizes.tp, "tp": sizes.tp}
    m, element = batch_plan(config, sizes.dp).num_microbatches, BYTES_PER_ELEMENT[config.precision.dtype]
    for layer in stage.layers:
        if not config.model.layer_kind(layer).has_experts:
            continue
        chosen = None if choices is None else choices[layer]
        passes = Passes(m, m, m * (layer in again))
        for call in expert_calls(config, sizes, passes, element):
            size = axis_sizes[call.axis]
            tally.add(call.axis, call.purpose, call.op, size, call.num_bytes, call.calls)
        if dispatch_of(config) == "all_to_all":
            for purpose, calls, num_bytes in row_calls(config, sizes, member, chosen, passes, element):
                tally.add_uneven("experts", purpose, "all_to_all_rows", axis_sizes["experts"], num_bytes, calls)


def _pipeline(tally: _Tally, config: Config, sizes: ParallelSizes, stage: int, num_stages: int) -> None:
    m = batch_plan(config, sizes.dp).num_microbatches
    num_bytes = _activation_bytes(config, local_seq_length(config))
    # At the turn of a V two neighbouring stages are on one rank.
    turn = num_stages // 2 if sizes.is_v else 0
    from_before = stage not in (0, turn)
    to_next = stage + 1 not in (num_stages, turn)
    for axis, sends, receives in (
        ("pp_forward", to_next, from_before),
        ("pp_backward", from_before, to_next),
    ):
        tally.add(axis, HAND_OVER, "send", sizes.pp, num_bytes, m * sends)
        tally.add(axis, HAND_OVER, "recv", sizes.pp, num_bytes, m * receives)


def _data_parallel(
    tally: _Tally, config: Config, sizes: ParallelSizes, at: Coordinates, stages: Sequence[StageContents]
) -> None:
    element, m = BYTES_PER_ELEMENT[config.precision.dtype], batch_plan(config, sizes.dp).num_microbatches
    axis_sizes = {
        "tp": sizes.tp,
        "kv_replicas": max(1, sizes.tp // config.model.kv_heads),
        "ends": sizes.num_ends,
        "dp_replicas": sizes.dp_replicas,
    }
    for layout in layout_of(config, sizes, held_records(config, sizes, stages, at.tp)):
        key = layout.key
        owners, axis = sizes.owners(key.reduce_over), sizes.owner_axis(key.reduce_over)
        # What is not trained has no gradient: every rank changes it alike.
        if not key.is_trained:
            continue
        main_grad = ITEMSIZE[main_grad_dtype(config.precision)]
        layout_gathers = _gathers(config, sizes, at, stages, layout) if key.cut == "parameters" else None
        for number, bucket in enumerate(layout.buckets):
            numel = bucket.stop - bucket.start
            # A bucket in a slot is reduced after each microbatch.
            sums = 1 if key.cut == "state" else m
            tally.add(axis, "gradients", "reduce_scatter", owners, numel * main_grad, sums)
            gathers = int(key.is_updated) if layout_gathers is None else layout_gathers[number]
            tally.add(axis, "parameters", "all_gather", owners, numel * element // owners, gathers)
            for over in ("dp_replicas", key.sum_over):
                if over is not None:
                    size = axis_sizes[over]
                    tally.add(over, REPLICA_GRADIENTS, "all_reduce", size, numel * main_grad // owners)


def _gathers(
    config: Config, sizes: ParallelSizes, at: Coordinates, stages: Sequence[StageContents], layout: BufferLayout
) -> Counter[int]:
    """Count a step's gathers of each bucket, by bucket index, under ZeRO-3; `stages` lists the contents of the rank's chunks."""
    numbers = {bucket.entries[0].record.spec.unit: number for number, bucket in enumerate(layout.buckets)}
    order = GatherOrder(len(layout.buckets), len(layout.slot_numels()))
    counts: Counter[int] = Counter()
    for action in schedules.of_step(config, sizes).actions[at.pp]:
        stage = stages[action.chunk]
        # Delayed weight gradients read inputs and output gradients alone.
        uses = {Kind.F: _forward_uses(stage), Kind.W: ()}.get(action.kind)
        for unit in _backward_uses(config, stage) if uses is None else uses:
            if unit in numbers:
                counts.update(order.use(numbers[unit]))
    return counts


def _forward_uses(stage: StageContents) -> tuple[int | str, ...]:
    """List a stage's units in the order in which a forward reads their weights; ends that it lacks have no bucket."""
    return (WORD_EMBEDDING, *stage.layers, HEAD)


def _backward_uses(config: Config, stage: StageContents) -> Iterator[int | str]:
    """Yield a stage's units in the order in which a backward reads their weights; that of the embedding reads none.

    A recomputed group's layers are yielded twice: first to last for the forward, then last to first.
    """
    yield HEAD
    recompute, layers, num_again = config.recompute, stage.layers, recomputed_layers(config, stage)
    size, of_own = recompute.num_layers if recompute.method == "uniform" else 1, min(stage.num_own, num_again)
    groups = [range(start, min(start + size, of_own)) for start in range(0, of_own, size)]
    groups += [range(each, each + 1) for each in range(stage.num_own, num_again)]
    again = {place for group in groups for place in group}
    alone = [range(place, place + 1) for place in range(len(layers)) if place not in again]
    for group in sorted((*groups, *alone), key=lambda group: group.start, reverse=True):
        if group.start in again:
            yield from (layers[place] for place in group)
        yield from (layers[place] for place in reversed(group))


def measured_traffic(posted: Iterable[Event]) -> dict[Flow, Volume]:
    """Sum a ledger's posted calls by flow, for comparison with `expected_traffic`."""
    tally = _Tally()
    for event in posted:
        purpose = event.purpose
        if event.axis in ("pp_forward", "pp_backward"):
            purpose = HAND_OVER
        elif purpose.startswith(FP8_SCALES):
            purpose = FP8_SCALES
        elif event.axis == "cp":
            purpose = HEADS if event.op == "all_to_all" else KEYS_AND_VALUES
        elif event.axis == "tp" and purpose != REPLICA_GRADIENTS:
            is_cut = purpose.endswith(TOKENS)
            others = TOKENS if is_cut else "activations"
            purpose = next((name for name in (CROSS_ENTROPY, QK_NORM) if purpose.startswith(name)), others)
        tally.add(event.axis, purpose, event.op, event.group_size, event.numel * event.dtype.itemsize)
    return tally.volumes()
