"""Layers with experts in checkpoints: resumed to the bit, cut over other ranks on load, a bias without moments saved as such."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

import triaxis.engine.checkpoint.writer
from tests.checkpoint.runs import Trace, engine_of, run
from tests.harness import RankFailedError, run_ranks
from tests.parity.cases import Case
from tests.planting import run_planted
from triaxis.engine.checkpoint.directory import CheckpointDirectory, find
from triaxis.engine.checkpoint.format.manifest import MANIFEST, Manifest, manifest_problems, read_manifest
from triaxis.engine.checkpoint.import_weights import read_tensor
from triaxis.engine.checkpoint.resume import resume_or_start
from triaxis.engine.config.values.optimizer_kinds import MASTER, OPTIMIZERS
from triaxis.engine.optimizer.distributed import DistributedOptimizer, OwnedBucket
from triaxis.launch.inspect.check import check_files
from triaxis.launch.inspect.compare import differences, tensors_of
from triaxis.models.specs import model_specs

NUM_BEFORE, NUM_STEPS = 2, 5
"""An odd number of steps after: two moves of a bias may cancel each other."""
SAVING = {"interval": NUM_BEFORE, "keep_last": None}
TOLERANCE = 1e-9

ONE = Case("deepseek", global_batch_size=8, micro_batch_size=2)
LAYOUTS = {
    "one": ONE,
    "dp2 ep2": replace(ONE, dp=2, ep=2),
    "tp2 etp2": replace(ONE, tp=2, etp=2, sequence_parallel=True, bucket_bytes=700),
    "tp2 etp2 dp2 ep2": replace(
        ONE, tp=2, etp=2, dp=2, ep=2, dispatch="all_to_all", sequence_parallel=True, bucket_bytes=700
    ),
    "pp2 tp2 ep2": replace(ONE, pp=2, tp=2, ep=2, bucket_bytes=700),
    "dp4 ep2": replace(ONE, dp=4, ep=2, dispatch="all_to_all", micro_batch_size=1),
    "cp2 tp2 ep4": replace(ONE, cp=2, tp=2, ep=4, micro_batch_size=4),
}
IN_CI = {("dp2 ep2", "tp2 etp2")}
PAIRS = [
    pytest.param(*pair, marks=() if pair in IN_CI else pytest.mark.slow, id=" -> ".join(pair))
    for pair in product(LAYOUTS, repeat=2)
    if pair[0] != pair[1]
]


def manifest_of(folder: Path, step: int) -> Manifest:
    return read_manifest(folder / f"step_{step:08d}")


def is_bias(name: str) -> bool:
    return name.endswith("router.bias")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Trace]]:
    """Runs that are saved at step 2 and at the end, by layout; filled by `run_of`."""
    return {}


def run_of(layout: str, saved: dict[str, tuple[Path, Trace]], factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    if layout not in saved:
        case, folder = LAYOUTS[layout], factory.mktemp("straight")
        (first, *_) = run_ranks(run, case.world_size, case, str(folder), NUM_STEPS, 0, SAVING, (NUM_BEFORE,))
        saved[layout] = folder, first
    return saved[layout]


@pytest.mark.distributed
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_experts_are_cut_over_other_ranks_on_load(
    one: str,
    other: str,
    saved: dict[str, tuple[Path, Trace]],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The state is the same to the bit, the next losses to rounding, and the bias after them to the bit: it follows counts."""
    folder, straight = run_of(one, saved, tmp_path_factory)
    case, begin = LAYOUTS[other], str(folder / f"step_{NUM_BEFORE:08d}")
    section = {"load": begin, "interval": NUM_STEPS}
    traces: list[Trace] = run_ranks(
        run, case.world_size, case, str(tmp_path / "cut"), NUM_STEPS, 0, section, (NUM_BEFORE,)
    )
    assert {trace.began for trace in traces} == {NUM_BEFORE}
    assert traces[0].fingerprints == straight.fingerprints
    for trace in traces:
        assert trace.losses == pytest.approx(straight.losses[NUM_BEFORE:], rel=TOLERANCE, abs=0)
    before, here, there = (
        manifest_of(folder, NUM_BEFORE),
        manifest_of(folder, NUM_STEPS),
        manifest_of(tmp_path / "cut", NUM_STEPS),
    )
    moved = {found.name for found in differences(before, here) if is_bias(found.name)}
    assert moved == {name for name in here.tensors if is_bias(name)}, "the steps after the load move every bias"
    assert not [found for found in differences(here, there) if is_bias(found.name)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [
        replace(ONE, dp=2, ep=2, dtype="bf16"),
        pytest.param(replace(ONE, tp=2, dp=2, ep=4, sequence_parallel=True, dtype="bf16"), marks=pytest.mark.slow),
        pytest.param(replace(ONE, tp=2, dp=2, ep=4, dispatch="all_to_all", dtype="fp32"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_resumed_run_with_experts_equals_the_undisturbed_one_to_the_bit(case: Case, tmp_path: Path) -> None:
    looked_at, cut = (NUM_BEFORE, NUM_STEPS), str(tmp_path / "cut")
    straight: list[Trace] = run_ranks(
        run, case.world_size, case, str(tmp_path / "straight"), NUM_STEPS, 0, {}, looked_at
    )
    before: list[Trace] = run_ranks(run, case.world_size, case, cut, NUM_BEFORE, 0, {"interval": 2}, looked_at)
    after: list[Trace] = run_ranks(run, case.world_size, case, cut, NUM_STEPS, 1, {}, looked_at)
    for whole, first, second in zip(straight, before, after, strict=True):
        assert [*first.losses, *second.losses] == whole.losses
        assert first.fingerprints | second.fingerprints == whole.fingerprints
        assert second.fingerprints[NUM_BEFORE] == first.fingerprints[NUM_BEFORE]


def only_the_first_rank_saves_experts() -> None:
    """Plant a writer that takes the experts of other ranks for replicas of the first ones."""
    found = triaxis.engine.checkpoint.writer.saved_buckets

    def of_first(optimizer: DistributedOptimizer) -> list[OwnedBucket]:
        return [
            owned
            for owned in found(optimizer)
            if owned.buffer.layout.key.reduce_over == "dp" or owned.segments[0].record.box[0][0] == 0
        ]

    triaxis.engine.checkpoint.writer.saved_buckets = of_first


@pytest.mark.slow
@pytest.mark.distributed
def test_a_checkpoint_without_the_experts_of_a_rank_is_named_and_not_loaded(tmp_path: Path) -> None:
    case = LAYOUTS["dp2 ep2"]
    section = {"interval": NUM_BEFORE}
    run_planted(only_the_first_rank_saves_experts, run, 2, case, str(tmp_path), NUM_BEFORE, 0, section)
    name = "layers.1.mlp.experts.down.weight"
    assert (
        f"master:{name}: 512 elements saved of 1,024"
        in check_files(tmp_path / f"step_{NUM_BEFORE:08d}", lambda num_bytes: None).problems
    )
    with pytest.raises(RankFailedError, match=f"{name}: 512 elements saved of 1,024"):
        run_ranks(run, 2, case, str(tmp_path), NUM_STEPS, 1, {})


# The file, in one process -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one process after two steps."""
    folder = tmp_path_factory.mktemp("one")
    run(0, ONE, str(folder), NUM_BEFORE, 0, {"interval": NUM_BEFORE})
    return find(folder).folder


def test_a_bias_has_no_moments_and_every_expert_is_there(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    kinds: dict[str, set[str]] = {}
    for name, kind in tensors_of(manifest):
        kinds.setdefault(name, set()).add(kind)
    all_kinds = set(OPTIMIZERS["adamw"].state_kinds)
    specs = model_specs(ONE.config().model)
    assert kinds == {spec.name: {MASTER} if is_bias(spec.name) else all_kinds for spec in specs}
    assert sum(map(is_bias, kinds)) == 3
    checked = check_files(checkpoint, lambda num_bytes: None)
    assert not checked.problems and checked.fingerprint == manifest.fingerprint
    built = engine_of(0, ONE, {"load": str(checkpoint)})
    resume_or_start(built, CheckpointDirectory(checkpoint.parent / "none"), has_saved=False, data={})
    for spec in specs:
        read = read_tensor(checkpoint, manifest, spec.name)
        # A padded vocabulary has more rows in memory.
        assert torch.equal(read, built.parameters[spec.name].value.detach()[: len(read)]), spec.name
        if ".experts." in spec.name:
            assert len({tuple(expert.flatten().tolist()) for expert in read}) == 8, "each expert has values of its own"


def test_a_manifest_says_which_tensor_is_not_trained(checkpoint: Path) -> None:
    described = json.loads((checkpoint / MANIFEST).read_text())["tensors"]
    assert {name for name, info in described.items() if "is_trained" in info} == set(filter(is_bias, described))
    manifest = read_manifest(checkpoint)
    name = next(filter(is_bias, manifest.tensors))
    forgotten = {name: manifest.tensors[name].model_copy(update={"is_trained": True})}
    problems = manifest_problems(checkpoint, manifest.model_copy(update={"tensors": manifest.tensors | forgotten}))
    assert problems == [f"{kind}:{name}: 0 elements saved of 8" for kind in manifest.kinds if kind != MASTER]


def test_weights_alone_begin_a_run_with_their_bias(checkpoint: Path, tmp_path: Path) -> None:
    trace = run(
        0, ONE, str(tmp_path), 1, 0, {"load": str(checkpoint), "load_what": "weights", "interval": 1}, look_at=(0,)
    )
    assert trace.began == 0
    assert trace.fingerprints[0][MASTER] == read_manifest(checkpoint).fingerprint[MASTER]
