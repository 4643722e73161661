"""Find the product inputs that are kept in FP8 (1 byte per element) when each tensor has one scale.

A product keeps its input in FP8 if no other operator keeps the same tensor, and if recomputation does not replace the tensor.
Left: products. Right: the input that each keeps in FP8.

    attention.qkv, attention.down, mlp.up     a norm's output (mlp.up: unless the part `mlp` is recomputed)
    attention.q_up                            the queries' normalised latent
    mlp.down, mlp.shared.down                 an activation's output
    every column-parallel product             the gathered input, if `recompute.gathered_inputs` is keep

Sequence parallelism keeps shards of the inputs of attention.qkv, attention.q_up and mlp.up, and gathers them again in the
backward. Unless `precision.fp8.gather` is fp8, that gather is in the run's dtype, so these shards are kept in the run's dtype.
Two more inputs stay in the run's dtype. Fused attention keeps the input of attention.proj for its own backward, and the router
keeps that of mlp.shared.up. With the fp8 gather, deferred weight gradients hold the output gradients of attention.proj, mlp.down
and mlp.shared.down in FP8.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction

from triaxis.engine.config.quantities.fp8_layers import fp8_layers, linears_of
from triaxis.engine.config.schema.fp8 import BLOCKS
from triaxis.engine.config.tree import Config
from triaxis.models.predict.terms import BYTES_PER_ELEMENT, Sizes, Term


def is_in_fp8(config: Config, layer: int) -> bool:
    """Whether a transformer layer's linear layers have FP8 operands."""
    return layer in fp8_layers(config)


def kept_in_fp8(config: Config, at: Sizes, terms: Sequence[Term], parts: Collection[str]) -> list[Term]:
    """Return an FP8 layer's terms with 1 byte per element for the tensors that are stored in FP8.

    With a recipe that scales blocks, no tensor is stored in FP8, and the terms come back unchanged.

    Args:
        parts: the layer's recomputed parts.
    """
    fp8 = config.precision.fp8
    if fp8 is None or fp8.recipe in BLOCKS:
        return list(terms)
    stored = {(module, "input") for module in _stored(config, at, parts)}
    if sends_fp8(config, at):
        stored |= {(module, "gradient") for module in ("attention.proj", "mlp.down", "mlp.shared.down")}
    return [replace(term, ours=term.ours / at.w) if (term.module, term.tensor) in stored else term for term in terms]


def sends_fp8(config: Config, at: Sizes) -> bool:
    """Whether sequence parallelism gathers the tensors for FP8 layers in FP8."""
    fp8 = config.precision.fp8
    return fp8 is not None and fp8.gather == "fp8" and at.shard != 1


def remembered_terms(config: Config, at: Sizes, layer: int) -> list[Term]:
    """List what a fully recomputed FP8 layer remembers for its recomputation: the scale of each product's input.

    A scale is the largest input and the factor that follows from it, 4 bytes each.

    With a recipe that scales blocks, a layer remembers nothing.
    """
    fp8 = config.precision.fp8
    if fp8 is None or fp8.recipe in BLOCKS or not is_in_fp8(config, layer):
        return []
    num_bytes = 2 * BYTES_PER_ELEMENT["fp32"] * len(linears_of(config, layer))
    return [Term("block", "scales of inputs", Fraction(0), Fraction(num_bytes * at.c, at.b * at.s))]


def _stored(config: Config, at: Sizes, parts: Collection[str]) -> set[str]:
    """Name the products whose inputs are kept in FP8, by the module docstring's rules."""
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
