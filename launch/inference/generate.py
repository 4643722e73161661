"""Continues each prompt for `triaxis generate`; rank 0 writes the text as it is generated."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from triaxis.engine.data.corpus.tokenizers import Tokenizer, load_tokenizer
from triaxis.launch.inference.rank import run
from triaxis.launch.inference.text_stream import UNKNOWN, TextStream
from triaxis.launch.rank.join import Rank
from triaxis.models.inference.generate import Sampling, stream
from triaxis.models.inference.load import LoadedModel


def main(argv: Sequence[str]) -> int:
    """Run one rank of `triaxis generate` (`launch/commands/generate.py`) and return its exit code."""
    return run(argv, _generate)


@dataclass
class TokenTimes:
    """Times of a prompt's start, first token and last token, by `time.monotonic`."""

    started: float
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0

    def tick(self) -> None:
        self.last = time.monotonic()
        self.num_tokens += 1
        if self.num_tokens == 1:
            self.first = self.last

    @property
    def prompt_seconds(self) -> float:
        """Seconds from the start to the first token; 0.0 if none has come."""
        return self.first - self.started if self.num_tokens else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second after the first token; None if fewer than two tokens have come."""
        return (self.num_tokens - 1) / (self.last - self.first) if self.num_tokens > 1 else None


def _generate(rank: Rank, model: LoadedModel, job: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(rank.config.data.tokenizer_name)
    tokenizer.eod_id = job["eod_id"]
    for number, prompt in enumerate(job["prompts"]):
        clock = TokenTimes(time.monotonic())
        tokens = _timed(
            stream(
                model,
                prompt["tokens"],
                prompt["num_tokens"],
                Sampling(**job["sampling"]),
                window=job["window"],
                stop=tokenizer.eod_id,
            ),
            clock,
        )
        if rank.number != 0:
            _drain(tokens)
        elif job["json"]:
            print(json.dumps(_record(prompt, list(tokens), tokenizer, clock, job["sampling"])), flush=True)
        else:
            _write(prompt, tokens, tokenizer, is_first=number == 0)
            _print_speed(prompt, clock)


def _timed(tokens: Iterator[int], clock: TokenTimes) -> Iterator[int]:
    for token in tokens:
        clock.tick()
        yield token


def _drain(tokens: Iterator[int]) -> None:
    for _ in tokens:
        pass


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


def _print_speed(prompt: dict[str, Any], clock: TokenTimes) -> None:
    """Print the speed on stderr, so that stdout has only text."""
    ended = "the model ended the document" if clock.num_tokens < prompt["num_tokens"] else "as many as were asked for"
    words = [
        f"{clock.num_tokens:,} tokens ({ended})",
        f"prompt of {len(prompt['tokens']):,} tokens read in {clock.prompt_seconds:.2f} s",
    ]
    if clock.tokens_per_second is not None:
        words.append(f"then {clock.tokens_per_second:,.1f} tokens/s")
    print("; ".join(words), file=sys.stderr)


def _record(
    prompt: dict[str, Any], tokens: list[int], tokenizer: Tokenizer, clock: TokenTimes, sampling: dict[str, Any]
) -> dict[str, Any]:
    text = TextStream(tokenizer, prompt["tokens"])
    return {
        "prompt": prompt["text"],
        "text": "".join(text.add(token) for token in tokens) + text.finish(),
        "prompt_tokens": prompt["tokens"],
        "tokens": tokens,
        "finish": "end_of_document" if len(tokens) < prompt["num_tokens"] else "length",
        "prompt_seconds": clock.prompt_seconds,
        "tokens_per_second": clock.tokens_per_second,
        **sampling,
    }
