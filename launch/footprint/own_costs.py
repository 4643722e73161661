"""Measure the costs that an extension's parts add to a layer.

    cost per layer = (extended, 2 layers - extended, 1 layer) - (plain, 2 layers - plain, 1 layer)

Each of these four costs comes from one microbatch, run on fake tensors on one rank of the tp x cp layout. Subtracting a one-layer
run removes the costs of embedding and head. Subtracting the plain runs removes the costs without the extension. A model with
several kinds of layers runs all its layers instead of two.
"""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from triaxis.engine.comm.ledger import REPLICA_GRADIENTS
from triaxis.engine.config.schema.extension_parts import NO_COSTS, OwnCosts, OwnMessages
from triaxis.engine.config.schema.layout import ScheduleConfig
from triaxis.engine.config.schema.recompute import OffloadConfig, RecomputeConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import brief
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.storage.user_module import place_in_user_module
from triaxis.models.predict.terms import tokens_of_microbatch
from triaxis.models.predict.traffic import measured_traffic

Kind = tuple[Any, ...]
"""What is counted: (KEPT,) or (FLOPS,), or CALLS or SENT with a message's axis, purpose, operation, and whether in the backward."""

KEPT, FLOPS, CALLS, SENT = "kept", "flops", "calls", "sent"


class OwnCostsMeter:
    """Measures the extra memory, FLOPs and messages of an extension's layers.

    Each combination of sizes and settings that can change them is measured once.
    """

    def __init__(self) -> None:
        self._known: dict[object, OwnCosts] = {}

    def __call__(self, config: Config, sizes: ParallelSizes) -> OwnCosts:
        """Return a layer's extra costs in this layout, from the extension's own `costs` function or measured.

        `NO_COSTS`: the extension replaces no attention, MLP, norm or block. If a measurement fails, `unknown` in the result says
        why.
        """
        own = config.model.own
        if not own.with_parameters():
            return NO_COSTS
        key = repr(
            [
                *(sizes.tp, sizes.cp, config.parallel.sequence_parallel, config.train.micro_batch_size, config.model),
                *(config.kernels, config.precision, config.data, config.recompute.gathered_inputs),
                config.recompute.gathered_kv,
            ]
        )
        if key not in self._known:
            self._known[key] = (own.costs or _measured)(config, sizes)
        return self._known[key]


def _measured(config: Config, sizes: ParallelSizes) -> OwnCosts:
    most = 2 if len(set(config.model.kinds)) == 1 else config.model.num_layers
    extra = Counter[Kind]()
    try:
        for sign, num_layers, is_own in ((1, most, True), (-1, 1, True), (-1, most, False), (1, 1, False)):
            for kind, count in _step(config, sizes, num_layers, is_own=is_own).items():
                extra[kind] += sign * count
    except Exception as error:  # code that needs data may fail on fake tensors: it is reported and stops no run
        place = place_in_user_module(error) or type(error).__name__
        return OwnCosts(unknown=f"{place}: {brief(' '.join(str(error).split()))}")
    tokens, others = tokens_of_microbatch(config), most - 1
    calls = {kind[1:]: round(count / others) for kind, count in extra.items() if kind[0] == CALLS and count}
    messages = tuple(
        OwnMessages(
            axis,
            purpose,
            op,
            in_backward,
            count,
            Fraction(extra[SENT, axis, purpose, op, in_backward], tokens * others),
        )
        for (axis, purpose, op, in_backward), count in sorted(calls.items())
    )
    over_tp = [one for one in messages if one.axis == "tp"]
    return OwnCosts(
        kept=Fraction(extra[KEPT,], tokens * others),
        weights=round(extra[FLOPS,] * sizes.tp / (6 * tokens * others)),
        sent=sum((one.sent for one in over_tp), Fraction(0)),
        calls=sum(one.calls for one in over_tp),
        messages=messages,
    )


def _step(config: Config, sizes: ParallelSizes, num_layers: int, *, is_own: bool) -> Counter[Kind]:
    """Run forward and backward of one microbatch on the first rank, and count their costs.

    Args:
        is_own: whether to use the extension's parts, not built-in ones.

    Returns:
        Bytes kept for the backward; FLOPs; calls over tp and cp, and the bytes that they send, by kind of message and pass.
            Gradient sums for parameters that several ranks hold are left out.
    """
    # Imported here: few runs have parts to measure.
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from triaxis.launch.footprint.run import Footprints, looking_at, microbatches
    from triaxis.models.gpt.chunk import build_chunks

    # The head cancels in the difference, and its loss takes many operators.
    model = config.model.model_copy(update={"num_layers": num_layers, "mtp": None, "vocab_size": 8 * sizes.tp})
    parallel = config.parallel.model_copy(
        update={"pp": 1, "vpp": 1, "dp": 1, "dp_replicas": 1, "ep": 1, "etp": 1, "layers_per_stage": None}
    )
    recompute = RecomputeConfig(
        gathered_inputs=config.recompute.gathered_inputs, gathered_kv=config.recompute.gathered_kv
    )
    small = config.model_copy(
        update={
            "model": model if is_own else model.model_copy(update={"extension": None}),
            "parallel": parallel,
            "train": config.train.model_copy(update={"global_batch_size": config.train.micro_batch_size}),
            "schedule": ScheduleConfig(),
            "recompute": recompute,
            "offload": OffloadConfig(),
            "optimizer": config.optimizer.model_copy(update={"name": "adamw", "groups": []}),
        }
    )
    footprints = Footprints(small, build_chunks)
    mapping: dict[Any, Any] = {
        torch.ops.aten.addmm_: _product_flops,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_grad_flops,
    }
    with (
        footprints.watched_engine(footprints.config, 0) as (engine, watch),
        FlopCounterMode(display=False, custom_mapping=mapping) as counter,
        looking_at(engine, watch),
    ):
        ledger, ends = engine.topology.ledger, list[int]()
        chunk: Any = engine.chunks[0]
        chunk.register_forward_hook(lambda *_: ends.append(len(ledger.events)))
        engine.forward_backward(microbatches(engine))
    found = Counter[Kind]({(KEPT,): sum(saved.num_bytes for saved in watch.saved), (FLOPS,): counter.get_total_flops()})
    (end,) = ends
    for posted, in_backward in ((ledger.events[:end], False), (ledger.events[end:], True)):
        for flow, volume in measured_traffic(event for event in posted if event.phase == "post").items():
            if flow.axis in ("tp", "cp") and flow.purpose != REPLICA_GRADIENTS:
                labels = flow.axis, flow.purpose, flow.op, in_backward
                found[CALLS, *labels] += volume.calls
                found[SENT, *labels] += volume.wire_bytes
    return found


def _product_flops(total: Sequence[int], left: Sequence[int], right: Sequence[int], **_: object) -> int:
    """Count the FLOPs of total += left @ right from the shapes."""
    return 2 * left[0] * left[1] * right[1]


def _attention_flops(q: Sequence[int], k: Sequence[int], *_: object, **__: object) -> int:
    """Count the FLOPs of fused causal attention from shapes [b, heads, s, d], as the formula for built-in layers does."""
    return 2 * q[0] * q[1] * q[2] * k[2] * q[3]


def _attention_grad_flops(grad: object, q: Sequence[int], k: Sequence[int], *_: object, **__: object) -> int:
    """Count the FLOPs of its backward by convention: twice the forward's."""
    return 2 * _attention_flops(q, k)
