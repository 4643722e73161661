"""Formats the banner before the first step and the summary after the last one.

Triaxis: gpt_tiny                               Finished: 300 steps in 3:12
  layout      tp=2 pp=2 ...                       loss      losses of this, a uniform, a unigram and a bigram model, largest first
  parameters  counted and by formula          text      what the model writes
  logs        where to look                       results   where to look
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from triaxis.engine.config.quantities.context_parallel import gathers_keys, method_line
from triaxis.engine.config.quantities.head_pieces import head_tokens
from triaxis.engine.config.quantities.plan import BatchPlan
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.deal import windows_of
from triaxis.engine.context_parallel.imbalance import predicted_imbalance
from triaxis.engine.data.document_statistics import DocumentStatistics
from triaxis.engine.errors import attempt_name, counted
from triaxis.engine.program import triaxis
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.run.entries import LOGS
from triaxis.engine.storage.files import write_atomically
from triaxis.engine.storage.redaction import without_secrets
from triaxis.engine.storage.state_files import read_object
from triaxis.engine.telemetry.outlets.console import Report
from triaxis.engine.telemetry.outlets.format import compact, duration
from triaxis.engine.telemetry.outlets.table import MEMORY
from triaxis.engine.telemetry.record.flops import (
    attention_share,
    convention,
    cost_of_cp_imbalance,
    cost_of_imbalance,
)
from triaxis.engine.telemetry.record.metrics import Meter
from triaxis.engine.telemetry.record.parameters import comparison

NOTHING = "nothing (checkpoint.interval=never): the weights are lost when the run ends"

LEAST_IMBALANCE = 0.01
"""Smallest share of a step's FLOPs for which unequal documents get a line."""


@dataclass(frozen=True, slots=True)
class Start:
    """Facts for a run's banner, known once the engine is built.

    Attributes:
        layout: sizes and schedule in a line, such as "tp=2 pp=2 dp=2: 8 ranks on 1 node, interleaved".
        device: device and backend in a line, such as "cpu, gloo, 1 thread per rank".
        kernels: line with the chosen kernels' names.
        memory: line with the predicted memory.
        device_type: the logging rank's device type: `cpu` or `cuda`.
        counted: parameters by module, summed over the ranks (`triaxis.engine.telemetry.record.parameters.local_counts`).
        listed: number of elements in each of the model's parameters, by name.
        recompute: `config.recompute` with `auto` replaced by the chosen setting.
        documents: statistics of the documents that attention stays within; None if it crosses documents.
        doubts: rows about samples that are probably not what is meant (`triaxis.engine.data.datasets.doubts`).
    """

    config: Config
    plan: BatchPlan
    layout: str
    device: str
    kernels: str
    memory: str
    counted: Mapping[str, int]
    listed: Mapping[str, int]
    recompute: RecomputeConfig
    device_type: str = "cpu"
    documents: DocumentStatistics | None = None
    doubts: Sequence[tuple[str, str]] = ()


def show_start(report: Report, directory: RunDirectory, meter: Meter, start: Start) -> None:
    """Show the banner, and keep its rows in the attempt's banner.json. A later attempt shows only changed rows."""
    attempt = f", {attempt_name(directory.attempt)}" if directory.attempt else ""
    rows = [
        ("layout", start.layout),
        ("device", f"{start.device}, {start.config.precision.dtype}"),
        ("kernels", start.kernels),
        ("batch", str(start.plan)),
        *([("attention", method_line(start.config))] if start.config.parallel.cp > 1 else []),
        *([("extension", "\n".join(extension.lines))] if (extension := start.config.model.extension) else []),
        ("memory" if start.device_type == "cpu" else MEMORY[start.device_type], start.memory),
        *_documents(start),
        *start.doubts,
        *_activations(start),
        ("parameters", "\n".join(comparison(start.counted, start.listed, start.config.model))),
        ("FLOPs", "\n".join(_flops(meter, start))),
        (
            "results",
            f"{directory.path}/ (metrics.jsonl, events/, logs/{directory.rank_log(0).parent.name}/)",
        ),
        ("saves", _saves(start.config, directory)),
    ]
    before = _rows_before(directory)
    with suppress(OSError):  # the next attempt shows all of it again
        kept = without_secrets(json.dumps({"rows": rows}, indent=2))
        write_atomically(_rows_path(directory, directory.attempt), [f"{kept}\n".encode()])
    if before is None:
        report.block(f"Triaxis: {directory.path.name}{attempt}", rows)
    else:
        report.block(f"Triaxis: {directory.path.name}{attempt}, as before except for", _changes(before, rows))
    report.say()


def _rows_path(directory: RunDirectory, attempt: int) -> Path:
    """Build the path of the file that keeps an attempt's banner rows."""
    return directory.path / LOGS / f"attempt_{attempt:02d}" / "banner.json"


def _rows_before(directory: RunDirectory) -> list[tuple[str, str]] | None:
    """Read the latest banner rows that an earlier attempt kept. None if there are no such rows."""
    for attempt in reversed(range(directory.attempt)):
        try:
            found = read_object(_rows_path(directory, attempt))
            if found is not None:
                return [(str(label), str(text)) for label, text in found["rows"]]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _changes(before: Sequence[tuple[str, str]], rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """List the rows that are new or different, then those whose label is gone."""
    labels = {label for label, _ in rows}
    gone = [(label, f"no longer: {text}") for label, text in before if label not in labels]
    return [*(row for row in rows if row not in before), *gone]


def _saves(config: Config, directory: RunDirectory) -> str:
    """Describe what the run saves, and where."""
    if not config.checkpoint.saves:
        return NOTHING
    every = "" if config.checkpoint.every is None else f"every {config.checkpoint.every:,} steps, "
    return f"{every}the last step and a stop, in {directory.checkpoints(config).path}/"


def _documents(start: Start) -> Iterator[tuple[str, str]]:
    """Yield rows about attention within documents and unequal document lengths."""
    documents, model = start.documents, start.config.model
    if documents is not None:
        share = attention_share(model, documents)
        samples = f"the first {documents.num_samples:,} samples"
        yield (
            "documents",
            f"attention within, {documents.per_sample:.1f} per sample: {share:.0%} of the attention FLOPs across ({samples})",
        )
        if (cost := cost_of_imbalance(model, documents)) >= LEAST_IMBALANCE:
            yield (
                "imbalance",
                f"the replica with the longest documents of a step computes {cost:.1%} more than the mean; all wait for it",
            )
        if gathers_keys(start.config):
            yield "imbalance", cp_imbalance_line(start.config, documents)


def cp_imbalance_line(config: Config, documents: DocumentStatistics) -> str:
    """Describe the cost of unequal attention work across context-parallel ranks."""
    most = predicted_imbalance(documents, config.train.micro_batch_size, config.parallel.cp, windows_of(config.model))
    cost = cost_of_cp_imbalance(config.model, documents, most)
    return (
        f"over cp, the rank with the most attention work in a microbatch has {most - 1:.1%} more than the mean; the others wait "
        f"for {cost:.2%} of the step's FLOPs"
    )


def _activations(start: Start) -> Iterator[tuple[str, str]]:
    """Yield banner rows on activation memory: recompute, offload, and gathered tensors kept for the backward."""
    asked, offload = start.config.recompute, start.config.offload
    if asked.is_any:
        why = f" (the cheapest that fits {asked.memory_gb:g} GB)" if asked.granularity == "auto" else ""
        yield "recompute", f"{start.recompute}{why}"
    if (at_a_time := head_tokens(start.config)) is not None:
        yield "head", f"logits of {at_a_time:,} tokens at a time"
    if start.config.parallel.cuts_sequence and start.recompute.gathered_inputs == "keep":
        why = "" if asked.gathered_inputs == "keep" else f" (they fit {asked.memory_gb:g} GB)"
        yield "gathered", f"inputs of column-parallel layers are kept for the backward{why}"
    if gathers_keys(start.config) and start.recompute.gathered_kv == "keep":
        why = "" if asked.gathered_kv == "keep" else f" (they fit {asked.memory_gb:g} GB)"
        yield "gathered", f"keys and values of all cp ranks are kept for the backward{why}"
    if offload.num_layers:
        yield (
            "offload",
            f"the first {offload.num_layers} layers of each chunk, tensors of {offload.min_bytes:,} bytes and more",
        )


def _flops(meter: Meter, start: Start) -> Iterator[str]:
    """Describe the FLOPs per token, and the device's peak if any."""
    has_mfu = meter.peak is not None or start.device_type != "cpu"
    # A number that people compare with other runs needs its convention.
    formula = f" = {convention(start.config.model, start.documents)}" if has_mfu else ", causal attention"
    yield f"{compact(meter.model_flops_per_token)} per token, forward and backward{formula}"
    if start.recompute.is_any:
        yield f"{compact(meter.hardware_flops_per_token)} executed, with the padded vocabulary and recompute: {start.recompute}"
    if meter.peak is not None:
        yield f"peak {meter.peak.tflops:,g} TFLOP/s per device ({meter.peak.source}); MFU = model / peak"
    elif has_mfu:
        yield "no peak is known for this device and dtype, so there is no MFU; telemetry.peak_tflops=... sets it"


@dataclass(frozen=True, slots=True)
class End:
    """Results of a finished run.

    Attributes:
        steps: number of completed steps, over all attempts.
        seconds: training time in this attempt.
        loss, val_loss: loss in the last step and in the last validation; None if this attempt has none.
        entropies: nats per token that simple models reach on the corpus, by model name; may be empty.
        text: text that the model wrote; None if no text was requested.
        prompt: prompt that the text continues.
        saved: folder of the last step's checkpoint; None if the run saves nothing.
        memory: line with the logging rank's peak memory and the predicted peak.
    """

    steps: int
    seconds: float
    loss: float | None
    val_loss: float | None
    entropies: Mapping[str, float]
    saved: Path | None
    prompt: str = ""
    text: str | None = None
    memory: str = ""


def show_end(report: Report, directory: RunDirectory, end: End) -> None:
    """Show the summary with last losses, a sample of the model's text, and result paths."""
    rows = [("nats/token", "\n".join(ladder(end.loss, end.val_loss, end.entropies)))]
    if end.text is not None:
        rows += [("prompt", end.prompt.expandtabs(4)), ("output", end.text.expandtabs(4).rstrip())]
    if end.memory:
        rows.append(("memory", end.memory))
    rows.append(("results", f"{directory.path}/ (metrics.jsonl: one object per step; events/, config.yaml, logs/)"))
    rows.append(("saved", NOTHING if end.saved is None else f"in {end.saved}"))
    if end.saved is not None:
        rows.append(
            ("next", "\n".join(_uses(shlex.quote(str(directory.path)), shlex.quote(f"{directory.path.name}-hf"))))
        )
    report.say()
    in_attempt = f" of training in {attempt_name(directory.attempt)}" if directory.attempt else " of training"
    report.block(f"Finished: {counted(end.steps, 'step')}, {duration(end.seconds)}{in_attempt}", rows)


def _uses(run: str, exported: str) -> Iterator[str]:
    """Yield the commands that read a run's newest checkpoint. Both arguments must be quoted for a shell."""
    yield triaxis(f"evaluate {run} --text FILE")
    yield triaxis(f"generate {run} --prompt 'Once upon a time'")
    yield triaxis(f"export {run} {exported}")


def ladder(loss: float | None, val_loss: float | None, entropies: Mapping[str, float]) -> Sequence[str]:
    """List this model's losses and the `entropies` of simple models (such as bigram), largest first."""
    marked = {"validation loss": val_loss, "training loss, last step": loss}
    steps = [(value, name, "") for name, value in entropies.items()]
    steps += [(value, name, "  <- this model") for name, value in marked.items() if value is not None]
    width = max((len(name) for _, name, _ in steps), default=0)
    return [f"{value:7.4f}  {name:<{width}}{mark}".rstrip() for value, name, mark in sorted(steps, reverse=True)]
