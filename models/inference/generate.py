"""Generate text with a model on the ranks that hold it, in any layout.

    prompt  --one forward of its tokens-->  caches filled, logits  --draw-->  token  --one forward of it-->  logits ..

The last stage gathers its logits over tp, draws a token, and sends it to the other stages. A draw's noise is a function of (seed,
token position in the text). Every layout therefore writes the same text, with or without a cache.

The model reads at most `window` tokens, at positions 0 .. window - 1, as in training. When the text fills the window, the last half
of the window becomes a new prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from triaxis.engine.comm.texts import gather_text
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.errors import ModelError
from triaxis.engine.numerics.hashing import GOLDEN, key64, mix_words_, shift_right
from triaxis.engine.numerics.precision import DTYPES
from triaxis.engine.pipeline.executor import Executor
from triaxis.engine.pipeline.forwards import of_forward
from triaxis.engine.pipeline.programs import Programs
from triaxis.models.gpt.chunk import GPTChunk
from triaxis.models.inference.decoding import DecodingChunk

if TYPE_CHECKING:  # generation reads neither's own parts
    from triaxis.engine.step import Engine
    from triaxis.models.inference.load import LoadedModel

Model: TypeAlias = "Engine | LoadedModel"
"""A model that generation reads: in training, or loaded from a checkpoint."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters for drawing a token from logits.

    Attributes:
        temperature: divisor for the logits; 0: always choose the most likely token.
        top_k: number of most likely tokens to draw from, plus any tied with the last; None: all.
        top_p: sum of probabilities at which the list of most likely tokens ends, after top_k (1904.09751); None: all.
        seed: noise seed.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


def generate(
    model: Model, prompt: Sequence[int], num_tokens: int, *, temperature: float = 1.0, seed: int = 0
) -> list[int]:
    """Draw `num_tokens` tokens that continue `prompt`, as `stream` does."""
    return list(stream(model, prompt, num_tokens, Sampling(temperature, seed=seed)))


def stream(
    model: Model,
    prompt: Sequence[int],
    num_tokens: int,
    sampling: Sampling,
    *,
    window: int | None = None,
    stop: int | None = None,
) -> Iterator[int]:
    """Yield the tokens that continue `prompt`, one at a time.

    Every rank yields the same tokens.

    Args:
        prompt: at least one token id; if longer than the window, only its last half window is read.
        num_tokens: maximum number of tokens to draw.
        sampling: how to draw a token from logits.
        window: maximum number of tokens that the model reads at once; None uses `model.seq_length`.
        stop: token that ends the text; it is not yielded.
    """
    window = model.config.model.seq_length if window is None else window
    # A window of one token is legal: then only the last token is read.
    restart = max(1, window // 2)
    decoder = Decoder(model, min(window, len(prompt) + num_tokens))
    tokens = list(prompt)
    unread = tokens if len(tokens) <= window else tokens[-restart:]
    for _ in range(num_tokens):
        if decoder.length + len(unread) > window:
            decoder.forget()
            unread = tokens[-restart:]
        token = decoder.next_token(unread, sampling, place=len(tokens))
        if token == stop:
            return
        tokens.append(token)
        unread = [token]
        yield token


class Decoder:
    """Continues one sequence with this rank's chunks and their caches.

    Args:
        model: model to decode with; each call uses its current weights.
        places: number of tokens the caches can hold.

    Raises:
        ModelError: an extension's attention has no cache. Raised on every rank; all ranks build a decoder together.
    """

    def __init__(self, model: Model, places: int) -> None:
        config, self._topology = model.config, model.topology
        self._chunks = [DecodingChunk(_gpt(chunk)) for chunk in model.chunks]
        lacking = max(chunk.without_cache() for chunk in self._chunks)
        if name := max(gather_text(self._topology.axis("world"), lacking, self._topology.device, "generation")):
            raise ModelError(
                f"{name} of model.extension keeps no keys and values of the tokens before, which generation needs. Let the "
                "attention hold `self.mixer = context.mixer(name, kind)` and call it with queries, keys and values, as "
                "triaxis.models.gpt.attention does."
            )
        self._hidden_size, self._vocab_size = config.model.hidden_size, config.model.vocab_size
        self._dtype = DTYPES[config.precision.dtype]
        self._places = places
        sizes = self._topology.sizes
        self._programs = Programs(of_forward(sizes, 1))
        # Only generation uses this group, so it is connected here, where no send is in flight.
        self._topology.axis("pp").connect(self._topology.device)
        self.forget()

    def forget(self) -> None:
        """Empty the caches, so that the next tokens start a new prompt."""
        self.length = 0
        for chunk in self._chunks:
            for cache in chunk.caches():
                cache.forget(self._places)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """Read tokens, and return the logits [V] for the token after them.

        The first call reads a prompt, each later call one token. Ranks without the last stage return None.
        """
        topology = self._topology
        # Activations between stages are as long as the tokens just read, so each pass has its own shape.
        executor = Executor(
            topology, [chunk.queue for chunk in self._chunks], (len(tokens), 1, self._hidden_size), self._dtype
        )
        outputs = executor.run(
            self._programs.next(),
            [_batch(tokens, self.length, topology.device)],
            lambda chunk, x, batch: self._chunks[chunk].decode(x, batch),
        )
        self.length += len(tokens)
        if not outputs:
            return None
        return topology.axis("tp").all_gather(outputs[0][0, 0], "generation").wait()[: self._vocab_size]

    def next_token(self, tokens: Sequence[int], sampling: Sampling, place: int) -> int:
        """Read tokens and draw the token after them, the same on every rank.

        `place` is the drawn token's position in the text.
        """
        logits = self.logits(tokens)
        # All tp ranks of the last stage draw alike from the gathered logits; the other stages receive the token.
        token = torch.zeros(1, dtype=torch.int64, device=self._topology.device)
        if logits is not None:
            token.fill_(sample_token(logits.cpu(), sampling, place))
        placement = self._programs.schedule.placement
        last_stage_rank = placement.rank_of(placement.num_stages - 1)
        return int(self._topology.axis("pp").broadcast(token, last_stage_rank, "generation").wait())


def sample_token(logits: torch.Tensor, sampling: Sampling, place: int) -> int:
    """Draw one token id from logits [V] on the CPU.

    argmax(logits / temperature + Gumbel noise) samples the logits' softmax. `place` is the drawn token's position in the text. Each
    token id has its own noise, so layouts whose logits differ by rounding rarely draw different tokens.
    """
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    scores = logits.double() / sampling.temperature
    if sampling.top_k is not None:
        least = scores.topk(min(sampling.top_k, len(scores))).values[-1]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p is not None:
        probabilities, order = scores.softmax(-1).sort(descending=True, stable=True)
        before = probabilities.cumsum(-1) - probabilities
        scores[order[before >= sampling.top_p]] = -torch.inf
    return int((scores + _gumbel(sampling.seed, place, len(scores))).argmax())


def _gumbel(seed: int, place: int, num: int) -> torch.Tensor:
    """Compute standard Gumbel noise, float64 [num], for each token id at text position `place`."""
    words = mix_words_((torch.arange(num) + 1) * GOLDEN + key64(f"{seed}/generation/{place}"))
    # Use the top 53 bits, plus a half so that u is never 0 or 1.
    u = (shift_right(words, 11).double() + 0.5) * 2.0**-53
    return -(-u.log()).log()


def _gpt(chunk: object) -> GPTChunk:
    assert isinstance(chunk, GPTChunk), f"{type(chunk).__name__} has no attention caches"
    return chunk


def _batch(tokens: Sequence[int], first: int, device: torch.device) -> MicroBatch:
    """Build an unlabeled one-sample batch whose first token is at position `first`."""
    ids = torch.tensor([list(tokens)], device=device)
    return MicroBatch(
        tokens=ids,
        labels=torch.zeros_like(ids),
        loss_mask=torch.zeros_like(ids, dtype=torch.bool),
        position_ids=torch.arange(first, first + len(tokens), device=device).unsqueeze(0),
        sample_ids=[0],
        num_tokens=0,
    )
