"""Records what each microbatch asks of a device, so that two can be compared: operators, constants, tensors and their memory.

A CUDA graph replays one microbatch's calls on the memory of its recording. So microbatches of a step may differ in the values of
their inputs alone: not in an operator, a shape or a number that Python passes, nor in which memory is read and written.

    made     memory that this microbatch allocated, numbered in the order of its operators
    input    the batch's tensors and what a stage receives, by name: a graph gets them copied to a fixed place
    outside  all other memory, such as weights and main grads, by its address
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.pipeline.actions import Action
from triaxis.engine.pipeline.p2p import Transport

Key = tuple[str, int, int]
"""Kind of an action, chunk and microbatch."""


class Work(TorchDispatchMode):
    """What was asked for while it was active.

    Attributes:
        calls: by action, its operators in order, each as text.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Key, list[str]] = defaultdict(list)
        self._key: Key | None = None
        self._inputs: dict[int, str] = {}
        self._made: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        # No address is given out again.
        self._kept: list[torch.UntypedStorage] = []

    def observe(self, instruction: object) -> None:
        """Say which instruction runs next, as an observer of the executor."""
        is_action = isinstance(instruction, Action)
        self._key = (instruction.kind.name, instruction.chunk, instruction.microbatch) if is_action else None

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Give the memory of an input a name."""
        self._inputs[self._address(tensor)] = name

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._key is not None:
            given = self._text([*args, *(kwargs or {}).items()])
            known = {self._address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
            made = self._made[self._key[1:]]
            for each in tree_leaves(result):
                if isinstance(each, torch.Tensor) and self._address(each) not in known:
                    made.setdefault(self._address(each), len(made))
            self.calls[self._key].append(f"{func}{given} -> {self._text(result)}")
        return result

    def _text(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            form = f"{[*value.shape]} {[*value.stride()]} + {value.storage_offset()} {value.dtype}"
            return f"{self._place(self._address(value))} {form}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._text, value))}]"
        # A group, or a call's handle: an object of its own in each call.
        return "object" if isinstance(value, torch.ScriptObject) else repr(value)

    def _place(self, address: int) -> str:
        assert self._key is not None
        number = self._made[self._key[1:]].get(address)
        return self._inputs.get(address) or (f"outside {address:x}" if number is None else f"made {number}")

    def _address(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        return storage._cdata


@contextmanager
def recorded(microbatches: Sequence[MicroBatch]) -> Iterator[Work]:
    """Record the step of these microbatches, which runs inside with `Work.observe` as an observer."""
    work, take = Work(), Transport.take

    def taken(self: Transport, key: Any) -> torch.Tensor:
        tensor = take(self, key)
        work.name(tensor, f"received {key.direction}")
        return tensor

    for batch in microbatches:
        for name, tensor in _tensors("batch", batch):
            work.name(tensor, name)
    with patch.object(Transport, "take", taken), work:
        yield work


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a dataclass, and in those that it has, by name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif is_dataclass(value):
        for one in fields(value):
            yield from _tensors(f"{name}.{one.name}", getattr(value, one.name))


def differences(work: Work, one: int, other: int) -> list[str]:
    """Return, for each action of two microbatches, the first operator in which they differ."""
    found = []
    for kind, chunk, microbatch in list(work.calls):
        if microbatch == one:
            pair = [work.calls[kind, chunk, number] for number in (one, other)]
            unlike = (both for both in zip(*pair, strict=False) if both[0] != both[1])
            first, second = next(unlike, ("", ""))
            if first or len(pair[0]) != len(pair[1]):
                found.append(
                    f"{kind} of chunk {chunk}, {len(pair[0])} and {len(pair[1])} operators: {first} | {second}"
                )
    return found
