"""The token that ends a document, by its usual names."""

from collections.abc import Callable
from pathlib import Path

from triaxis.engine.errors import DataError

END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""Names of the token, tried in this order where none is given."""


def end_of_document(
    path: Path, id_of: Callable[[str], int | None], eod_token: str | None, own: str | None = None
) -> int:
    """Return the id of the token that ends a document.

    Args:
        path: of the tokenizer.
        id_of: returns the id of a token; None where there is no such token.
        eod_token: the user's choice.
        own: the tokenizer's; used where the user has chosen none.

    Raises:
        DataError: no such token.
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
