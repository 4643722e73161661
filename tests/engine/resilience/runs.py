"""Runs of the parity tests' models through the real training loop, with what goes wrong planted in them."""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from tests.checkpoint.runs import Silent, fingerprint_of
from tests.parity.cases import Case, dataset
from triaxis.engine.checkpoint.directory import CheckpointDirectory
from triaxis.engine.checkpoint.format.manifest import Kind
from triaxis.engine.checkpoint.history import RunHistory
from triaxis.engine.checkpoint.resume import resume_or_start
from triaxis.engine.checkpoint.saving import CheckpointSaver, RunFacts
from triaxis.engine.comm.stop import Stop, StopRequest
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import Batches
from triaxis.engine.errors import TriaxisError
from triaxis.engine.layout.rank_grid import RankGrid
from triaxis.engine.resilience.guard import Guard
from triaxis.engine.resilience.rollback import Rollback
from triaxis.engine.run.validation import StepSource
from triaxis.engine.step import Engine
from triaxis.engine.step_result import StepResult
from triaxis.engine.train import TrainingRun, build, train
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.specs import model_specs

DATA = {"samples": "same"}


@dataclass(frozen=True)
class Plant:
    """A fault that belongs to the data: on one rank, at one module, in every microbatch with one of the samples.

    Attributes:
        module: as the chunk names it: "blocks.1.mlp"; "" is the chunk itself.
        factor: of the output; in the backward, of the gradient that arrives at it.
    """

    rank: int
    module: str
    sample_ids: tuple[int, ...]
    factor: float = math.nan
    in_backward: bool = False

    def into(self, engine: Engine) -> None:
        """Plant it; on other ranks nothing is done."""
        if engine.topology.rank != self.rank:
            return
        chunk = cast(nn.Module, engine.chunks[0])
        current: list[list[int]] = [[]]

        def begins(_: nn.Module, arguments: Any) -> None:
            current[0] = arguments[1].sample_ids

        def spoils(_: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor | None:
            if not set(current[0]) & set(self.sample_ids):
                return None
            if self.in_backward:
                output.register_hook(lambda grad: grad * self.factor)
                return None
            return output * self.factor

        chunk.register_forward_pre_hook(begins)
        chunk.get_submodule(self.module).register_forward_hook(spoils)


class Fault(Protocol):
    """Something that goes wrong in an engine."""

    def into(self, engine: Engine) -> None: ...


@dataclass
class Trace:
    """What one rank saw.

    Attributes:
        told: (step from 0, loss) in the order in which they were told; steps that are made again come again.
        scales: (loss scale, whether the step overflowed) of each step, in the same order.
        validated: (step from 0, loss) of each validation.
        stopped: why the run stopped before its end.
        events: (kind, step from 0, message, details).
        fingerprint: of the state at the end.
        num_updates: that the moments have seen at the end.
        history: of the run at the end.
        error: that ended it; "": none did.
        ledger_purposes: of the calls of the last step.
    """

    told: list[tuple[int, float]] = field(default_factory=list)
    scales: list[tuple[float | None, bool]] = field(default_factory=list)
    validated: list[tuple[int, float]] = field(default_factory=list)
    stopped: Stop | None = None
    events: list[tuple[str, int, str, dict[str, Any]]] = field(default_factory=list)
    fingerprint: dict[Kind, str] = field(default_factory=dict)
    num_updates: int = 0
    history: RunHistory = field(default_factory=RunHistory)
    error: str = ""
    exit_code: int = 0

    # The observer

    def on_validation(self, step: int, loss: float) -> None:
        self.validated.append((step, loss))

    def on_batch(self, microbatches: Sequence[Any]) -> None: ...
    def end_step(self) -> None: ...
    def enter(self, name: str) -> None: ...
    def begin(self, steps_made: int) -> None: ...
    def on_validation_left_out(self, step: int) -> None: ...

    def on_step(self, step: int, result: StepResult, lr: float) -> None:
        self.told.append((step, result.loss))
        self.scales.append((result.loss_scale, result.skip == "overflowed"))

    # The notices

    def on_trouble(self, kind: str, step: int, message: str, **details: Any) -> None:
        self.events.append((kind, step, message, details))


def config_of(case: Case, sections: dict[str, dict[str, Any]]) -> Config:
    """The case's configuration with fields of some sections changed; it saves nothing unless they say so."""
    tree = case.config().model_dump() | {"checkpoint": {"interval": "never"}}
    return Config.model_validate(tree | {name: tree[name] | fields for name, fields in sections.items()})


def engine_of(rank: int, config: Config, case: Case) -> Engine:
    sizes = parallel_sizes(config)
    topology = Topology(
        RankGrid(sizes), rank, torch.device("cpu"), kv_heads=config.model.kv_heads, has_experts=config.model.has_experts
    )
    return build(resolve_recompute(config, topology.sizes), topology, build_chunks)


def open_batches(engine: Engine, history: RunHistory) -> Callable[[int], Batches]:
    def at(consumed_samples: int) -> Batches:
        return Batches(
            dataset(engine.config),
            global_batch_size=engine.plan.global_batch_size,
            micro_batch_size=engine.plan.micro_batch_size,
            dp=engine.topology.sizes.dp,
            dp_rank=engine.topology.coordinates.dp,
            consumed_samples=consumed_samples,
            device="cpu",
            skipped=history.skipped,
        )

    return at


def run(
    rank: int,
    case: Case,
    folder: str,
    sections: dict[str, dict[str, Any]],
    plant: Fault | None = None,
    attempt: int = 0,
    change: Callable[[Engine, int], None] | None = None,
    open_validation: Callable[[Engine, StopRequest], StepSource] | None = None,
) -> Trace:
    """One rank: begin from what `folder` holds and train to the end, with a fault in it.

    `change` is called before the update of each step (from 0), with the gradients in. `open_validation` opens the
    validation batches of this rank, which may ask its run to stop.
    """
    config = config_of(case, sections)
    engine = engine_of(rank, config, case)
    if plant is not None:
        plant.into(engine)
    directory = CheckpointDirectory(Path(folder))
    beginning = resume_or_start(engine, directory, has_saved=False, data=DATA)
    history, trace = beginning.history, Trace(history=beginning.history)
    facts = RunFacts("test", attempt, DATA, beginning.lineage, lambda: None, model_specs(config.model), history)
    guard = Guard(engine, history, open_batches(engine, history), trace)
    if change is not None:
        checked, changed = guard.before_update, change

        def change_and_check(step: int) -> None:
            changed(engine, step)
            checked(step)

        guard.before_update = change_and_check  # type: ignore[method-assign]
    with closing(CheckpointSaver(engine, directory, facts, Silent())) as checkpoints:
        request = StopRequest(rank)
        try:
            training = TrainingRun(
                engine,
                open_batches(engine, history),
                None if open_validation is None else lambda: open_validation(engine, request),
                trace,
                checkpoints,
                request,
                guard,
                Rollback(engine, directory, DATA, history, trace),
            )
            state = beginning.state
            trace.stopped, _ = train(training, state.consumed_samples, validation_is_due=state.validation_is_due)
        except TriaxisError as error:
            trace.error, trace.exit_code = str(error), error.exit_code
    trace.fingerprint = fingerprint_of(engine)
    trace.num_updates = engine.optimizer.num_updates
    engine.topology.close()
    return trace
