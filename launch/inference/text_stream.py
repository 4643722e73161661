"""Decodes text from tokens that arrive one at a time.

ids    72   226   130   172   33     here each token is a byte; a BPE token may also hold a part of a character
text   H    -     -     €     !      text that each token adds; nothing until a character is complete
"""

from collections.abc import Sequence

from triaxis.engine.data.corpus.tokenizer import Tokenizer

UNKNOWN = "�"
"""Replacement that a decoder writes for invalid bytes: an incomplete character, or an undertrained model's output."""


class TextStream:
    """Decoder for a growing text that returns the text that each new token adds.

    New tokens are decoded together with earlier ones, because some tokenizers treat the start of a text differently.

    Args:
        before: the prompt's tokens, which the stream continues.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = list(before)
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """Add a token and return the text that it completes; "" while a character is incomplete."""
        self._waiting.append(token)
        text = self._new_text()
        if not text or text.endswith(UNKNOWN):
            return ""
        self._shown, self._waiting = self._waiting, []
        return text

    def finish(self) -> str:
        """Return the remaining text, in which an incomplete character becomes `UNKNOWN`."""
        return self._new_text()

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode(self._shown + self._waiting)[len(before) :]
