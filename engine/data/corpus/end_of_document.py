"""Finds a tokenizer's end-of-document token."""

from collections.abc import Callable
from pathlib import Path

from triaxis.engine.errors import DataError

END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""Usual token names, tried in this order if no name is given."""


def end_of_document(
    path: Path, id_of: Callable[[str], int | None], eod_token: str | None, own: str | None = None
) -> int:
    """Look up the end-of-document token's id.

    Without `eod_token` and `own`, the usual names are tried.

    Args:
        path: path of the tokenizer, for error messages.
        id_of: function (token) -> the token's id, or None.
        eod_token: token that the user named, if any.
        own: token that the tokenizer itself names, used without `eod_token`.

    Raises:
        DataError: the tokenizer has no such token.
    """
    chosen = eod_token or own
    names = END_OF_DOCUMENT_NAMES if chosen is None else (chosen,)
    for name in names:
        if (found := id_of(name)) is not None:
            return found
    raise DataError(
        f"{path} has no token {' or '.join(names)}: without a token between documents the model would learn that one "
        f"document continues the other. Name the token with --eod-token."
    )
