"""Runs one rank of a training run: assembles a GPT, its data and its telemetry, and trains.

    PYTHONSAFEPATH=1 torchrun --nproc-per-node 8 --module triaxis.launch.pretrain_gpt configs/gpt_tiny.yaml train.steps=20

`launch/pretrain_gpt.sh` starts this module, and so does srun with one task per GPU. These functions begin in this order:

    main       joins the process group, opens the run directory and this rank's log      rank/join.py, rank/directory.py
    _train     builds the engine and opens the telemetry                                 engine/train.py
    _begin     shows the banner, and loads a checkpoint or the initial weights           rank/banner.py, engine/checkpoint/resume.py
    _loop      trains to the last step or a stop, with guard, heartbeat and watchers     rank/watchers.py, rank/hang_watch.py
    _report    reports the end of the run                                                rank/sample_text.py
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from triaxis.engine.checkpoint.environment import describe_environment
from triaxis.engine.checkpoint.inspect.recorded import END_OF_DOCUMENTS
from triaxis.engine.checkpoint.resume import TOKENIZER, ResumePoint, resume_or_start
from triaxis.engine.checkpoint.saving import CheckpointSaver, RunFacts
from triaxis.engine.comm.runtime import RankEnvironment
from triaxis.engine.comm.stop import Stop, StopRequest
from triaxis.engine.config.tree import Config
from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.engine.data.datasets import Datasets, doubts
from triaxis.engine.data.document_statistics import DocumentStatistics
from triaxis.engine.data.loader import Batches
from triaxis.engine.data.run_tokenizer import recorded_end
from triaxis.engine.errors import CheckpointError, DataError, ModelError
from triaxis.engine.resilience.guard import Guard
from triaxis.engine.resilience.rollback import Rollback
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.step import Engine
from triaxis.engine.telemetry.meters.table import open_meters
from triaxis.engine.telemetry.observer import TrainingObserver, peak_memory_bytes, peak_memory_of_ranks
from triaxis.engine.telemetry.outlets.banner import End, Start, show_end, show_start
from triaxis.engine.telemetry.outlets.hub import Telemetry, open_telemetry
from triaxis.engine.telemetry.outlets.notices import CheckpointNotices, TroubleNotices, say_beginning, say_stopped
from triaxis.engine.telemetry.outlets.rank_log import RankStreams, rank_log
from triaxis.engine.telemetry.record.metrics import Meter
from triaxis.engine.train import TrainingRun, build, train
from triaxis.launch.footprint.own_costs import OwnCostsMeter
from triaxis.launch.rank.banner import (
    corpus_entropies,
    count_parameters,
    describe,
    measured_memory,
    predicted_memory_line,
)
from triaxis.launch.rank.batches import open_batches, run_documents
from triaxis.launch.rank.directory import begin_attempt, open_directory
from triaxis.launch.rank.first_orders import FirstOrders
from triaxis.launch.rank.hang_watch import open_hang_watch
from triaxis.launch.rank.join import Rank, join_run
from triaxis.launch.rank.lost_peer import naming_lost_peers
from triaxis.launch.rank.memory_snapshot import snapshot_writer
from triaxis.launch.rank.out_of_memory import explaining_memory
from triaxis.launch.rank.phase import config_of_phase
from triaxis.launch.rank.sample_text import write_sample
from triaxis.launch.rank.step_times import (
    finish_step_times,
    open_memory_check,
    open_slow_ranks,
)
from triaxis.launch.rank.watchers import Watchers
from triaxis.launch.start.launcher import FROM_SCRATCH
from triaxis.launch.start.preflight import refuse_without_gpu
from triaxis.launch.start.process.ending import WayOut, print_error, run_rank
from triaxis.launch.start.process.failure import AFTER, ExplainedError, code_of
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.specs import model_specs


def main(argv: Sequence[str]) -> int:
    """Train on one rank, given the arguments `[config.yaml, section.key=value ..., --from-scratch]`.

    `triaxis.engine.errors.ExitCode` explains the exit codes.
    """
    words = [word for word in argv if word != FROM_SCRATCH]
    stem, from_scratch = Path(words[0]).stem, FROM_SCRATCH in argv

    def choose_phase(config: Config, environment: RankEnvironment) -> Config:
        return config_of_phase(config, stem, environment, from_scratch=from_scratch, is_first_start=first)

    first = is_first_start(RankEnvironment.from_variables(os.environ))
    orders = FirstOrders(stem, from_scratch=from_scratch, is_first_start=first)
    joining = join_run(words, trains=True, choose_phase=choose_phase, before=orders.build, measure=OwnCostsMeter())
    with WayOut() as way_out, joining as rank:
        refuse_without_gpu(rank.config, has_gpu=rank.topology.device.type == "cuda")
        directory = open_directory(rank, stem, from_scratch=from_scratch, is_first_start=first)
        if directory.finished is not None:
            if rank.number == 0:
                print(directory.finished_message(rank.config))
            return 0
        log = rank_log(directory.rank_log(rank.number), show=rank.number == 0)
        with log as streams, _printing_errors(), closing(Watchers(rank, directory)) as watchers:
            orders.progress.heartbeat = watchers.heartbeat
            return _train(rank, directory, watchers, streams, way_out, orders.datasets(rank.config))


def is_first_start(environment: RankEnvironment) -> bool:
    """Whether neither a launcher nor SLURM has started this command before."""
    return not (environment.restart_count or int(os.environ.get("SLURM_RESTART_COUNT") or 0))


@contextmanager
def _printing_errors() -> Iterator[None]:
    """Print an exception while this rank's log still receives output, and raise `ExplainedError` instead."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        print_error(error)
        raise ExplainedError(code_of(error)) from error


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The parts of one rank's attempt to train: engine, data, telemetry, watchers.

    Attributes:
        held_before: this process's peak memory before its engine was built, in bytes.
        explaining: function (engine) -> context in which a memory error becomes a readable error.
        way_out: time limit for closing after an error.
    """

    rank: Rank
    directory: RunDirectory
    datasets: Datasets
    engine: Engine
    telemetry: Telemetry
    meter: Meter
    documents: DocumentStatistics | None
    watchers: Watchers
    stop: StopRequest
    held_before: int
    explaining: Callable[[Engine], AbstractContextManager[None]]
    way_out: WayOut


def _train(
    rank: Rank, directory: RunDirectory, watchers: Watchers, streams: RankStreams, way_out: WayOut, datasets: Datasets
) -> int:
    """Build the engine, begin the attempt and train; return the exit code."""
    config, topology = rank.config, rank.topology
    held_before = peak_memory_bytes(topology.device)
    explaining = partial(explaining_memory, config, topology, snapshot_writer(rank, directory))
    with way_out.bounded(), explaining():
        engine = build(rank.resolved, watchers.topology, build_chunks, observers=watchers.observers)
    described = describe(engine)
    documents = run_documents(config, topology, datasets.train)
    meter = Meter(
        rank.resolved,
        engine.plan,
        layers_per_chunk=described.layers_per_chunk,
        world_size=topology.grid.world_size,
        device_name=described.device_name,
        attempt=directory.attempt,
        documents=documents,
    )
    telemetry = open_telemetry(
        config,
        directory,
        is_logging_rank=rank.number == 0,
        streams=streams,
        num_steps=engine.plan.num_steps,
        show_mfu=meter.peak is not None,
        layout={**describe_environment(engine), "sizes": str(topology.sizes), "backend": described.device},
        device_type=topology.device.type,
    )
    stop = StopRequest(rank.number, streams.write)
    attempt = _Attempt(
        rank, directory, datasets, engine, telemetry, meter, documents, watchers, stop, held_before, explaining, way_out
    )
    lost_peers = naming_lost_peers(topology, watchers.heartbeat, streams.log, lambda: directory.next_start(config))
    try:
        with lost_peers:
            beginning, facts = _begin(attempt)
            notices = CheckpointNotices(telemetry, directory)
            saver = CheckpointSaver(engine, directory.checkpoints(config), facts, notices)
            with closing(saver) as checkpoints:
                stop.listen()
                stopped = _loop(attempt, beginning, facts, checkpoints)
    except CheckpointError as error:
        telemetry.event("failed", error=f"CheckpointError: {error}")
        if stop.agreed is not Stop.PREEMPTED:
            raise
        # The run is preempted all the same: the next attempt resumes from the newest complete checkpoint.
        print(f"error: {error}", file=sys.stderr)
        stopped = stop.agreed
    except BaseException as error:
        telemetry.event("failed", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        telemetry.close()
        directory.close()
    if stopped is None:
        return 0
    # No rank leaves before rank 0 has closed its files: a launcher ends all ranks as soon as one exits with a nonzero code.
    topology.axis("world").barrier(topology.device, "stop")
    return AFTER[stopped]


def _begin(attempt: _Attempt) -> tuple[ResumePoint, RunFacts]:
    """Show the banner, load the starting state, and record the attempt in the run directory.

    Returns:
        The state, and the facts that each checkpoint of the attempt records.
    """
    rank, directory, engine, telemetry = attempt.rank, attempt.directory, attempt.engine, attempt.telemetry
    config, described, counted = rank.config, describe(engine), count_parameters(engine)
    tokenizer = None if config.data.synthetic else load_tokenizer(config.data.tokenizer_name)
    end = None if tokenizer is None else recorded_end(config, tokenizer)
    if telemetry.report is not None:
        start = Start(
            config,
            engine.plan,
            described.layout,
            described.device,
            described.kernels,
            predicted_memory_line(engine, attempt.held_before),
            counted,
            {spec.name: spec.numel for spec in model_specs(config.model)},
            recompute=rank.resolved.recompute,
            device_type=engine.topology.device.type,
            documents=attempt.documents,
            doubts=list(doubts(attempt.datasets, config, end)),
        )
        show_start(telemetry.report, directory, attempt.meter, start)
    # Each phase has its own samples; a difference from the previous phase's is not a change of the data.
    name = engine.plan.phase.name
    data = {f"samples of {name}" if name else "samples": attempt.datasets.fingerprint}
    if tokenizer is not None:
        data |= {TOKENIZER: tokenizer.identity, END_OF_DOCUMENTS: str(end)}
    beginning = resume_or_start(
        engine,
        directory.checkpoints(config),
        has_saved=directory.has_saved,
        data=data,
        from_scratch=directory.from_scratch,
    )
    begin_attempt(rank, directory)
    say_beginning(telemetry, directory, beginning, config)
    return beginning, RunFacts(
        run=directory.path.name,
        attempt=directory.attempt,
        data=data,
        lineage=beginning.lineage,
        wandb_id=directory.known_wandb_id,
        specs=model_specs(config.model),
        history=beginning.history,
    )


def _loop(attempt: _Attempt, beginning: ResumePoint, facts: RunFacts, checkpoints: CheckpointSaver) -> Stop | None:
    """Train to the last step or a stop, and report the end. Return why the run stopped, or None."""
    engine, directory, telemetry, watchers = attempt.engine, attempt.directory, attempt.telemetry, attempt.watchers
    config, history, datasets, trouble = engine.config, facts.history, attempt.datasets, TroubleNotices(telemetry)
    hang_watch = open_hang_watch(engine, watchers.heartbeat, directory, telemetry)

    def open_training(consumed_samples: int) -> Batches:
        train = datasets.train_after(history.skipped)
        return open_batches(config, engine.topology, train, consumed_samples, history.skipped)

    guard = Guard(engine, history, open_training, trouble)
    rollback = Rollback(engine, directory.checkpoints(config), facts.data, history, trouble)
    times, notices = watchers.times, watchers.notices(telemetry)
    observer = TrainingObserver(
        telemetry,
        attempt.meter,
        engine.topology.device,
        watchers=(*watchers.steps, *notices),
        meters=open_meters(engine),
        times=times,
        slow_ranks=open_slow_ranks(engine, times),
        memory=open_memory_check(engine),
        fusions=(engine.kernels.fusion, engine.optimizer.fusion),
    )
    valid = datasets.valid
    validation = None if valid is None else lambda: open_batches(config, engine.topology, valid)
    run = TrainingRun(engine, open_training, validation, observer, checkpoints, attempt.stop, guard, rollback)
    started_seconds = time.monotonic()
    hang_watch.start()
    try:
        with attempt.way_out.bounded(agreed=(CheckpointError,)), attempt.explaining(engine):
            state = beginning.state
            stopped, consumed_samples = train(run, state.consumed_samples, validation_is_due=state.validation_is_due)
            finish_step_times(times, directory, telemetry)
    finally:
        hang_watch.close()
        watchers.close()
    _report(attempt, observer, stopped, consumed_samples, time.monotonic() - started_seconds)
    return stopped


def _report(
    attempt: _Attempt, observer: TrainingObserver, stopped: Stop | None, consumed_samples: int, seconds: float
) -> None:
    """Report the end of the run, after `seconds` of training.

    A finished run is also marked as finished in its directory, and writes its sample text.
    """
    engine, directory, telemetry, valid = attempt.engine, attempt.directory, attempt.telemetry, attempt.datasets.valid
    config, plan, loss, val_loss = engine.config, engine.plan, observer.loss, observer.val_loss
    telemetry.flush()
    held, memory = peak_memory_of_ranks(engine.topology), measured_memory(engine, attempt.held_before)
    step = plan.num_steps if stopped is None else plan.phase.step_after(consumed_samples)
    saved = directory.checkpoints(config).step_folder(step) if config.checkpoint.saves else None
    if stopped is not None:
        say_stopped(telemetry, stopped, step, saved=saved, peak_memory_bytes=held)
        return
    if telemetry.report is not None:
        telemetry.event("finished", steps=step, loss=loss, val_loss=val_loss, peak_memory_bytes=held)
        directory.finish(steps=step, loss=loss, val_loss=val_loss)
    prompt, text, entropies = "", None, dict[str, float]()
    with _summarizing(telemetry):
        if valid is not None:
            prompt, text = write_sample(engine, valid, attempt.stop)
    if telemetry.report is not None:
        with _summarizing(telemetry):
            entropies = corpus_entropies(config)
        show_end(
            telemetry.report, directory, End(step, seconds, loss, val_loss, entropies, saved, prompt, text, memory)
        )


@contextmanager
def _summarizing(telemetry: Telemetry) -> Iterator[None]:
    """Turn an error in the block into a warning that a part of the run's summary is missing."""
    try:
        yield
    except (DataError, ModelError, OSError) as error:
        telemetry.say(f"a part of the summary is missing: {error}", "yellow")


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
