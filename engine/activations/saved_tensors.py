"""What becomes of a tensor that autograd saves for the backward: it is kept, made again, or moved to host memory.

    kept       the tensor
    again      a function and what it was made from, where the tensor is what a cheap function returned (a norm, an activation):
               the function runs once in the backward, for all who saved its result
    moved      a place in host memory (`engine/activations/offload.py`): the tensor leaves while the next layer is computed,
               and comes back during the backward of that layer

One pair of hooks decides (`torch.autograd.graph.saved_tensors_hooks`), for torch's operators and functions of our own alike, by the
tensor's storage: several views of one storage are one thing. What a function is made again from is saved by the same rule, so a
chain of functions is made again from its beginning, and from what comes back from the host.

Functions that are made again must give the same bits and must not communicate. Whole layers, which do, are for `recompute`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from engine.activations.offload import HostMemory, Mark, OffloadedStorage
from engine.activations.recompute import recompute

Function = Callable[..., torch.Tensor]

ATTENTION = "attention"
"""The part that is recomputed inside, `SavedTensors.recompute_inside`: its result is needed anyway."""


class SavedTensors:
    """The choice for one rank's model chunks.

    Args:
        parts: names of what is made again.
        host: where to move tensors; None: nowhere.
        min_bytes: smaller tensors are not moved.
        weights: this rank's weights, asked for when the first layer moves its tensors; they are never moved.

    Attributes:
        observer: told of each tensor that holds device memory for a backward; for who counts it.
    """

    def __init__(
        self,
        parts: Collection[str] = (),
        host: HostMemory | None = None,
        min_bytes: int = 1,
        weights: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        self.parts = frozenset(parts)
        self.host = host
        self.min_bytes = min_bytes
        self.observer: Callable[[torch.Tensor], None] = lambda tensor: None
        self._weights = weights
        self._weight_storages: frozenset[int] | None = None
        self._has_hooks = bool(self.parts - {ATTENTION})
        self._open: _Layer | None = None
        self._below: _Layer | None = None
        self._sources: WeakKeyDictionary[torch.UntypedStorage, _Source] = WeakKeyDictionary()

    def run_layer(
        self, function: Function, x: torch.Tensor, *, moves: bool = False, whole: bool = False, shared: Any = None
    ) -> torch.Tensor:
        """`function(x)`, whose saved tensors are treated as this object says. Layers are called in order, then `end_chunk`.

        Args:
            function: a layer, or several that are recomputed together.
            x: its input.
            moves: move what it saves to the host.
            whole: recompute all of it; then nothing but x is saved.
            shared: a tensor that other layers save as well (or None): it is not moved.
        """
        if not torch.is_grad_enabled():
            return function(x)
        layer = _Layer(self.host if moves else None, self.observer)
        if moves:
            layer.stays = set(self._storages_of_weights())
            # A leaf is what came from another stage: the executor holds it for its gradient.
            layer.stays |= {_identity(tensor) for tensor in (x if x.is_leaf else None, shared) if tensor is not None}
        with self._opened(layer, hooks=moves or (self._has_hooks and not whole)):
            y = recompute(function, x) if whole else function(x)
        if self.host is not None:
            self._pass_on(layer, y)
        return y

    def end_chunk(self, output: torch.Tensor) -> torch.Tensor:
        """The output of a chunk whose layers have been called; its backward begins by fetching what the last layer moved."""
        last, self._below = self._below, None
        if last is not None:
            last.let_go()
            _before_backward_of(output, last.fetch)
        return output

    def recompute_output(self, part: str, function: Function, *inputs: torch.Tensor) -> torch.Tensor:
        """`function(*inputs)`; who saves the result saves how to make it again, if `part` is among the parts."""
        output = function(*inputs)
        if self._open is not None and part in self.parts and torch.is_grad_enabled():
            storage = output.untyped_storage()
            if all(_identity(each) != storage._cdata for each in inputs):
                # A module's hooks are for its forward.
                maker = function.forward if isinstance(function, nn.Module) else function
                self._sources[storage] = _Source(maker, [each.detach() for each in inputs], storage.nbytes())
        return output

    def recompute_inside(self, part: str, function: Function, *inputs: torch.Tensor) -> torch.Tensor:
        """`function(*inputs)`; what it saves is made again from the inputs, if `part` is among the parts."""
        if self._open is not None and part in self.parts and torch.is_grad_enabled():
            return recompute(function, *inputs)
        return function(*inputs)

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
        """Send what the layer moves, give back what the layer below it has sent, and say what its backward begins with."""
        layer.send()
        below, self._below = self._below, layer
        if below is not None:
            below.let_go()
        _before_backward_of(y, partial(_begin_backward, layer, below))

    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | _View":
        storage = tensor.untyped_storage()
        source = self._sources.get(storage)
        if source is not None:
            source.use(self._pack)
            return _View.of(tensor, source)
        # Autograd may hand over a node's own output, whose history would keep the node alive for ever.
        tensor = tensor.detach()
        self.observer(tensor)
        layer = self._open
        assert layer is not None, "a layer's hooks are active in its forward alone"
        if layer.host is None or storage.nbytes() < self.min_bytes or storage._cdata in layer.stays:
            return tensor
        return _View.of(tensor, layer.moved(tensor))

    def _storages_of_weights(self) -> frozenset[int]:
        if self._weight_storages is None:
            self._weight_storages = frozenset(_identity(weight) for weight in self._weights())
        return self._weight_storages


def _identity(tensor: torch.Tensor) -> int:
    """Of the tensor's storage, while it lives."""
    return int(tensor.untyped_storage()._cdata)


def _unpack(packed: "torch.Tensor | _View") -> torch.Tensor:
    return packed.take() if isinstance(packed, _View) else packed


def _before_backward_of(y: torch.Tensor, function: Callable[[], None]) -> None:
    """Call the function when the gradient of y is complete, before anything is computed from it."""
    assert y.grad_fn is not None, "a layer has weights"

    def call(grads: object) -> None:
        function()

    y.grad_fn.register_prehook(call)


def _begin_backward(layer: "_Layer", below: "_Layer | None") -> None:
    layer.need()
    if below is not None:
        below.fetch()


class _Source:
    """How a tensor is made again, once for all who have saved it."""

    def __init__(self, function: Function, inputs: list[torch.Tensor], num_bytes: int) -> None:
        self.function = function
        self.num_bytes = num_bytes
        self.inputs: list[torch.Tensor | _View] = list(inputs)
        self.num_uses = 0
        self.made: torch.Tensor | None = None

    def use(self, pack: "Callable[[torch.Tensor], torch.Tensor | _View]") -> None:
        """One more has saved the tensor. With the first the inputs are saved as well."""
        if not self.num_uses:
            self.inputs = [pack(each) for each in self.inputs if isinstance(each, torch.Tensor)]
        self.num_uses += 1

    def whole(self) -> torch.Tensor:
        """The tensor; kept until the last of its users has asked."""
        made = self.made
        if made is None:
            with torch.no_grad():
                made = self.function(*(_unpack(each) for each in self.inputs))
            assert made.untyped_storage().nbytes() == self.num_bytes, "a function made something else this time"
        self.num_uses -= 1
        self.made = made if self.num_uses > 0 else None
        return made


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor as a view of a storage that is made or fetched."""

    of_what: "_Source | _Fetched"
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, what: "_Source | _Fetched") -> "_View":
        return cls(what, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def take(self) -> torch.Tensor:
        return self.of_what.whole().as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A storage that was moved; it has come back when a backward asks for it."""

    moved: OffloadedStorage

    def whole(self) -> torch.Tensor:
        assert self.moved.tensor is not None, "its layer's backward has begun, so it has been fetched"
        return self.moved.tensor


@dataclass(slots=True, eq=False)
class _Layer:
    """What one layer moves in one microbatch.

    Attributes:
        host: None where the layer moves nothing.
        observer: told of what has come back.
        stays: identities of storages that are not moved.
    """

    host: HostMemory | None
    observer: Callable[[torch.Tensor], None]
    stays: set[int] = field(default_factory=set)
    _moved: dict[int, OffloadedStorage] = field(default_factory=dict)
    _mark: Mark = None
    _is_fetched: bool = False

    def moved(self, tensor: torch.Tensor) -> _Fetched:
        """The tensor's storage among what the layer moves. It is held until `let_go`, so its identity is its own."""
        key = _identity(tensor)
        if key not in self._moved:
            numel = tensor.untyped_storage().nbytes() // tensor.element_size()
            self._moved[key] = OffloadedStorage(tensor.as_strided((numel,), (1,), 0))
        return _Fetched(self._moved[key])

    def send(self) -> None:
        """The layer's forward is over: post the copies to the host."""
        if self.host is not None and self._moved:
            self._mark = self.host.send(list(self._moved.values()))

    def let_go(self) -> None:
        """Give back the device memory of what was sent."""
        if self.host is not None and self._moved:
            self.host.let_go(list(self._moved.values()), self._mark)

    def fetch(self) -> None:
        """Post the copies back, if nobody has."""
        if self.host is not None and self._moved and not self._is_fetched:
            self._mark = self.host.fetch(list(self._moved.values()))
            self._is_fetched = True
            for each in self._moved.values():
                assert each.tensor is not None
                self.observer(each.tensor)

    def need(self) -> None:
        """The layer's backward begins. What it saved is freed by whoever uses it last, so nothing is held here any more."""
        self.fetch()
        if self.host is not None and self._moved:
            self.host.arrived(self._mark)
        self._moved.clear()
