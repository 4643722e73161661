"""Compiles a function of tensors to inductor's graph, one for each set of shapes, and calls the graph by itself.

torch.compile finds the graph of a call by guards on Python's state, which cost the host more than the graph. These functions read
only their arguments, so shapes, strides, dtypes, devices and constants say which graph is meant.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from types import CodeType
from typing import Any, Literal

import torch

Lengths = Literal["fixed", "rows", "all"]
"""Lengths that one graph accepts: a single shape, any first dim, or any length in every dim."""

MOST_GRAPHS: dict[Lengths, int] = {"fixed": 64, "rows": 8, "all": 8}
"""Of one function. One whose shapes never repeat would compile in every step."""

_SCALARS = (int, float, bool, str, type(None), torch.dtype)
"""Types of constants that are compared by value; others are compared by identity."""

_ALIGNMENT = 16
"""Bytes. Inductor copies a tensor that lies elsewhere, if the one for which the graph was made did not."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """A compiled function of some shapes.

    Attributes:
        run: takes a list of the tensors among the arguments, in order, and empties it; returns the tensors among the results.
        results: the form of the results, with places instead of tensors.
        guards: torch's condition on the open lengths `L["t0"]`, `L["t1"]`, ..; None if there is none.
        constants: among the arguments; kept, because the key has their identities.
    """

    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    results: Any
    guards: CodeType | None
    constants: Sequence[Any]


class CompiledFunction:
    """A function of tensors and constants, compiled for each set of shapes with which it is called.

    Args:
        function: a function that reads only its arguments: tensors, constants, and lists and tuples of them. It has no autograd and
            no communication. It may write to arguments that share no element with others.
        lengths: lengths that one graph accepts.
        on_compiled: called with the seconds that each graph took.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        lengths: Lengths,
        on_compiled: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._function = function
        self._lengths = lengths
        self._on_compiled = on_compiled
        self._graphs: dict[tuple[Any, ...], list[_Graph]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Call the function.

        Raises:
            RuntimeError: it would have more graphs than MOST_GRAPHS.
        """
        tensors: list[torch.Tensor] = []
        graph = self._graph(arguments, tensors)
        return _filled(graph.results, graph.run(tensors))

    def bound(self, *arguments: Any) -> Callable[[], Any]:
        """Return a call with these arguments, which looks up its graph once. The tensors keep their memory, shapes and strides."""
        tensors: list[torch.Tensor] = []
        graphs: list[_Graph] = []

        def call() -> Any:
            if not graphs:
                graphs.append(self._graph(arguments, tensors))
            return _filled(graphs[0].results, graphs[0].run([*tensors]))

        return call

    def _graph(self, arguments: Sequence[Any], tensors: list[torch.Tensor]) -> _Graph:
        """Return the graph for a call, compiled if it is the first of its kind; append the tensors among the arguments."""
        key: list[Any] = []
        lengths: list[int] = []
        self._read(arguments, tensors, key, lengths)
        graphs = self._graphs.setdefault(tuple(key), [])
        for graph in graphs:
            if graph.guards is None or _hold(graph.guards, lengths):
                return graph
        started_seconds = time.perf_counter()
        graphs.append(self._compiled(arguments, tensors))
        self._on_compiled(time.perf_counter() - started_seconds)
        return graphs[-1]

    def _read(self, values: Sequence[Any], tensors: list[torch.Tensor], key: list[Any], lengths: list[int]) -> None:
        """Append the tensors among arguments, what says which graph is theirs, and the lengths that a graph leaves open."""
        for value in values:
            if isinstance(value, torch.Tensor):
                # Without its history: a graph of a leaf would ask for gradients.
                tensors.append(value.detach() if value.requires_grad else value)
                num_open = self._num_open(value)
                if num_open == 0:
                    offset = value.storage_offset() * value.element_size() % _ALIGNMENT
                    key += (value.dtype, value.device, value.shape, value.stride(), offset)
                else:
                    stride = value.stride() if num_open == 1 else None
                    key += (value.dtype, value.device, value.shape[num_open:], stride)
                    lengths += value.shape[:num_open]
            elif type(value) in (list, tuple):
                key.append(len(value))
                self._read(value, tensors, key, lengths)
            else:
                key.append(value if isinstance(value, _SCALARS) else id(value))

    def _compiled(self, arguments: Sequence[Any], tensors: Sequence[torch.Tensor]) -> _Graph:
        # Loaded by the first function that is compiled: it takes seconds.
        import torch._functorch.config
        from torch._guards import TracingContext, tracing
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        most = MOST_GRAPHS[self._lengths]
        if sum(map(len, self._graphs.values())) == most:
            name = getattr(self._function, "__name__", self._function)
            raise RuntimeError(
                f"{name} was called with more than {most} sets of shapes, and each has to be compiled: no step would be fast. "
                "Say which lengths change, where it is given to `Fusion`, or run it eagerly."
            )
        shapes = ShapeEnv()
        mode = FakeTensorMode(shape_env=shapes)
        forms: list[Any] = []
        codes: list[Any] = []

        def inner(*given: Any, **options: Any) -> Any:
            codes.append(compile_fx_inner(*given, **options))
            return codes[-1]

        def flat(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results: list[torch.Tensor] = []
            forms.append(_form(self._function(*_replaced(arguments, iter(given))), results))
            return tuple(results)

        with torch.no_grad(), tracing(TracingContext(mode)):
            fakes: list[Any] = [self._fake(mode, tensor, place) for place, tensor in enumerate(tensors)]
            with mode:
                graph = make_fx(flat)(*fakes)
            # Around inductor's code, `compile_fx` returns wrappers for autograd, whose cache would not call `inner`.
            has_cache = torch._functorch.config.enable_autograd_cache
            torch._functorch.config.enable_autograd_cache = False
            try:
                compile_fx(graph, fakes, inner_compile=inner)
            finally:
                torch._functorch.config.enable_autograd_cache = has_cache
        lengths = [size for fake in fakes for size in fake.shape if isinstance(size, torch.SymInt)]
        guards = shapes.produce_guards_expression(lengths)
        code = compile(guards, "guards", "eval") if guards else None
        return _Graph(codes[0], forms[-1], code, _replaced(arguments, repeat(None)))

    def _num_open(self, tensor: torch.Tensor) -> int:
        """Count the first dims that may have any length. torch makes another graph of lengths 0 and 1."""
        if self._lengths == "fixed" or tensor.dim() == 0:
            return 0
        if self._lengths == "rows":
            return int(tensor.size(0) > 1)
        return tensor.dim() if min(tensor.shape) > 1 and tensor.is_contiguous() else 0

    def _fake(self, mode: Any, tensor: torch.Tensor, place: int) -> torch.Tensor:
        """Return a tensor without memory, whose open lengths are symbols."""
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        num_open = self._num_open(tensor)
        if num_open == 0:
            if tensor.storage_offset() * tensor.element_size() % _ALIGNMENT:
                return mode.from_tensor(tensor, static_shapes=True)
            # Without its storage, which others may share: inductor would write to parts of one through a copy.
            with mode:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        symbols = [
            mode.shape_env.create_unspecified_symint_and_symbol(
                length, ConstantSource(f"t{place}_{dim}"), DimDynamic.DYNAMIC
            )
            for dim, length in enumerate(tensor.shape[:num_open])
        ]
        with mode:
            like = torch.empty(*symbols, *tensor.shape[num_open:], dtype=tensor.dtype, device=tensor.device)
            return like if num_open > 1 else like.new_empty_strided(like.shape, tensor.stride())


def _hold(guards: CodeType, lengths: Sequence[int]) -> bool:
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    return bool(eval(guards, {**SYMPY_INTERP, "L": {f"t{i}": length for i, length in enumerate(lengths)}}))


def _replaced(values: Sequence[Any], others: Iterator[Any]) -> list[Any]:
    """Return arguments with others in place of the tensors, in order."""
    return [
        next(others)
        if isinstance(value, torch.Tensor)
        else _replaced(value, others)
        if type(value) in (list, tuple)
        else value
        for value in values
    ]


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor's place among the results of a graph."""

    number: int


def _form(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the form of results, and append their tensors."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    return tuple(_form(each, tensors) for each in value) if type(value) in (list, tuple) else value


def _filled(form: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(form, _Place):
        return tensors[form.number]
    return tuple(_filled(each, tensors) for each in form) if isinstance(form, tuple) else form
