"""Ours: `triaxis.launch.pretrain_gpt` itself, from a config.yaml to metrics.jsonl, and one trace of it.

A step's time is the one that the run writes down: from one reading of a loss to the next, one step behind the posting.
"""

import json
import re
from pathlib import Path

import torch

from benchmarks.gpu_contenders.kernel_classes import breakdown
from benchmarks.gpu_contenders.records import Job, Run
from benchmarks.gpu_contenders.shapes import resolve, write_config
from benchmarks.gpu_contenders.timed_loop import read_lines, write_corpus
from triaxis.launch import pretrain_gpt
from triaxis.launch.start.process.ending import exit_code

OUT_OF_MEMORY = "is out of memory"
"""What a rank says that a smaller microbatch would help (`triaxis.launch.rank.out_of_memory`)."""


class OursFailedError(Exception):
    """The run ended with an error; the message is what it said."""


def run(job: Job, folder: Path) -> Run:
    """Train ours.

    Raises:
        ConfigError: the words are no configuration.
        torch.OutOfMemoryError: it does not fit.
        OursFailedError: anything else that went wrong.
    """
    # One step more than is timed: the last step of a run is read together with the one before it.
    timed = job.warm_up + job.steps
    path = write_config(
        folder,
        job.sizes,
        corpus=write_corpus(folder, job),
        micro_batch_size=job.micro_batch_size,
        num_steps=timed + job.traced + 1,
        dtype=job.dtype,
        device=job.device,
    )
    config = resolve(path, job.words)
    trace = [f"telemetry.profile.start={timed + 1}", f"telemetry.profile.steps={job.traced}"] if job.traced else []
    code = exit_code(pretrain_gpt.main, [str(path), *job.words, *trace])
    directory = Path(config.runtime.runs_dir) / "ours"
    if code != 0:
        said = last_error(directory / "logs" / "attempt_00" / "rank_00000.log")
        raise torch.OutOfMemoryError(said) if OUT_OF_MEMORY in said else OursFailedError(said)

    records = read_lines(directory / "metrics.jsonl")
    seconds = [float(str(record["step_time_seconds"])) for record in records[job.warm_up : timed]]
    peak = records[timed - 1]["peak_memory_bytes"]
    traces = list((directory / "profile").rglob("*.json.gz"))
    assert len(traces) == bool(job.traced), f"one trace, or none: {traces}"
    return Run(
        step_seconds=seconds,
        first_loss=float(str(records[0]["loss"])),
        last_loss=float(str(records[-1]["loss"])),
        peak_memory_bytes=int(str(peak)) if job.device == "cuda" else None,
        recompute=config.recompute,
        settings={"kernels": said_kernels(directory)},
        breakdown=breakdown(traces[0], job.traced, sum(seconds) / len(seconds)) if traces else None,
    )


_STAMP = re.compile(r"^\d{4}-\d\d-\d\d [\d:.]+ ", re.MULTILINE)
"""The time at the head of each line of a rank's log."""


def last_error(log: Path) -> str:
    """Return the last error in a rank's log: the text after `error:`, or its last lines."""
    text = _STAMP.sub("", log.read_text(errors="replace")) if log.exists() else "the run left no log"
    errors = re.split(r"^error: ", text, flags=re.MULTILINE)
    return errors[-1].strip() if len(errors) > 1 else "\n".join(text.splitlines()[-20:])


def said_kernels(directory: Path) -> str:
    """Return the kernels in the banner of the run."""
    rows = dict(json.loads((directory / "logs" / "attempt_00" / "banner.json").read_text())["rows"])
    return " ".join(rows["kernels"].split())
