"""Count a microbatch's work on one rank: products, attention, and bytes through memory and over links.

A microbatch of b samples with s tokens on c context-parallel ranks has T = b s / c tokens on each. Let h be the hidden size, t the
number of tensor-parallel ranks, f the MLP's width, and q and g the query and key/value heads times the head size. A layer's
forward computes these products [m, k] x [k, n]:

    qkv      [T, h] x [h, (q + 2 g) / t]          up       [T, h] x [h, f / t or 2 f / t]
    proj     [T, q / t] x [q / t, h]              down     [T, f / t] x [f / t, h]

Attention's core takes 4 x keys x q / t FLOPs per token. Each input gradient is the same product with n and k exchanged. Each weight
gradient is the same product with m and k exchanged, and is added to the main grads.

Latent attention replaces qkv by the three products below. T' is T / t with sequence parallelism, else T; r_q and r are latent
sizes, a is the number of heads, and dn + dr and dv are head sizes (`engine/config/schema/mla.py`):

    down     [T', h] x [h, r_q + r + dr]          kv_up    [c T, r] x [r, a (dn + dv) / t]
    q_up     [T, r_q] x [r_q, a (dn + dr) / t]

Elementwise kernels are charged the bytes of every tensor that they read or write. GEMMs and fused attention are not: their
measured rates include memory traffic.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from triaxis.engine.config.quantities.attention_blocks import block_size
from triaxis.engine.config.quantities.attention_pattern import attention_pattern
from triaxis.engine.config.quantities.context_parallel import exposed_share, gathers_keys, local_kv_heads
from triaxis.engine.config.quantities.layer_products import layer_products
from triaxis.engine.config.quantities.plan import part_length
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.attention_kernels import ATTENTION_KERNELS
from triaxis.engine.data.document_statistics import DocumentStatistics
from triaxis.engine.layout.partition import StageLayers
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.layout.shard_spec import ParamSpec, localize
from triaxis.engine.telemetry.record.flops import core_flops_forward
from triaxis.models.predict.layer_calls import (
    Call,
    Moment,
    context_parallel_calls,
    tensor_parallel_calls,
    wire_bytes,
)
from triaxis.models.predict.step_time.experts import ExpertWork, expert_work
from triaxis.models.predict.step_time.implementation import Implementation
from triaxis.models.predict.step_time.links import Wire
from triaxis.models.predict.terms import BYTES_PER_ELEMENT, tokens_of_microbatch
from triaxis.models.specs import StageContents, layer_specs, stage_specs


@dataclass(frozen=True, slots=True)
class Gemm:
    """A forward product [m, k] x [k, n].

    Attributes:
        column: the input is gathered over tp, and the weight is cut by columns.
    """

    m: int
    n: int
    k: int
    column: bool

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Unfused:
    """Attention without a fused kernel: two batched products, whose scores [count, rows, keys] go through memory.

    Attributes:
        count: heads on the rank x samples.
        rows: queries of a sample on the rank.
        keys: keys of a sample.
        head: head size.
    """

    count: int
    rows: int
    keys: int
    head: int

    @property
    def scores(self) -> int:
        return self.count * self.rows * self.keys


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One layer's work on a microbatch.

    Attributes:
        gemms: the forward's products.
        core_flops: FLOPs of attention's forward on this rank.
        unfused: attention's batched products; None: a fused kernel computes attention.
        forward_bytes, backward_bytes: bytes that elementwise kernels read and write.
        again_bytes, again_gemms: elementwise bytes and GEMMs that selective recomputation repeats, without attention's core.
        core_again: attention's core is recomputed.
        experts: the routed experts' work; None: the layer has none.
        wires: traffic over tp, by moment.
        head_size, keys_length: head size and key length that select attention's rate.
        more_calls: calls in a forward and in a backward beyond those of a layer with one kernel of attention and two norms.
        more: factor on GEMM seconds, 1 without an extension: FLOPs with an extension's parts over the built-in layer's.
        sent, sent_over_cp: extra traffic over tp and cp that an extension's parts send.
    """

    gemms: tuple[Gemm, ...]
    core_flops: float
    unfused: Unfused | None
    forward_bytes: float
    backward_bytes: float
    again_bytes: float
    again_gemms: tuple[Gemm, ...]
    core_again: bool
    experts: ExpertWork | None
    wires: dict[Moment, Wire]
    head_size: int
    keys_length: int
    more_calls: tuple[int, int]
    more: float
    sent: Wire
    sent_over_cp: Wire


BLOCK_KERNELS = (6, 15)
"""Kernels of a block of queries in a forward and in a backward, where plain operators compute attention."""

FLEX_KERNELS = (1, 2)
"""Kernels that `flex` has beside one of attention."""

NORM_KERNELS = (1, 4)
"""Kernels of a further norm."""

REPEATED = {"mlp": ("mlp.up", "mlp.shared.up"), "attention": ("attention.kv_up",)}
"""Products that recomputing a part of a layer repeats."""


def element_bytes(config: Config) -> int:
    """Look up the bytes per element in the run's dtype."""
    return BYTES_PER_ELEMENT[config.precision.dtype]


def layer_gemms(config: Config, sizes: ParallelSizes, layer: int = 0) -> dict[str, Gemm]:
    """List the products in a layer's forward by name (`engine/config/quantities/layer_products.py`)."""
    model, rows = config.model, tokens_of_microbatch(config)
    own = rows // (sizes.tp if config.parallel.sequence_parallel else 1)
    of_kind = {"own": own, "latents": rows * sizes.cp}
    return {
        product.name: Gemm(of_kind.get(product.kind, rows), product.n, product.k, column=product.kind == "column")
        for product in layer_products(model, model.layer_kind(layer), sizes.tp)
    }


def head_gemm(config: Config, sizes: ParallelSizes) -> Gemm:
    """Build the output head's product."""
    model = config.model
    rows, columns = tokens_of_microbatch(config), model.padded_vocab_size // sizes.tp
    return Gemm(rows, columns, model.hidden_size, column=True)


def layer_work(
    config: Config,
    sizes: ParallelSizes,
    implementation: Implementation,
    layer: int = 0,
    documents: DocumentStatistics | None = None,
    load: float = 1.0,
) -> LayerWork:
    """Count one layer's work.

    Args:
        documents: statistics of the documents, if tokens attend only within their document; None: they attend across documents.
        load: rows of the slowest rank's experts over the mean rank's.
    """
    model, t = config.model, sizes.tp
    rows, w = tokens_of_microbatch(config), element_bytes(config)
    gemms = layer_gemms(config, sizes, layer)
    experts = expert_work(config, sizes, load) if model.layer_kind(layer).has_experts else None
    local = rows / (t if config.parallel.sequence_parallel else 1)
    proj, up = gemms["attention.proj"], gemms.get("mlp.up") or gemms.get("mlp.shared.up")
    h, q = model.hidden_size, model.num_attention_heads * model.head_size // t
    # In latent attention a single key rotates, and all keys are copied beside it.
    kv = 2 * local_kv_heads(config) * model.head_size
    inputs = model.activation_kind.num_inputs
    f = 0 if up is None else up.n // inputs
    # A norm reads and writes; a residual reads two tensors and writes one. Unfused, each has one more read and write.
    loose = 0 if implementation.fused_elementwise else 1
    # Before an MTP layer, two tensors are normalised and concatenated.
    joined = 2 if model.layer_kind(layer).is_mtp else 0
    norms = 2 * (model.norms_before + model.norms_after + joined) * (1 + loose) * h * local * w
    dropped = (1 + w) * h * local if model.hidden_dropout else 0.0
    residuals = 2 * (3 + 2 * loose) * h * local * w
    rotated = implementation.rotations * (q + kv / 2) * rows * w if model.position_kind.is_rotary else 0.0
    activated = (inputs + 1) * f * rows * w
    biased = sum(gemm.n for gemm in gemms.values()) * rows * w if model.bias == "all" else 0.0
    # Repeated: the keys and values are read, and written once per query head. Their gradients are summed again.
    repeated = (kv + 2 * q) * rows * w if implementation.repeats_kv and kv < 2 * q else 0.0
    unfused = None
    scores_forward = scores_backward = 0.0
    if implementation.attention == "" or config.kernels.attention == "explicit":
        heads = model.num_attention_heads // t
        unfused = Unfused(heads * config.train.micro_batch_size, part_length(config), model.seq_length, model.head_size)
        dropout = 2 * w + 1 if model.attention_dropout else 0
        # The fused scale-mask-softmax reads and writes; its backward reads two tensors and writes one. Attention's output is
        # copied into the projection's order, and the q, k and v gradients into one tensor.
        scores_forward = unfused.scores * (2 * w + dropout) + 2 * q * rows * w
        scores_backward = unfused.scores * (3 * w + dropout) + 2 * (2 * q + kv) * rows * w
    parts = config.recompute.parts if config.recompute.granularity != "none" else frozenset()
    again = (norms if "norm" in parts else 0.0) + (activated if parts & {"activation", "mlp"} else 0.0)
    if experts is not None and parts & {"activation", "mlp"}:
        again += experts.activated_bytes
    again += (rotated if "rope" in parts else 0.0) + (scores_forward if "attention" in parts else 0.0)
    core = core_flops_forward(model, documents)[layer] * rows / t
    own = model.own_costs
    return LayerWork(
        gemms=tuple(gemms.values()),
        core_flops=core,
        unfused=unfused,
        forward_bytes=norms + residuals + 2 * dropped + rotated + repeated + activated + scores_forward,
        backward_bytes=2 * norms
        + 2 * dropped
        + rotated
        + repeated
        + (2 * inputs + 1) * f * rows * w
        + biased
        + scores_backward,
        again_bytes=again,
        again_gemms=tuple(
            gemms[name] for part in REPEATED if part in parts for name in REPEATED[part] if name in gemms
        ),
        core_again="attention" in parts,
        experts=experts,
        wires=tensor_parallel_wires(config, sizes, layer),
        head_size=model.head_size,
        keys_length=round(2 * core / (2 * rows * (q + proj.k)) / sizes.cp) if core else model.seq_length,
        more_calls=_more_calls(config, sizes),
        more=1 + 2 * own.weights * rows / t / sum(gemm.flops for gemm in gemms.values()),
        sent=Wire(float(own.sent) * rows, own.calls),
        sent_over_cp=Wire(float(own.sent_over_cp) * rows, sum(one.calls for one in own.messages if one.axis == "cp")),
    )


def _more_calls(config: Config, sizes: ParallelSizes) -> tuple[int, int]:
    """Count calls beyond those of a plain layer, as `tests/cuda_stub/golden/gemma.txt` has them."""
    model, queries, asked = config.model, part_length(config), attention_pattern(config).asked
    kernel: str = config.kernels.attention
    if kernel == "auto":
        records = ((name, each) for name, each in ATTENTION_KERNELS.items() if each.auto is not None)
        kernel = next(name for name, each in records if asked <= each.has["cuda"])
    forward, backward = FLEX_KERNELS if kernel == "flex" else (0, 0)
    if kernel == "blocks":
        rows = config.train.micro_batch_size * model.num_attention_heads // sizes.tp
        blocks = -(-queries // block_size(rows, queries, model.seq_length))
        forward, backward = (blocks * each for each in BLOCK_KERNELS)
    norms = 2 * (model.norm_placement == "both")
    return forward + norms * NORM_KERNELS[0], backward + norms * NORM_KERNELS[1]


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters on one rank.

    Attributes:
        all: number of parameters, the experts' included.
        experts: number of the experts' parameters, whose replicas are on other ranks than those of the rest.
    """

    all: int = 0
    experts: int = 0

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(self.all + other.all, self.experts + other.experts)

    def times(self, count: int) -> "Parameters":
        return Parameters(count * self.all, count * self.experts)


def parameters_of_layer(config: Config, sizes: ParallelSizes, layer: int) -> Parameters:
    """Count a layer's parameters on one rank."""
    return _on_rank(config, sizes, layer_specs(config.model, layer))


def parameters_of_ends(config: Config, sizes: ParallelSizes, stage: StageContents) -> Parameters:
    """Count a stage's parameters on one rank outside its layers: embedding, final norm and head."""
    ends = StageLayers(range(0), stage.has_embedding, stage.has_head)
    return _on_rank(config, sizes, stage_specs(config.model, ends))


def _on_rank(config: Config, sizes: ParallelSizes, specs: Iterable[ParamSpec]) -> Parameters:
    sequence_parallel, place = config.parallel.sequence_parallel, sizes.expert_place(0)
    records = [
        localize(spec, tp=sizes.tp, tp_index=0, sequence_parallel=sequence_parallel, experts=place) for spec in specs
    ]
    experts = sum(record.numel for record in records if record.reduce_over == "expert_dp")
    return Parameters(sum(record.numel for record in records), experts)


def tensor_parallel_wires(config: Config, sizes: ParallelSizes, layer: int = 0) -> dict[Moment, Wire]:
    """Sum one layer's traffic over tp per microbatch, by the moment of its calls (`models/predict/layer_calls.py`)."""
    return _wires(tensor_parallel_calls(config, sizes, layer), sizes.tp)


def _wires(calls: Iterable[Call], size: int) -> dict[Moment, Wire]:
    found = dict.fromkeys(get_args(Moment), Wire())
    for call in calls if size > 1 else ():
        found[call.moment] += Wire(wire_bytes(call.op, size, call.num_bytes), 1)
    return found


def activation_bytes(config: Config) -> int:
    """Count the bytes in a microbatch's activation [s / c, b, h]."""
    return tokens_of_microbatch(config) * config.model.hidden_size * element_bytes(config)


@dataclass(frozen=True, slots=True)
class ContextParallelWires:
    """Attention's traffic over cp, per layer and microbatch.

    Attributes:
        forward, backward: traffic of each pass.
        exposed: share of the traffic that no other piece's attention can hide.
    """

    forward: Wire
    backward: Wire
    exposed: float


def context_parallel_wires(config: Config, sizes: ParallelSizes) -> ContextParallelWires:
    """Count the keys and values, or heads, that one layer sends over cp."""
    wires = _wires(context_parallel_calls(config, sizes), sizes.cp)
    in_pieces = gathers_keys(config) and config.model.mla is None and config.kernels.attention != "explicit"
    share = float(exposed_share(local_kv_heads(config))) if in_pieces else 1.0
    return ContextParallelWires(wires["forward"], wires["backward"], share)
