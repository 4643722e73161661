"""Write an adapter's inputs, and compare the reports that its ranks write.

An adapter is the script that runs another engine for `triaxis verify --subject`.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from triaxis.engine.config.tree import Config
from triaxis.engine.errors import counted
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.layout.shard_spec import localize
from triaxis.engine.numerics.precision import DTYPES
from triaxis.engine.storage.state_files import read_text
from triaxis.launch.verify.measure import deviation, reference_file, starting_values
from triaxis.launch.verify.oracles.corpus import rows_of_steps, with_corpus, write_corpus
from triaxis.launch.verify.samples import MASKED_FRACTION
from triaxis.launch.verify.subject.run import ReportError
from triaxis.launch.verify.verdict.records import REFERENCE_STEPS, ParameterFacts, RankReport, StepFacts, TensorReport
from triaxis.models.interop.huggingface.config import family_of, to_hugging_face
from triaxis.models.interop.huggingface.weights import exchanges
from triaxis.models.specs import model_specs

KINDS = ("gradient", "parameter")
"""Tensor kinds that an adapter reports in each step."""


def write_inputs(config: Config, folder: Path) -> tuple[dict[str, Any], tuple[ParameterFacts, ...]]:
    """Write the first weights, the corpus and all batches to `folder`.

    Returns:
        (content of the adapter's job.json without the layout, facts about all parameters by Hugging Face name in forward order).
    """
    model, optimizer, dtype = config.model, config.optimizer, DTYPES[config.precision.dtype]
    name = str(dtype).removeprefix("torch.")
    family = family_of(model)
    weights: dict[str, torch.Tensor] = {}
    facts = []
    order = {spec.name: place for place, spec in enumerate(model_specs(model))}
    for pair in sorted(exchanges(family, model), key=lambda pair: order[pair.ours[0].name]):
        records = [localize(spec, tp=1, tp_index=0, sequence_parallel=False) for spec in pair.ours]
        values = [starting_values(record, config.train.seed, dtype).view(record.spec.shape) for record in records]
        for theirs, tensor in zip(pair.theirs, pair.to_theirs(values), strict=True):
            weights[theirs] = tensor.contiguous()
            facts.append(ParameterFacts(theirs, pair.ours[0].decay, 0))
    save_file(weights, folder / "weights.safetensors")
    write_corpus(config, folder)
    batches = {}
    for step, rows in enumerate(rows_of_steps(with_corpus(config, folder), MASKED_FRACTION)):
        for part, arrays in (
            ("tokens", [each.tokens for each in rows]),
            ("labels", [each.labels for each in rows]),
            ("counted", [each.loss_mask for each in rows]),
        ):
            batches[f"{step}.{part}"] = torch.stack([torch.from_numpy(one) for one in arrays])
    save_file(batches, folder / "batches.safetensors")
    job = {
        "model": to_hugging_face(model, family, dtype=name)[0],
        "dtype": name,
        "num_steps": config.train.steps,
        "inputs": str(folder),
        "optimizer": {
            "lr": optimizer.lr,
            "betas": [optimizer.beta1, optimizer.beta2],
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
            "max_norm": optimizer.clip_grad,
            "no_decay": [one.name for one in facts if not one.decay],
        },
    }
    return job, tuple(facts)


def write_as_subject(config: Config, folder: Path) -> Path:
    """Rewrite the reference in `folder` like a report from another engine's adapter script.

    Tensors get Hugging Face's names. Returns the report's folder.

    Args:
        config: configuration for one process.
    """
    place = folder / "against"
    place.mkdir()
    pairs = exchanges(family_of(config.model), config.model)
    steps = json.loads(read_text(folder / REFERENCE_STEPS))
    for step in range(len(steps)):
        with safe_open(reference_file(folder, step), framework="pt") as found:
            tensors = {
                f"{kind}:{theirs}": tensor.contiguous()
                for kind in KINDS
                for pair in pairs
                for theirs, tensor in zip(
                    pair.theirs,
                    pair.to_theirs([found.get_tensor(f"{kind}:{spec.name}") for spec in pair.ours]),
                    strict=True,
                )
            }
        save_file(tensors, place / _tensors_of(0, step))
    (place / _report_of(0)).write_text(json.dumps({"place": {}, "steps": steps}))
    return place


class Reference:
    """The reports of the smallest layout, with which other layouts' reports are compared.

    If several ranks report a tensor, the first rank's is the reference.

    Args:
        folder: folder with the reports.
        world_size: number of ranks.

    Raises:
        ReportError: rank 0 has ended without `Job.close`, which writes its report.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        self._folder, self._world_size = folder, world_size
        self.steps = _steps(_told(folder, 0))

    def reports(
        self, folder: Path, parameters: Sequence[ParameterFacts], sizes: ParallelSizes
    ) -> tuple[RankReport, ...]:
        """Compare a layout's reports in `folder` with the reference.

        If n ranks report the same tensor, each report's sums of squared values and errors are divided by n.

        Raises:
            ReportError: a rank has ended without `Job.close`, or its coordinates are outside the layout or are another rank's.
            ReportError: a rank's number of steps is zero, above the reference's or unlike rank 0's.
            ReportError: a tensor is missing, or its name or shape is not the reference's.
        """
        ranks = [self._read(folder, rank) for rank in range(sizes.world_size)]
        places: dict[tuple[int, ...], int] = {}
        for rank in ranks:
            outside = [axis for axis, at in rank.coordinates.items() if not 0 <= at < sizes.size(axis)]
            other = places.setdefault(tuple(rank.coordinates.values()), rank.rank)
            if outside or other != rank.rank:
                why = f"{outside[0]} has {sizes.size(outside[0])} ranks" if outside else f"rank {other} has it too"
                raise ReportError(f"rank {rank.rank} closes its job at the place {rank.coordinates}, and {why}")
        for rank in ranks:
            if len(rank.steps) != len(ranks[0].steps) or not 0 < len(rank.steps) <= len(self.steps):
                raise ReportError(
                    f"rank {rank.rank} reports {counted(len(rank.steps), 'step')}, but one process {len(self.steps)}"
                )
        held = {(one.step, one.kind, one.name) for rank in ranks for one in rank.tensors}
        for step, kind in product(range(len(ranks[0].steps)), KINDS):
            if missing := [one.name for one in parameters if (step, kind, one.name) not in held]:
                raise ReportError(f"no rank reports the {kind} of {missing[0]} in step {step + 1}")
        copies = Counter((one.step, one.kind, one.name) for rank in ranks for one in rank.tensors)
        return tuple(
            replace(
                rank,
                tensors=tuple(
                    replace(one, deviation=one.deviation.shared(copies[one.step, one.kind, one.name]))
                    for one in rank.tensors
                ),
            )
            for rank in ranks
        )

    def _read(self, folder: Path, rank: int) -> RankReport:
        told = _told(folder, rank)
        place = {axis: told["place"].get(axis, 0) for axis in ("pp", "dp", "cp", "tp")}
        tensors = tuple(
            one
            for step in range(len(told["steps"]))
            for one in self._tensors(folder / _tensors_of(rank, step), rank, step)
        )
        return RankReport(rank, place, _steps(told), tensors, (), experts={"edp": 0, "ep": 0, "etp": 0})

    def _tensors(self, path: Path, rank: int, step: int) -> Iterator[TensorReport]:
        with ExitStack() as stack:
            ours, *known = (
                stack.enter_context(safe_open(one, framework="pt"))
                for one in (path, *(self._folder / _tensors_of(other, step) for other in range(self._world_size)))
            )
            # The first rank's copy is the reference, and later copies are compared with it.
            holder = {key: one for one in reversed(known) for key in list(one.keys())}
            for key in sorted(ours.keys()):
                kind, _, parameter = key.partition(":")
                if key not in holder:
                    raise ReportError(
                        f"rank {rank} reports the {kind} of {parameter}, a name that the one-process run does not "
                        "report"
                    )
                wanted, got = holder[key].get_tensor(key), ours.get_tensor(key)
                if wanted.shape != got.shape:
                    shapes = f"{list(got.shape)}, and one process {list(wanted.shape)}: whole tensors are compared"
                    raise ReportError(f"rank {rank} reports the {kind} of {parameter} with the shape {shapes}")
                yield TensorReport(step, kind, parameter, deviation(wanted, got))


def _report_of(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def _tensors_of(rank: int, step: int) -> str:
    return f"rank_{rank:05d}.step_{step:02d}.safetensors"


def _told(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / _report_of(rank)
    if not path.exists():
        raise ReportError(f"rank {rank} has ended without job.close()")
    told: dict[str, Any] = json.loads(read_text(path))
    return told


def _steps(told: Mapping[str, Any]) -> tuple[StepFacts, ...]:
    return tuple(StepFacts(one["loss"], one["grad_norm"], one["num_tokens"]) for one in told["steps"])
