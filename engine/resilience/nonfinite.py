"""Finds a step's first non-finite value by repeating the step under hooks.

A non-finite step has changed no weight, and dropout masks are hashes of sample ids. So the same microbatches give the same values
again. While they run, each rank checks

    weights                          before anything runs
    outputs of modules, forward      in execution order; inner modules before those that contain them
    gradients, backward              those that arrive at module outputs, and main grads as they accumulate

Then the earliest non-finite value on any rank is reported. Weights come first. Each microbatch's forward follows, from the first
stage to the last, and then its backward in reverse. Ties are ordered by rank. Copies of a non-finite value that reach other
tp ranks or stages come later in this order.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from triaxis.engine.comm.texts import gather_text
from triaxis.engine.pipeline.actions import Action, Kind
from triaxis.engine.step import Engine
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

_BEFORE, _DURING = 0, 1
_FORWARD, _BACKWARD = 0, 1


@dataclass(frozen=True, slots=True)
class _Seen:
    """One checked value: whether it is finite, where it arose, and a sort key that puts earlier values first."""

    order: tuple[int, ...]
    what: str
    sample_ids: Sequence[int]
    is_finite: torch.Tensor


@dataclass(frozen=True, slots=True)
class FirstNonFinite:
    """The first non-finite value.

    Attributes:
        rank: rank that produced the value; None if no rank finds a non-finite value.
        what: description, such as "the output of layers.2.mlp (stage 0) in the forward of microbatch 3". If `rank` is None, it says
            why no value may have been found.
        sample_ids: the microbatch's sample ids; empty if the value belongs to no microbatch.
    """

    rank: int | None
    what: str
    sample_ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.rank is None:
            return self.what
        samples = f" (samples {', '.join(map(str, self.sample_ids))})" if self.sample_ids else ""
        return f"First on rank {self.rank}: {self.what}{samples}"


def locate(engine: Engine, microbatches: Sequence[Any]) -> FirstNonFinite:
    """Repeat a step's forward and backward, and find the first non-finite value.

    Every rank calls this function and gets the same finding. Main grads are overwritten, and weights stay as they are.

    Args:
        engine: engine that holds the step's weights, or later ones if a later step has already updated them.
        microbatches: this rank's microbatches in the step.
    """
    watch = _Watch(engine, microbatches)
    with watch.open():
        engine.forward_backward(microbatches, on_grad=watch.grad_added)
    first = watch.first()
    world = engine.topology.axis("world")
    mine = "" if first is None else json.dumps([first.order, first.what, list(first.sample_ids)])
    found = []
    for rank, text in enumerate(gather_text(world, mine, engine.topology.device, "non-finite")):
        if text:
            order, what, sample_ids = json.loads(text)
            found.append((tuple(order), rank, FirstNonFinite(rank, what, tuple(sample_ids))))
    if found:
        return min(found, key=lambda entry: entry[:2])[2]
    return FirstNonFinite(
        None,
        "When the step is repeated, every output and gradient on every rank is finite: the sum over ranks overflows, or the fault "
        "does not repeat (a hardware fault, or kernels that are not deterministic)",
    )


class _Watch:
    """One rank's checks for non-finite values while `locate` repeats a step. Only `first` waits for the device."""

    def __init__(self, engine: Engine, microbatches: Sequence[Any]) -> None:
        self._engine = engine
        self._microbatches = microbatches
        self._seen: list[_Seen] = []

    def first(self) -> _Seen | None:
        """Find the earliest non-finite value; None if there is none."""
        if not self._seen:
            return None
        finite = torch.stack([seen.is_finite for seen in self._seen]).tolist()
        bad = [seen for seen, is_finite in zip(self._seen, finite, strict=True) if not is_finite]
        return min(bad, key=lambda seen: seen.order, default=None)

    @contextmanager
    def open(self) -> Iterator[None]:
        engine = self._engine
        engine.buffers.wait_all()
        for number, (name, parameter) in enumerate(engine.parameters.items()):
            self._look(parameter.weight(), (_BEFORE, number), f"the weight {name}, before the step", ())
        hooks = []
        for number, chunk in enumerate(engine.chunks):
            for path, module in cast(nn.Module, chunk).named_modules():
                title = module_title(cast(nn.Module, chunk), path)
                hooks.append(module.register_forward_hook(self._after_forward(number, title)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _after_forward(self, chunk: int, module: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(_: nn.Module, arguments: Any, output: Any) -> None:
            # A norm that adds a branch first returns the sum as well.
            for each in output if isinstance(output, tuple) else (output,):
                at(each, f"{'an' if isinstance(output, tuple) else 'the'} output of {module}")

        def at(tensor: Any, where: str) -> None:
            action = self._action()
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or action is None:
                return
            if action.kind is Kind.F:
                stage = self._stage(chunk)
                order = (_DURING, action.microbatch, _FORWARD, stage, len(self._seen))
                words = f"{where} (stage {stage}) in the forward of microbatch {action.microbatch}"
                self._look(tensor, order, words, self._sample_ids(action))
            if tensor.requires_grad:
                # Recomputed layers pass here in their backward, and only then with gradients.
                tensor.register_hook(lambda grad: self._grad_arrived(grad, where, chunk))

        return look

    def _grad_arrived(self, grad: torch.Tensor, where: str, chunk: int) -> None:
        action = self._action()
        if action is not None:
            stage = self._stage(chunk)
            words = f"the gradient of {where} (stage {stage}) in the backward of microbatch {action.microbatch}"
            self._look(grad, self._backward_order(action, stage), words, self._sample_ids(action))

    def grad_added(self, parameter: ShardedParameter) -> None:
        """Check a parameter's main grad after a gradient was added to it."""
        action = self._action()
        if action is not None:
            words = f"the gradient of {parameter.record.name} in the backward of microbatch {action.microbatch}"
            order = self._backward_order(action, self._stage(action.chunk))
            self._look(parameter.bound_main_grad(), order, words, self._sample_ids(action))

    def _backward_order(self, action: Action, stage: int) -> tuple[int, ...]:
        return (_DURING, action.microbatch, _BACKWARD, -stage, len(self._seen))

    def _look(self, value: torch.Tensor, order: tuple[int, ...], what: str, sample_ids: Sequence[int]) -> None:
        self._seen.append(_Seen(order, what, sample_ids, value.detach().isfinite().all()))

    def _action(self) -> Action | None:
        running = self._engine.executor.running
        return running if isinstance(running, Action) else None

    def _stage(self, chunk: int) -> int:
        engine = self._engine
        return engine.schedule.placement.stage_of(engine.topology.coordinates.pp, chunk)

    def _sample_ids(self, action: Action) -> Sequence[int]:
        return list(getattr(self._microbatches[action.microbatch], "sample_ids", ()))


def module_title(chunk: nn.Module, path: str) -> str:
    """Find a module's global name, such as `layers.5.mlp` for `blocks.1.mlp`.

    The name begins with the `name` of the outermost module that has one. The rest of the path follows. If no module has one, the
    path is returned; an empty path becomes "the whole chunk".
    """
    parts = path.split(".") if path else []
    for depth in range(1, len(parts) + 1):
        name = getattr(chunk.get_submodule(".".join(parts[:depth])), "name", None)
        if isinstance(name, str):
            return ".".join([name, *parts[depth:]])
    return path or "the whole chunk"
