"""Time a layer's forward, input gradient and weight gradient on one rank.

compute    seconds of GEMMs and attention, elementwise kernels' bytes / streaming rate, and a launch for each kernel
exposed    seconds that a collective lasts longer than the products that run at the same time; a collective in t pieces (one for
           each tensor-parallel rank) always exposes one piece
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from triaxis.engine.config.quantities.head_pieces import head_tokens
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.device import Device
from triaxis.models.predict.layer_calls import Moment
from triaxis.models.predict.step_time.experts import ExpertWork
from triaxis.models.predict.step_time.facts import (
    ContextParallelWires,
    Gemm,
    LayerWork,
    activation_bytes,
    context_parallel_wires,
    element_bytes,
)
from triaxis.models.predict.step_time.implementation import Implementation
from triaxis.models.predict.step_time.links import Link, Links, Wire

EXPERT_KERNELS = (37, 28)
"""Kernels that router, dispatch and experts add to a dense layer's in a forward, and in a backward (`tests/cuda_stub/golden`)."""

END_CALLS = 27
"""Calls of the embedding or the head in a microbatch, half of what both have there."""

PIECE_CALLS = 17
"""Calls of each further piece of the head."""

BACKWARD_FORWARDS = 2.5
"""A fused attention's backward FLOPs over its forward FLOPs: five products for two (2205.14135, algorithm 4)."""


@dataclass(slots=True)
class Seconds:
    """Seconds by component that a layer, or a sum of layers, takes in forward (F), input gradient (I) and weight gradient (W).

    Attributes:
        calls: kernels and collectives that the host posts for all three.
    """

    forward: dict[str, float] = field(default_factory=dict)
    input_grad: dict[str, float] = field(default_factory=dict)
    weight_grad: dict[str, float] = field(default_factory=dict)
    calls: float = 0.0

    def add(self, other: "Seconds", count: float = 1) -> None:
        """Add `count` times the seconds of `other` to these."""
        for mine, others in zip(self.passes, other.passes, strict=True):
            for name, seconds in others.items():
                mine[name] = mine.get(name, 0.0) + count * seconds
        self.calls += count * other.calls

    @property
    def passes(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        return self.forward, self.input_grad, self.weight_grad

    @property
    def total(self) -> float:
        return sum(sum(part.values()) for part in self.passes)


class LayerTimer:
    """Predicts the seconds of layers, the embedding and the head, in one layout on one cluster."""

    def __init__(
        self, config: Config, sizes: ParallelSizes, device: Device, links: Links, implementation: Implementation
    ) -> None:
        self.config, self.sizes, self.device, self.implementation = config, sizes, device, implementation
        self._tp, self._cp, self._experts = links.of_axes("tp"), links.of_axes("cp"), links.of_experts()
        self._dtype = "fp8" if implementation.fp8 else config.precision.dtype
        self._cp_wires: ContextParallelWires = context_parallel_wires(config, sizes)

    def stream(self, num_bytes: float) -> float:
        """Seconds to read and write `num_bytes` bytes of memory."""
        return num_bytes / self.device.stream_bytes_per_s

    def products(self, gemms: Iterable[Gemm]) -> tuple[float, float, float]:
        """Time the products, in seconds: (forward, input gradients, weight gradients and adding them to the step's sums)."""
        forward = input_grad = weight_grad = 0.0
        for gemm in gemms:
            forward += self._gemm(gemm.m, gemm.n, gemm.k) + self._cast(gemm.m * gemm.k)
            forward += self._cast(gemm.n * gemm.k) if self.implementation.casts_weights else 0.0
            input_grad += self._gemm(gemm.m, gemm.k, gemm.n) + self._cast(gemm.m * gemm.n)
            weight_grad += self._gemm(gemm.k, gemm.n, gemm.m) + self.added(gemm.n * gemm.k)
        return forward, input_grad, weight_grad

    def layer(self, work: LayerWork, *, recomputed: bool) -> Seconds:
        """Time one layer.

        Args:
            recomputed: the layer's forward runs once more before its backward.
        """
        forward, input_grad, weight_grad = (work.more * seconds for seconds in self.products(work.gemms))
        if self._in_pieces:
            forward = work.more * self.products(self._pieces(work.gemms))[0] * self.sizes.tp
        core, core_back = self.core(work)
        kernels = self.implementation.kernels_per_layer
        launches = self.launches(kernels)
        forward_exposed = self._forward_tp(forward, work.wires["forward"])
        computed = forward + core + self.stream(work.forward_bytes) + launches
        again = self.stream(work.again_bytes) + sum(self._gemm(gemm.m, gemm.n, gemm.k) for gemm in work.again_gemms)
        again += core if work.core_again and not self.implementation.selective_products else 0.0
        if work.core_again:
            # Some products and attention are kept, so all elementwise work is recomputed.
            again += self.implementation.selective_products * forward
            again += self.stream(work.forward_bytes) if self.implementation.selective_products else 0.0
        cp_forward, cp_backward = self._cp_exposed(core, core_back)
        seconds = Seconds(
            forward={"compute": computed, "tp": forward_exposed, "cp": cp_forward},
            input_grad={
                "compute": input_grad + core_back + self.stream(work.backward_bytes) + launches,
                "recompute": again,
                "tp": 0.0,
                "cp": cp_backward,
            },
            weight_grad={"compute": weight_grad + launches, "tp": 0.0},
        )
        forward_calls = kernels + work.more_calls[0] + work.wires["forward"].calls + self._cp_wires.forward.calls
        backward_calls = 2 * kernels + work.more_calls[1] + self._cp_wires.backward.calls
        backward_calls += sum(wire.calls for moment, wire in work.wires.items() if moment != "forward")
        seconds.input_grad["tp"], seconds.weight_grad["tp"] = self._backward_tp(input_grad, weight_grad, work.wires)
        seconds.forward["tp"] += self._tp_seconds(work.sent)
        seconds.forward["cp"] += self._seconds(self._cp, work.sent_over_cp)
        if work.experts is not None:
            self._add_experts(seconds, work, work.experts)
            forward_calls += EXPERT_KERNELS[0] + work.experts.forward.calls
            backward_calls += EXPERT_KERNELS[1] + work.experts.backward.calls
        seconds.calls = forward_calls * (1 + recomputed) + backward_calls
        if recomputed:
            seconds.input_grad["recompute"] = seconds.forward["compute"]
            forward_exposed = seconds.forward["tp"]
            if work.experts is not None:
                seconds.input_grad["experts"] += seconds.forward["experts"]
            seconds.input_grad["tp"] += forward_exposed
            seconds.input_grad["cp"] += cp_forward
        return seconds

    def _add_experts(self, seconds: Seconds, work: LayerWork, experts: ExpertWork) -> None:
        """Add the time of a layer's routed experts to `seconds`: products, row copies, launches and dispatch traffic."""
        router, up, down = (experts.router, self._router_dtype), (experts.up, self._dtype), (experts.down, self._dtype)
        products = [router, up, down]
        time, moved = self.device.gemm_seconds, self.stream(experts.moved_bytes)
        forward = sum(time(one.m, one.n, one.k, dtype, one.count) for one, dtype in products)
        input_grad = sum(time(one.m, one.k, one.n, dtype, one.count) for one, dtype in products)
        weight_grad = sum(
            time(one.k, one.n, one.m, dtype, one.count) + self.added(one.n * one.k * one.count)
            for one, dtype in products
        )
        launches, launches_back = (self.launches(kernels) for kernels in EXPERT_KERNELS)
        seconds.forward["compute"] += forward + moved + launches
        seconds.input_grad["compute"] += input_grad + 2 * moved + launches_back
        seconds.weight_grad["compute"] += weight_grad
        if "mlp" in self.config.recompute.parts:
            first = experts.up
            seconds.input_grad["recompute"] += time(first.m, first.n, first.k, self._dtype, first.count)
        seconds.forward["experts"] = self._seconds(self._experts, experts.forward)
        seconds.input_grad["experts"] = self._seconds(self._experts, experts.backward)
        cut = self._tp_seconds(experts.cut)
        seconds.forward["tp"] += cut
        seconds.input_grad["tp"] += cut

    @property
    def _router_dtype(self) -> str:
        return "fp32" if "fp32" in self.device.peak_tflops else self.config.precision.dtype

    @property
    def _in_pieces(self) -> bool:
        return self.implementation.tp_overlap and self.config.parallel.cuts_sequence

    def _pieces(self, gemms: Iterable[Gemm]) -> list[Gemm]:
        """Cut each product's rows into one piece per tp rank: while one piece is sent, another is multiplied."""
        return [replace(gemm, m=gemm.m // self.sizes.tp) for gemm in gemms]

    def core(self, work: LayerWork) -> tuple[float, float]:
        """Time attention's core, in seconds: (forward, backward). If no fused kernel computes it, only its products count."""
        if work.unfused is not None:
            at, dtype = work.unfused, self.config.precision.dtype
            time = self.device.gemm_seconds
            scores = time(at.rows, at.keys, at.head, dtype, at.count)
            weighted = time(at.rows, at.head, at.keys, dtype, at.count)
            return scores + weighted, 2 * scores + 2 * weighted
        rates = [
            self.device.attention_tflops(self.implementation.attention, direction, work.head_size, work.keys_length)
            for direction in ("forward", "backward")
        ]
        return work.core_flops / rates[0] * 1e-12, BACKWARD_FORWARDS * work.core_flops / rates[1] * 1e-12

    def launches(self, kernels: float) -> float:
        """Seconds lost between kernels on the device."""
        return kernels * self.device.launch_us * 1e-6

    def embedding(self) -> Seconds:
        """Time the embedding, which reads and writes rows and sums them over tp."""
        moved = self.stream(2 * activation_bytes(self.config)) + self.launches(2)
        sent = self._ends_wire()
        return Seconds(
            {"compute": moved, "tp": self._tp_seconds(sent)},
            {},
            {"compute": 2 * moved, "tp": self._scattered(sent)},
            END_CALLS,
        )

    def head(self, gemm: Gemm) -> Seconds:
        """Time the final norm, output head and loss."""
        w, at_a_time = element_bytes(self.config), head_tokens(self.config)
        pieces = 1 if at_a_time is None else ceil(gemm.m / at_a_time)
        dtype = self.config.precision.dtype
        time = self.device.gemm_seconds
        forward, input_grad = time(gemm.m, gemm.n, gemm.k, dtype), time(gemm.m, gemm.k, gemm.n, dtype)
        # Each piece adds its weight gradient to the step's sum.
        weight_grad = time(gemm.k, gemm.n, gemm.m, dtype) + pieces * self.added(gemm.n * gemm.k)
        logits = gemm.m * gemm.n
        # Fused: two reads forward, a read and a write backward. Otherwise float copies: cast, shift, exp, divide, cast back.
        loss, loss_back = (2 * w, 2 * w) if self.implementation.fused_loss else (w + 32, 8 + w)
        sent = self._ends_wire()
        seconds = Seconds(
            {"compute": forward + self.stream(loss * logits) + self.launches(6 * pieces), "tp": self._scattered(sent)},
            {
                "compute": input_grad + self.stream(loss_back * logits) + self.launches(4 * pieces),
                "tp": self._tp_seconds(sent),
            },
            {"compute": weight_grad + self.launches(pieces)},
            END_CALLS + (pieces - 1) * PIECE_CALLS,
        )
        # In pieces, the forward computes the gradients too.
        return seconds if at_a_time is None else Seconds(total(seconds.passes), calls=seconds.calls)

    def _gemm(self, m: float, n: float, k: float) -> float:
        return self.device.gemm_seconds(m, n, k, self._dtype)

    def _cast(self, numel: float) -> float:
        """Seconds to cast an operand to fp8; 0 in other dtypes."""
        return self.stream(self.implementation.cast_bytes * numel) if self._dtype == "fp8" else 0.0

    def added(self, numel: float) -> float:
        """Seconds to add a weight gradient with `numel` elements to the step's sum."""
        # The sums are float32. If the GEMM adds, its epilogue moves 6 bytes more than a bf16 result's, with no product beside
        # it. A separate pass reads the gradient, and reads and writes the sum, whose elements have as many bytes as the wire's.
        if self.implementation.fused_weight_grad:
            return self.stream(6 * numel)
        return self.stream((2 + 2 * self.implementation.gradient_bytes) * numel)

    def _tp_seconds(self, wire: Wire) -> float:
        return self._tp.seconds(wire.bytes, wire.calls) if wire.calls else 0.0

    def _beside(self, wire: Wire, products: float, *, pieces: bool) -> float:
        """Seconds that a collective adds to products that run at the same time.

        Args:
            wire: the collective's traffic.
            products: the products' seconds.
            pieces: the collective runs in pieces, of which the first is exposed.
        """
        seconds = self._tp_seconds(wire)
        first = seconds / self.sizes.tp if pieces else 0.0
        return first + self.device.beyond(seconds - first, products)

    def _forward_tp(self, forward: float, wire: Wire) -> float:
        if not self._in_pieces:
            return self._tp_seconds(wire)
        return self._beside(wire, forward, pieces=True)

    def _backward_tp(self, input_grad: float, weight_grad: float, wires: Mapping[Moment, Wire]) -> tuple[float, float]:
        """Compute the seconds of tp traffic that a layer's backward exposes: (in the input gradient, in the weight gradient)."""
        how, pieces = self.implementation, self._in_pieces
        entering, leaving, regathered = wires["entering"], wires["leaving"], wires["regathered"]
        if self.config.schedule.defers_weight_gradients:
            return self._tp_seconds(entering + leaving), self._tp_seconds(regathered + wires["deferred"])
        # Two of the four products of each kind belong to column-parallel layers.
        before = self._beside(entering, input_grad / 2, pieces=True) if pieces else self._tp_seconds(entering)
        if not how.tp_backward_overlap and not pieces:
            return before + self._tp_seconds(regathered + leaving), 0.0
        hidden = self._beside(regathered, input_grad / 2, pieces=False)
        return before + hidden, self._beside(leaving, weight_grad / 2, pieces=False)

    def _cp_exposed(self, core: float, core_back: float) -> tuple[float, float]:
        wires = self._cp_wires
        return tuple(  # type: ignore[return-value]
            wires.exposed * seconds + self.device.beyond((1 - wires.exposed) * seconds, beside)
            for seconds, beside in (
                (self._seconds(self._cp, wires.forward), core),
                (self._seconds(self._cp, wires.backward), core_back),
            )
        )

    def _seconds(self, link: Link, wire: Wire) -> float:
        return link.seconds(wire.bytes, wire.calls) if wire.calls else 0.0

    def _ends_wire(self) -> Wire:
        """Count the traffic of the sum over tp after the embedding's forward, or after the head's backward."""
        if self.sizes.tp == 1:
            return Wire()
        half = activation_bytes(self.config) * (self.sizes.tp - 1) / self.sizes.tp
        return Wire(half, 1) if self.config.parallel.sequence_parallel else Wire(2 * half, 1)

    def _scattered(self, wire: Wire) -> float:
        """Time the gather that sequence parallelism adds in the opposite pass of a sum from `_ends_wire`; 0 without it."""
        return self._tp_seconds(wire) if self.config.parallel.cuts_sequence else 0.0


def total(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sum the seconds of several passes, component by component."""
    summed: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.items():
            summed[name] = summed.get(name, 0.0) + seconds
    return summed
