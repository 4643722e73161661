"""Work of one operator that runs by itself: bytes through a GPU's memory, or the sizes of a product.

    bytes    each tensor that is given is read once, each result written once; a tensor that changes is both
             of a table from which rows are taken or to which rows are added, those rows alone
    views    move nothing; products and attention are timed by their FLOPs

A cache may hold what was written just before, which no count here includes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from benchmarks.operators import is_view

PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_grouped_mm")
SCALED_PRODUCTS = ("aten::_scaled_mm", "aten::_scaled_mm_v2")
"""Products whose first two tensors are the matrices, and others their scales."""

OVERWRITES = ("aten::copy_", "aten::fill_", "aten::zero_")
"""Operators that write a tensor without reading it."""

ROW_READS = ("aten::embedding", "aten::index", "aten::index_select", "aten::gather")
ROW_WRITES = ("aten::index_add_", "aten::index_put_", "aten::scatter_add_", "aten::scatter_")
"""Operators that read or change some rows of their first tensor."""


@dataclass(frozen=True, slots=True)
class Product:
    """`count` products [m, k] x [k, n] in one kernel."""

    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.count


def is_work(func: Any) -> bool:
    """Return whether an operator launches a kernel."""
    return func.namespace == "aten" and not is_view(func)


def is_attention(func: Any) -> bool:
    """Return whether it is a fused attention, forward or backward."""
    return "_attention" in func.name()


def product_of(func: Any, args: Sequence[Any]) -> Product | None:
    """Return the product that an operator computes; None where it is none."""
    base, tensors = _base(func), [each for each in args if isinstance(each, torch.Tensor)]
    if base not in PRODUCTS + SCALED_PRODUCTS:
        return None
    left, right = tensors[:2] if base in SCALED_PRODUCTS else tensors[-2:]
    return Product(left.shape[-2], right.shape[-1], left.shape[-1], math.prod(left.shape[:-2]))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Count the bytes of a tensor's elements, an expanded dim once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return math.prod(sizes) * tensor.element_size()


def moved_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Count the bytes that an operator reads and writes."""
    base, outputs = _base(func), [each for each in tree_iter(result) if isinstance(each, torch.Tensor)]
    tensors = (each for each in tree_iter((args, dict(kwargs))) if isinstance(each, torch.Tensor))
    given = list({id(each): each for each in tensors}.values())  # twice the same is read once
    # What is written is a result too, and what only receives it is not read.
    only_written = _only_written(func, args, kwargs)
    read = [each for each in given if not any(each is other for other in only_written)]
    written = sum(map(tensor_bytes, outputs))
    if base in ROW_READS:
        return sum(map(tensor_bytes, read[1:])) + 2 * written
    if base in ROW_WRITES:
        rows = max(read[1:], key=tensor_bytes)
        return sum(map(tensor_bytes, read[1:])) + 2 * tensor_bytes(rows)
    return sum(map(tensor_bytes, read)) + written


def _only_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    arguments = func._schema.arguments
    values = dict(zip((each.name for each in arguments), args, strict=False)) | dict(kwargs)
    overwrites = _base(func) in OVERWRITES
    found = [
        values.get(each.name)
        for each in arguments
        if each.alias_info is not None and each.alias_info.is_write and (each.kwarg_only or overwrites)
    ]
    return [each for each in tree_iter(found) if isinstance(each, torch.Tensor)]


def _base(func: Any) -> str:
    """Return the operator's name without its overload; a product that writes over an argument is the product."""
    name: str = func.name().partition(".")[0]
    return name.removesuffix("_") if name.removesuffix("_") in PRODUCTS else name
