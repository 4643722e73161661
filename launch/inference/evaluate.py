"""Computes a text's loss under the loaded model for `triaxis evaluate`."""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from triaxis.engine.data.corpus.indexed import IndexedTokens
from triaxis.engine.data.corpus.tokenizer import Tokenizer
from triaxis.engine.data.corpus.tokenizers import BytesTokenizer, load_tokenizer
from triaxis.engine.data.loader import Batches, MicroBatch
from triaxis.engine.storage.state_files import read_text
from triaxis.launch.inference.rank import run
from triaxis.launch.pictures.tables import terminal_table
from triaxis.launch.rank.batches import open_batches
from triaxis.launch.rank.join import Rank
from triaxis.models.inference.evaluate import CorpusTokens, ListedTokens, TokenSource, Windows, loss_of
from triaxis.models.inference.load import LoadedModel

BLOCK_TOKENS = 2**20
"""Number of tokens decoded at once while counting bytes."""


def main(argv: Sequence[str]) -> int:
    """Run one rank of `triaxis evaluate` (`launch/commands/evaluate.py`) and return its exit code."""
    return run(argv, _evaluate)


def _evaluate(rank: Rank, model: LoadedModel, job: dict[str, Any]) -> None:
    config, topology = rank.config, rank.topology
    tokenizer = load_tokenizer(config.data.tokenizer_name)
    tokenizer.eod_id = job["eod_id"]
    text, num_bytes = open_text(job, tokenizer, count_bytes=rank.number == 0)
    length = config.model.seq_length
    windows = Windows(
        text,
        tokenizer.eod_id,
        seq_length=length,
        stride=job["stride"] or length,
        vocab_size=config.model.vocab_size,
    )
    started = time.monotonic()
    num_steps = -(-windows.num_windows // config.train.global_batch_size)
    with closing(open_batches(config, topology, windows, weighs=False)) as batches:
        loss_sum, num_tokens = loss_of(model, _steps(batches, num_steps, show=rank.number == 0))
    assert num_tokens == text.num_tokens, f"{num_tokens} tokens counted of {text.num_tokens}"
    if rank.number == 0:
        result = {
            "checkpoint": job["checkpoint"],
            "weights": job["weights"],
            "text": job["text"] or job["bin"],
            "tokens": num_tokens,
            "bytes": num_bytes,
            "windows": windows.num_windows,
            "seq_length": length,
            "stride": windows.stride,
            "seconds": time.monotonic() - started,
            **measures(loss_sum, num_tokens, num_bytes),
        }
        if job["json"]:
            print(json.dumps(result), flush=True)
        else:
            show_losses(Console(highlight=False, soft_wrap=True), result)


def open_text(job: dict[str, Any], tokenizer: Tokenizer, *, count_bytes: bool) -> tuple[TokenSource, int]:
    """Open the job's tokens, and count the bytes of their text.

    The count is 0 if `count_bytes` is False and counting would need decoding.
    """
    limit = job["max_tokens"]
    if job["bin"] is not None:
        text: TokenSource = CorpusTokens(IndexedTokens(job["bin"]), limit)
        return text, bytes_of(text, tokenizer) if count_bytes else 0
    content = read_text(Path(job["text"]))
    tokens = tokenizer.encode(content)
    if limit is None or limit >= len(tokens):
        return ListedTokens(tokens), len(content.encode())
    text = ListedTokens(tokens[:limit])
    return text, bytes_of(text, tokenizer) if count_bytes else 0


def bytes_of(text: TokenSource, tokenizer: Tokenizer) -> int:
    """Count the UTF-8 bytes of the decoded tokens, without end-of-document tokens."""
    total = 0
    kept: list[int] = []
    for start in range(0, text.num_tokens, BLOCK_TOKENS):
        tokens = text.read(start, start + BLOCK_TOKENS)
        if isinstance(tokenizer, BytesTokenizer):
            # Counted without decoding, which would replace invalid UTF-8 with longer byte sequences.
            total += int((tokens < tokenizer.eod_id).sum())
            continue
        # Decode document by document, because no character or word crosses a document boundary.
        kept += tokens.tolist()
        ends = [at for at, token in enumerate(kept) if token == tokenizer.eod_id]
        first = 0
        for end in ends:
            total += len(tokenizer.decode(kept[first:end]).encode())
            first = end + 1
        kept = kept[first:]
    return total + len(tokenizer.decode(kept).encode())


def measures(loss_sum: float, num_tokens: int, num_bytes: int) -> dict[str, float | None]:
    """Compute loss in nats and perplexity, per token and per byte, and bits per byte.

    Values per byte are None if the text has no bytes. A perplexity is None if it overflows a double.
    """
    loss = loss_sum / num_tokens
    per_byte = loss_sum / num_bytes if num_bytes else None
    return {
        "loss": loss,
        "perplexity": _exp(loss),
        "loss_per_byte": per_byte,
        "perplexity_per_byte": None if per_byte is None else _exp(per_byte),
        "bits_per_byte": None if per_byte is None else per_byte / math.log(2),
    }


def _exp(nats: float) -> float | None:
    """Compute exp(nats); None if it overflows a double."""
    return math.exp(nats) if nats < math.log(sys.float_info.max) else None


def show_losses(console: Console, result: dict[str, Any]) -> None:
    """Print a result with its table of losses on stdout, and the speed on stderr."""
    average = ", the moving average of its weights" if result["weights"] == "ema" else ""
    rows = {
        "checkpoint": f"{result['checkpoint']}{average}",
        "text": f"{result['text']}: {result['tokens']:,} tokens, {result['bytes']:,} bytes",
        "windows": f"{result['windows']:,} of {result['seq_length']:,} tokens, stride {result['stride']:,}",
    }
    for name, value in rows.items():
        console.print(f"{name:<12}{value}", markup=False)
    table = terminal_table("", "nats", "bits", "perplexity", names=("",))
    for name, loss, perplexity in (
        ("per token", result["loss"], result["perplexity"]),
        ("per byte", result["loss_per_byte"], result["perplexity_per_byte"]),
    ):
        if loss is not None:
            shown = "too large" if perplexity is None else f"{perplexity:,.4f}"
            table.add_row(name, f"{loss:.4f}", f"{loss / math.log(2):.4f}", shown)
    console.print(table)
    seconds = result["seconds"]
    print(f"{seconds:,.1f} s, {result['tokens'] / seconds:,.0f} tokens/s", file=sys.stderr)


def _steps(batches: Batches, num_steps: int, *, show: bool) -> Iterator[Sequence[MicroBatch]]:
    """Yield `num_steps` global batches. With `show`, draw a progress bar if stderr is a terminal."""
    console = Console(stderr=True)
    numbers = track(
        range(num_steps), "evaluate", console=console, transient=True, disable=not (show and console.is_terminal)
    )
    for _ in numbers:
        yield batches.next_step()
