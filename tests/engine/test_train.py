"""The order of things in the training loop, with an engine that only writes down what it is asked."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast
from unittest.mock import Mock

import pytest

import triaxis.engine.run.garbage
from triaxis.engine.checkpoint.format.manifest import TrainingState
from triaxis.engine.checkpoint.saving import CheckpointSaver
from triaxis.engine.comm.agreement import SaveFlags, StepFlags, StopFlags
from triaxis.engine.comm.stop import Stop, StopRequest
from triaxis.engine.config.quantities.plan import batch_plan
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import DivergenceError
from triaxis.engine.step import Engine
from triaxis.engine.step_limits import StepLimits
from triaxis.engine.step_result import Skip, StepResult
from triaxis.engine.steps_in_flight import RollbackRequested
from triaxis.engine.train import TrainingRun, train_steps

Log = list[tuple[str, int]]

CONFIG: dict[str, Any] = {
    "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 4, "vocab_size": 8},
    "train": {"steps": 6, "global_batch_size": 2},
}


class Result:
    def __init__(self, log: Log, step: int, diverges: bool, flags: StepFlags) -> None:
        self.log, self.step, self.diverges, self.flags = log, step, diverges, flags

    def read(self) -> StepResult:
        self.log.append(("read", self.step))
        skip: Skip = "diverged" if self.diverges else ""
        return StepResult(float(self.step), 1.0, num_tokens=8, flags=self.flags, skip=skip, why="not finite")


class Endless:
    """Validation batches that write down each one that is taken."""

    consumed_samples = 0

    def __init__(self, log: Log) -> None:
        self.log = log

    def next_step(self) -> list[Any]:
        self.log.append(("batch", 0))
        return []

    def close(self) -> None: ...


class Loop:
    """Engine, batches, observer and guard of one run, all writing to one log; steps count from 0."""

    def __init__(
        self,
        config: Config,
        saves_every: int | None = None,
        diverges_at: int | None = None,
        asked_at: int | None = None,
        retries_at: Sequence[int] = (),
        asked_in_batch: tuple[int, int] | None = None,
        begins_at: int = 0,
    ) -> None:
        self.config, self.plan = config, batch_plan(config, 1)
        self.saves_every, self.diverges_at = saves_every, diverges_at
        self.asked_at, self.request, self.ended = asked_at, StopRequest(), None
        self.retries_at, self.is_late = retries_at, False
        self.asked_in_batch = asked_in_batch
        self.log: Log = []
        self.consumed_samples = begins_at * self.plan.samples_per_step
        self.step, self.begins_at = begins_at - 1, begins_at
        self.saved: list[tuple[int, bool]] = []

    def run(self, *, validation_is_due: bool = False) -> Log:
        validation = (lambda: Endless(self.log)) if self.config.eval.interval else None
        run = TrainingRun(
            cast(Engine, self),
            lambda consumed_samples: self,
            validation,
            self,
            cast(CheckpointSaver, self),
            self.request,
            self,
            rollback=self._no_rollback,
        )
        self.ended = train_steps(run, self, validation_is_due=validation_is_due)
        return self.log

    def _no_rollback(self, request: RollbackRequested) -> TrainingState:
        raise AssertionError("no policy asks for it")

    # The engine

    def post_labels(self, num_labels: list[int]) -> list[int]:
        return num_labels

    def forward_backward(self, microbatches: Any, labels: list[int] | None) -> None:
        self.step += 1
        # Those of a first step are summed in it, those of each later one during the step before.
        is_first = self.step == self.begins_at
        assert labels == (None if is_first else [self.step])
        if self.step == self.asked_at:
            self.request.ask(Stop.PREEMPTED)

    def update(self, counts: None, lr: float, flags: StepFlags, limits: StepLimits) -> Result:
        assert limits.divergence == 100.0 + self.step and self.log[-1] == ("check", self.step)
        assert (flags.stop == StopFlags()) == (self.asked_at is None or self.step < self.asked_at)
        self.log.append(("post", self.step))
        flags = flags._replace(retried=3.0 * (self.step in self.retries_at))
        return Result(self.log, self.step, self.step == self.diverges_at, flags)

    def evaluate(self, steps: Any) -> float:
        self.log.append(("validate", self.step))
        for batch, _ in enumerate(steps):
            if (self.step, batch) == self.asked_in_batch:
                self.request.ask(Stop.PREEMPTED)
        return 1.0

    def post_stop(self, flags: StopFlags) -> Callable[[], list[float]]:
        return lambda: list(flags)

    def receive_late(self) -> bool:
        self.log.append(("late", self.step))
        was_early, self.is_late = not self.is_late, True
        return was_early

    # The guard

    def limits(self, step: int) -> StepLimits:
        return StepLimits(100.0 + step)

    def before_update(self, step: int) -> None:
        self.log.append(("check", step))

    def judge(self, step: int, result: StepResult) -> None:
        self.log.append(("judge", step))
        if result.skip:
            raise DivergenceError(result.why)

    # Batches

    def next_step(self) -> list[Any]:
        self.consumed_samples += self.plan.samples_per_step
        return []

    def next_labels(self) -> list[int]:
        upcoming = self.step + 2
        assert upcoming < self.plan.phase.end_step, "no label of the run's last step is behind it"
        return [upcoming]

    def close(self) -> None: ...

    # The observer

    def enter(self, name: str) -> None: ...

    def on_batch(self, microbatches: Sequence[Any]) -> None:
        pass

    def end_step(self) -> None:
        self.log.append(("end", self.step))

    def on_step(self, step: int, result: StepResult, lr: float) -> None:
        assert result.loss == step
        self.log.append(("tell", step))

    def on_validation(self, step: int, loss: float) -> None:
        self.log.append(("validated", step))

    def on_validation_left_out(self, step: int) -> None:
        self.log.append(("left out", step))

    def begin(self, steps_made: int) -> None: ...

    def on_allocator_retry(self, step: int, num_ranks: int) -> None:
        assert num_ranks == 3
        self.log.append(("retry", step))

    # CheckpointSaver

    def flags(self) -> SaveFlags:
        return SaveFlags()

    def agreed(self, flags: SaveFlags) -> None: ...

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return self.saves_every is not None and (is_last or step % self.saves_every == 0)

    def after_step(
        self, step: int, consumed_samples: int, lr: float, *, is_last: bool, validation_is_due: bool
    ) -> None:
        if self.is_due(step, is_last=is_last):
            self.log.append(("save", step - 1))
            self.saved.append((step - 1, validation_is_due))

    def finish(self) -> None: ...


@pytest.fixture(autouse=True)
def nothing_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection of all that a run of tests holds takes longer than a test; `test_garbage.py` has the loop's."""
    monkeypatch.setattr(triaxis.engine.run.garbage, "gc", Mock())


def config(**sections: Mapping[str, Any]) -> Config:
    return Config.model_validate(CONFIG | {name: CONFIG.get(name, {}) | dict(own) for name, own in sections.items()})


def test_a_step_is_read_when_the_next_one_is_posted() -> None:
    log = [entry for entry in Loop(config()).run() if entry[0] in ("post", "read")]
    expected = [("post", 0)]
    for step in range(1, 6):
        expected += [("post", step), ("read", step - 1)]
    assert log == [*expected, ("read", 5)]


def test_every_step_ends_once_and_is_told_once_in_order() -> None:
    for loop in (Loop(config()), Loop(config(eval={"interval": 4}), saves_every=3), Loop(config(train={"steps": 1}))):
        log = loop.run()
        for what in ("post", "read", "end", "tell"):
            assert [step for word, step in log if word == what] == list(range(loop.plan.num_steps)), what
        for step in range(loop.plan.num_steps):
            assert log.index(("end", step)) < log.index(("tell", step)), "its time is known when it is told"


def test_memory_that_runs_short_makes_receives_late_with_one_event() -> None:
    """The flag of step 1 is read when step 2 is posted; that of step 2 prolongs what has begun."""
    log = Loop(config(), retries_at=(1, 2)).run()
    assert [entry for entry in log if entry[0] in ("late", "retry")] == [("late", 2), ("retry", 1), ("late", 3)]
    assert log.index(("post", 2)) < log.index(("tell", 1)) < log.index(("retry", 1)) < log.index(("post", 3))


@pytest.mark.parametrize("what", ["validate", "save"])
def test_before_a_validation_or_a_save_all_steps_are_read(what: str) -> None:
    loop = Loop(config(eval={"interval": 2})) if what == "validate" else Loop(config(), saves_every=2)
    log = loop.run()
    assert [step for word, step in log if word == what] == [1, 3, 5]
    for step in (1, 3, 5):
        at = log.index((what, step))
        assert log.index(("post", step)) < log.index(("tell", step)) < at
    # Between them nothing is hurried.
    assert log.index(("post", 2)) < log.index(("post", 3)) < log.index(("read", 2))


def test_a_step_that_is_not_finite_is_never_saved_and_stops_the_run() -> None:
    loop = Loop(config(), saves_every=4, diverges_at=3)
    with pytest.raises(DivergenceError):
        loop.run()
    assert not [entry for entry in loop.log if entry[0] == "save"] and ("tell", 3) not in loop.log

    loop = Loop(config(), diverges_at=2)
    with pytest.raises(DivergenceError):
        loop.run()
    assert loop.log[-3:] == [("read", 2), ("end", 3), ("judge", 2)], (
        "the step after it is posted already, and updates nothing"
    )


@pytest.mark.parametrize(
    ("loop", "last"),
    [
        # The flag travels with step 2 and is read when step 3 is posted: that one is finished and saved.
        (Loop(config(), asked_at=2), 3),
        (Loop(config(), saves_every=50, asked_at=0), 1),
        # Where a step is read at once, it is the last: the validation that was due is left out, a save is not made twice.
        (Loop(config(eval={"interval": 3}), asked_at=2), 2),
        (Loop(config(), saves_every=3, asked_at=2), 2),
    ],
)
def test_a_stop_finishes_the_step_that_is_posted_and_saves_it(loop: Loop, last: int) -> None:
    loop.saves_every = loop.saves_every or 50
    log = loop.run()
    assert loop.ended is Stop.PREEMPTED
    for what in ("post", "read", "tell", "end"):
        assert [step for word, step in log if word == what] == list(range(last + 1)), what
    assert [entry for entry in log if entry[0] in ("save", "validate")] == [("save", last)]
    assert log[-1] == ("save", last)


@pytest.mark.parametrize("asked_at", [4, 5])
def test_a_stop_in_the_last_steps_lets_a_run_finish_that_has_no_validation(asked_at: int) -> None:
    loop = Loop(config(), saves_every=6, asked_at=asked_at)
    log = loop.run()
    assert loop.ended is None
    assert log[-1] == ("save", 5) and loop.saved == [(5, False)]


@pytest.mark.parametrize("asked_at", [4, 5])
def test_a_stop_in_the_last_steps_leaves_the_last_validation_to_the_next_attempt(asked_at: int) -> None:
    loop = Loop(config(eval={"interval": 6}), saves_every=6, asked_at=asked_at)
    log = loop.run()
    assert loop.ended is Stop.PREEMPTED
    assert log[-2:] == [("left out", 5), ("save", 5)] and loop.saved == [(5, True)]
    assert ("validate", 5) not in log

    later = Loop(config(eval={"interval": 6}), saves_every=6, begins_at=6)
    assert [entry for entry in later.run(validation_is_due=True) if entry[0] != "batch"] == [
        ("validate", 5),
        ("validated", 5),
    ]
    assert later.ended is None


@pytest.mark.parametrize("asked_at", [0, 7, 297, 298])
def test_a_stop_ends_a_validation_after_the_batch_that_follows(asked_at: int) -> None:
    """The flag travels behind batch `asked_at` and is read when the next batch is posted."""
    loop = Loop(config(eval={"interval": 3, "steps": 300}), saves_every=50, asked_in_batch=(2, asked_at))
    log = loop.run()
    is_whole = asked_at == 298
    assert log.count(("batch", 0)) == asked_at + 2
    assert loop.ended is Stop.PREEMPTED and loop.step == 2
    assert loop.saved == [(2, not is_whole)]
    assert log[-2:] == [("validated" if is_whole else "left out", 2), ("save", 2)]


def test_a_stop_in_the_last_batch_keeps_the_loss() -> None:
    loop = Loop(config(eval={"interval": 3, "steps": 4}), saves_every=50, asked_in_batch=(2, 3))
    assert loop.run()[-2:] == [("validated", 2), ("save", 2)]
    assert loop.ended is Stop.PREEMPTED and loop.saved == [(2, False)]

    # After the last step there is nothing left to do, so the run is finished.
    loop = Loop(config(eval={"interval": 6, "steps": 4}), saves_every=50, asked_in_batch=(5, 3))
    assert loop.run()[-2:] == [("validated", 5), ("save", 5)]
    assert loop.ended is None


def test_a_validation_that_is_due_comes_before_the_first_step() -> None:
    straight = Loop(config(eval={"interval": 3, "steps": 2}), saves_every=50)
    whole = straight.run()
    cut = Loop(config(eval={"interval": 3, "steps": 2}), saves_every=50, asked_at=2)
    assert ("validated", 2) not in cut.run() and cut.saved == [(2, True)]
    later = Loop(config(eval={"interval": 3, "steps": 2}), saves_every=50, begins_at=3)
    assert later.run(validation_is_due=True) == whole[whole.index(("validate", 2)) :]

    # A stop that comes again leaves it due: the checkpoint that the attempt has begun from says so already.
    again = Loop(config(eval={"interval": 3, "steps": 9}), saves_every=50, begins_at=3, asked_in_batch=(2, 0))
    again.run(validation_is_due=True)
    assert again.ended is Stop.PREEMPTED and again.saved == [] and again.log[-1] == ("left out", 2)

    # Validations that the configuration no longer wants are not made.
    changed = Loop(config(eval={"interval": 4}), saves_every=50, begins_at=3)
    assert ("validate", 2) not in changed.run(validation_is_due=True)
