"""Keeps, recomputes or moves each tensor that autograd saves.

Until the backward, autograd holds one of these in place of a saved tensor:

    kept         the tensor itself.
    recomputed   a cheap function (a norm, an activation) and its inputs; the function runs once in the backward.
    moved        a place in host memory; the tensor leaves during the next layer's forward and returns during that layer's backward.

The unit is a storage, so several views into it count as one. A recomputed function's inputs are saved by the same rule. So chains
are recomputed from their first kept or moved tensor.

Recomputed functions must give the same bits and must not communicate. Whole layers do communicate, so `recompute` replays them.
`once` keeps results that a replay must not compute again, such as the choice of experts.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from triaxis.engine.activations.offload import HostMemory, OffloadedStorage
from triaxis.engine.activations.recompute import recompute
from triaxis.engine.activations.saved_tensors import ATTENTION, Result, SavedTensors, TensorObserver, unobserved
from triaxis.engine.device.copy_lane import Mark

Function = Callable[..., torch.Tensor]


class SavingHooks(SavedTensors):
    """The policy for a run that recomputes or moves some saved tensors.

    Args:
        parts: names of a layer's parts to recompute, such as `norm` and `attention`.
        host: host memory for moved tensors, or None if none is moved.
        min_bytes: size in bytes of the smallest storage that is moved.
        weights: function () -> this rank's weights, which are never moved.
        on_saved: observer called with each tensor that stays in device memory for a backward.
    """

    def __init__(
        self,
        parts: Collection[str] = (),
        host: HostMemory | None = None,
        min_bytes: int = 1,
        weights: Callable[[], Iterable[torch.Tensor]] = tuple,
        on_saved: TensorObserver = unobserved,
    ) -> None:
        self.parts = frozenset(parts)
        self.host = host
        self.min_bytes = min_bytes
        self._on_saved = on_saved
        self._weights = weights
        self._has_hooks = bool(self.parts - {ATTENTION})
        self._open: _Layer | None = None
        self._memo: _Memo | None = None
        self._below: _Layer | None = None
        self._sources: WeakKeyDictionary[torch.UntypedStorage, _Source] = WeakKeyDictionary()

    def run_layer(
        self,
        function: Function,
        x: torch.Tensor,
        *,
        moves: bool = False,
        whole: bool = False,
        shared: Iterable[torch.Tensor] = (),
    ) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return function(x)
        layer = _Layer(self.host if moves else None, self._on_saved)
        if moves:
            layer.stays = set(self._weight_storages)
            # A leaf came from another stage: the executor holds it for its gradient.
            layer.stays |= {_identity(tensor) for tensor in ((x,) if x.is_leaf else ())} | set(map(_identity, shared))
        with self._opened(layer, hooks=moves or (self._has_hooks and not whole)):
            y = recompute(partial(self._remembering, _Memo(self._on_saved), function), x) if whole else function(x)
        if self.host is not None:
            self._pass_on(layer, y)
        return y

    def end_chunk(self, output: torch.Tensor) -> torch.Tensor:
        # The chunk's backward begins by fetching the tensors that the last layer moved.
        last, self._below = self._below, None
        if last is not None:
            last.let_go()
            _before_backward_of(output, last.fetch)
        return output

    def recomputed(self, part: str, function: Function) -> Function:
        return partial(self._output, part, function) if part in self.parts else function

    def recomputed_inside(self, part: str, function: Function) -> Function:
        return partial(self._inside, part, function) if part in self.parts else function

    def makes_again(self, part: str) -> bool:
        return self._open is not None and part in self.parts

    def once(self, function: Callable[[], Result]) -> Result:
        return function() if self._memo is None else self._memo.next(function)

    def _output(self, part: str, function: Function, *inputs: torch.Tensor) -> torch.Tensor:
        output = function(*inputs)
        if self.makes_again(part) and torch.is_grad_enabled():
            storage = output.untyped_storage()
            # A view of an input needs no recipe: saving the view saves the input.
            if all(_identity(each) != storage._cdata for each in inputs):
                # The replay calls `forward`, since a module's hooks must not run twice.
                maker = function.forward if isinstance(function, nn.Module) else function
                self._sources[storage] = _Source(maker, [each.detach() for each in inputs], storage.nbytes())
        return output

    def _inside(self, part: str, function: Function, tensors: Sequence[torch.Tensor], *others: Any) -> torch.Tensor:
        if self.makes_again(part) and torch.is_grad_enabled():
            return recompute(lambda *again: function(again, *others), *tensors)
        return function(tensors, *others)

    def _remembering(self, memo: "_Memo", function: Function, x: torch.Tensor) -> torch.Tensor:
        self._memo = memo.begin()
        try:
            return function(x)
        finally:
            self._memo = None

    @contextmanager
    def _opened(self, layer: "_Layer", hooks: bool) -> Iterator[None]:
        self._open = layer
        try:
            if hooks:
                with saved_tensors_hooks(self._pack, _unpack):
                    yield
            else:
                yield
        finally:
            self._open = None

    def _pass_on(self, layer: "_Layer", y: torch.Tensor) -> None:
        """Send the layer's moved tensors, free the previous layer's, and prepare the layer's backward."""
        layer.send()
        below, self._below = self._below, layer
        if below is not None:
            below.let_go()
        _before_backward_of(y, partial(layer.need, below))

    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | _View":
        storage = tensor.untyped_storage()
        source = self._sources.get(storage)
        if source is not None:
            source.use(self._pack)
            return _View.of(tensor, source)
        # Autograd may pass a node's own output, whose history would keep the node alive for ever.
        tensor = tensor.detach()
        self._on_saved(tensor)
        layer = self._open
        assert layer is not None, "a layer's hooks are active in its forward alone"
        if layer.host is None or storage.nbytes() < self.min_bytes or storage._cdata in layer.stays:
            return tensor
        return _View.of(tensor, layer.moved(tensor))

    @cached_property
    def _weight_storages(self) -> frozenset[int]:
        return frozenset(_identity(weight) for weight in self._weights())


def _identity(tensor: torch.Tensor) -> int:
    """Return a number that identifies the tensor's storage, unique while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def _unpack(packed: "torch.Tensor | _View") -> torch.Tensor:
    return packed.take() if isinstance(packed, _View) else packed


def _before_backward_of(y: torch.Tensor, function: Callable[[], None]) -> None:
    """Call the function after y's gradient is complete and before it is used."""
    assert y.grad_fn is not None, "a layer has weights"

    def call(grads: object) -> None:
        function()

    y.grad_fn.register_prehook(call)


class _Memo:
    """Results from a layer's forward that the layer's replay reuses instead of computing again.

    `SavedTensors.once` calls `next`. `on_saved` is called with each tensor in a result.
    """

    def __init__(self, on_saved: Callable[[torch.Tensor], None]) -> None:
        self._on_saved = on_saved
        self._results: list[Any] = []
        self._next = 0

    def begin(self) -> "_Memo":
        """Start the forward or a replay: `next` then begins at the first result."""
        self._next = 0
        return self

    def next(self, function: Callable[[], Result]) -> Result:
        """Return the next recorded result. In the forward, run `function` to get the result, and record it."""
        if self._next == len(self._results):
            result = function()
            for each in result if isinstance(result, tuple) else (result,):
                if isinstance(each, torch.Tensor):
                    self._on_saved(each)
            self._results.append(result)
        self._next += 1
        recorded: Result = self._results[self._next - 1]
        return recorded


class _Source:
    """A function and its inputs, from which a tensor is recomputed once for all saved views of it."""

    def __init__(self, function: Function, inputs: list[torch.Tensor], num_bytes: int) -> None:
        self.function = function
        self.num_bytes = num_bytes
        self.inputs: list[torch.Tensor | _View] = list(inputs)
        self.num_uses = 0
        self.made: torch.Tensor | None = None

    def use(self, pack: "Callable[[torch.Tensor], torch.Tensor | _View]") -> None:
        """Count one more saved view of the recomputed tensor. The first view also saves the inputs, through `pack`."""
        if not self.num_uses:
            self.inputs = [pack(each) for each in self.inputs if isinstance(each, torch.Tensor)]
        self.num_uses += 1

    def whole(self) -> torch.Tensor:
        """Return the recomputed tensor. Each saved view calls this once.

        The first call computes the tensor, and the last call drops it.
        """
        made = self.made
        if made is None:
            with torch.no_grad():
                made = self.function(*(_unpack(each) for each in self.inputs))
            assert made.untyped_storage().nbytes() == self.num_bytes, "the recomputed tensor has another size"
        self.num_uses -= 1
        self.made = made if self.num_uses > 0 else None
        return made


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor, as a view into a storage that is recomputed or fetched."""

    of_what: "_Source | OffloadedStorage"
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, what: "_Source | OffloadedStorage") -> "_View":
        return cls(what, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def take(self) -> torch.Tensor:
        return self.of_what.whole().as_strided(self.size, self.stride, self.offset)


@dataclass(slots=True, eq=False)
class _Layer:
    """The storages that one layer moves to host memory and back in one microbatch.

    Attributes:
        host: host memory for these storages, or None if the layer moves nothing.
        on_saved: observer called with each tensor that `fetch` puts back into device memory.
        stays: identities (`_identity`) of storages that are not moved.
    """

    host: HostMemory | None
    on_saved: Callable[[torch.Tensor], None]
    stays: set[int] = field(default_factory=set)
    _moved: dict[int, OffloadedStorage] = field(default_factory=dict)
    _mark: Mark = None
    _is_fetched: bool = False

    def moved(self, tensor: torch.Tensor) -> OffloadedStorage:
        """Register the tensor's storage, to be moved to the host by `send`.

        The storage lives until `let_go`, so no other storage gets the same identity before.
        """
        key = _identity(tensor)
        if key not in self._moved:
            numel = tensor.untyped_storage().nbytes() // tensor.element_size()
            self._moved[key] = OffloadedStorage(tensor.as_strided((numel,), (1,), 0))
        return self._moved[key]

    def send(self) -> None:
        """Start to copy the registered storages to the host, after the layer's forward."""
        if self.host is not None and self._moved:
            self._mark = self.host.send(list(self._moved.values()))

    def let_go(self) -> None:
        """Free the device memory of the storages that `send` copies to the host."""
        if self.host is not None and self._moved:
            self.host.let_go(list(self._moved.values()), self._mark)

    def fetch(self) -> None:
        """Start to copy the storages back to the device, and report these tensors to `on_saved`.

        A second call does nothing.
        """
        if self.host is not None and self._moved and not self._is_fetched:
            self._mark = self.host.fetch(list(self._moved.values()))
            self._is_fetched = True
            for each in self._moved.values():
                assert each.tensor is not None
                self.on_saved(each.tensor)

    def need(self, below: "_Layer | None") -> None:
        """Call `fetch`, wait for its copies, drop the references to the storages, and fetch those of the layer below."""
        self.fetch()
        if self.host is not None and self._moved:
            self.host.arrived(self._mark)
        self._moved.clear()
        # One layer ahead, so that the copies run under this layer's backward.
        if below is not None:
            below.fetch()
