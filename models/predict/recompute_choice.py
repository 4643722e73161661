"""Price the recomputation of each part of a layer, and choose the parts whose saved memory is worth it.

Cost is counted in bytes moved to and from device memory per token; a FLOP costs 1 / F bytes, where F is the `flops_per_byte` of
PRICED_ON. The gain is the size of the part's tensors by the formula in `models/predict/activation_memory.py`.
For a Llama-3-8B layer in bf16:

    part         recomputed                                 cost per saved byte
    norm         input of the qkv and up projections        2
    rope         q and k after rotation                     2.1
    activation   input of the down projection               3 (GELU: 2)
    mlp          gate and up: a GEMM                        h / F + ..
    attention    scores and softmax                         high: a fused kernel keeps no scores, so little is saved
    whole layer  all but its input

A GEMM's cost grows with its inner width, an elementwise function's does not. So elementwise parts come first in wide models.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from triaxis.engine.config.quantities.layer_products import layer_products
from triaxis.engine.config.quantities.plan import stages_of
from triaxis.engine.config.rules.problem import Subject
from triaxis.engine.config.rules.recompute import RECOMPUTED_PARTS
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.device import load_device
from triaxis.models.predict.experts.memory import columns_per_token
from triaxis.models.predict.layer_terms import block_terms, per_token
from triaxis.models.predict.terms import Sizes, Term

PRICED_ON = "H100-SXM-80GB"
"""Device whose rates price a recomputation. It is one for all, so that a configuration recomputes the same parts everywhere."""

ATTENTION, MLP = "attention", "mlp"
"""The parts with GEMMs."""
PARTS = ("norm", "rope", "activation", MLP, ATTENTION)


@dataclass(frozen=True, slots=True)
class Price:
    """The price of recomputing one part of a layer, per token.

    Attributes:
        saved: bytes of the tensors that need not be kept if the part is recomputed.
        moved: bytes read and written to recompute these tensors.
        flops: GEMM FLOPs to recompute these tensors.
    """

    part: str
    saved: Fraction
    moved: Fraction
    flops: Fraction

    @property
    def per_byte(self) -> Fraction:
        """Cost per saved byte, in bytes moved; FLOPs are converted by the rates of PRICED_ON."""
        return _in_bytes(self.moved, self.flops) / self.saved


def _in_bytes(moved: Fraction, flops: Fraction) -> Fraction:
    """Compute the cost of bytes moved and of GEMM FLOPs, in bytes moved."""
    return moved + flops / load_device(PRICED_ON).flops_per_byte


def prices(config: Config, sizes: ParallelSizes) -> list[Price]:
    """Price the parts that save memory and are legal, cheapest per byte first.

    Recomputing `mlp` includes `activation`, and the price of `mlp` covers only what it adds. Inputs that sequence parallelism
    would gather again belong to no part.
    """
    plain = config.model_copy(update={"recompute": choice_for_layers(config.recompute)})
    kept = block_terms(plain, sizes, usual_layer(config))
    found = []
    for part in PARTS:
        saved = _saved(config, sizes, kept, part)
        if saved > 0 and part_is_legal(config, part):
            found.append(Price(part, saved, *_work(config, sizes, part)))
    return sorted(found, key=lambda price: price.per_byte)


def part_is_legal(config: Config, part: str) -> bool:
    """Whether the configuration's rules allow the part to be recomputed alone."""
    alone = choice_for_layers(config.recompute, granularity="selective", modules=[part])
    subject = Subject(config.model_copy(update={"recompute": alone}), None, None)
    return not any(problem for rule in RECOMPUTED_PARTS for problem in rule(subject))


def _saved(config: Config, sizes: ParallelSizes, kept: Sequence[Term], part: str) -> Fraction:
    if part == "attention":
        # Recomputing attention also changes how its operands are kept, so its gain is a difference.
        again = choice_for_layers(config.recompute, granularity="selective", modules=["attention"])
        changed = block_terms(config.model_copy(update={"recompute": again}), sizes, usual_layer(config))
        return per_token(kept) - per_token(changed)
    return per_token([term for term in kept if term.part == part])


def usual_layer(config: Config) -> int:
    """Return the index of the layer whose prices stand for all layers'.

    It is the first layer with experts if most layers have experts, else the first layer without.
    """
    kinds = config.model.kinds
    with_experts = sum(kind.has_experts for kind in kinds)
    return next(layer for layer, kind in enumerate(kinds) if kind.has_experts == (2 * with_experts > len(kinds)))


def _activated(config: Config, sizes: ParallelSizes, at: Sizes) -> Fraction:
    """Count the elements per token that enter the usual layer's last GEMM."""
    has_experts = config.model.layer_kind(usual_layer(config)).has_experts
    return columns_per_token(config, sizes) if has_experts else at.f


def _work(config: Config, sizes: ParallelSizes, part: str) -> tuple[Fraction, Fraction]:
    """Count (bytes moved, GEMM FLOPs) per token to recompute a part."""
    model, at = config.model, Sizes.of(config, sizes)
    nothing = Fraction(0)
    whole = at.w * at.h * at.shard
    activated = _activated(config, sizes, at)
    columns = model.activation_kind.num_inputs * activated
    if part == "norm":
        return 4 * whole * model.norms_before, nothing
    if part == "rope":
        rotary = next((kind.rotary for kind in model.kinds if kind.rotary is not None), None)
        passes = (rotary is not None) + bool(model.qk_norm)
        tables = 0 if rotary is None else 2 * at.acc * rotary.dim
        # Latent attention's rotating key is not counted: it is small, and all heads share it.
        return 2 * passes * at.w * (at.q + at.kv * (model.mla is None)) + tables, nothing
    if part == "activation":
        return at.w * (columns + activated), nothing
    if part == "mlp":
        return at.w * (at.h + columns), Fraction(2 * at.h * columns)
    # A causal kernel does half the work of the two GEMMs. Explicit scores go to memory and back with each operator.
    products = layer_products(model, model.layer_kind(usual_layer(config)), sizes.tp)
    gemms, made = 2 * (at.q + at.out) * at.s, sum(each.weights * at.c for each in products if each.kind == "latents")
    if config.kernels.attention != "explicit":
        return at.w * (at.q + at.out + 2 * at.kv), gemms / 2 + 2 * made
    scores = at.heads * at.s
    return scores * (4 * at.acc + 4 * at.w), gemms + 2 * made


def worthwhile_parts(config: Config, sizes: ParallelSizes) -> list[str]:
    """List the parts that are worth recomputing, cheapest per saved byte first.

    The list ends before the first part whose saved byte costs more than one saved by recomputing the whole layer.
    """
    plain = config.model_copy(update={"recompute": choice_for_layers(config.recompute)})
    kept = block_terms(plain, sizes, usual_layer(config))
    at = Sizes.of(config, sizes)
    left = per_token(kept) - at.w * at.h * at.shard
    whole = _whole_layer(config, sizes)
    parts = []
    for price in prices(config, sizes):
        if price.per_byte * left > whole:
            break
        parts.append(price.part)
        left -= price.saved
    return parts


def _whole_layer(config: Config, sizes: ParallelSizes) -> Fraction:
    """Compute the cost of a layer's forward, in bytes moved per token."""
    at = Sizes.of(config, sizes)
    work = [_work(config, sizes, part) for part in PARTS]
    # The other GEMMs: qkv, proj, down; and two residual additions of three tensors each.
    latents = 0 if config.model.mla is None else config.model.mla.latent_size
    activated = _activated(config, sizes, at)
    moved = at.w * (3 * at.h + at.q + at.out + 2 * at.kv + activated + 6 * at.h * at.shard + 2 * latents * at.shard)
    moved += at.w * 4 * at.h * at.shard * config.model.norms_after
    products = layer_products(config.model, config.model.layer_kind(usual_layer(config)), sizes.tp)
    # Attention's price already includes the products from key latents, and that of `mlp` the first product.
    share = {"column": Fraction(1), "row": Fraction(1), "own": at.shard}
    weights = sum(each.weights * share.get(each.kind, 0) for each in products if each.name.startswith("attention."))
    flops = 2 * (weights + at.h * activated)
    return (
        moved
        + sum(moved for moved, _ in work)
        + (flops + sum(flops for _, flops in work)) / load_device(PRICED_ON).flops_per_byte
    )


def choice_for_layers(recompute: RecomputeConfig, **choice: object) -> RecomputeConfig:
    """Build a `recompute` section with another choice for layers; its fields for the head and gathered tensors stay."""
    stays = {name: getattr(recompute, name) for name in ("head_tokens", "gathered_inputs", "gathered_kv")}
    return RecomputeConfig.model_validate({**stays, **choice})


def candidates(
    config: Config, sizes: ParallelSizes, memo: dict[object, Any] | None = None
) -> Iterator[RecomputeConfig]:
    """Yield the choices that `recompute.granularity = auto` tries, in order.

    The first recomputes nothing. The next ones recompute more and more parts of every layer, cheapest first. The last ones
    recompute more and more whole layers of every chunk, and all of these parts in the other layers. With deferred weight
    gradients, no whole layers are recomputed.

    Args:
        memo: cache of this run's predictions with other layouts and batch sizes; read and filled.
    """
    yield choice_for_layers(config.recompute)
    memo, parallel = {} if memo is None else memo, config.parallel
    key = ("parts", sizes.tp, sizes.cp, sizes.ep, sizes.etp, parallel.sequence_parallel, config.train.micro_batch_size)
    if key not in memo:
        memo[key] = worthwhile_parts(config, sizes)
    parts: list[str] = memo[key]
    for count in range(1, len(parts) + 1):
        yield choice_for_layers(config.recompute, granularity="selective", modules=parts[:count])
    if config.schedule.defers_weight_gradients:
        return
    for num_layers in range(1, max(len(stage.layers) for stage in stages_of(config, memo)) + 1):
        yield choice_for_layers(
            config.recompute, granularity="full", method="block", num_layers=num_layers, modules=parts
        )
