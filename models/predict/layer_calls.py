"""List the calls that one layer posts over tp and cp for a microbatch.

`models/predict/traffic.py` adds them up to a step's bytes, which the communication ledger confirms, and
`models/predict/step_time/facts.py` times them. With T tokens on the rank and w bytes per element, a product with sides k and n
(`engine/config/quantities/layer_products.py`) sends, over tp:

    column    its input, T k w: gathered before the product (SP); gathered again for the weight gradient (SP, unless gathered inputs
              are kept); the input's gradient is summed afterwards
    row       its output, T n w: summed after the product; its gradient is gathered before the backward (SP), and once more for a
              deferred weight gradient (SP)
    latents   keys' and values' latents: gathered (SP), and their gradient summed; their product belongs to no tp cut

A sum is a reduce-scatter with sequence parallelism (SP), else an all-reduce. Attention sends heads or keys and values over cp.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from triaxis.engine.comm.ledger import HEADS, KEYS_AND_VALUES
from triaxis.engine.config.quantities.context_parallel import gathers_keys, heads_of_pieces, local_kv_heads
from triaxis.engine.config.quantities.fp8_layers import fp8_layers
from triaxis.engine.config.quantities.layer_products import layer_products
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.models.predict.terms import BYTES_PER_ELEMENT, accumulation_bytes, tokens_of_microbatch

Moment = Literal["forward", "entering", "regathered", "leaving", "deferred", "backward"]
"""When a call is posted: in a forward; before a row-parallel product's backward (entering); for the weight gradient of a
column-parallel product (regathered) and after its input gradient (leaving); only for a deferred weight gradient (deferred); or
anywhere in attention's backward (backward)."""


class Call(NamedTuple):
    """One call of a layer.

    Attributes:
        moment: when the call is posted.
        purpose, op: the call's labels in the communication ledger.
        num_bytes: bytes that the ledger counts: for an all-gather the shard's, else the whole tensor's.
    """

    moment: Moment
    purpose: str
    op: str
    num_bytes: int


def wire_bytes(op: str, size: int, num_bytes: int) -> int:
    """Compute the bytes that a rank sends in one call over a ring of `size` ranks; 0 for a receive.

    `num_bytes` is the size that the ledger records: for an all-gather the shard's, for exchanged rows that of rows to other ranks,
    else the whole tensor's.
    """
    if op == "all_reduce":
        return 2 * (size - 1) * num_bytes // size
    if op in ("reduce_scatter", "all_to_all"):
        return (size - 1) * num_bytes // size
    if op == "all_gather":
        return (size - 1) * num_bytes
    # Rows are counted without those that stay on the rank.
    return num_bytes if op in ("send", "all_to_all_rows") else 0


def tensor_parallel_calls(config: Config, sizes: ParallelSizes, layer: int) -> Iterator[Call]:
    """Yield a layer's calls over tp; an axis with one rank posts none of them."""
    model, is_cut, fp8 = config.model, config.parallel.sequence_parallel, config.precision.fp8
    tokens, element = tokens_of_microbatch(config), BYTES_PER_ELEMENT[config.precision.dtype]
    gathered = 1 if fp8 is not None and fp8.gather == "fp8" and layer in fp8_layers(config) else element

    def call(moment: Moment, width: int, gathers: int | None = None) -> Call:
        """Build a sum, or a gather with `gathers` bytes per element, of a tensor [tokens, width]."""
        if gathers is not None:
            return Call(moment, "activations", "all_gather", gathers * width * tokens // sizes.tp)
        return Call(moment, "activations", "reduce_scatter" if is_cut else "all_reduce", element * width * tokens)

    products = layer_products(model, model.layer_kind(layer), sizes.tp)
    for width in [product.n for product in products if product.kind == "row"]:
        yield call("forward", width)
        if is_cut:
            yield call("entering", width, gathered)
            yield call("deferred", width, gathered)
    entering = [(product.k, gathered) for product in products if product.kind == "column"]
    if is_cut and config.recompute.gathered_inputs != "keep":
        yield from (call("regathered", width, num_bytes) for width, num_bytes in entering)
    # Key latents enter without a product, for whose weight they would be gathered again.
    for width, num_bytes in [*entering, *([] if model.mla is None else [(model.mla.cached_size, element)])]:
        yield call("leaving", width)
        if is_cut:
            yield call("forward", width, num_bytes)


def context_parallel_calls(config: Config, sizes: ParallelSizes) -> Iterator[Call]:
    """Yield the calls over cp of a layer's attention; an axis with one rank posts none of them."""
    model, kv_heads = config.model, local_kv_heads(config)
    tokens, element = config.train.micro_batch_size * model.seq_length, BYTES_PER_ELEMENT[config.precision.dtype]
    if not gathers_keys(config):
        heads = model.num_attention_heads // sizes.tp
        for exchanged in (heads + 2 * kv_heads, heads):
            num_bytes = exchanged * model.head_size * tokens * element // sizes.cp
            yield Call("forward", HEADS, "all_to_all", num_bytes)
            yield Call("backward", HEADS, "all_to_all", num_bytes)
        return
    # Attention in plain operators gathers at once, and keeps what was gathered.
    is_explicit = config.kernels.attention == "explicit"
    widths = [2 * heads * model.head_size for heads in ([kv_heads] if is_explicit else heads_of_pieces(kv_heads))]
    if model.mla is not None:
        widths = [model.mla.cached_size]
    is_kept = model.mla is not None or is_explicit or config.recompute.gathered_kv == "keep"
    summed = accumulation_bytes(element) if config.parallel.cp_gradients == "accumulation" else element
    for width in widths:
        gather = Call("forward", KEYS_AND_VALUES, "all_gather", width * tokens * element // sizes.cp)
        yield gather
        if not is_kept:
            yield gather._replace(moment="backward")
        yield Call("backward", KEYS_AND_VALUES, "reduce_scatter", width * tokens * summed)
