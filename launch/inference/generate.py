"""Continues each prompt for `triaxis generate`; rank 0 writes the text as it is generated."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from triaxis.engine.data.corpus.tokenizer import Tokenizer
from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.launch.inference.rank import run
from triaxis.launch.inference.text_stream import UNKNOWN, TextStream
from triaxis.launch.rank.join import Rank
from triaxis.models.inference.generate import Sampling, stream
from triaxis.models.inference.load import LoadedModel


def main(argv: Sequence[str]) -> int:
    """Run one rank of `triaxis generate` (`launch/commands/generate.py`) and return its exit code."""
    return run(argv, _generate)


def _generate(rank: Rank, model: LoadedModel, job: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(rank.config.data.tokenizer_name)
    tokenizer.eod_id = job["eod_id"]
    for number, prompt in enumerate(job["prompts"]):
        times = [time.monotonic()]
        tokens = _timed(
            stream(
                model,
                prompt["tokens"],
                prompt["num_tokens"],
                Sampling(**job["sampling"]),
                window=job["window"],
                stop=tokenizer.eod_id,
            ),
            times,
        )
        if rank.number != 0:
            list(tokens)
        elif job["json"]:
            print(json.dumps(_record(prompt, list(tokens), tokenizer, times, job["sampling"])), flush=True)
        else:
            _write(prompt, tokens, tokenizer, is_first=number == 0)
            _print_speed(prompt, times)


def _timed(tokens: Iterator[int], times: list[float]) -> Iterator[int]:
    """Yield the tokens, and append each one's time to `times`, which begins with the start's."""
    for token in tokens:
        times.append(time.monotonic())
        yield token


def _speed(times: Sequence[float]) -> tuple[float, float | None]:
    """Compute (seconds to the first token, tokens per second after it) from the times of the start and of each token.

    The seconds are 0.0 if no token has come. The speed is None if fewer than two have.
    """
    first = times[1] if len(times) > 1 else times[0]
    return first - times[0], (len(times) - 2) / (times[-1] - first) if len(times) > 2 else None


def _write(prompt: dict[str, Any], tokens: Iterator[int], tokenizer: Tokenizer, *, is_first: bool) -> None:
    """Write the prompt (dim on a terminal) and then the text as it is generated."""
    console = Console(highlight=False, soft_wrap=True)

    def show(text: str, style: str = "") -> None:
        if console.is_terminal:
            # An undertrained model may emit terminal control sequences.
            text = "".join(char if char.isprintable() or char in "\n\t" else UNKNOWN for char in text)
            console.print(Text(text, style=style), end="")
        else:
            sys.stdout.write(text)
            sys.stdout.flush()

    if not is_first:
        show("\n")
    show(prompt["text"], "dim")
    text = TextStream(tokenizer, prompt["tokens"])
    for token in tokens:
        show(text.add(token))
    show(f"{text.finish()}\n")


def _print_speed(prompt: dict[str, Any], times: Sequence[float]) -> None:
    """Print the speed on stderr, so that stdout has only text."""
    num_tokens, (prompt_seconds, tokens_per_second) = len(times) - 1, _speed(times)
    ended = "the model ended the document" if num_tokens < prompt["num_tokens"] else "as many as were asked for"
    words = [
        f"{num_tokens:,} tokens ({ended})",
        f"prompt of {len(prompt['tokens']):,} tokens read in {prompt_seconds:.2f} s",
    ]
    if tokens_per_second is not None:
        words.append(f"then {tokens_per_second:,.1f} tokens/s")
    print("; ".join(words), file=sys.stderr)


def _record(
    prompt: dict[str, Any], tokens: list[int], tokenizer: Tokenizer, times: Sequence[float], sampling: dict[str, Any]
) -> dict[str, Any]:
    text = TextStream(tokenizer, prompt["tokens"])
    prompt_seconds, tokens_per_second = _speed(times)
    return {
        "prompt": prompt["text"],
        "text": "".join(text.add(token) for token in tokens) + text.finish(),
        "prompt_tokens": prompt["tokens"],
        "tokens": tokens,
        "finish": "end_of_document" if len(tokens) < prompt["num_tokens"] else "length",
        "prompt_seconds": prompt_seconds,
        "tokens_per_second": tokens_per_second,
        **sampling,
    }
