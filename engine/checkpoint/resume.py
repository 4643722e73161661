"""Starts a run from its newest checkpoint, a checkpoint named in the config, or initial weights.

The first line that applies decides:

    --from-scratch                         ignore the run's own checkpoints, which are moved aside once the run has begun
    the run has checkpoints of its own     resume from the newest complete one
      .. none of them is complete          stop (--from-scratch starts again)
    checkpoint.load names a checkpoint     resume from that checkpoint, or load only the weights (checkpoint.load_what)
      .. it is missing or damaged          stop
    none of these                          initial weights

Rank 0 decides, all ranks load, and all agree that everything was loaded. Nothing ever falls back to random weights.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from triaxis.engine.checkpoint.directory import Candidate, CheckpointDirectory, find
from triaxis.engine.checkpoint.environment import describe_environment, layout_differences
from triaxis.engine.checkpoint.format.fingerprint import to_text
from triaxis.engine.checkpoint.format.manifest import Ancestor, Manifest, TrainingState, parse_manifest
from triaxis.engine.checkpoint.format.store import fingerprints
from triaxis.engine.checkpoint.history import RunHistory, read_history
from triaxis.engine.checkpoint.resume_rules import ABSENT, accepting, changes, refuse, refuse_other_past
from triaxis.engine.checkpoint.schedule_change import schedule_change
from triaxis.engine.checkpoint.shards import LoadWhat, fingerprint, loaded_kinds, restore, saved_numel
from triaxis.engine.comm.texts import announce, gather_text
from triaxis.engine.config.quantities.run_phases import phase_at
from triaxis.engine.config.quantities.update_settings import is_frozen_by
from triaxis.engine.config.values.optimizer_kinds import EMA, MASTER
from triaxis.engine.data.corpus.tokenizers import BytesTokenizer
from triaxis.engine.data.skipped import SkippedRanges
from triaxis.engine.errors import CheckpointError
from triaxis.engine.step import Engine
from triaxis.engine.storage.redaction import tree_without_secrets

TOKENIZER = "tokenizer"
"""Key of the one data fingerprint that may never change during a run."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The state from which a run continues.

    Attributes:
        state: step and counters; step 0 for a fresh start.
        source: folder of the loaded checkpoint; None for initial weights.
        loaded: part of `source` that was loaded: everything, or only weights.
        lineage: ancestors to record in the run's own checkpoints.
        differences: printable lines about allowed differences from the saved run; () unless everything was loaded. They concern
            layout, accepted fields, learning rate, average, frozen parameters and data.
        passed_over: problems with newer checkpoints that could not be used.
        history: the run's earlier faults and the samples it skips.
    """

    state: TrainingState
    source: Path | None = None
    loaded: LoadWhat = "all"
    lineage: tuple[Ancestor, ...] = ()
    differences: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    history: RunHistory = field(default_factory=RunHistory)


def resume_or_start(
    engine: Engine, directory: CheckpointDirectory, *, has_saved: bool, data: dict[str, str], from_scratch: bool = False
) -> ResumePoint:
    """Load the state that the run continues from into the engine. Every rank calls this.

    If there is no checkpoint to load, the engine keeps its initial weights.

    Args:
        engine: freshly built engine.
        directory: the run's own checkpoints.
        has_saved: whether this run has saved before; only rank 0's value counts.
        data: fingerprints of the run's data, as checkpoints record them.
        from_scratch: whether to ignore the run's own checkpoints; only rank 0's value counts.

    Raises:
        CheckpointError: nothing can be loaded, the checkpoint is damaged or another model's, or a field differs that must not
            change; raised on every rank.
    """
    passed_over: list[str] = []
    own = None if from_scratch else directory
    candidates = _candidates(engine, own, has_saved and not from_scratch, passed_over)
    point = _first_that_loads(engine, candidates, data, passed_over)
    if point is not None:
        return point
    return ResumePoint(TrainingState.at_start(), history=RunHistory(SkippedRanges.of(engine.config.data.skip_samples)))


def go_back(engine: Engine, directory: CheckpointDirectory, step: int, data: dict[str, str]) -> ResumePoint:
    """Load the newest complete checkpoint saved before step `step` (from 0) ran. Every rank calls this.

    Raises:
        CheckpointError: no such checkpoint exists, or none can be loaded; raised on every rank.
    """
    passed_over: list[str] = []
    candidates = (
        ResumeCandidate(candidate.folder, "all", True)
        for candidate in directory.candidates(passed_over)
        if candidate.manifest.state.step <= step
    )
    point = _first_that_loads(engine, candidates, data, passed_over)
    if point is None:
        raise CheckpointError(
            "\n".join(
                [f"{directory.path} holds no checkpoint of this run from before step {step + 1:,}.", *passed_over]
            )
        )
    return point


def _first_that_loads(
    engine: Engine, candidates: Iterator["ResumeCandidate"], data: dict[str, str], passed_over: list[str]
) -> ResumePoint | None:
    """Load rank 0's candidates in order until every rank has loaded one, else return None.

    Problems with the run's own candidates are appended to `passed_over`.

    Raises:
        CheckpointError: a candidate that is not the run's own cannot be loaded, or rank 0 refuses to go on.
    """
    while True:
        chosen = _rank_0_decides(engine, lambda: next(candidates, None))
        if chosen is None:
            return None
        reasons, point = _load(engine, chosen, data)
        if point is not None:
            return replace(point, passed_over=tuple(passed_over))
        if not chosen.is_own:
            raise CheckpointError(reasons)
        # Another checkpoint of this run may be whole: rank 0 yields it, or raises.
        passed_over.append(reasons)


@dataclass(frozen=True, slots=True)
class ResumeCandidate:
    """A checkpoint to try, the part to load, and whether the run owns the checkpoint.

    If the run's own checkpoint cannot be loaded, an older one is tried. If another checkpoint cannot be loaded, the run stops.
    """

    folder: Path
    what: LoadWhat
    is_own: bool


def _candidates(
    engine: Engine, directory: CheckpointDirectory | None, has_saved: bool, passed_over: list[str]
) -> Iterator[ResumeCandidate]:
    """Yield the checkpoints to try, best first, on rank 0. A run from initial weights has none.

    Args:
        directory: the run's own checkpoints; None: ignore them.
        has_saved: whether the run has saved checkpoints before, so that finding none of them is an error.
        passed_over: receives the problems with the run's own checkpoints.

    Raises:
        CheckpointError: a checkpoint and the run differ where they must not (`resume_rules.py`), none of the run's own checkpoints
            could be loaded, or `checkpoint.load` is unusable.
    """
    config = engine.config
    for candidate in directory.candidates(passed_over) if directory is not None else ():
        manifest, source = candidate.manifest, f"{candidate.folder} (of this run)"
        refuse(changes(manifest.config, config), config.checkpoint.accept, source)
        refuse_other_past(manifest.config, config, manifest.state.consumed_tokens, source)
        yield ResumeCandidate(candidate.folder, "all", True)
    if passed_over or has_saved:
        assert directory is not None, "a start from scratch looks for none"
        what = "\n".join(passed_over) or f"{directory.path} holds none any more."
        raise CheckpointError(
            "this run has saved checkpoints, but none of them can be loaded, and random weights would lose its training:\n"
            f"{what}\nRestore one; or add --from-scratch to start again (what is there is moved aside, not removed)."
        )
    if config.checkpoint.load is None:
        return
    candidate = find(Path(config.checkpoint.load))
    found = changes(candidate.manifest.config, config)
    if config.checkpoint.load_what == "weights":
        found = [change for change in found if change.key.startswith("model.")]
    else:
        # Only an import has no layout. It may know nothing but its model, so fields that it lacks count as equal. `restore`
        # reports missing moments.
        found = [change for change in found if candidate.manifest.layout or change.there != ABSENT]
        consumed_tokens = candidate.manifest.state.consumed_tokens
        refuse_other_past(candidate.manifest.config, config, consumed_tokens, str(candidate.folder))
    refuse(found, config.checkpoint.accept, str(candidate.folder))
    yield ResumeCandidate(candidate.folder, config.checkpoint.load_what, False)


def _rank_0_decides(engine: Engine, decide: Callable[[], ResumeCandidate | None]) -> ResumeCandidate | None:
    """Run `decide` on rank 0 and return its result on every rank.

    Raises:
        CheckpointError: rank 0 cannot decide; raised on every rank.
    """
    world, device = engine.topology.axis("world"), engine.topology.device
    text = ""
    if world.index == 0:
        try:
            one = decide()
            text = "none" if one is None else f"{'own' if one.is_own else 'other'}\n{one.what}\n{one.folder}"
        except CheckpointError as error:
            text = f"error\n{error}"
    verdict, _, rest = announce(world, text, device, "begin").partition("\n")
    if verdict == "error":
        raise CheckpointError(rest)
    if verdict == "none":
        return None
    what, _, folder = rest.partition("\n")
    return ResumeCandidate(Path(folder), "weights" if what == "weights" else "all", verdict == "own")


def _load(engine: Engine, chosen: ResumeCandidate, data: dict[str, str]) -> tuple[str, ResumePoint | None]:
    """Load the chosen checkpoint on every rank. Return ("", resume point), or (reasons, None) if any rank failed.

    Raises:
        CheckpointError: all ranks have loaded, but the result is not the saved state (`_check_whole`).
    """
    world, device = engine.topology.axis("world"), engine.topology.device
    reason, point = "", None
    candidate = None
    try:
        # Rank 0 has checked every file in the manifest; if all ranks did so, they would overload the file system.
        candidate = Candidate(chosen.folder, parse_manifest(chosen.folder))
        state = restore(engine, candidate, chosen.what)
        point = _resume_point(engine, candidate, chosen, state, data)
    except CheckpointError as error:
        reason = str(error)
    reasons = [f"rank {rank}: {text}" for rank, text in enumerate(gather_text(world, reason, device, "begin")) if text]
    if reasons:
        return "\n".join(reasons[:3]), None
    assert candidate is not None and point is not None
    _check_whole(engine, candidate, chosen.what)
    return "", point


def _resume_point(
    engine: Engine, candidate: Candidate, chosen: ResumeCandidate, state: TrainingState, data: dict[str, str]
) -> ResumePoint:
    manifest = candidate.manifest
    lineage = manifest.lineage
    if not chosen.is_own:
        path, step = str(candidate.folder.resolve()), manifest.state.step
        lineage += (Ancestor(path=path, step=step, loaded=chosen.what, fingerprint=manifest.fingerprint),)
    differences: list[str] = []
    if chosen.what == "all":
        _check_phase(engine, chosen.folder, state)
        differences += layout_differences(manifest.layout, describe_environment(engine))
        differences += [str(change) for change in changes(manifest.config, engine.config) if change.verdict == "meant"]
        differences += schedule_change(manifest.config, engine.config, state.consumed_tokens)
        differences += _average_differences(engine, manifest)
        differences += _frozen_differences(engine, candidate)
        differences += data_differences(candidate, data, engine.config.checkpoint.accept)
    return ResumePoint(
        state, candidate.folder, chosen.what, lineage, tuple(differences), history=_history(engine, chosen, state)
    )


def _check_phase(engine: Engine, folder: Path, state: TrainingState) -> None:
    """Refuse a checkpoint from another phase than the one that these ranks were started for.

    Raises:
        CheckpointError: the phases differ; the message names both.
    """
    here, there = engine.plan.phase, phase_at(engine.config, state.consumed_tokens)
    if here.number != there.number:
        raise CheckpointError(
            f"{folder} belongs to the phase {there.name}, and these ranks were started for {here.name}: a newer checkpoint "
            "has become unusable since, and the layout may be another one. Give the same command again."
        )


def _frozen_differences(engine: Engine, candidate: Candidate) -> Iterator[str]:
    """Yield printable lines about parameters that are frozen in only one of the two runs."""
    thawed, frozen = _frozen_otherwise(engine, candidate.manifest)
    if thawed:
        yield f"{_named(thawed)}: frozen there and trained here; moments begin at zero"
    if frozen:
        yield f"{_named(frozen)}: trained there and frozen here; moments are discarded"


def _frozen_otherwise(engine: Engine, manifest: Manifest) -> tuple[list[str], list[str]]:
    """List the parameters frozen only in the checkpoint's run, and those frozen only here."""
    there = manifest.config.get("optimizer", {}).get("groups", ())
    was, now = (
        {name for name in manifest.tensors if is_frozen_by(name, groups)}
        for groups in (there, engine.config.optimizer.groups)
    )
    return sorted(was - now), sorted(now - was)


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"


def _history(engine: Engine, chosen: ResumeCandidate, state: TrainingState) -> RunHistory:
    """Build the run's history from the checkpoint, and add the samples that the configuration skips.

    For the run's own checkpoint, skipped.json is merged in.

    Raises:
        CheckpointError: the history is damaged, or samples to be skipped were already trained on.
    """
    history = RunHistory(SkippedRanges.of(state.skipped), state.num_rollbacks)
    if chosen.is_own:
        history = read_history(chosen.folder.parent, state.skipped, state.num_rollbacks)
    history.losses, history.grad_norms = list(state.recent_losses), list(state.recent_grad_norms)
    asked = history.skipped.with_(engine.config.data.skip_samples)
    if not asked.keeps_past_of(history.skipped, state.consumed_samples):
        trained = history.skipped.id_at(state.consumed_samples - 1) + 1
        raise CheckpointError(
            f"data.skip_samples = {[list(pair) for pair in engine.config.data.skip_samples]} leaves out samples before "
            f"{trained:,}, and {chosen.folder} was trained on those already: all later samples would move. Leave out samples from "
            f"{trained:,} on, or start from an older checkpoint."
        )
    history.skipped = asked
    return history


def _average_differences(engine: Engine, manifest: Manifest) -> list[str]:
    """List a printable line if only the run or only the checkpoint has a moving average."""
    is_saved, is_kept = EMA in manifest.kinds, EMA in engine.optimizer.state_kinds
    if is_saved == is_kept:
        return []
    return [
        "ema: none was saved, so it starts as the loaded weights" if is_kept else "ema: the saved average is not loaded"
    ]


def data_differences(candidate: Candidate, data: dict[str, str], accept: Sequence[str]) -> list[str]:
    """List the allowed differences between the checkpoint's data and the run's, as printable lines.

    Only entries that both have are compared. If the samples are equal, a checkpoint's tokenizer `bytes` may differ from the run's:
    earlier versions recorded `bytes` if no tokenizer was named.

    Raises:
        CheckpointError: the tokenizer differs otherwise, or a corpus differs and `accept` does not name the data.
    """
    saved, data = candidate.manifest.state.data, tree_without_secrets(data)
    compared = [part for part in data if part in saved]
    differed = [part for part in compared if saved[part] != data[part]]
    if differed == [TOKENIZER] != compared and saved[TOKENIZER] == BytesTokenizer().identity:
        # Earlier versions assumed bytes if no tokenizer was named. The samples and the meaning of their ids are unchanged.
        return [f"{TOKENIZER}: bytes were assumed there; the corpus records another one"]
    if TOKENIZER in differed:
        raise CheckpointError(
            f"{candidate.folder}: data.tokenizer is not the tokenizer it was trained with, so the same ids would mean other text. "
            "Give the original one; to start again with these weights: checkpoint.load_what=weights"
        )
    if differed and not any(name == "data" or name.startswith("data.") for name in accept):
        raise CheckpointError(
            f"{candidate.folder}: the training data differ from those it was trained on: same names, but other fingerprints for "
            f"{', '.join(differed)}. Samples would be repeated or left out silently. Restore the corpora, or, if the change is "
            f"intended: {accepting([*accept, 'data'])}"
        )
    return [f"{part}: other data (accepted)" for part in differed]


def _check_whole(engine: Engine, candidate: Candidate, what: LoadWhat) -> None:
    """Refuse a loaded state whose number of parameters or fingerprint is not the saved one.

    Fingerprints are compared only if the files have the accumulation dtype. Moments that loading rounds to bf16 are left out, and
    so are parameters that only one of the runs freezes.

    Raises:
        CheckpointError: the number of parameters or a fingerprint differs; raised on every rank.
    """
    topology, manifest = engine.topology, candidate.manifest
    (numel,) = topology.axis("world").sum_values([saved_numel(engine.optimizer)], topology.device, "begin")
    if int(numel) != manifest.num_parameters:
        raise CheckpointError(
            f"{candidate.folder} holds {manifest.num_parameters:,} parameters, but this model has {int(numel):,}. It belongs to "
            "another model, whose function would change. Give the config that it was trained with."
        )
    saved_dtypes = {piece.dtype for file in manifest.files for piece in file.pieces}
    if saved_dtypes != {str(engine.optimizer.wide).removeprefix("torch.")}:
        return
    saved_moments = manifest.config.get("precision", {}).get("moments", "full")
    rounds = engine.config.precision.moments == "bf16" != saved_moments
    kinds = [kind for kind in loaded_kinds(engine, manifest, what) if not rounds or kind in (MASTER, EMA)]
    # A parameter frozen in only one of the runs has no moments to compare, and may have been rounded to its weight.
    changed = {name for names in _frozen_otherwise(engine, manifest) for name in names}
    pieces = (piece for file in manifest.files for piece in file.pieces)
    saved = fingerprints(piece for piece in pieces if piece.name not in changed) if changed else manifest.fingerprint
    live = fingerprint(engine, changed)
    wrong = [kind for kind in kinds if to_text(live[kind]) != saved.get(kind, to_text(0))]
    if wrong:
        raise CheckpointError(
            f"{candidate.folder}: after loading, the fingerprint of {', '.join(wrong)} is not the one that was saved: "
            "the state in memory is not the state on the disk. This is a bug or broken memory; do not train on it."
        )
