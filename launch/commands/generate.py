"""`triaxis generate` continues prompts with a checkpoint's model, on one rank or many."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.launch.inference.request import add_arguments as add_checkpoint_arguments
from triaxis.launch.inference.request import ask, open_tokenizer, start
from triaxis.launch.start.command_line import CommandParser, refuse

EXAMPLES = """examples:
  triaxis generate runs/gpt_tiny --prompt 'def main('
  triaxis generate runs/gpt_tiny/checkpoints/step_00001000 --prompt 'import ' --temperature 0 --max-new-tokens 64
  triaxis generate runs/gpt_tiny --prompt 'class ' --prompt 'def ' --top-p 0.9 --seed 7 --tp 2 --pp 2 --json

The checkpoint may be of any layout; without --tp and --pp one process reads it. The same seed draws the same text in every
layout (as far as rounding allows: in 16-bit dtypes two layouts may part where two tokens are nearly as likely). Several
prompts are continued one after another, each as if it were alone. A text ends where the model ends the document. An empty
prompt begins a new document. Text goes to stdout, all else to stderr.
"""

DEFAULT_NEW_TOKENS = 128


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "triaxis generate CHECKPOINT [section.key=value ...] --prompt TEXT [options]"
    parser.epilog = EXAMPLES
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="text to be continued; repeatable"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"tokens at most (default: {DEFAULT_NEW_TOKENS}, or fewer where the model's window ends)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="prompt and text together, in tokens (default: the model's seq_length); more than that only with RoPE",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="divides the logits (default: 1); 0: most likely token",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K most likely tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw among the fewest likely tokens that sum to probability P"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Check everything that needs no weights, then start the ranks. Return their exit code."""
    asked = ask(args)
    asked, tokenizer = open_tokenizer(asked)
    # In training, each document follows the previous one's end token, so an empty prompt starts with that token.
    prompts = [(text, tokenizer.encode(text) or [tokenizer.eod_id]) for text in args.prompt]
    lengths = [len(tokens) for _, tokens in prompts]
    refuse([*_sampling_problems(args), *_length_problems(args, asked.config.model, lengths)])
    window = args.max_length or asked.config.model.seq_length
    wanted = args.max_new_tokens or DEFAULT_NEW_TOKENS
    job: dict[str, Any] = {
        "eod_id": tokenizer.eod_id,
        "prompts": [
            {"text": text, "tokens": tokens, "num_tokens": min(wanted, window - len(tokens))}
            for text, tokens in prompts
        ],
        "sampling": {
            "temperature": args.temperature,
            "top_k": args.top_k,
            "top_p": args.top_p,
            "seed": args.seed,
        },
        "window": window,
        "json": args.json,
    }
    return start(asked, "triaxis.launch.inference.generate", job)


def _sampling_problems(args: argparse.Namespace) -> Iterator[str]:
    if not 0 <= args.temperature < float("inf"):
        yield f"--temperature {args.temperature}: must be 0 (the most likely token) or greater; it divides the logits."
    if args.top_k is not None and args.top_k < 1:
        yield f"--top-k {args.top_k}: must be at least 1, or there is no token to draw. Leave it out to draw among all."
    if args.top_p is not None and not 0 < args.top_p <= 1:
        yield f"--top-p {args.top_p}: a probability above 0 and at most 1, or there is no token to draw."


def _length_problems(args: argparse.Namespace, model: ModelConfig, lengths: Sequence[int]) -> Iterator[str]:
    window = args.max_length or model.seq_length
    for option, given in (("--max-new-tokens", args.max_new_tokens), ("--max-length", args.max_length)):
        if given is not None and given < 1:
            yield f"{option} {given}: must be at least 1, or there is nothing to do."
            return
    if window > model.seq_length and model.position_kind.has_table:
        yield (
            f"--max-length {window}: the model has learned {model.seq_length} positions (model.seq_length) and has no "
            f"embedding for further ones. At most {model.seq_length}."
        )
        return
    further = "" if model.position_kind.has_table else ", or allow more with --max-length (RoPE goes on, untrained)"
    for number, length in enumerate(lengths, start=1):
        wanted = args.max_new_tokens or 1
        if length + wanted > window:
            which = "the prompt" if len(lengths) == 1 else f"prompt {number}"
            longest = window - length
            shorter = f"ask for at most --max-new-tokens {longest}" if longest > 0 else "shorten the prompt"
            yield (
                f"{which} has {length:,} tokens, and {wanted:,} more make {length + wanted:,}: the model was trained on "
                f"{model.seq_length:,} positions, and the window is {window:,}. What lies beyond would be noise: "
                f"{shorter}{further}."
            )
