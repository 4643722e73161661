"""Live bytes by kind, counted by storages as they come and go; operators by the place of the model that needs them.

Every operator passes a dispatch mode, which sees new storages; a weak reference reports when one is freed. This counts what
tensors hold, exactly and at every moment, with real tensors as with fake ones; what an allocator rounds up or caches is not in it.

    parameters, gradients, optimizer    said by name when the watch begins
    p2p                                 what a send or a receive was called with, until autograd saves it
    logits, activations                 what autograd saved for the backward, at the head or elsewhere
    temporaries                         all else

An operator of the backward belongs to the module whose forward made its autograd node: nodes are numbered in order, and the
numbers at which modules begin and end are written down.

The largest tensor that an operator made has a name too: the module and the operator.
"""

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from triaxis.engine.activations.saved_tensors import SavedTensors

MemoryKind = Literal["parameters", "gradients", "optimizer", "activations", "logits", "p2p", "temporaries"]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One storage that autograd keeps for a backward: where it was saved, its shape as saved, and its bytes."""

    site: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor with memory of its own: the module that asked for it, the operator that made it, its shape, dtype and bytes."""

    site: str
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


@dataclass
class _Storage:
    num_bytes: int
    kind: MemoryKind
    watcher: Any


@dataclass
class Peak:
    """The moment with the most live bytes: bytes by kind, and the module that was at work."""

    by_kind: dict[MemoryKind, int] = field(default_factory=dict)
    site: str = ""

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


@dataclass
class Extremes:
    """Peak values since the last reset.

    Attributes:
        most: the most bytes of each kind that grew, each at a moment of its own.
        peak: the first of the largest moments at which a storage was new; None where none was.
        largest: the first of the largest tensors that were made; None where none was.
        ops: how often each operator was dispatched, by (place, name).
    """

    most: dict[MemoryKind, int] = field(default_factory=dict)
    peak: Peak | None = None
    largest: NewTensor | None = None
    ops: Counter[tuple[str, str]] = field(default_factory=Counter)


class MemoryWatch(TorchDispatchMode):
    """Live bytes and operators, counted while the watch is entered.

    Attributes:
        live: bytes by kind, now.
        step: what happened since `forget_peak`; `most` and `peak` begin with what was live then.
        part: what happened since `begin_part`, a shorter time.
        phase: the place of operators that belong to no module.
        saved: what autograd saved in the first forward of each chunk, in order, each storage once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[MemoryKind] = Counter()
        self.step = Extremes()
        self.part = Extremes()
        self.phase = ""
        self.saved: list[SavedTensor] = []
        self._storages: dict[int, _Storage] = {}
        self._sites: list[tuple[str, str]] = []
        self._places: Mapping[str, str] = {}
        self._last_child = ""
        self._logits: Sequence[str] | None = None
        self._first_nodes: list[int] = []
        self._node_places: list[str] = []
        self._node_sites: list[str] = []
        self._forwards: Counter[str] = Counter()
        self._is_first = False
        self._is_outside = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_outside:
            self._see_outside(result)
            return result
        if func.namespace != "prim":  # questions, not work
            key = (self._place, func.name())
            self.step.ops[key] += 1
            self.part.ops[key] += 1
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._see(value, func.name())
        if func.namespace == "c10d" and func.name().endswith(("send", "recv_")):
            for value in tree_iter(args):
                if isinstance(value, torch.Tensor):
                    self.label(value, "p2p")
        return result

    def _see_outside(self, result: Any) -> None:
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._know(value.untyped_storage(), 0)

    def _know(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = id(storage)

        def freed(_: Any) -> None:
            gone = self._storages.pop(key)
            self.live[gone.kind] -= gone.num_bytes

        self._storages[key] = _Storage(num_bytes, "temporaries", weakref.ref(storage, freed))

    def label(self, tensor: torch.Tensor, kind: MemoryKind) -> None:
        """Set the kind of the tensor's storage, which counts as that from now on."""
        self._see(tensor)
        storage = self._storages[id(tensor.untyped_storage())]
        self.live[storage.kind] -= storage.num_bytes
        storage.kind = kind
        self._grow(kind, storage.num_bytes)

    def _grow(self, kind: MemoryKind, num_bytes: int) -> None:
        self.live[kind] += num_bytes
        live = self.live[kind]
        for extremes in (self.step, self.part):
            extremes.most[kind] = max(extremes.most.get(kind, 0), live)

    def forget_peak(self) -> None:
        """Begin a new step: a search for the peak, new counts of operators and saved tensors."""
        self.step = Extremes(dict(self.live), Peak(dict(self.live), ""))
        self.begin_part()
        self.saved.clear()
        self._forwards.clear()

    def begin_part(self) -> None:
        """Begin a new part of the step."""
        self.part = Extremes()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Exclude new tensors from the step and from the device's memory."""
        self._is_outside = True
        try:
            yield
        finally:
            self._is_outside = False

    @contextmanager
    def looking_at(
        self,
        modules: Sequence[nn.Module],
        saving: Sequence[SavedTensors],
        logits: Sequence[str],
        places: Mapping[str, str],
    ) -> Iterator[None]:
        """Name saved tensors by the module that was running; those of a module in `logits` count as logits.

        Our hooks see the tensors that autograd saves; hooks that come before them report theirs (`saving`).

        `places` groups operators: the name of a chunk's child -> its place. A chunk's own operators count to the place of the
        child that ran last, or before all children to the place of the name "".
        """
        self._places = places
        hooks = []
        for number, chunk in enumerate(modules):
            prefix = f"chunk {number}: " if len(modules) > 1 else ""
            for name, module in chunk.named_modules():
                hooks.append(module.register_forward_pre_hook(self._enter(prefix, name)))
                hooks.append(module.register_forward_hook(self._leave))

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.on_saved(tensor)
            return tensor

        self._logits = logits
        try:
            for each in saving:
                if each.host is not None:
                    each.host.making = self.outside
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                yield
        finally:
            self._logits = None
            for each in saving:
                if each.host is not None:
                    each.host.making = nullcontext
            for hook in hooks:
                hook.remove()

    def _enter(self, prefix: str, name: str) -> Any:
        is_chunk = not name

        def enter(module: nn.Module, inputs: Any) -> None:
            if is_chunk:
                self._forwards[prefix] += 1
                self._is_first = self._forwards[prefix] == 1
                self._last_child = ""
            self._sites.append((prefix, name))
            self._new_nodes_belong_here()

        return enter

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        _, name = self._sites.pop()
        if name:
            self._last_child = name.split(".")[0]
        if not self._sites:
            self._is_first = False
        self._new_nodes_belong_here()

    def _new_nodes_belong_here(self) -> None:
        """Record the number from which autograd nodes belong to the running module."""
        self._first_nodes.append(torch.autograd._get_sequence_nr())
        self._node_places.append(self._place if self._sites else "")
        self._node_sites.append("".join(self._site))

    @property
    def _place(self) -> str:
        if self._sites:
            child = self._sites[-1][1].split(".")[0] or self._last_child
            return self._places[child]
        return self._of_node(self._node_places) or self.phase

    @property
    def _work(self) -> str:
        """Return the module that is at work, forward or backward; outside of both, the phase."""
        if self._sites:
            return "".join(self._site)
        of_node = self._of_node(self._node_sites)
        return f"{of_node} (backward)" if of_node else self.phase

    def _of_node(self, found: Sequence[str]) -> str:
        """Return the entry of the module whose backward runs; "" where there is none."""
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        # Sums of gradients into leaves have no number of their own, but the largest there is.
        index = bisect_right(self._first_nodes, node._sequence_nr()) - 1
        return found[index] if index >= 0 else ""

    @property
    def _site(self) -> tuple[str, str]:
        """Return (the chunk, the module in it); empty outside of a forward, and in a backward's recomputation."""
        return self._sites[-1] if self._sites else ("", "")

    def _see(self, tensor: torch.Tensor, operator: str = "") -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._storages:
            return
        num_bytes = storage.nbytes()
        self._know(storage, num_bytes)
        self._grow("temporaries", num_bytes)
        total = sum(self.live.values())
        for extremes in (self.step, self.part):
            if extremes.peak is None or total > extremes.peak.total:
                extremes.peak = Peak(dict(self.live), "".join(self._site))
            if operator and (extremes.largest is None or num_bytes > extremes.largest.num_bytes):
                extremes.largest = NewTensor(self._work, operator, tuple(tensor.shape), tensor.dtype, num_bytes)

    def on_saved(self, tensor: torch.Tensor) -> None:
        """Name a tensor that holds memory for a backward; outside of `looking_at`, nothing is saved that counts."""
        if self._logits is None:
            return
        self._see(tensor)
        storage = self._storages[id(tensor.untyped_storage())]
        if storage.kind not in ("temporaries", "p2p"):
            return
        chunk, module = self._site
        if self._is_first:
            self.saved.append(SavedTensor(chunk + module, tuple(tensor.shape), tensor.dtype, storage.num_bytes))
        self.label(tensor, "logits" if set(self._logits) & set(module.split(".")) else "activations")
