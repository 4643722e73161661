"""Write a small corpus for an oracle, and read it without `engine/data`.

    PREFIX.bin, PREFIX.idx  --`rows_of_steps`-->  every microbatch's tokens, labels and masks

`rows_of_steps` follows the formulas that `engine/data` documents, but shares no code with it. So an error in our loader shows as a
difference.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from triaxis.engine.config.schema.data import DataConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.sources import Source

CORPUS = "corpus"
"""File name, without suffix, of the corpus in a comparison's folder."""

TOKENIZER = "tokenizer.json"
"""File name of the corpus's tokenizer in the same folder."""

HEADER = struct.Struct("<9sQBQQ")
MAGIC, VERSION, UINT16 = b"MMIDIDX\x00\x00", 1, 8
LONGEST_DOCUMENT = 3
"""Bound for a document's length, in samples; a run that depends on documents uses 1, so that samples have several documents."""


@dataclass(frozen=True, slots=True)
class OracleBatch:
    """One microbatch with b samples of s labels.

    Attributes:
        tokens, labels: int64 [b, s].
        loss_mask: bool [b, s]; True for labels that count.
        documents: int64 [b, s]; each token's document number in its row, from 0.
        positions: int64 [b, s]; each token's position in its sample. With `data.positions: document`: its position in its document.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    documents: NDArray[np.int64]
    positions: NDArray[np.int64]
    sample_ids: list[int]


def with_corpus(config: Config, folder: Path) -> Config:
    """Return a configuration that reads the corpus and the tokenizer in `folder`.

    All documents are for training. Settings about documents stay as they are.
    """
    corpus, tokenizer = str(folder / CORPUS), str(folder / TOKENIZER)
    of_documents = config.data.model_dump(include={"attention", "positions", "count_document_starts"})
    data = DataConfig(train=[Source(path=corpus)], split=(1.0, 0.0, 0.0), tokenizer=tokenizer, **of_documents)
    return config.model_copy(update={"data": data})


def write_corpus(config: Config, folder: Path) -> None:
    """Write a corpus with random tokens and lengths, and a tokenizer.

    The corpus is so small that the steps in `config` need more than one epoch. The tokenizer has one word for each id in the model.
    """
    model, train = config.model, config.train
    draw = np.random.default_rng(train.seed)
    needed = (train.steps or 1) * train.global_batch_size * model.seq_length
    longest = (1 if config.data.reads_documents else LONGEST_DOCUMENT) * model.seq_length
    lengths: list[int] = []
    while sum(lengths) < max(needed * 2 // 3, 2 * model.seq_length):
        lengths.append(int(draw.integers(1, longest)))
    tokens = draw.integers(0, model.vocab_size, sum(lengths)).astype("<u2")
    tokens.tofile(folder / f"{CORPUS}.bin")
    starts = np.cumsum([0, *lengths[:-1]]) * tokens.itemsize
    with (folder / f"{CORPUS}.idx").open("wb") as handle:
        handle.write(HEADER.pack(MAGIC, VERSION, UINT16, len(lengths), len(lengths) + 1))
        handle.write(np.array(lengths, "<i4").tobytes())
        handle.write(starts.astype("<i8").tobytes())
        handle.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    words = WordLevel({str(token): token for token in range(model.vocab_size)}, unk_token="0")
    Tokenizer(words).save(str(folder / TOKENIZER))


def rows_of_steps(config: Config, masked_fraction: float) -> Iterator[list[OracleBatch]]:
    """Yield the microbatches of each step for one process.

    Row k in microbatch j is sample number consumed + j x micro + k, where `consumed` samples precede the step and `micro` is the
    microbatch size.

    Args:
        config: configuration with the corpus in `data.train`.
        masked_fraction: probability that a label is not counted.
    """
    train, micro = config.train, config.train.micro_batch_size
    samples = _Samples(config.data, config.model.seq_length, train.seed)
    for step in range(train.steps or 1):
        consumed = step * train.global_batch_size
        yield [
            _rows(samples, list(range(first, first + micro)), train.seed, masked_fraction)
            for first in range(consumed, consumed + train.global_batch_size, micro)
        ]


def _rows(samples: "_Samples", ids: list[int], seed: int, masked_fraction: float) -> OracleBatch:
    tokens, labels, is_counted, documents, positions = (
        np.stack(part) for part in zip(*(samples.row(number) for number in ids), strict=True)
    )
    draws = np.stack([_random_bits(tokens.shape[1], "synthetic mask", seed, number) for number in ids])
    is_counted &= (draws >> np.uint64(11)) * 2.0**-53 >= masked_fraction
    return OracleBatch(tokens, labels, is_counted, documents, positions, ids)


class _Samples:
    """The samples from all documents in a corpus, epoch after epoch."""

    def __init__(self, data: DataConfig, seq_length: int, seed: int) -> None:
        prefix, self._data = data.train[0].path, data
        content = Path(f"{prefix}.idx").read_bytes()
        _, _, _, num_sequences, num_bounds = HEADER.unpack(content[: HEADER.size])
        lengths = np.frombuffer(content, "<i4", num_sequences, HEADER.size)
        pointers = np.frombuffer(content, "<i8", num_sequences, HEADER.size + lengths.nbytes)
        bounds = np.frombuffer(content, "<i8", num_bounds, HEADER.size + lengths.nbytes + pointers.nbytes)
        stored = np.fromfile(f"{prefix}.bin", "<u2").astype(np.int64)
        sequences = [stored[at // 2 : at // 2 + length] for at, length in zip(pointers, lengths, strict=True)]
        self._documents = [np.concatenate(sequences[a:b]) for a, b in pairwise(bounds)]
        self._length, self._seed = seq_length, seed
        self._per_epoch = (sum(map(len, self._documents)) - 1) // seq_length

    def row(self, sample_id: int) -> tuple[NDArray[Any], ...]:
        """Read one sample, as a row [s] for each array in `OracleBatch`.

        Sample k of an epoch has the tokens k s .. k s + s - 1 in the epoch's shuffled documents. The label of a
        token is the next token.
        """
        epoch, place = divmod(sample_id, self._per_epoch)
        order = _permutation(len(self._documents), "documents", self._seed, epoch)
        stream = np.concatenate([self._documents[number] for number in order])
        document = np.repeat(np.arange(len(order)), [len(self._documents[number]) for number in order])
        start = int(_permutation(self._per_epoch, "samples", self._seed, epoch)[place]) * self._length
        row, after = slice(start, start + self._length), slice(start + 1, start + 1 + self._length)
        documents = document[row] - document[start]
        positions = np.arange(self._length)
        if self._data.positions == "document":
            positions -= np.searchsorted(documents, documents)  # place of each document's first token
        is_counted = np.full(self._length, True)
        if not self._data.count_document_starts:
            is_counted = document[after] == document[row]
        return stream[row], stream[after], is_counted, documents, positions


def _random_bits(count: int, *key: int | str) -> NDArray[np.uint64]:
    digest = hashlib.sha256(json.dumps(key).encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(count)


def _permutation(count: int, *key: int | str) -> NDArray[np.int64]:
    """Shuffle 0 .. count - 1 by the high bits of each index's random draw. Indices with equal bits stay in order."""
    index_bits = np.uint64(max(count - 1, 0).bit_length())
    return np.argsort(_random_bits(count, *key) >> index_bits, kind="stable")
