"""Count live bytes by kind, and operators by module.

The counts are exact, for real and for fake tensors. An allocator's rounding and caching are not included.

Each storage has one kind at a time:

    parameters, gradients, optimizer    labeled when the watch begins
    p2p                                 passed to a send or a receive, until autograd saves them
    logits                              saved by autograd for the backward at the head
    activations                         saved by autograd for the backward elsewhere
    temporaries                         all else

A backward operator belongs to the module whose forward created its autograd node.
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
    """A storage that autograd keeps for a backward."""

    site: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor with memory of its own.

    Attributes:
        site: module that requested the tensor.
        operator: operator that created the tensor.
    """

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
    """The moment with the most live bytes.

    Attributes:
        by_kind: live bytes of each kind of memory, such as `activations`.
        site: module that was running.
    """

    by_kind: dict[MemoryKind, int] = field(default_factory=dict)
    site: str = ""

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


@dataclass
class Extremes:
    """Peak values since the last reset.

    Attributes:
        most: peak bytes of each kind of memory that grew; the peaks may be at different moments.
        peak: moment with the most live bytes, among those at which a storage was created; None: no storage was created.
        largest: largest tensor created, the first of several equal ones; None: no tensor was created.
        ops: number of dispatches of each operator, by (place in the model, name).
    """

    most: dict[MemoryKind, int] = field(default_factory=dict)
    peak: Peak | None = None
    largest: NewTensor | None = None
    ops: Counter[tuple[str, str]] = field(default_factory=Counter)


class MemoryWatch(TorchDispatchMode):
    """A mode that counts live bytes and operators while it is entered.

    Attributes:
        live: current bytes of each kind of memory, such as `activations`.
        step: peaks and counts since `forget_peak`.
        part: peaks and counts since `begin_part`, in one part of the step, such as a pipeline instruction.
        phase: label under which operators outside all modules are counted.
        saved: tensors that autograd saved in each chunk's first forward, in order; each storage is listed once.
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
        if func.namespace != "prim":  # queries, not work
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
        """Set the kind of the tensor's storage from now on."""
        self._see(tensor)
        storage = self._storages[id(tensor.untyped_storage())]
        self.live[storage.kind] -= storage.num_bytes
        storage.kind = kind
        self._grow(kind, storage.num_bytes)

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Exclude the tensor's storage from all counts from now on, as it is in host memory."""
        self._see(tensor)
        storage = self._storages[id(tensor.untyped_storage())]
        self.live[storage.kind] -= storage.num_bytes
        storage.num_bytes = 0

    def _grow(self, kind: MemoryKind, num_bytes: int) -> None:
        self.live[kind] += num_bytes
        live = self.live[kind]
        for extremes in (self.step, self.part):
            extremes.most[kind] = max(extremes.most.get(kind, 0), live)

    def forget_peak(self) -> None:
        """Begin a new step. The peak, the operator counts and the saved tensors are reset."""
        self.step = Extremes(dict(self.live), Peak(dict(self.live), ""))
        self.begin_part()
        self.saved.clear()
        self._forwards.clear()

    def begin_part(self) -> None:
        """Begin a new part of the step, with peaks and counts of its own."""
        self.part = Extremes()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Exclude tensors that are created in the block from all counts."""
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
        """Count saved tensors and operators under the modules that they belong to, inside the block.

        Args:
            modules: the model's chunks.
            saving: objects that keep saved tensors and report them to `on_saved`; their copies in host memory are not counted.
            logits: names of modules whose saved tensors count as logits.
            places: label under which a child module's operators are counted, by the child's name. Operators of the chunk itself
                get the label of the child that ran last, or the label for "" if none has run.
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
        """Record the sequence number from which new autograd nodes belong to the running module."""
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
        """Return the module that is running, forward or backward, or else the phase."""
        if self._sites:
            return "".join(self._site)
        of_node = self._of_node(self._node_sites)
        return f"{of_node} (backward)" if of_node else self.phase

    def _of_node(self, found: Sequence[str]) -> str:
        """Return the entry of `found` for the module whose backward runs; "" if none runs.

        `found` is `_node_places` or `_node_sites`.
        """
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        # Gradient sums into leaves have the largest possible number instead of their own.
        index = bisect_right(self._first_nodes, node._sequence_nr()) - 1
        return found[index] if index >= 0 else ""

    @property
    def _site(self) -> tuple[str, str]:
        """Return (chunk, module in the chunk) whose forward runs.

        The result is ("", "") outside a forward, and in a backward's recomputation.
        """
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
        """Count a tensor that is kept for a backward as activations or logits.

        Only a tensor of kind `temporaries` or `p2p` (sent or received) is counted, and only inside a `looking_at` block. In a
        chunk's first forward, the tensor is also added to `saved`.
        """
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
