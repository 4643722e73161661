"""Values of the card that is not there: each operator is called as it is, then computed on the CPU over the same memory.

The first call is the real one: torch's checks, its allocator and its kernels' launches, which do nothing. The second writes the
result. A kernel outside of such an operator ends the process (c/card.c), and so does an operator without a form for the CPU: an
exception would be swallowed by the trial of a kernel, and another kernel would pass in its place.

A compiled function is one operator: its graph runs on the card, then its own Python gives the values.

In an order (`executed`), the second call is a task in the operator's stream, as copies and messages are. While the stream is
captured, the graph gets the task, and each launch runs it again.
"""

import atexit
import ctypes
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.cuda_stub.build import LIBRARIES, LISTENER, OURS
from tests.cuda_stub.operators import FORMS, is_sized_by_values

CPU = torch.device("cpu")

WITHOUT_KERNELS = ("c10d::", "_c10d_functional::", "prim::", "profiler::")
WRITTEN_IN_PYTHON = ("torch_attn",)
"""Namespaces of torch's own operators that Python functions implement."""

WITHOUT_VALUES = {
    "aten::detach",
    "aten::lift_fresh",
    "aten::record_stream",
    "aten::is_pinned",
    "aten::set_",
    "aten::resize_",
    "aten::_local_scalar_dense",
    "aten::_pin_memory",
}
"""Operators that compute nothing on the device, or only copy, which the stub does."""


@cache
def library() -> ctypes.CDLL:
    """Return the stub, which torch has loaded."""
    return ctypes.CDLL(str(LIBRARIES / OURS))


def on_card(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose kernels get values."""
    library().card_enter()
    try:
        return function(*args, **kwargs)
    finally:
        library().card_leave()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the memory of a tensor of the card; it does not own the memory."""
    if tensor.device.type != "cuda":
        return tensor
    storage = tensor.untyped_storage()
    same = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    host = torch.empty(0, dtype=tensor.dtype).set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())
    host = host.conj() if tensor.is_conj() else host
    return torch._neg_view(host) if tensor.is_neg() else host


def end(text: str) -> None:
    """End the process, as a kernel without a value does."""
    print(f"cuda stub: {text}", file=sys.stderr)
    traceback.print_stack(file=sys.stderr)
    sys.stderr.flush()
    os._exit(70)


class Operator:
    """What does not change from call to call.

    Attributes:
        is_python: whether it is made of other operators, which get values.
        makes_memory: whether its result has no values.
        has_values: whether values have to be computed.
        is_new: for each result, whether it is a new tensor; else an argument that the operator has changed.
        form: the operator, or a form of it for the CPU.
        is_random: whether it draws from a generator.
    """

    def __init__(self, func: Any) -> None:
        schema = func._schema
        base, self.name = schema.name, str(func)
        self.makes_memory = base.startswith("aten::") and "empty" in base
        self.has_values = not (
            func.is_view or base.startswith(WITHOUT_KERNELS) or base in WITHOUT_VALUES or self.makes_memory
        )
        self.is_python = func.namespace in WRITTEN_IN_PYTHON
        self.is_new = [each.alias_info is None for each in schema.returns]
        self.form = FORMS.get(self.name, func)
        # A form draws nothing: kernels of attention could, for dropout.
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags and self.form is func


class Later:
    """Computes values in the queues of their streams, if it is on: in an order, and in a captured stream.

    A task owns no memory of the card, so torch's allocator reuses it as on a card. Torch's allocator tells of new and freed
    memory, which is filled with NaN in its stream's turn.
    """

    def __init__(self) -> None:
        self._has_order = False
        self._of_graphs: set[int] = set()
        self._tasks: dict[int, Callable[[], object]] = {}
        self._numbers = itertools.count(1)
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._compute)
        self._listens = False

    @property
    def is_on(self) -> bool:
        return self._has_order or self.is_captured

    @property
    def is_captured(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def order(self, order: str) -> None:
        if order and not self._listens:
            torch.cuda.init()
            ctypes.CDLL(str(LIBRARIES / LISTENER)).card_watch_allocator()
            atexit.register(self.order, "")
            self._listens = True
        self._has_order = bool(order)
        library().card_order(order.encode())

    def wait(self) -> None:
        """Wait for what is queued in the current stream."""
        library().card_wait_for_stream(ctypes.c_void_p(_stream()))

    def post(self, compute: Callable[[], object]) -> None:
        number = next(self._numbers)
        self._tasks[number] = compute
        if self.is_captured:
            self._of_graphs.add(number)
        library().cudaLaunchHostFunc(ctypes.c_void_p(_stream()), self._run, ctypes.c_void_p(number))

    def _compute(self, number: int) -> None:
        try:
            with torch.no_grad():
                (self._tasks[number] if number in self._of_graphs else self._tasks.pop(number))()
        except BaseException as error:
            end(f"a value of an order failed: {type(error).__name__}: {error}")


LATER = Later()


@contextmanager
def executed(order: str) -> Iterator[None]:
    """Wait for the card; then execute what is posted in an order: "late", "early", a seed, or "" for at once."""
    LATER.order(order)
    try:
        yield
    finally:
        LATER.order("")


class Values(TorchDispatchMode):
    """Gives operators on the card their values. Autograd's threads inherit it; `install` gives it to Python's."""

    def __init__(self) -> None:
        super().__init__()
        self._operators: dict[Any, Operator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self._operators:
            self._operators[func] = Operator(func)
        operator = self._operators[func]
        if operator.is_python:
            with self:
                return func(*args, **kwargs)
        flat, tree = pytree.tree_flatten((args, kwargs))
        if not operator.has_values or not any(_is_on_card(each) for each in flat):
            return _unwritten(operator, func(*args, **kwargs))
        if LATER.is_on and operator.name == "aten._to_copy.default" and _crosses(args[0], kwargs):
            with self:
                return _copied(args[0], **kwargs)
        generator = _generator(flat) if operator.is_random else None
        # A captured stream cannot be waited for: the card's own operator says so.
        is_sized = is_sized_by_values(operator.name, args) and not LATER.is_captured
        # The CPU's own generator belongs to the program: it is borrowed at once, not later.
        borrows = operator.is_random and not any(isinstance(each, torch.Generator) for each in flat)
        is_later = LATER.is_on and not is_sized and not borrows
        if not is_later:
            # What is queued in the stream comes first: messages of other ranks, and what waits for them.
            LATER.wait()
        seen = [_kept(each, flat[0], generator) if is_later else _seen(each, generator) for each in flat]
        if is_sized:
            return self._sized_by_values(operator, seen, tree, args, kwargs)

        def compute() -> Any:
            return self._computed(operator, seen, tree, generator)

        if is_later and not any(operator.is_new):
            # Before the call, which may wait for its own copy, or mark its end.
            LATER.post(compute)
            return on_card(func, *args, **kwargs)
        found = on_card(func, *args, **kwargs)
        if not isinstance(found, (torch.Tensor, tuple, list)):
            LATER.wait()
            return compute()
        _write(_places(operator, found), compute, is_later)
        return found

    def _computed(self, operator: Operator, seen: list[Any], tree: Any, generator: torch.Generator | None) -> Any:
        args, kwargs = pytree.tree_unflatten(seen, tree)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        try:
            if generator is None or generator in seen:
                return operator.form(*args, **kwargs)
            with torch.random.fork_rng(devices=[]):
                torch.random.default_generator.set_state(generator.get_state())
                return operator.form(*args, **kwargs)
        except Exception as error:
            end(f"{operator.name} has no value: {type(error).__name__}: {error}")

    def _sized_by_values(
        self, operator: Operator, seen: list[Any], tree: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Compute first, because the size of the result depends on values; the card's own operator would wait for them."""
        computed = self._computed(operator, seen, tree, None)
        device = next(each.device for each in pytree.tree_leaves((args, kwargs)) if _is_on_card(each))

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            _write([on_host(made)], lambda: value, LATER.is_on)
            return made

        return pytree.tree_map(moved, computed)


def _stream() -> int:
    """Return the current stream of the current card."""
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())


def _is_on_card(value: object) -> bool:
    device = value.device if isinstance(value, torch.Tensor) else value
    return isinstance(device, torch.device) and device.type == "cuda"


def _seen(value: Any, generator: torch.Generator | None) -> Any:
    """Return an argument as the CPU's form gets it."""
    if isinstance(value, torch.Tensor):
        return on_host(value)
    if isinstance(value, torch.Generator):
        return generator
    return CPU if isinstance(value, torch.device) else value


def _kept(value: Any, first: Any, generator: torch.Generator | None) -> Any:
    """Return an argument as the CPU's form gets it later. CUDA reads pageable memory of the host during the call."""
    if isinstance(value, torch.Tensor) and not _is_on_card(value) and value is not first and not value.is_pinned():
        return value.clone()
    return _seen(value, generator)


def _crosses(tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    return torch.device(kwargs.get("device") or tensor.device).type != tensor.device.type


def _copied(tensor: torch.Tensor, non_blocking: bool = False, memory_format: Any = None, **kwargs: Any) -> torch.Tensor:
    """Copy between host and card as CUDA's own code does: the copy has an operator of its own."""
    if non_blocking and torch.device(kwargs["device"]).type == "cpu":
        kwargs["pin_memory"] = True
    made = torch.empty_like(tensor, memory_format=memory_format or torch.preserve_format, **kwargs)
    return made.copy_(tensor, non_blocking)


def _unwritten(operator: Operator, made: Any) -> Any:
    """Fill new page-locked memory of the host with NaN, in an order; memory of the card is filled in its stream."""
    if LATER.is_on and operator.makes_memory and made.device.type == "cpu" and made.is_pinned():
        ctypes.memset(made.data_ptr(), 0xFF, made.nbytes)
    return made


def _generator(flat: Sequence[Any]) -> torch.Generator:
    """Return a generator of the CPU in a state that the seed and offset of the card's decide."""
    given = next((each for each in flat if isinstance(each, torch.Generator)), None)
    given = given or torch.cuda.default_generators[torch.cuda.current_device()]
    offset = int.from_bytes(bytes(given.get_state()[-8:].tolist()), "little")
    return torch.Generator().manual_seed((given.initial_seed() * 1_000_003 + offset) & (2**63 - 1))


def _places(operator: Operator, found: Any) -> list[torch.Tensor | None]:
    """Return where the values of results go; None: nowhere, for an argument that the operator has changed."""
    places: list[torch.Tensor | None] = []
    for number, result in enumerate(found if isinstance(found, (tuple, list)) else [found]):
        is_new = number >= len(operator.is_new) or operator.is_new[number]
        places += [_place(leaf) if is_new else None for leaf in pytree.tree_leaves(result)]
    return places


def _place(value: object) -> torch.Tensor | None:
    return on_host(value) if isinstance(value, torch.Tensor) and value.numel() else None


def _write(places: Sequence[torch.Tensor | None], compute: Callable[[], Any], is_later: bool) -> None:
    """Compute values and write them, now or in the stream's turn."""

    def write() -> None:
        for to, value in zip(places, pytree.tree_leaves(compute()), strict=True):
            if to is not None and isinstance(value, torch.Tensor):
                to.copy_(value)

    if is_later:
        LATER.post(write)
        return
    if LATER.is_on:
        LATER.wait()
    write()


def with_values(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the engine's compiler: a call of a compiled function runs its graph on the card, then the function on the CPU."""

    def compile_with_values(function: Callable[..., Any], *options: Any) -> Callable[..., Any]:
        made = compiled(function, *options)

        def call(*arguments: Any) -> Any:
            # torch compiles nothing under a dispatch mode.
            with _disable_current_modes():
                if not any(_is_on_card(each) for each in pytree.tree_leaves(arguments)):
                    return made(*arguments)
                if not LATER.is_on:
                    LATER.wait()
                found = on_card(made, *arguments)
                with torch.no_grad():
                    seen = pytree.tree_map_only(torch.Tensor, lambda each: _kept(each.detach(), None, None), arguments)
                    places = [_place(leaf) for leaf in pytree.tree_leaves(found)]
                    _write(places, lambda: values(*seen), LATER.is_on)
                return found

        def values(*arguments: Any) -> Any:
            # A stream's turn comes under a mode, too, and some operators refuse to run under one.
            with _disable_current_modes():
                return function(*arguments)

        return call

    return compile_with_values


def install_in_compiler(fusion: ModuleType) -> None:
    """Give compiled functions of the engine their values."""
    fusion.CompiledFunction = with_values(fusion.CompiledFunction)  # type: ignore[attr-defined]


RUN, SHOW = threading.Thread.run, torch._tensor_str._str


def _run_with_values(thread: threading.Thread) -> None:
    with Values():
        RUN(thread)


def install(torch: ModuleType) -> None:
    """Give every operator of this process its values: in this thread, in those that start later, and in forked processes."""
    threading.Thread.run = _run_with_values  # type: ignore[method-assign]
    # torch prints tensors without modes.
    torch._tensor_str._str = lambda tensor, **options: SHOW(on_host(tensor.detach()), **options)
    Values().__enter__()
