"""A loss or gradient that is not finite: stop, skip, rollback; each in float64, to the bit, with the fault in the data."""

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.runs import fingerprint_of
from tests.engine.resilience.runs import Plant, Trace, config_of, engine_of, open_batches, run
from tests.harness import RankFailedError, run_ranks
from tests.parity.cases import Case
from triaxis.engine.checkpoint.history import RunHistory
from triaxis.engine.optimizer.lr import learning_rate
from triaxis.engine.resilience.guard import Guard
from triaxis.engine.step_result import StepResult

pytestmark = pytest.mark.distributed

SPLIT = Case("gpt_dropout", tp=2, pp=2, num_layers=4, global_batch_size=4)
ALONE = Case("llama", num_layers=2, global_batch_size=4)
REPLICATED = replace(ALONE, dp=2)
BATCH, NUM_STEPS = SPLIT.global_batch_size, 6

BAD_STEP = 3
BAD = Plant(rank=2, module="blocks.1.mlp", sample_ids=(BAD_STEP * BATCH + 2,))
"""Rank 2 is tp rank 0 of the second stage of SPLIT, whose chunk begins with layer 2."""


def steps(num_steps: int = NUM_STEPS, micro_batch_size: int = 1) -> dict[str, int]:
    return {"steps": num_steps, "micro_batch_size": micro_batch_size}


def few(num_steps: int = NUM_STEPS) -> dict[str, int]:
    """Steps of few microbatches, where it does not matter which of them is bad."""
    return steps(num_steps, micro_batch_size=2)


# Skip --------------------------------------------------------------------------------------------------------------------


def without_one_update(
    rank: int, case: Case, left_out: int, train: dict[str, int]
) -> tuple[dict[int, float], dict[str, str]]:
    """Losses by step and the state at the end of a run that makes no use of one step."""
    engine = engine_of(rank, config_of(case, {"train": train}), case)
    losses = {}
    with closing(open_batches(engine, RunHistory())(0)) as batches:
        for step in range(NUM_STEPS):
            microbatches = batches.next_step()
            if step != left_out:
                lr = learning_rate(step, 1, engine.config.optimizer, NUM_STEPS)
                losses[step] = engine.train_step(microbatches, lr).loss
    return losses, dict(fingerprint_of(engine))


def test_a_skipped_update_is_as_if_it_had_been_left_out(tmp_path: Path) -> None:
    sections = {"train": steps(), "resilience": {"on_nonfinite": "skip"}}
    traces: list[Trace] = run_ranks(run, 4, SPLIT, str(tmp_path), sections, BAD)
    for trace, (losses, fingerprint) in zip(
        traces, run_ranks(without_one_update, 4, SPLIT, BAD_STEP, steps()), strict=True
    ):
        assert trace.error == "" and [step for step, _ in trace.told] == list(range(NUM_STEPS))
        assert {step: loss for step, loss in trace.told if step != BAD_STEP} == losses
        assert trace.fingerprint == fingerprint and trace.num_updates == NUM_STEPS - 1
        [(kind, step, message, details)] = trace.events
        assert (kind, step) == ("non_finite", BAD_STEP) and "Its update is skipped" in message
        assert details["samples"] == [BAD_STEP * BATCH, (BAD_STEP + 1) * BATCH]
        assert (details["first_rank"], details["first_samples"]) == (2, list(BAD.sample_ids))
        assert details["first"] == "the output of layers.3.mlp (stage 1) in the forward of microbatch 2"


def test_a_run_that_only_skips_comes_to_an_end(tmp_path: Path) -> None:
    everything = Plant(rank=0, module="", sample_ids=tuple(range(BATCH, 100 * BATCH)))
    sections = {"train": few(), "resilience": {"on_nonfinite": "skip", "max_skips_in_a_row": 2}}
    (trace,) = run_ranks(run, 1, ALONE, str(tmp_path), sections, everything)
    assert "2 updates in a row were skipped" in trace.error and trace.exit_code == 6
    assert [step for _, step, _, _ in trace.events] == [1, 2, 3] and trace.num_updates == 1


# Stop --------------------------------------------------------------------------------------------------------------------


def test_a_stop_names_the_first_rank_and_module(tmp_path: Path) -> None:
    plant = Plant(1, "blocks.1.attention", (BAD_STEP * BATCH + 3,), in_backward=True)
    words = "the gradient of the output of layers.1.attention (stage 0) in the backward of microbatch 3 (samples 15)"
    traces: list[Trace] = run_ranks(run, 4, SPLIT, str(tmp_path), {"train": steps()}, plant)
    for trace in traces:
        assert "step 4 on samples 12 to 15: loss sum" in trace.error and trace.exit_code == 6
        assert f"First on rank 1: {words}." in trace.error
        assert [(kind, step) for kind, step, _, _ in trace.events] == [("non_finite", BAD_STEP)]
        assert trace.num_updates == BAD_STEP, "the step that was posted after it has updated nothing"


# Rollback ----------------------------------------------------------------------------------------------------------------

SAVING = {"interval": 2, "keep_last": None}
ROLLBACK = {"on_nonfinite": "rollback", "max_rollbacks": 1}
OF_REPLICATED = Plant(rank=1, module="blocks.1.mlp", sample_ids=(BAD_STEP * BATCH + 3,))


def test_after_a_rollback_the_run_is_the_one_that_never_had_the_samples(tmp_path: Path) -> None:
    skipped = (BAD_STEP * BATCH, (BAD_STEP + 1) * BATCH)
    always = {"optimizer": {"decay_steps": 50}, "resilience": ROLLBACK}
    first, cut = always | {"train": few(), "checkpoint": SAVING}, tmp_path / "back"
    traces: list[Trace] = run_ranks(run, 2, REPLICATED, str(cut), first, OF_REPLICATED)
    longer = first | {"train": few(8)}
    told = always | {"train": few(8), "data": {"skip_samples": [skipped]}, "resilience": {}}
    straight: list[Trace] = run_ranks(run, 2, REPLICATED, str(tmp_path / "straight"), told, OF_REPLICATED)
    undisturbed = dict(straight[0].told)
    for trace in traces:
        assert trace.error == ""
        # Saved after steps 2, 4, 6: back to where two steps were made, whose losses stay what they were.
        assert [step for step, _ in trace.told] == [0, 1, 2, 2, 3, 4, 5]
        assert all(undisturbed[step] == loss for step, loss in trace.told)
        assert [kind for kind, *_ in trace.events] == ["non_finite", "rolled_back"]
        _, step, _, details = trace.events[1]
        assert (step, details["to_step"], details["samples"]) == (BAD_STEP, 2, list(skipped))
        assert trace.history.skipped.ranges == (skipped,)

    # A later attempt leaves them out too: by the newest checkpoint, and by an older one with what stands beside it.
    for number, forgets in enumerate((False, True), start=1):
        folder = tmp_path / f"again_{number}"
        shutil.copytree(cut, folder)
        if forgets:
            for step in (4, 6):
                shutil.rmtree(folder / f"step_{step:08d}")
            (folder / "latest").write_text("step_00000002\n")
        again: list[Trace] = run_ranks(run, 2, REPLICATED, str(folder), longer, OF_REPLICATED, number)
        for trace, whole in zip(again, straight, strict=True):
            assert trace.error == "" and trace.events == []
            assert trace.told == whole.told[2 if forgets else 6 :]
            assert trace.fingerprint == whole.fingerprint
            assert (trace.history.skipped.ranges, trace.history.num_rollbacks) == ((skipped,), 1)


def test_too_many_rollbacks_stop_the_run(tmp_path: Path) -> None:
    twice = Plant(rank=0, module="blocks.0", sample_ids=(BAD_STEP * BATCH, (BAD_STEP + 2) * BATCH))
    sections = {"train": few(), "checkpoint": SAVING, "resilience": ROLLBACK}
    (trace,) = run_ranks(run, 1, ALONE, str(tmp_path), sections, twice)
    assert "has already gone back 1 time (resilience.max_rollbacks = 1)" in trace.error and trace.exit_code == 6
    assert [kind for kind, *_ in trace.events] == ["non_finite", "rolled_back", "non_finite"]
    # The second time on other samples, by their ids.
    assert trace.events[2][3]["samples"] == [(BAD_STEP + 2) * BATCH, (BAD_STEP + 3) * BATCH]


def test_before_the_first_checkpoint_there_is_nowhere_to_go(tmp_path: Path) -> None:
    early = Plant(rank=0, module="blocks.0", sample_ids=(BATCH,))
    sections = {"train": few(), "checkpoint": SAVING, "resilience": ROLLBACK}
    (trace,) = run_ranks(run, 1, ALONE, str(tmp_path), sections, early)
    assert "holds no checkpoint of this run from before step 2" in trace.error


def test_what_was_trained_on_cannot_be_left_out_any_more(tmp_path: Path) -> None:
    case, saving = ALONE, {"interval": 2}
    run_ranks(run, 1, case, str(tmp_path), {"train": few(2), "optimizer": {"decay_steps": 50}, "checkpoint": saving})
    for skipped, refusal in (((2 * BATCH - 1, 2 * BATCH), "from 8 on"), ((2 * BATCH, 3 * BATCH), "")):
        sections = {
            "train": few(3),
            "optimizer": {"decay_steps": 50},
            "checkpoint": saving | {"accept": ["data.skip_samples"]},
            "data": {"skip_samples": [skipped]},
        }
        if refusal:
            with pytest.raises(RankFailedError, match=refusal):
                run_ranks(run, 1, case, str(tmp_path), sections, None, 1)
        else:
            (trace,) = run_ranks(run, 1, case, str(tmp_path), sections, None, 1)
            assert [step for step, _ in trace.told] == [2] and trace.history.skipped.ranges == (skipped,)


# Loss spikes -------------------------------------------------------------------------------------------------------------


def test_a_loss_above_its_limit_is_left_out_whenever_the_run_saves(tmp_path: Path) -> None:
    # Finite, and ten times what it should be.
    spike = Plant(rank=0, module="", sample_ids=(11 * BATCH + 2,), factor=30.0)
    ends = []
    for number, interval in enumerate((None, 3)):
        saving = {"interval": interval, "async": False}
        sections = {"train": few(14), "resilience": {"on_nonfinite": "skip", "loss_spike": 1.5}, "checkpoint": saving}
        (trace,) = run_ranks(run, 1, ALONE, str(tmp_path / str(number)), sections, spike)
        [(kind, step, message, _)] = trace.events
        assert (kind, step) == ("loss_spike", 11) and "is above the limit of" in message
        assert trace.num_updates == 13
        ends.append((message, trace.fingerprint, trace.history.losses))
    assert ends[0] == ends[1]
    assert [folder.name for folder in (tmp_path / "0").glob("step_*")] == ["step_00000014"], "null saves the end alone"
    # What the limit depends on is saved: a run that was cut before the spike sees it too.
    shutil.rmtree(tmp_path / "1" / "step_00000014")
    shutil.rmtree(tmp_path / "1" / "step_00000012")
    (tmp_path / "1" / "latest").write_text("step_00000009\n")
    (again,) = run_ranks(run, 1, ALONE, str(tmp_path / "1"), sections, spike, 1)
    assert [(again.events[0][2], again.fingerprint, again.history.losses)] == ends[:1]


# No labels ---------------------------------------------------------------------------------------------------------------


def test_a_step_without_labels_is_reported_and_is_nothing_else() -> None:
    """Its loss of zero is not remembered, and however many follow each other, it is no fault of the weights."""
    case, sections = replace(ALONE, num_layers=1), {"train": few(), "resilience": {"loss_spike": 2.0}}
    engine, trace, history = engine_of(0, config_of(case, sections), case), Trace(), RunHistory()
    guard = Guard(engine, history, open_batches(engine, history), trace)
    most = engine.config.resilience.max_skips_in_a_row
    for step in range(most + 2):
        guard.judge(step, StepResult(loss=0.0, grad_norm=0.1, num_tokens=0, skip="no_labels"))
    guard.judge(most + 2, StepResult(loss=3.0, grad_norm=0.1, num_tokens=8))
    assert [step for step, _ in history.losses] == [most + 2]
    assert [(kind, step) for kind, step, *_ in trace.events] == [("no_labels", step) for step in range(most + 2)]
    _, _, message, details = trace.events[1]
    assert message.startswith("step 2 on samples 4 to 7: none of their labels counts, so there is no loss (")
    assert message.endswith("Its update is skipped.") and details == {"samples": [4, 8]}
