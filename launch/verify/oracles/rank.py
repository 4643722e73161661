"""Train another library's model as `triaxis verify` trains ours, and write the same files.

    python -P -m triaxis.launch.verify.oracles.rank verify.yaml    next to it job.json: {"folder": .., "oracle": "megatron-core"}

The model starts from our weights. The files hold whole tensors under our names.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from triaxis.engine.config.load import load_config
from triaxis.engine.config.tree import Config
from triaxis.engine.data.documents import Documents
from triaxis.engine.data.loader import MicroBatch, weighted
from triaxis.engine.layout.shard_spec import ParamRecord, ParamSpec, localize
from triaxis.engine.numerics.precision import DTYPES
from triaxis.launch.inference.request import read_job
from triaxis.launch.start.process.ending import run_rank
from triaxis.launch.start.process.parent_death import end_with_parent
from triaxis.launch.verify.measure import HeldElements, Writing, starting_values
from triaxis.launch.verify.oracle import is_own
from triaxis.launch.verify.oracles.corpus import OracleBatch, rows_of_steps
from triaxis.launch.verify.oracles.model import Oracle
from triaxis.launch.verify.rank import REFERENCE_SITES, checksums
from triaxis.launch.verify.samples import MASKED_FRACTION
from triaxis.launch.verify.verdict.records import REFERENCE_SAMPLES, REFERENCE_STEPS, Sample, StepFacts, TensorKind
from triaxis.models.inference.probes import LOSS, TOKEN_LOSSES
from triaxis.models.specs import model_specs


def main(argv: Sequence[str]) -> int:
    """Run the job that `launch/verify/oracle.py` wrote."""
    end_with_parent()
    job = read_job(argv)
    run(job["oracle"], load_config(argv[0]), Path(job["folder"]))
    return 0


def run(name: str, config: Config, folder: Path) -> None:
    """Write the named oracle's steps to `folder`. Afterwards the process cannot be used for anything else."""
    # Weights are drawn before the oracle is built: inside its contexts even our fp32 draws would be float64.
    start = {
        spec.name: starting_values(_whole(spec), config.train.seed, DTYPES[config.precision.dtype]).view(spec.shape)
        for spec in model_specs(config.model)
    }
    with ExitStack() as stack:
        observe(build_oracle(name, config, stack), config, start, folder)


def build_oracle(name: str, config: Config, stack: ExitStack) -> Oracle:
    """Build the named oracle in the run's dtype. The contexts that the oracle needs are entered on `stack`."""
    if config.precision.dtype == "float64":
        from triaxis.launch.verify.oracles.in_float64 import InFloat64

        stack.enter_context(InFloat64())
    if name == "megatron-core":
        from triaxis.launch.verify.oracles.megatron_core import MegatronCore
        from triaxis.launch.verify.oracles.megatron_cpu import on_cpu

        stack.enter_context(on_cpu())
        return MegatronCore(config)
    if is_own(name):
        from triaxis.launch.verify.oracles.own import OwnFunction

        return OwnFunction(name, config)
    from triaxis.launch.verify.oracles.hugging_face import HuggingFace

    return HuggingFace(config)


def observe(oracle: Oracle, config: Config, start: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Train `config.train.steps` steps, and write the reference files to `folder`.

    Args:
        oracle: oracle, whose weights are overwritten.
        config: configuration for one process, with the corpus in `data.train`.
        start: our weights by name, in logical shapes and in the run's dtype.
        folder: folder where `triaxis.launch.verify.rank` looks for its reference.
    """
    notebook = Writing(folder)
    book = _Book(oracle, notebook)
    book.set_start(start)
    facts = []
    samples: list[list[Sample]] = []
    sites: dict[str, torch.Tensor] = {}
    for step, rows in enumerate(rows_of_steps(config, MASKED_FRACTION)):
        microbatches = [microbatch_of(one, within=config.data.attention == "within") for one in rows]
        if (weigh := config.model.own.weigh) is not None:
            microbatches = [weighted(one, weigh) for one in microbatches]
        samples.append([sample for one in microbatches for sample in checksums(one)])
        oracle.begin_step()
        loss_sum, num_tokens = 0.0, sum(microbatch.num_tokens for microbatch in microbatches)
        counted = max(num_tokens, 1)  # a batch without counted tokens has no gradient and zero loss
        for microbatch in microbatches:
            losses = oracle.token_losses(microbatch)
            loss = (losses * microbatch.loss_mask).sum()
            (loss / counted).backward()
            loss_sum += float(loss.detach())
            if step == 0:
                for sample, row in zip(microbatch.sample_ids, losses.detach().double(), strict=True):
                    sites[f"{TOKEN_LOSSES}|{sample}"] = row.clone()
                sites[f"{LOSS}|{','.join(map(str, microbatch.sample_ids))}"] = loss.detach().double().view(1)
        oracle.end_backward()
        book.write(step, "gradient", oracle.gradient)
        grad_norm = oracle.update()
        for kind in config.state_kinds:
            book.write(step, kind, partial(oracle.state, kind))
        book.write(step, "parameter", oracle.parameter)
        notebook.step_done(step)
        facts.append(StepFacts(loss_sum / counted, grad_norm, num_tokens))
    (folder / REFERENCE_SAMPLES).write_text(json.dumps(samples))
    (folder / REFERENCE_STEPS).write_text(json.dumps([asdict(one) for one in facts]))
    save_file(sites, folder / REFERENCE_SITES)


def microbatch_of(rows: OracleBatch, *, within: bool) -> MicroBatch:
    """Convert the oracle's rows into a model's input tensors. With `within`, attention stays within documents."""
    numbers = torch.from_numpy(rows.documents)
    return MicroBatch(
        tokens=torch.from_numpy(rows.tokens),
        labels=torch.from_numpy(rows.labels),
        loss_mask=torch.from_numpy(rows.loss_mask),
        position_ids=torch.from_numpy(rows.positions),
        sample_ids=rows.sample_ids,
        num_tokens=int(rows.loss_mask.sum()),
        # An oracle masks by document numbers alone.
        documents=Documents(None, torch.empty(0), numbers) if within else None,
    )


class _Book:
    """Writes an oracle's tensors as the reference for layouts, under Triaxis' parameter names."""

    def __init__(self, oracle: Oracle, notebook: Writing) -> None:
        self._oracle, self._notebook = oracle, notebook

    @torch.no_grad()
    def set_start(self, start: Mapping[str, torch.Tensor]) -> None:
        """Give our weights to the oracle, and record the oracle's weights afterwards."""
        for pair in self._oracle.pairs:
            theirs = pair.to_theirs([start[spec.name] for spec in pair.ours])
            for name, values in zip(pair.theirs, theirs, strict=True):
                self._oracle.parameter(name).copy_(values)
        self.write(0, "start", self._oracle.parameter)

    @torch.no_grad()
    def write(self, step: int, kind: TensorKind, read: Callable[[str], torch.Tensor]) -> None:
        """Write all tensors of a kind, as `read` returns them for the oracle's names.

        Gradients and moments of parameters that are not trained are skipped.
        """
        is_of_all = kind in ("start", "master", "parameter")
        for pair in self._oracle.pairs:
            if not (is_of_all or all(spec.is_trained for spec in pair.ours)):
                continue
            theirs = [read(name).view_as(self._oracle.parameter(name)) for name in pair.theirs]
            for spec, values in zip(pair.ours, pair.to_ours(theirs), strict=True):
                self._notebook.tensor(step, kind, HeldElements(_whole(spec), 0, values.reshape(-1)))


def _whole(spec: ParamSpec) -> ParamRecord:
    return localize(spec, tp=1, tp_index=0, sequence_parallel=False)


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
