"""The files between us and an adapter: what it starts from, and what its ranks report."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from triaxis.engine.config.tree import Config
from triaxis.engine.layout.shard_spec import localize
from triaxis.engine.numerics.precision import DTYPES
from triaxis.engine.storage.state_files import read_text
from triaxis.launch.verify.measure import deviation, starting_values
from triaxis.launch.verify.oracles.corpus import rows_of_steps, with_corpus, write_corpus
from triaxis.launch.verify.samples import MASKED_FRACTION
from triaxis.launch.verify.subject.run import ReportError
from triaxis.launch.verify.verdict.records import ParameterFacts, RankReport, StepFacts, TensorReport
from triaxis.models.interop.huggingface.config import family_of, to_hugging_face
from triaxis.models.interop.huggingface.weights import exchanges


def write_inputs(config: Config, folder: Path) -> tuple[dict[str, Any], tuple[ParameterFacts, ...]]:
    """Write the first weights and all batches; return the job without its layout, and the parameters in forward order."""
    model, optimizer, dtype = config.model, config.optimizer, DTYPES[config.precision.dtype]
    name = str(dtype).removeprefix("torch.")
    family = family_of(model)
    weights: dict[str, torch.Tensor] = {}
    facts = []
    for pair in exchanges(family, model):
        records = [localize(spec, tp=1, tp_index=0, sequence_parallel=False) for spec in pair.ours]
        values = [starting_values(record, config.train.seed, dtype).view(record.spec.shape) for record in records]
        for theirs, tensor in zip(pair.theirs, pair.to_theirs(values), strict=True):
            weights[theirs] = tensor.contiguous()
            facts.append(ParameterFacts(theirs, None, None, pair.ours[0].decay, pair.ours[0].tied_ends, 0))
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


def read_reports(
    folder: Path, reference: Path, parameters: Sequence[ParameterFacts], world_size: int
) -> tuple[RankReport, ...]:
    """Compare what the ranks of a layout left in `folder` with the one process's tensors in `reference`.

    Raises:
        ReportError: a rank has not closed its job, or a tensor has no name or shape of the model's, or no rank holds it.
    """
    ranks = [_read(folder, reference, rank) for rank in range(world_size)]
    wanted = json.loads(read_text(reference / "rank_00000.json"))["steps"]
    for rank in ranks:
        if len(rank.steps) != len(wanted):
            raise ReportError(f"rank {rank.rank} reports {len(rank.steps)} steps, and one process {len(wanted)}")
    held = {(one.step, one.kind, one.name) for rank in ranks for one in rank.tensors}
    for step in range(len(ranks[0].steps)):
        for kind in ("gradient", "parameter"):
            if missing := [one.name for one in parameters if (step, kind, one.name) not in held]:
                raise ReportError(f"no rank reports the {kind} of {missing[0]} in step {step + 1}")
    return tuple(ranks)


def _read(folder: Path, reference: Path, rank: int) -> RankReport:
    path = folder / f"rank_{rank:05d}.json"
    if not path.exists():
        raise ReportError(f"rank {rank} has ended without job.close()")
    told = json.loads(read_text(path))
    place = {axis: told["place"].get(axis, 0) for axis in ("pp", "dp", "cp", "tp")}
    return RankReport(
        rank,
        place,
        tuple(StepFacts(one["loss"], one["grad_norm"], 0.0) for one in told["steps"]),
        tuple(one for step in range(len(told["steps"])) for one in _tensors(folder, reference, rank, step)),
        (),
        experts={"edp": 0, "ep": 0, "etp": 0},
    )


def _tensors(folder: Path, reference: Path, rank: int, step: int) -> Iterator[TensorReport]:
    name = f"step_{step:02d}.safetensors"
    with (
        safe_open(folder / f"rank_{rank:05d}.{name}", framework="pt") as found,
        safe_open(reference / f"rank_00000.{name}", framework="pt") as known,
    ):
        names = set(known.keys())
        for key in sorted(found.keys()):
            kind, _, parameter = key.partition(":")
            if key not in names:
                raise ReportError(f"rank {rank} reports the {kind} of {parameter}, a name that one process has not")
            wanted, got = known.get_tensor(key), found.get_tensor(key)
            if wanted.shape != got.shape:
                shapes = f"{list(got.shape)}, and one process {list(wanted.shape)}: whole tensors are compared"
                raise ReportError(f"rank {rank} reports the {kind} of {parameter} with the shape {shapes}")
            yield TensorReport(step, kind, parameter, deviation(wanted, got))
