"""How a run begins: from its own newest checkpoint, from one that it was told to load, or from nothing.

    --from-scratch: its own are left out, and moved aside once the run begins
    the run has checkpoints of its own     go on from the newest complete one (what `latest` names first)
      .. none of them is complete          stop; --from-scratch starts again
    else checkpoint.load names one         go on from it, or take its weights (checkpoint.load_what)
      .. it is not there, or damaged       stop
    else                                   initial weights

Rank 0 looks and decides, all ranks load, all agree that everybody has what it needs. Nothing ever falls back to random weights.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.checkpoint.directory import Candidate, CheckpointDirectory, find
from engine.checkpoint.environment import describe_layout, layout_differences
from engine.checkpoint.format.fingerprint import to_text
from engine.checkpoint.format.manifest import Ancestor, TrainingState, parse_manifest
from engine.checkpoint.history import RunHistory, read_history
from engine.checkpoint.resume_rules import ABSENT, changes, refuse
from engine.checkpoint.shards import LoadWhat, fingerprint, restore, saved_numel
from engine.config.optimizer_kinds import MASTER
from engine.data.skipped import SkippedRanges
from engine.errors import CheckpointError
from engine.step import Engine

TOKENIZER = "tokenizer"
"""The part of the data's fingerprints that can never change under a run."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run begins.

    Attributes:
        state: where it stands; step 0 for a fresh start.
        source: the checkpoint that was loaded; None: initial weights.
        loaded: what was taken from it.
        lineage: what the run descends from, for its own checkpoints.
        differences: of the layout and of accepted fields, to be printed.
        passed_over: what is wrong with newer checkpoints that could not be used.
        history: what went wrong in the run before, and which samples it leaves out.
    """

    state: TrainingState
    source: Path | None = None
    loaded: LoadWhat = "all"
    lineage: tuple[Ancestor, ...] = ()
    differences: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    history: RunHistory = field(default_factory=RunHistory)


def resume_or_start(
    engine: Engine,
    directory: CheckpointDirectory,
    *,
    has_saved: bool,
    data: dict[str, str],
    from_scratch: bool = False,
) -> ResumePoint:
    """Load what the run is to begin from into the engine; every rank calls it.

    Args:
        engine: freshly built.
        directory: of the run's own checkpoints.
        has_saved: whether this run is known to have saved (rank 0's word counts).
        data: fingerprints of the data of this run, as checkpoints record them.
        from_scratch: whether the run's own checkpoints are left out (rank 0's word counts); they are moved aside afterwards.

    Raises:
        CheckpointError: on every rank, with the reasons of all: nothing can be loaded where something should be, it is damaged,
            of another model, or differs in a field that may not change.
    """
    passed_over: list[str] = []
    own = None if from_scratch else directory
    offers = _offers(engine, own, has_saved and not from_scratch, passed_over)
    beginning = _first_that_loads(engine, offers, data, passed_over)
    if beginning is not None:
        return beginning
    return ResumePoint(TrainingState.at_start(), history=RunHistory(SkippedRanges.of(engine.config.data.skip_samples)))


def go_back(engine: Engine, directory: CheckpointDirectory, step: int, data: dict[str, str]) -> ResumePoint:
    """Load the run's newest complete checkpoint that was made before step number `step` (from 0); every rank calls it.

    Raises:
        CheckpointError: on every rank: there is none, or none that can be loaded.
    """
    passed_over: list[str] = []
    offers = (
        ResumeCandidate(candidate.folder, "all", True)
        for candidate in directory.candidates(passed_over)
        if candidate.manifest.state.step <= step
    )
    beginning = _first_that_loads(engine, offers, data, passed_over)
    if beginning is None:
        raise CheckpointError(
            "\n".join(
                [f"{directory.path} holds no checkpoint of this run from before step {step + 1:,}.", *passed_over]
            )
        )
    return beginning


def _first_that_loads(
    engine: Engine, offers: Iterator["ResumeCandidate"], data: dict[str, str], passed_over: list[str]
) -> ResumePoint | None:
    """The first of the offers (rank 0's) that is whole; None where there are none."""
    while True:
        offer = _rank_0_decides(engine, lambda: next(offers, None))
        if offer is None:
            return None
        reasons, beginning = _load(engine, offer, data)
        if beginning is not None:
            return replace(beginning, passed_over=tuple(passed_over))
        if not offer.is_own:
            raise CheckpointError(reasons)
        # Another one of this run's may be whole: the first rank offers it, or says that there is none.
        passed_over.append(reasons)


@dataclass(frozen=True, slots=True)
class ResumeCandidate:
    """A checkpoint to try: its folder, what to take, and whether it is the run's own (an older one may stand in for it)."""

    folder: Path
    what: LoadWhat
    is_own: bool


def _offers(
    engine: Engine, directory: CheckpointDirectory | None, has_saved: bool, passed_over: list[str]
) -> Iterator[ResumeCandidate]:
    """Checkpoints to try, the one to prefer first; ends where initial weights are right (used on rank 0)."""
    config = engine.config
    for candidate in directory.candidates(passed_over) if directory is not None else ():
        refuse(
            changes(candidate.manifest.config, config), config.checkpoint.accept, f"{candidate.folder} (of this run)"
        )
        yield ResumeCandidate(candidate.folder, "all", True)
    if passed_over or has_saved:
        assert directory is not None, "a start from scratch looks for none"
        what = "\n".join(passed_over) or f"{directory.path} holds none any more."
        raise CheckpointError(
            f"this run has saved checkpoints, but none of them can be loaded, and starting from random weights would lose it:\n"
            f"{what}\nRestore one; or add --from-scratch to start again (what is there is moved aside, not removed)."
        )
    if config.checkpoint.load is None:
        return
    candidate = find(Path(config.checkpoint.load))
    found = changes(candidate.manifest.config, config)
    if config.checkpoint.load_what == "weights":
        found = [change for change in found if change.key.startswith("model.")]
    else:
        # Only where both have a field if no run of ours wrote it (then it has a layout): an import may know its model alone, and
        # `restore` says when it has no moments.
        found = [change for change in found if candidate.manifest.layout or change.there != ABSENT]
    refuse(found, config.checkpoint.accept, str(candidate.folder))
    yield ResumeCandidate(candidate.folder, config.checkpoint.load_what, False)


def _rank_0_decides(engine: Engine, decide: Callable[[], ResumeCandidate | None]) -> ResumeCandidate | None:
    """What rank 0 decides, on every rank.

    Raises:
        CheckpointError: rank 0 cannot go on; on every rank.
    """
    world, device = engine.topology.axis("world"), engine.topology.device
    text = ""
    if world.index == 0:
        try:
            offer = decide()
            text = "none" if offer is None else f"{'own' if offer.is_own else 'other'}\n{offer.what}\n{offer.folder}"
        except CheckpointError as error:
            text = f"error\n{error}"
    verdict, _, rest = world.announce(text, device, "begin").partition("\n")
    if verdict == "error":
        raise CheckpointError(rest)
    if verdict == "none":
        return None
    what, _, folder = rest.partition("\n")
    return ResumeCandidate(Path(folder), "weights" if what == "weights" else "all", verdict == "own")


def _load(engine: Engine, offer: ResumeCandidate, data: dict[str, str]) -> tuple[str, ResumePoint | None]:
    """Load on every rank and agree: (reasons, None) where a rank could not."""
    world, device = engine.topology.axis("world"), engine.topology.device
    reason, beginning = "", None
    candidate = None
    try:
        # Rank 0 has looked at every file that the manifest names; all ranks at once would keep a file system busy with it.
        candidate = Candidate(offer.folder, parse_manifest(offer.folder))
        state = restore(engine, candidate, offer.what)
        beginning = _beginning(engine, candidate, offer, state, data)
    except CheckpointError as error:
        reason = str(error)
    reasons = [f"rank {rank}: {text}" for rank, text in enumerate(world.tell(reason, device, "begin")) if text]
    if reasons:
        return "\n".join(reasons[:3]), None
    assert candidate is not None and beginning is not None
    _check_whole(engine, candidate, offer.what)
    return "", beginning


def _beginning(
    engine: Engine, candidate: Candidate, offer: ResumeCandidate, state: TrainingState, data: dict[str, str]
) -> ResumePoint:
    manifest = candidate.manifest
    lineage = manifest.lineage
    if not offer.is_own:
        path, step = str(candidate.folder.resolve()), manifest.state.step
        lineage += (Ancestor(path=path, step=step, loaded=offer.what, fingerprint=manifest.fingerprint),)
    differences: list[str] = []
    if offer.what == "all":
        differences += layout_differences(manifest.layout, describe_layout(engine))
        differences += [str(change) for change in changes(manifest.config, engine.config) if change.verdict == "meant"]
        differences += _data_differences(candidate, data, engine.config.checkpoint.accept)
    return ResumePoint(
        state, candidate.folder, offer.what, lineage, tuple(differences), history=_history(engine, offer, state)
    )


def _history(engine: Engine, offer: ResumeCandidate, state: TrainingState) -> RunHistory:
    """What went wrong before, with the samples that the configuration leaves out besides.

    Raises:
        CheckpointError: what is known of it is damaged, or samples are to be left out that were trained on already.
    """
    history = RunHistory(SkippedRanges.of(state.skipped), state.num_rollbacks)
    if offer.is_own:
        history = read_history(offer.folder.parent, state.skipped, state.num_rollbacks)
    history.losses = list(state.recent_losses)
    asked = history.skipped.with_(engine.config.data.skip_samples)
    if not asked.keeps_past_of(history.skipped, state.consumed_samples):
        trained = history.skipped.id_at(state.consumed_samples - 1) + 1
        raise CheckpointError(
            f"data.skip_samples = {[list(pair) for pair in engine.config.data.skip_samples]} leaves out samples before "
            f"{trained:,}, and {offer.folder} was trained on those already: all later samples would move. Leave out samples from "
            f"{trained:,} on, or start from an older checkpoint."
        )
    history.skipped = asked
    return history


def _data_differences(candidate: Candidate, data: dict[str, str], accept: Sequence[str]) -> list[str]:
    """Parts of the data that are not what they were, if that was meant.

    Raises:
        CheckpointError: it was not meant, or cannot be.
    """
    saved = candidate.manifest.state.data
    differed = [part for part, value in data.items() if part in saved and saved[part] != value]
    if TOKENIZER in differed:
        raise CheckpointError(
            f"{candidate.folder}: data.tokenizer is another tokenizer than the one it was trained with: the same ids would mean "
            "other text. Give the original one; to begin again with these weights: checkpoint.load_what=weights"
        )
    if differed and not any(name == "data" or name.startswith("data.") for name in accept):
        raise CheckpointError(
            f"{candidate.folder}: the training data are not those it was trained on: the fingerprint of {', '.join(differed)} "
            "differs though the names are the same. Samples would be repeated or left out without a word. Restore the "
            "corpora, or, if the change is meant: checkpoint.accept=[data]"
        )
    return [f"{part}: other data (accepted)" for part in differed]


def _check_whole(engine: Engine, candidate: Candidate, what: LoadWhat) -> None:
    """What was loaded is what was saved: as many elements, and (for a resume in the same dtype) the same fingerprint."""
    topology, manifest = engine.topology, candidate.manifest
    (numel,) = topology.axis("world").agree([saved_numel(engine.optimizer)], topology.device, "begin")
    if int(numel) != manifest.num_parameters:
        raise CheckpointError(
            f"{candidate.folder} holds {manifest.num_parameters:,} parameters, this model has {int(numel):,}: it is of another "
            "model, and what is left out would change the function. Give the config that it was trained with."
        )
    saved_dtypes = {piece.dtype for file in manifest.files for piece in file.pieces}
    if saved_dtypes != {str(engine.optimizer.wide).removeprefix("torch.")}:
        return
    saved_moments = manifest.config.get("precision", {}).get("moments", "full")
    rounds = engine.config.precision.moments == "bf16" != saved_moments
    kinds = engine.optimizer.state_kinds if what == "all" and not rounds else (MASTER,)
    live = fingerprint(engine)
    wrong = [kind for kind in kinds if to_text(live[kind]) != manifest.fingerprint[kind]]
    if wrong:
        raise CheckpointError(
            f"{candidate.folder}: after loading, the fingerprint of {', '.join(wrong)} is not the one that was saved: "
            "the state in memory is not the state on the disk. This is a bug or broken memory; do not train on it."
        )
