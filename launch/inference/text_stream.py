"""Text from tokens that come one at a time.

ids    72  226 130 172  33           bytes; of a BPE likewise, whose tokens may hold parts of a character
text   H   -   -   €    !            nothing is shown before its character is complete
"""

from collections.abc import Sequence

from triaxis.engine.data.corpus.tokenizers import Tokenizer

UNKNOWN = "�"
"""What a decoder writes for bytes that are no character: the beginning of one, or what a young model makes up."""


class TextStream:
    """Decoder of a growing text: each token becomes the text that it adds.

    Some tokenizers write a token differently at the start of a text, so a new token is decoded together with those
    of the last complete piece, whose text is then cut off.

    Args:
        before: the tokens that the stream continues.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = list(before)
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """Add a token and return the text that is complete with it; may be empty."""
        self._waiting.append(token)
        text = self._new_text()
        if not text or text.endswith(UNKNOWN):
            return ""
        self._shown, self._waiting = self._waiting, []
        return text

    def finish(self) -> str:
        """Return the rest at the end: an incomplete character as `UNKNOWN`."""
        text = self._new_text()
        self._shown, self._waiting = self._waiting, []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode(self._shown + self._waiting)[len(before) :]
