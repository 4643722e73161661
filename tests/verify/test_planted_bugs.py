"""Each planted bug is found, by the parameter or place that goes wrong first and the axis, and nothing else is blamed."""

import math
import tempfile
from pathlib import Path

import pytest

from tests.documented import ROOT
from tests.harness import RankFailedError, run_ranks
from tests.parity.cases import Case
from tests.planting import Plant, run_planted
from tests.verify import planted_axes, planted_documents, planted_fp8, planted_shrunk
from tests.verify.bug import Bug
from tests.verify.planted import BUGS, DOWN
from tests.verify.trials import run
from triaxis.engine.config.write import to_yaml
from triaxis.engine.step import Engine
from triaxis.launch.start.command_line import layout_overrides
from triaxis.launch.verify.run import Trial, trial
from triaxis.launch.verify.verdict.judge import Verdict

pytestmark = pytest.mark.distributed
NUM_STEPS = 2


def trial_of(case: Case, dtype: str) -> Trial:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.yaml"
        path.write_text(to_yaml(case.config()))
        return trial(path, (), small=False, num_steps=NUM_STEPS, dtype=dtype)


def is_named(bug: Bug, verdict: Verdict) -> bool:
    """Return True where the kind of the first difference and its parameters (or its place) are the bug's."""
    first, *_ = verdict.differences
    wrong = [first] if bug.what == "output" else verdict.differences
    return first.what == bug.what and all(bug.names(one.name) for one in wrong)


KINDS = ("gradient", "output", "master", "gradient norm", "parameter", "samples", "start", "loss", "routing", "exp_avg")
"""What can differ first."""

IN_CI = [next(number for number, bug in enumerate(BUGS) if bug.what == kind) for kind in KINDS]
"""The first bug of each kind; all of them with `--all`."""


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=str(bug), marks=() if number in IN_CI else pytest.mark.slow)
        for number, bug in enumerate(BUGS)
    ],
)
def test_a_planted_bug_is_named(number: int, references: Path) -> None:
    bug: Bug = BUGS[number]
    verdict = run(trial_of(bug.case, bug.dtype), references, bug.plant)
    assert not verdict.equal and verdict.cause is not None
    assert is_named(bug, verdict), verdict.differences
    assert verdict.cause.axis == bug.axis and bug.text in verdict.cause.text, verdict.cause


def plant_all(rank: int) -> list[str]:
    """Plant each bug, and return those that name what the engine does not have."""
    stale = []
    for bug in BUGS:
        try:
            bug.plant()
        except AttributeError as error:
            stale.append(f"{bug}: {error}")
    return stale


def test_each_planted_bug_replaces_what_the_engine_has() -> None:
    """Most of the bugs run only with `--all`: a change of the engine would leave their plants behind."""
    assert run_ranks(plant_all, 1) == [[]]


@pytest.mark.slow
def test_a_planted_bug_is_found_in_fp16(references: Path) -> None:
    """Gradients come with the loss scale, and their rounding is measured without it."""
    bug: Bug = BUGS[IN_CI[0]]
    verdict = run(trial_of(bug.case, "fp16"), references, bug.plant, sub_layouts=False)
    assert not verdict.equal and verdict.differences[0].what == "gradient"


RELATED = (
    (planted_axes.a_rank_of_padding_counts_one_column, "output", ("parallel.tp=4", "parallel.pp=1", "parallel.vpp=1")),
    (
        planted_axes.a_last_group_of_fewer_layers_runs_first,
        "output",
        (
            "parallel.tp=1",
            "parallel.vpp=1",
            "parallel.sequence_parallel=false",
            "model.num_layers=10",
            "recompute.granularity=full",
            "recompute.num_layers=2",
        ),
    ),
    (
        planted_axes.the_third_round_repeats_the_second,
        "loss",
        ("parallel.tp=1", "parallel.vpp=1", "parallel.sequence_parallel=false", "train.global_batch_size=40"),
    ),
)
"""Bugs that need a relation between sizes: the first difference, and words in which gpt_tiny has that relation."""


def small_trial(name: str, layout: str, *words: str, num_steps: int = 1) -> Trial:
    path = ROOT / "configs" / f"{name}.yaml"
    return trial(path, (*layout_overrides(layout), *words), small=True, num_steps=num_steps, dtype="float64")


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "what", "words"), RELATED)
def test_a_small_size_shows_what_the_full_one_does(
    plant: Plant, what: str, words: tuple[str, ...], references: Path
) -> None:
    path, overrides = ROOT / "configs" / "gpt_tiny.yaml", ("parallel.dp=1", *words)
    asked = trial(path, overrides, small=True, num_steps=1, dtype="float64")
    assert run(asked, references).equal
    verdict = run(asked, references, plant, sub_layouts=False)
    assert not verdict.equal and verdict.differences[0].what == what, verdict.differences[:1]


PATTERN = ("model.num_layers=8", "model.layers=[local*2, global]", "model.layer_kinds={local: {window: 4}, global: {}}")
SLOW_LAYERS = ("model.num_layers=6", "optimizer.groups=[{match: 'layers.[2-3].*', lr_factor: 0.1}]")
OFFLOADED = ("model.num_layers=6", "offload.num_layers=4")
FROM_STAGE = planted_documents.kinds_of_layers_count_from_each_stage
OF_LAYERS: tuple[tuple[Plant, str, str, tuple[str, ...], str, str, str | None], ...] = (
    (FROM_STAGE, "gpt_tiny", "pp=2,vpp=2", PATTERN, "output", "attention", "pp"),
    (FROM_STAGE, "gpt_tiny", "pp=4", PATTERN, "output", "attention", "pp"),
    (FROM_STAGE, "gemma2_9b", "pp=2", (), "output", "attention", "pp"),
    (FROM_STAGE, "smollm3_3b", "pp=2", (), "output", "attention", "pp"),
    (
        planted_shrunk.rates_are_those_of_a_stages_own_numbers,
        "gpt_tiny",
        "pp=2",
        SLOW_LAYERS,
        "master",
        "layers.",
        "pp",
    ),
    (planted_shrunk.host_buffers_are_free_before_they_are_read, "gpt_tiny", "dp=2", OFFLOADED, "gradient", "", None),
    (
        planted_shrunk.rows_without_room_are_not_counted,
        "moe_tiny",
        "dp=2,ep=2",
        ("model.moe.row_headroom=0.6",),
        "output",
        "mlp",
        None,
    ),
)
"""Bugs that need a relation between layers, or room for rows: config, layout, words, the first difference, its place and axis."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "name", "layout", "words", "what", "place", "axis"),
    OF_LAYERS,
    ids=["-".join([one[0].__name__, *one[1:3]]) for one in OF_LAYERS],
)
def test_a_small_size_keeps_the_layers_that_show_a_bug(
    plant: Plant,
    name: str,
    layout: str,
    words: tuple[str, ...],
    what: str,
    place: str,
    axis: str | None,
    references: Path,
) -> None:
    asked = small_trial(name, layout, *words)
    if plant is planted_shrunk.rows_without_room_are_not_counted:
        with pytest.raises(RankFailedError, match=r"found no room .* off the initial point"):
            run(asked, references)
    else:
        assert run(asked, references).equal
    verdict = run(asked, references, plant)
    assert not verdict.equal and verdict.cause is not None
    assert verdict.differences[0].what == what and place in verdict.differences[0].name, verdict.differences[:1]
    assert verdict.cause.axis == axis, verdict.cause


AHEAD = ("moe_tiny", "tp=2,ep=2", "model.mtp={num_layers: 1}")


@pytest.mark.slow
def test_the_choices_of_a_layer_ahead_are_compared(references: Path) -> None:
    asked = small_trial(*AHEAD)
    layer = f"layers.{asked.config.model.num_layers}.mlp"
    assert run(asked, references).equal
    verdict = run(asked, references, planted_shrunk.choices_of_a_layer_ahead_move_on_a_rank)
    assert not verdict.equal and verdict.cause is not None
    assert [(one.what, one.name) for one in verdict.differences] == [("routing", layer)] and verdict.cause.axis == "tp"


@pytest.mark.slow
def test_numbers_that_are_not_finite_have_a_verdict(references: Path) -> None:
    asked = small_trial("gpt_tiny", "tp=2", num_steps=2)
    verdict = run(asked, references, planted_shrunk.gradients_of_a_rank_are_not_finite)
    assert not verdict.equal and verdict.cause is not None
    first, *_ = verdict.differences
    assert (first.step, first.what, first.name) == (0, "gradient", "layers.0.mlp.down.weight")
    assert verdict.cause.axis == "tp" and not math.isfinite(first.error)


OF_FP8 = {str(bug) for bug in planted_fp8.BUGS}
"""In fp32 already numbers lie on both sides of the middle of two of FP8, and what is measured as rounding is that of FP8."""

UNSEEN = {
    "fp32": {"masters_do_not_follow_new_weights", "a_rank_has_the_bias_of_its_own_experts", *OF_FP8},
    "bf16": {
        *OF_FP8,
        "last_stage_takes_microbatches_in_another_order",
        "norms_are_decayed",
        "activations_between_stages_are_rounded",
        "later_owners_mix_up_decay",
        "weights_decay_twice",
        "every_rank_has_the_sinks_of_the_first",
        "scaled_frequencies_are_not_scaled",
        "sinks_are_decayed",
        "z_loss_is_divided_by_each_ranks_own_tokens",
        "squares_of_heads_are_not_added",
        "squares_of_replicated_key_heads_are_added_whole",
        "a_rank_has_the_bias_of_its_own_experts",
        "gradient_norm_has_the_experts_of_the_first_rank",
        "weights_stay_in_the_order_of_arrival",
        "tokens_beyond_the_capacity_are_dropped",
    },
}
"""Bugs that are not named rightly in a dtype: below its rounding, named by the place after, of choices of experts, which have no
verdict there, or (fp32, where weights and masters are one) another bug."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "dtype"),
    [
        pytest.param(bug, dtype, id=f"{bug}-{dtype}")
        for dtype, unseen in UNSEEN.items()
        for bug in BUGS
        if str(bug) not in unseen
    ],
)
def test_a_planted_bug_is_named_in_a_narrow_dtype(bug: Bug, dtype: str, references: Path) -> None:
    verdict = run(trial_of(bug.case, dtype), references, bug.plant, sub_layouts=False)
    assert not verdict.equal and is_named(bug, verdict), verdict.differences


def test_axes_are_named_and_right() -> None:
    """Each bug's own test shows that `axis` is what is named; here: how often one is, and how often it is right."""
    on_one = [bug for bug in BUGS if bug.axes]
    named = [bug for bug in on_one if bug.axis is not None]
    assert len(BUGS) >= 40 and len(named) >= 0.7 * len(on_one)
    assert sum(bug.axis in bug.axes for bug in named) >= 0.9 * len(named)
    assert len(BUGS) - len(UNSEEN["fp32"]) >= 38 and len(BUGS) - len(UNSEEN["bf16"]) >= 25


def test_ci_has_a_bug_of_each_kind() -> None:
    assert set(KINDS) == {bug.what for bug in BUGS}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=() if case == DOWN else pytest.mark.slow, id=f"{case}-{dtype}")
        for case, dtype in sorted({(bug.case, bug.dtype) for bug in BUGS}, key=str)
    ],
)
def test_without_the_bug_nothing_differs(case: Case, dtype: str, references: Path) -> None:
    verdict = run(trial_of(case, dtype), references)
    assert verdict.equal, verdict.differences[:3]


def nothing_calls_this() -> None:
    """Plant a function under a name that the engine does not have."""
    Engine.renamed_since = lambda self: None  # type: ignore[attr-defined]


def test_a_bug_whose_code_never_runs_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"the bug nothing_calls_this was never there: no rank called .*<lambda>"):
        run_planted(nothing_calls_this, str, 1)


def test_the_page_of_evidence_counts_them() -> None:
    claim = f"| {len(BUGS)} planted bugs of parallel training, in the ranks of a layout | {len(BUGS)} found, each by its kind"
    assert claim in (ROOT / "docs" / "verify.md").read_text()
