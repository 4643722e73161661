"""Compute a text's loss under a model, in windows that predict each token once.

    inputs    eod t0 t1 t2 t3 t4 ..        the text as a separate document, after the end of another
    labels    t0  t1 t2 t3 t4 t5 ..

    window 0  |--- seq_length ---|         all labels are counted
    window 1        |--- seq_length ---|   starts `stride` tokens later; window 0's labels are not counted again

With stride = seq_length, the model reads each token once. A smaller stride costs more forwards. Each token then has at least
seq_length - stride tokens of context, except at the start of the text.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from triaxis.engine.config.quantities.plan import local_seq_length
from triaxis.engine.data.corpus.indexed import IndexedTokens
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.data.samples import Sample
from triaxis.engine.errors import DataError, DivergenceError
from triaxis.engine.numerics.precision import DTYPES
from triaxis.engine.pipeline.executor import Executor
from triaxis.engine.pipeline.forwards import of_forward
from triaxis.engine.pipeline.programs import Programs
from triaxis.engine.step_result import without_room
from triaxis.models.inference.load import LoadedModel


class TokenSource(Protocol):
    """A text of `num_tokens` token ids. `read` returns ids `start` to `stop` - 1, or fewer at the end of the text."""

    num_tokens: int

    def read(self, start: int, stop: int) -> NDArray[np.int64]: ...


class ListedTokens:
    """A text whose token ids are in memory."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = np.asarray(tokens, np.int64)
        self.num_tokens = len(self._tokens)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens `start` to `stop` - 1."""
        return self._tokens[start:stop]


class CorpusTokens:
    """A text that consists of a `.bin/.idx` pair's documents, in stored order.

    The text ends after `num_tokens` tokens; None: it has all the documents.
    """

    def __init__(self, corpus: IndexedTokens, num_tokens: int | None = None) -> None:
        self._corpus = corpus
        lengths = corpus.document_lengths(range(corpus.num_documents))
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        total = int(self._starts[-1])
        self.num_tokens = total if num_tokens is None else min(num_tokens, total)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens `start` to `stop` - 1."""
        stop = min(stop, self.num_tokens)
        parts = [np.empty(0, np.int64)]
        document = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            first = start - int(self._starts[document])
            part = self._corpus.tokens(document, first, first + stop - start)
            parts.append(part.astype(np.int64))
            start += len(part)
            document += 1
        return np.concatenate(parts)


class Windows:
    """Dataset whose sample i is window i of a text.

    Samples after the last window have no labels that count in the loss.

    Args:
        text: source of the tokens.
        before: token before the text (the end-of-document token).
        seq_length: window length in tokens.
        stride: distance between two window starts, 1 .. seq_length.
        vocab_size: V; tokens must be below it.
    """

    def __init__(self, text: TokenSource, before: int, *, seq_length: int, stride: int, vocab_size: int) -> None:
        self.text, self.before, self.vocab_size = text, before, vocab_size
        self.seq_length, self.stride = seq_length, stride
        self.num_windows = 1 + -(-max(0, text.num_tokens - seq_length) // stride)

    def __getitem__(self, index: int) -> Sample:
        """Build the sample for the window `index`, from 0.

        Raises:
            DataError: a token is not in the model's vocabulary.
        """
        start, length = index * self.stride, self.seq_length
        labels = self.text.read(start, start + length)
        if len(labels) and not 0 <= labels.min() <= labels.max() < self.vocab_size:
            raise DataError(
                f"token ids {labels.min()} .. {labels.max()} stand in window {index}, but model.vocab_size = {self.vocab_size}: "
                "there is no embedding for them. The text was encoded with another tokenizer than the model's; encode it with "
                "the model's."
            )
        tokens = np.zeros(length + 1, np.int64)
        tokens[0] = self.before if start == 0 else self.text.read(start - 1, start)[0] if len(labels) else 0
        tokens[1 : 1 + len(labels)] = labels
        # Window 0 counts all its labels, the others their last `stride`.
        counted = np.zeros(length, np.bool_)
        counted[0 if index == 0 else length - self.stride : len(labels)] = True
        return Sample(tokens, counted, self.lengths(index))

    def lengths(self, index: int) -> tuple[int, ...]:
        """Return the lengths of a window's documents: one length, because a text is one document."""
        return (self.seq_length + 1,)


def loss_of(model: LoadedModel, steps: Iterable[Sequence[MicroBatch]]) -> tuple[float, int]:
    """Sum the losses, in nats, of all labels that count, over all `steps` and ranks.

    Every rank returns the same values: (sum of losses, number of labels summed).

    Args:
        steps: this data-parallel rank's microbatches for each global batch, equally many in every step.

    Raises:
        DivergenceError: the experts' buffers were too small for the tokens; raised on every rank.
    """
    config, topology = model.config, model.topology
    sizes = topology.sizes
    shape = (local_seq_length(config), config.train.micro_batch_size, config.model.hidden_size)
    executor = Executor(topology, [chunk.queue for chunk in model.chunks], shape, DTYPES[config.precision.dtype])
    loss_sum, num_tokens = 0.0, 0.0
    load = model.chunks[0].load
    if load is not None:
        load.begin()
    programs: Programs | None = None
    for microbatches in steps:
        if programs is None:
            programs = Programs(of_forward(sizes, len(microbatches)))
        losses = executor.run(programs.next(), microbatches, lambda chunk, x, batch: model.chunks[chunk](x, batch))
        # Counted once per model replica, by tp rank 0 on the last stage.
        if losses and topology.coordinates.tp == 0:
            loss_sum += sum(float(loss) for loss in losses)
            num_tokens += sum(microbatch.num_tokens for microbatch in microbatches)
    lost = 0 if load is None else int(load.overflow)
    sums = topology.axis("world").sum_values([loss_sum, num_tokens, lost], topology.device, "evaluation")
    loss_sum, total, lost_anywhere = sums
    if lost_anywhere:
        raise DivergenceError(f"Evaluation: {without_room(int(lost_anywhere))}.")
    return loss_sum, int(total)
