"""Short runs of the parity tests' models with the real checkpoint manager: train, save, be gone, begin again."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.parity.cases import Case, dataset
from triaxis.engine.checkpoint.directory import CheckpointDirectory
from triaxis.engine.checkpoint.format.fingerprint import to_text
from triaxis.engine.checkpoint.format.manifest import Ancestor, Kind
from triaxis.engine.checkpoint.resume import resume_or_start
from triaxis.engine.checkpoint.saving import CheckpointSaver, RunFacts
from triaxis.engine.checkpoint.shards import fingerprint
from triaxis.engine.comm.agreement import StepFlags
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.cut import ContextCut
from triaxis.engine.data.loader import Batches
from triaxis.engine.layout.rank_grid import RankGrid
from triaxis.engine.optimizer.lr import learning_rate
from triaxis.engine.step import Engine
from triaxis.engine.train import build
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.specs import model_specs


class Silent:
    """Notices that remember what failed."""

    def __init__(self) -> None:
        self.failures: list[tuple[int, str]] = []
        self.saved: list[int] = []

    def on_save_started(self, step: int, stall_seconds: float, waited_seconds: float) -> None:
        pass

    def on_saved(self, step: int, folder: Path, num_bytes: int, seconds: float) -> None:
        self.saved.append(step)

    def on_save_failed(self, step: int, reason: str) -> None:
        self.failures.append((step, reason))

    def on_retired(self, names: list[str]) -> None:
        pass

    def on_fingerprint(self, step: int, fingerprint: dict[Kind, str]) -> None:
        pass


@dataclass
class Trace:
    """What one rank saw.

    Attributes:
        began: the step that the run went on from.
        losses: of each step made, exact.
        sample_ids: that this rank read, step by step.
        fingerprints: by the steps that were made when the state was looked at.
        passed_over: what was said of checkpoints that could not be used.
    """

    began: int
    losses: list[float] = field(default_factory=list)
    sample_ids: list[list[int]] = field(default_factory=list)
    fingerprints: dict[int, dict[Kind, str]] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()


def engine_of(rank: int, case: Case, checkpoint: dict[str, Any]) -> Engine:
    """One rank's engine of a layout, from initial weights; it saves nothing unless `checkpoint` says so."""
    config = Config.model_validate(case.config().model_dump() | {"checkpoint": {"interval": "never"} | checkpoint})
    topology = Topology(
        RankGrid(parallel_sizes(config)),
        rank,
        torch.device("cpu"),
        kv_heads=config.model.kv_heads,
        has_experts=config.model.has_experts,
    )
    return build(resolve_recompute(config, topology.sizes), topology, build_chunks)


def facts_of(config: Config, attempt: int = 0, lineage: tuple[Ancestor, ...] = ()) -> RunFacts:
    return RunFacts("test", attempt, {"samples": "same"}, lineage, lambda: None, model_specs(config.model))


def run(
    rank: int,
    case: Case,
    folder: str,
    until: int,
    attempt: int,
    checkpoint: dict[str, Any],
    look_at: Collection[int] = (),
) -> Trace:
    """One rank: begin from what `folder` holds, train to step `until`, saving as `checkpoint` (a config section) says.

    `look_at`: numbers of steps made; the state is fingerprinted then.
    """
    engine = engine_of(rank, case, checkpoint)
    directory = CheckpointDirectory(Path(folder))
    beginning = resume_or_start(engine, directory, has_saved=False, data={"samples": "same"})
    trace = Trace(beginning.state.step, passed_over=beginning.passed_over)
    if trace.began in look_at:
        trace.fingerprints[trace.began] = fingerprint_of(engine)
    checkpoints = CheckpointSaver(engine, directory, facts_of(engine.config, attempt, beginning.lineage), Silent())
    batches = Batches(
        dataset(engine.config),
        global_batch_size=case.global_batch_size,
        micro_batch_size=case.micro_batch_size,
        dp=case.dp,
        dp_rank=engine.topology.coordinates.dp,
        consumed_samples=beginning.state.consumed_samples,
        device="cpu",
        num_ahead=engine.config.model.num_mtp_layers,
        cut=ContextCut.of(engine.config, engine.topology.sizes, engine.topology.coordinates.cp),
    )
    for step in range(beginning.state.step, until):
        microbatches = batches.next_step()
        lr = learning_rate(step, 1, engine.config.optimizer, 50)
        result = engine.update(engine.forward_backward(microbatches), lr, StepFlags(checkpoints.flags())).wait()
        checkpoints.agreed(result.flags.save)
        trace.losses.append(result.loss)
        trace.sample_ids.append([sample for microbatch in microbatches for sample in microbatch.sample_ids])
        checkpoints.after_step(step + 1, batches.consumed_samples, lr, is_last=step + 1 == until)
        if step + 1 in look_at:
            trace.fingerprints[step + 1] = fingerprint_of(engine)
    checkpoints.finish()
    checkpoints.close()
    batches.close()
    engine.topology.close()
    return trace


def fingerprint_of(engine: Engine) -> dict[Kind, str]:
    return {kind: to_text(value) for kind, value in fingerprint(engine).items()}
