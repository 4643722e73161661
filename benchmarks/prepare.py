"""Speed of `triaxis prepare` against its tokenizer's own batches on one core, and against the loop of Megatron-LM's preprocessing.

    batches     one process, one thread: encode_batch of the same texts, already in memory; nothing is read or written
    ours        triaxis prepare of a .jsonl: workers are started, lines parsed, tokens encoded, hashed, written and joined
    megatron    as tools/preprocess_data.py: Pool.imap over lines, a transformers tokenizer per process, IndexedDatasetBuilder

Megatron-LM's tool is not in the package megatron-core, so its loop is written here from the same calls: `json.loads`, the
tokenizer's call on one document, `add_document` of a tensor. The three run in turn, `--rounds` times; each corpus has the same
tokens. Speed is tokens per second of wall time, and per second of CPU of all processes, which other work on the machine
disturbs less. Share = ours / (cores x batches).

    python -m benchmarks.prepare
    python -m benchmarks.prepare --megabytes 8 --rounds 1 --tokenizer train-bpe:8000
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# One thread each: the library's own would use all cores in the measurement of one.
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.records import append_record
from triaxis.engine.data.corpus.indexed import IndexedTokens, bin_path, idx_path
from triaxis.engine.data.corpus.record import CorpusRecord, read_record
from triaxis.engine.data.corpus.stdlib import stdlib_files

SIDES = ("batches", "ours", "megatron")
BATCH = 1024
CHUNK = 32
"""Lines per call of a worker, as Megatron's tool has it."""
WANTED_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of one run of one side."""

    wall: float
    cpu: float


def write_text(path: Path, num_bytes: int) -> int:
    """Write sources of Python's standard library as a .jsonl, again and again up to this size; return its documents."""
    texts = [file.read_text() for file in stdlib_files(num_bytes)]
    written = count = 0
    with path.open("w") as handle:
        while written < num_bytes:
            for text in texts:
                written += handle.write(json.dumps({"text": text}) + "\n")
                count += 1
    return count


def timed(run: Callable[[], object]) -> Speed:
    """Run once; CPU seconds are those of this process and of the children that have ended."""

    def cpu() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in used)

    wall_start, cpu_start = time.perf_counter(), cpu()
    run()
    return Speed(time.perf_counter() - wall_start, cpu() - cpu_start)


def encode_batches(tokenizer: Any, texts: Sequence[str]) -> int:
    """Encode all texts in batches; return the tokens."""
    total = 0
    for start in range(0, len(texts), BATCH):
        found = tokenizer.encode_batch(texts[start : start + BATCH], add_special_tokens=False)
        total += sum(len(one.ids) for one in found)
    return total


class Encoder:
    """A worker of Megatron's loop."""

    def __init__(self, path: str) -> None:
        self.path = path

    def initialise(self) -> None:
        """Open the tokenizer in a worker."""
        import transformers

        Encoder.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=self.path)  # type: ignore[attr-defined]
        Encoder.eod = Encoder.tokenizer.convert_tokens_to_ids("<|endoftext|>")  # type: ignore[attr-defined]

    def encode(self, line: str) -> list[int]:
        """Return the ids of a line's document, with its end."""
        text = json.loads(line)["text"]
        ids: list[int] = Encoder.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[attr-defined]
        return [*ids, Encoder.eod]  # type: ignore[attr-defined]


def megatron(path: Path, tokenizer: str, prefix: str, num_workers: int) -> None:
    """Write a corpus as Megatron-LM's tool does."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    encoder = Encoder(tokenizer)
    builder = IndexedDatasetBuilder(str(bin_path(prefix)), dtype=np.uint16)
    with (
        multiprocessing.get_context("fork").Pool(num_workers, initializer=encoder.initialise) as pool,
        path.open() as lines,
    ):
        for ids in pool.imap(encoder.encode, lines, CHUNK):
            builder.add_document(torch.tensor(ids), [len(ids)])
        pool.close()
        pool.join()
    builder.finalize(str(idx_path(prefix)))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run all sides in turn, and return the record of the results."""
    import tokenizers

    path = folder / "text.jsonl"
    num_documents = write_text(path, options.megabytes * 10**6)

    def ours(output: str, tokenizer: str) -> CorpusRecord:
        words = ["--input", path, "--tokenizer", tokenizer, "--output", folder / output, "--workers", options.workers]
        command = [sys.executable, "-m", "triaxis.launch.cli", "prepare", "--force", *map(str, words)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        record = read_record(str(folder / output))
        assert record is not None
        return record

    record = ours("first", options.tokenizer)
    own = tokenizers.Tokenizer.from_file(record.tokenizer)
    texts = [json.loads(line)["text"] for line in path.open()]
    runs: dict[str, Callable[[], object]] = {
        "batches": lambda: encode_batches(own, texts),
        "ours": lambda: ours("ours", record.tokenizer),
        "megatron": lambda: megatron(path, record.tokenizer, str(folder / "megatron"), options.workers),
    }
    speeds: dict[str, list[Speed]] = {side: [] for side in SIDES}
    for _ in range(options.rounds):
        for side in SIDES:
            speeds[side].append(timed(runs[side]))
    check_equal(folder)
    seconds = {
        side: {"wall": [one.wall for one in speeds[side]], "cpu": [one.cpu for one in speeds[side]]} for side in SIDES
    }
    return {
        "tokenizer": options.tokenizer,
        "vocab_size": record.vocab_size,
        "workers": options.workers,
        "documents": num_documents,
        "input_bytes": path.stat().st_size,
        "tokens": record.num_tokens,
        "seconds": seconds,
    }


def check_equal(folder: Path) -> None:
    """Compare the corpora of both sides; ValueError where they differ, since their times could not be compared."""
    if IndexedTokens(folder / "ours").fingerprint != IndexedTokens(folder / "megatron").fingerprint:
        raise ValueError("the corpora of ours and of Megatron's loop differ, so their times cannot be compared")


def rates(record: dict[str, Any], clock: str) -> dict[str, float]:
    """Return the median tokens per second of each side, by wall or CPU seconds."""
    return {side: record["tokens"] / statistics.median(record["seconds"][side][clock]) for side in SIDES}


def shares(record: dict[str, Any]) -> dict[str, float]:
    """Return ours over what the tokenizer alone would do: on all cores by wall time, and per second of CPU."""
    wall, cpu = rates(record, "wall"), rates(record, "cpu")
    return {"wall": wall["ours"] / (record["workers"] * wall["batches"]), "cpu": cpu["ours"] / cpu["batches"]}


def show(record: dict[str, Any], console: Console) -> None:
    """Print the medians."""
    console.print(
        f"{record['tokens']:,} tokens of {record['input_bytes']:,} bytes in {record['documents']:,} documents, "
        f"{record['tokenizer']}, {record['workers']} workers, {len(record['seconds']['ours']['wall'])} rounds"
    )
    table = Table("side", "tokens/s", "tokens per CPU second", box=None)
    wall, cpu = rates(record, "wall"), rates(record, "cpu")
    for side in SIDES:
        table.add_row(side, f"{wall[side]:,.0f}", f"{cpu[side]:,.0f}")
    console.print(table)
    found = shares(record)
    console.print(
        f"ours / ({record['workers']} x batches): {found['wall']:.2f} by wall time, {found['cpu']:.2f} per CPU second "
        f"(wanted: {WANTED_SHARE}); ours / megatron: {wall['ours'] / wall['megatron']:.2f} by wall time"
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and append the record to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prepare", description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=64, help="of text (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="of all sides in turn (default: 5)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: one per core")
    parser.add_argument("--tokenizer", default="train-bpe:32000", help="train-bpe:N or a tokenizer.json")
    parser.add_argument("--results", type=Path, default=Path("runs/benchmarks/prepare.jsonl"), help="appended to")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        record = measure(Path(folder), options)
    append_record(options.results, "prepare", sys.argv[1:] if argv is None else argv, record)
    show(record, Console(highlight=False, soft_wrap=True))
    return record


if __name__ == "__main__":
    main()
