"""Train a tokenizer on the corpus itself, for `train-bpe:32000`.

    pieces of the input --evenly spread, TRAINING_BYTES at most--> documents --tokenizers' BpeTrainer--> PREFIX.tokenizer.json

The result is a byte-level BPE like GPT-2's, so any text has ids. The same text gives the same file, because ties are decided by id.
"""

from collections.abc import Iterator, Sequence

from triaxis.engine.data.corpus.end_of_document import END_OF_DOCUMENT_NAMES
from triaxis.engine.data.corpus.findings import OnBad, Reading, no_vocabulary
from triaxis.engine.data.corpus.pieces import Unit
from triaxis.engine.errors import DataError, shown
from triaxis.launch.prepare.encode import documents

PREFIX = "train-bpe:"
TRAINING_BYTES = 256 * 2**20
"""Most training text, in bytes; more text would change the merges little."""
SMALLEST_VOCABULARY = 257
"""256 bytes and the end-of-document token."""
LARGEST_VOCABULARY = 2**24
"""Far above any vocabulary in use; a limit is needed because the library allocates memory for the whole vocabulary at once."""


def size_to_train(name: str) -> int | None:
    """Parse N from `train-bpe:N`; None for any other tokenizer name.

    Raises:
        DataError: N is not a number from SMALLEST_VOCABULARY to LARGEST_VOCABULARY.
    """
    if not name.startswith(PREFIX):
        return None
    number = name.removeprefix(PREFIX)
    size = int(number) if number.isdecimal() and len(number) < 12 else 0
    if not SMALLEST_VOCABULARY <= size <= LARGEST_VOCABULARY:
        raise DataError(
            f"--tokenizer {shown(name)}: a vocabulary is a number of {SMALLEST_VOCABULARY} tokens, 256 bytes and the end of a "
            f"document, to {LARGEST_VOCABULARY:,}, for example {PREFIX}32000."
        )
    return size


def train_bpe(units: Sequence[Unit], vocab_size: int, eod_token: str | None, on_bad: OnBad) -> bytes:
    """Train a tokenizer and return its tokenizer.json. A short text may give fewer than `vocab_size` tokens.

    Raises:
        DataError: an input is bad and `on_bad` is stop, or an input holds tokens and no text.
    """
    import tokenizers  # 10 MB of native code, only needed here
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eod_token or END_OF_DOCUMENT_NAMES[0]],
        # Sorted, since the library lists the bytes in another order in each process.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(units, on_bad), trainer)
    content: str = tokenizer.to_str(pretty=True)
    return content.encode()


def _sample(units: Sequence[Unit], on_bad: OnBad) -> Iterator[str]:
    """Yield texts from evenly spaced units, until they have more than TRAINING_BYTES characters.

    Bad input is not counted here.
    """
    total = sum(piece.num_bytes for unit in units for piece in unit)
    step = max(1, -(-total // TRAINING_BYTES))
    left = TRAINING_BYTES
    for unit in units[::step]:
        for piece in unit:
            for document in documents(piece, Reading(on_bad)):
                if not isinstance(document.content, str):
                    raise no_vocabulary()
                yield document.content
                left -= len(document.content)
                if left < 0:
                    return
