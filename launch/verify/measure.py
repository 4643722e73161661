"""Run the training steps that a verification compares.

One process, the reference, writes whole tensors. A layout's ranks compare their parts with these tensors.

    reference.step_00.safetensors      first step: weights before the step, gradients, masters, moments and parameters
    reference.step_01.safetensors      the same without the weights before the step
    ...

Keys in these files are `kind:name`. Noise is added to all initial weights, so that no term starts at zero and hides an error.
Gradients are the main grads after their reduction, as the optimizer reads them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from triaxis.engine.checkpoint.shards import having
from triaxis.engine.config.values.optimizer_kinds import StateKind
from triaxis.engine.errors import DivergenceError
from triaxis.engine.layout.shard_spec import Init, ParamRecord
from triaxis.engine.numerics.precision import accumulation_dtype
from triaxis.engine.step import Engine
from triaxis.engine.step_result import explain
from triaxis.engine.tensor_parallel.initial_weights import initial_box
from triaxis.engine.tensor_parallel.parameter import ShardedParameter
from triaxis.launch.verify.verdict.deviation import Deviation
from triaxis.launch.verify.verdict.records import StepFacts, TensorKind, TensorReport, together

NOISE_STD = 0.1


class HeldElements:
    """Elements [start, stop) of this rank's part of one parameter. The part is a box, flattened in row-major order."""

    __slots__ = ("record", "start", "values")

    def __init__(self, record: ParamRecord, start: int, values: torch.Tensor) -> None:
        self.record, self.start, self.values = record, start, values


@torch.no_grad()
def leave_the_initial_point(engine: Engine, seed: int) -> None:
    """Add noise to every parameter, and copy the result to the masters.

    The noise is the same in every layout. `seed` is `train.seed`.
    """

    def add_noise(parameters: Iterable[ShardedParameter]) -> None:
        for parameter in parameters:
            record = parameter.record
            flat = parameter.value.data.view(-1)[: record.box_numel]
            flat += _noise(record, seed).to(flat.device, flat.dtype)

    engine.buffers.write(engine.parameters, add_noise)
    _masters_follow(engine)


def _masters_follow(engine: Engine) -> None:
    for owned in engine.optimizer.owned:
        owned.state.write({"master": owned.parameters.to(owned.state.wide)})
        owned.state.restart_average()


@torch.no_grad()
def start_from_rounded(engine: Engine, seed: int, dtype: torch.dtype) -> None:
    """Set every parameter and master to `starting_values` in `dtype`.

    So a run in another dtype starts from the same rounded weights as a run in `dtype`.
    """

    def round_to(parameters: Iterable[ShardedParameter]) -> None:
        for parameter in parameters:
            flat = parameter.value.data.view(-1)[: parameter.record.box_numel]
            flat.copy_(starting_values(parameter.record, seed, dtype))

    engine.buffers.write(engine.parameters, round_to)
    _masters_follow(engine)


def starting_values(record: ParamRecord, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Compute a parameter's initial values plus noise, as `leave_the_initial_point` does, without an engine.

    The result has this rank's part (`record.box`), flat, on the CPU.
    """
    dtype = dtype if record.spec.is_trained else accumulation_dtype(dtype)
    return initial_box(record, seed).to(dtype) + _noise(record, seed).to(dtype)


def _noise(record: ParamRecord, seed: int) -> torch.Tensor:
    """Draw a parameter's noise, with a seed other than that of the initial values.

    With the same seed, the noise would be a multiple of the initial values.
    """
    noisy = replace(record, spec=replace(record.spec, init=Init("normal", NOISE_STD)))
    return initial_box(noisy, seed + 1)


def run_steps(
    engine: Engine,
    steps: Sequence[Sequence[Any]],
    lr: float,
    notebook: "Writing | Comparing",
    watch: AbstractContextManager[None],
    begin_step: Callable[[int], None] = lambda step: None,
    *,
    may_diverge: bool,
) -> list[StepFacts]:
    """Train on the given global batches, and pass every tensor to the notebook.

    Args:
        engine: engine before its first step.
        steps: this rank's microbatches, step by step.
        watch: context that is open during the first forward and backward.
        begin_step: called with each step's number, from 0, before the step.
        may_diverge: continue after a loss or gradient that is not finite.

    Raises:
        DivergenceError: on every rank, if a number is not finite and `may_diverge` is False, if fp16 overflows, or if more rows
            arrive at experts than `model.moe.row_headroom` allows.
    """
    _write_parameters(engine, 0, "start", notebook)
    facts = []
    for step, microbatches in enumerate(steps):
        begin_step(step)
        with watch if step == 0 else nullcontext():
            counts = engine.forward_backward(microbatches)
        _write_owned(engine, step, "gradient", notebook)
        result = engine.update(counts, lr).read()
        if result.dropped:
            raise DivergenceError(
                f"Step {step + 1} of the verification: {result.why}. Verification moves weights off the initial point, "
                "so the load differs from a run's. Give model.moe.row_headroom=null to compare everything else."
            )
        if result.skip == "diverged" and not may_diverge:
            raise DivergenceError(
                f"Step {step + 1} of the verification, in one process: {explain(result)} There is nothing to compare with."
            )
        if result.skip == "overflowed":
            raise DivergenceError(
                f"Step {step + 1} of the verification overflows in fp16 at a loss scale of {result.loss_scale:g}, and would "
                "compare no update. Give a smaller one, such as precision.loss_scale.initial=1024."
            )
        engine.buffers.wait_all()
        for kind in engine.optimizer.state_kinds:
            _write_owned(engine, step, kind, notebook)
        _write_parameters(engine, step, "parameter", notebook)
        notebook.step_done(step)
        facts.append(StepFacts(result.loss, result.grad_norm, result.num_tokens))
    return facts


def _write_owned(engine: Engine, step: int, kind: StateKind, notebook: "Writing | Comparing") -> None:
    for owned in engine.optimizer.trained if kind == "gradient" else having(engine.optimizer.owned, kind):
        # In an fp16 run, gradients keep the loss scale until the update; the run in a wider dtype has none.
        values = owned.grads / engine.loss_scale.scale if kind == "gradient" else owned.state.read(kind)
        for segment in owned.segments:
            at = segment.offset - owned.bucket.owned[0]
            part = values[at : at + segment.stop - segment.start]
            notebook.tensor(step, kind, HeldElements(segment.record, segment.start, part))


def _write_parameters(engine: Engine, step: int, kind: TensorKind, notebook: "Writing | Comparing") -> None:
    for parameter in engine.parameters.values():
        flat = parameter.weight().detach().view(-1)[: parameter.record.box_numel]
        notebook.tensor(step, kind, HeldElements(parameter.record, 0, flat))


def reference_file(folder: Path, step: int) -> Path:
    return folder / f"reference.step_{step:02d}.safetensors"


class Writing:
    """Receives the reference's whole tensors in every step, and writes one file per step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, torch.Tensor] = {}

    def tensor(self, step: int, kind: TensorKind, part: HeldElements) -> None:
        shape = part.record.spec.shape
        assert part.record.box == tuple((0, size) for size in shape), "the reference holds every parameter whole"
        key = f"{kind}:{part.record.name}"
        if key not in self._tensors:
            self._tensors[key] = torch.full(shape, torch.nan, dtype=part.values.dtype)
        self._tensors[key].view(-1)[part.start : part.start + len(part.values)].copy_(part.values)

    def step_done(self, step: int) -> None:
        save_file(self._tensors, reference_file(self._folder, step))
        self._tensors = {}


class Comparing:
    """Receives one rank's elements in every step, and compares them with the reference's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[tuple[int, TensorKind, str], list[Deviation]] = {}

    def tensor(self, step: int, kind: TensorKind, part: HeldElements) -> None:
        with safe_open(reference_file(self._folder, step), framework="pt") as reference:
            whole = reference.get_slice(f"{kind}:{part.record.name}")
            box = whole[tuple(slice(*bounds) for bounds in part.record.box)]
        wanted = box.reshape(-1)[part.start : part.start + len(part.values)]
        found = self._found.setdefault((step, kind, part.record.name), [])
        found.append(deviation(wanted, part.values))

    def step_done(self, step: int) -> None:
        pass

    def reports(self) -> Iterator[TensorReport]:
        for (step, kind, name), parts in self._found.items():
            yield TensorReport(step, kind, name, together(parts))


def deviation(wanted: torch.Tensor, got: torch.Tensor) -> Deviation:
    """Compute the deviation between tensors with the same shape, in float64."""
    wanted, got = wanted.detach().cpu().double(), got.detach().cpu().double()
    error_square = float((got - wanted).square().sum())
    return Deviation(
        float(wanted.square().sum()),
        float(got.square().nan_to_num().sum()),
        float((wanted * got).nan_to_num().sum()),
        error_square if error_square == error_square else float("inf"),
    )
