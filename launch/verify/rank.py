"""Run one rank of `triaxis verify` for a few steps from fixed weights.

The reference writes its tensors. A layout's ranks compare their own tensors with them.
"""

import json
import math
import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.numerics.precision import DTYPES
from triaxis.engine.train import build
from triaxis.launch.inference.request import read_job
from triaxis.launch.rank.batches import open_batches
from triaxis.launch.rank.join import join_run
from triaxis.launch.verify.measure import (
    Comparing,
    Writing,
    deviation,
    leave_the_initial_point,
    run_steps,
    start_from_rounded,
)
from triaxis.launch.verify.routing import Routings
from triaxis.launch.verify.samples import masked_samples
from triaxis.launch.verify.verdict.deviation import Deviation
from triaxis.launch.verify.verdict.records import (
    NOISE_REPORT,
    REFERENCE_DIGESTS,
    REFERENCE_SAMPLES,
    REFERENCE_STEPS,
    RankReport,
    Sample,
    SiteReport,
    together,
)
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.inference.probes import LOSS, Probes, site_order

UNKNOWN = Deviation(0.0, 0.0, 0.0, math.inf)
REFERENCE_SITES = "reference.sites.safetensors"


def main(argv: Sequence[str]) -> int:
    """Run one rank of the job that `launch/verify/run.py` wrote."""
    job = read_job(argv)
    with join_run(argv) as rank:
        observe(
            rank.topology,
            rank.config,
            Path(job["folder"]),
            is_reference=job["is_reference"],
            sites=job["sites"],
            noise_of=job.get("noise_of"),
        )
    return 0


def observe(
    topology: Topology,
    config: Config,
    folder: Path,
    *,
    is_reference: bool,
    sites: Sequence[str] | None = None,
    noise_of: str | None = None,
) -> None:
    """Train `config.train.steps` steps, and write the reference or this rank's report to `folder`.

    Args:
        topology: this rank's topology.
        config: configuration with the layout. For the reference: the same in one process.
        folder: folder shared by all ranks. The reference writes its files there, and a layout's ranks read them.
        is_reference: True: write whole tensors; False: compare this rank's parts with them.
        sites: names of the outputs to compare, such as `layers.0.mlp`; None: all.
        noise_of: the reference's dtype, in the run that measures its rounding: that run computes in a wider dtype, from weights
            rounded to this one. None in other runs.
    """
    engine = build(config, topology, build_chunks)
    if noise_of is None:
        leave_the_initial_point(engine, config.train.seed)
    else:
        start_from_rounded(engine, config.train.seed, DTYPES[noise_of])
    probes = Probes(engine.chunks)
    is_narrow = config.precision.dtype != "float64" or noise_of is not None
    routings = Routings(engine.chunks, None if is_reference else folder, imposed=is_narrow and not is_reference)
    notebook = Writing(folder) if is_reference else Comparing(folder)
    steps = batches_of_steps(config, topology)
    samples = tuple(_samples_of(step, topology) for step in steps)
    begin_step = partial(setattr, routings, "step")
    facts = run_steps(
        engine,
        steps,
        config.optimizer.lr,
        notebook,
        probes.open(),
        begin_step,
        may_diverge=not is_reference and noise_of is None,
    )
    if isinstance(notebook, Writing):
        (folder / REFERENCE_SAMPLES).write_text(json.dumps(samples))
        (folder / REFERENCE_STEPS).write_text(json.dumps([asdict(one) for one in facts]))
        outputs = {
            f"{site}|{samples}": value for site, found in probes.values.items() for samples, value in found.items()
        }
        save_file(outputs, folder / REFERENCE_SITES)
        routings.write(folder)
        (folder / REFERENCE_DIGESTS).write_text(json.dumps([asdict(one) for one in routings.reports()]))
        return
    at, experts = topology.coordinates, topology.sizes.expert_place(topology.rank)
    of_stage = topology.rank % (topology.sizes.world_size // topology.sizes.pp)
    RankReport(
        rank=topology.rank,
        coordinates={"pp": at.pp, "dp": at.dp, "cp": at.cp, "tp": at.tp},
        steps=tuple(facts),
        tensors=tuple(notebook.reports()),
        sites=tuple(_sites(folder, probes, config, topology, steps, sites)),
        samples=samples,
        experts={"edp": of_stage // topology.sizes.expert_ranks, "ep": experts.ep_index, "etp": experts.etp_index},
        routings=routings.reports(),
    ).write(folder / (f"rank_{topology.rank:05d}.json" if noise_of is None else NOISE_REPORT))


def checksums(microbatch: MicroBatch) -> list[Sample]:
    """Return each sample's id in a microbatch, with a checksum over the sample's contents.

    A checksum is a sum over tokens. So context-parallel ranks can add up the checksums of their parts.
    """
    mask = microbatch.loss_mask
    counted = mask if mask.dtype is torch.bool else mask.view(torch.int32)  # weights are compared by their bits
    parts = [microbatch.tokens, microbatch.labels, counted, microbatch.position_ids]
    if microbatch.documents is not None:
        numbers, part = microbatch.documents.numbers, microbatch.part
        parts.append(numbers if part is None else numbers.gather(1, part.positions))
    tokens = torch.stack([part.cpu().to(torch.int64) for part in parts], dim=-1)
    sums = [sum(zlib.crc32(token.tobytes()) for token in row) for row in tokens.numpy()]
    return list(zip(microbatch.sample_ids, sums, strict=True))


def _samples_of(step: Sequence[MicroBatch], topology: Topology) -> tuple[Sample, ...]:
    """List the samples that this rank reads in a step. Their checksums are summed over the cp ranks."""
    mine = [sample for microbatch in step for sample in checksums(microbatch)]
    sums = torch.tensor([checksum for _, checksum in mine], device=topology.device)
    whole = topology.axis("cp").all_reduce(sums, "samples").wait().tolist()
    return tuple((number, checksum) for (number, _), checksum in zip(mine, whole, strict=True))


def batches_of_steps(config: Config, topology: Topology) -> list[list[MicroBatch]]:
    """Read this rank's microbatches for all steps. Some labels are masked, so that microbatches have unequal label counts."""
    with closing(open_batches(config, topology, masked_samples(config))) as batches:
        return [batches.next_step() for _ in range(config.train.steps or 1)]


def _sites(
    folder: Path,
    probes: Probes,
    config: Config,
    topology: Topology,
    steps: Sequence[Sequence[MicroBatch]],
    wanted_sites: Sequence[str] | None,
) -> list[SiteReport]:
    """Compare the first step's outputs, such as `layers.0.mlp`, with the reference's for the same tokens.

    `wanted_sites` names the outputs; None: all. An output that the reference lacks counts as an infinite error.
    """
    tp, cp = topology.axis("tp"), topology.axis("cp")
    places = {
        str(sample): microbatch.part.positions[row].cpu()
        for microbatch in steps[0]
        if microbatch.part is not None
        for row, sample in enumerate(microbatch.sample_ids)
    }
    reports = []
    with safe_open(folder / REFERENCE_SITES, framework="pt") as reference:
        known = set(reference.keys())
        for site, found in probes.values.items():
            if wanted_sites is not None and site not in wanted_sites:
                continue
            parts = []
            for samples, got in found.items():
                keys = (
                    [key] if (key := f"{site}|{samples}") in known else [f"{site}|{one}" for one in samples.split(",")]
                )
                if not known.issuperset(keys):
                    parts.append(UNKNOWN)
                    continue
                # If the reference has one sample per microbatch, a microbatch's loss is the sum over its samples.
                wanted = torch.stack([reference.get_tensor(key) for key in keys]).sum(0)
                if site == LOSS:
                    got = cp.all_reduce(got.to(topology.device), "loss").wait().cpu()
                elif samples in places:
                    wanted = wanted[places[samples]]
                if len(got) < len(wanted):
                    wanted = wanted[tp.index * len(got) : (tp.index + 1) * len(got)]
                parts.append(deviation(wanted, got))
            reports.append(SiteReport(site_order(site, config.model.num_layers), site, together(parts)))
    return reports
