"""Inputs of products that are kept in FP8 where one scale serves a tensor, 1 byte per element.

A layer keeps its input so where nothing else keeps it, and where it is not made again:

    attention.qkv, attention.down, mlp.up     a norm's output; not in front of a product that is recomputed itself
    attention.q_up                            the normalised latent of queries
    mlp.down, mlp.shared.down                 an activation's output
    what was gathered, and is kept whole      of every column-parallel product

With sequence parallelism the shards of the first are gathered again in the run's dtype, unless `precision.fp8.gather` is fp8, so
they are kept in it. So are the input of attention's projection, which a fused attention keeps for its own backward, and that of
shared experts, which the router keeps. With that gather, deferred gradients of weights wait with outputs' gradients in FP8.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction

from triaxis.engine.config.fp8 import BLOCKS, fp8_layers, linears_of
from triaxis.engine.config.tree import Config
from triaxis.models.predict.terms import BYTES_PER_ELEMENT, Sizes, Term


def is_in_fp8(config: Config, layer: int) -> bool:
    """Return whether the linear layers of a layer have FP8 operands."""
    return layer in fp8_layers(config)


def kept_in_fp8(config: Config, at: Sizes, terms: Sequence[Term], parts: Collection[str]) -> list[Term]:
    """Return the terms of an FP8 layer with recomputed `parts`, its inputs with the bytes that they are kept in."""
    fp8 = config.precision.fp8
    if fp8 is None or fp8.recipe in BLOCKS:
        return list(terms)
    stored = {(module, "input") for module in _stored(config, at, parts)}
    if sends_fp8(config, at):
        stored |= {(module, "gradient") for module in ("attention.proj", "mlp.down", "mlp.shared.down")}
    return [replace(term, ours=term.ours / at.w) if (term.module, term.tensor) in stored else term for term in terms]


def sends_fp8(config: Config, at: Sizes) -> bool:
    """Return whether what sequence parallelism gathers for FP8 layers travels in FP8."""
    fp8 = config.precision.fp8
    return fp8 is not None and fp8.gather == "fp8" and at.shard != 1


def remembered_terms(config: Config, at: Sizes, layer: int) -> list[Term]:
    """List the largest numbers that a layer which is recomputed as a whole remembers for its replay: 4 bytes for each product."""
    fp8 = config.precision.fp8
    if fp8 is None or fp8.recipe in BLOCKS or not is_in_fp8(config, layer):
        return []
    num_bytes = BYTES_PER_ELEMENT["fp32"] * len(linears_of(config, layer))
    return [Term("block", "largest inputs", Fraction(0), Fraction(num_bytes * at.c, at.b * at.s))]


def _stored(config: Config, at: Sizes, parts: Collection[str]) -> set[str]:
    """Return the products whose inputs are kept in FP8."""
    model = config.model
    stored = set() if "activation" in parts else {"mlp.down", "mlp.shared.down"}
    gathered = {"attention.qkv", "attention.q_up", "mlp.up", "mlp.shared.up"}
    has_latent = model.mla is not None and model.mla.q_lora_rank is not None
    is_behind_norm = model.norms_before and "norm" not in parts
    if is_behind_norm and has_latent:
        stored.add("attention.down")
    if at.shard != 1 and config.recompute.gathered_inputs == "keep":
        return stored | gathered
    if at.shard != 1 and not sends_fp8(config, at):
        return stored
    if is_behind_norm:
        stored |= {"attention.qkv"} if "mlp" in parts else {"attention.qkv", "mlp.up"}
    return stored | {"attention.q_up"} if has_latent and "norm" not in parts else stored
