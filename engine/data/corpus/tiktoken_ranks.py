"""Opens the tiktoken library's rank files as tokenizers.

    cl100k_base.tiktoken            each line, such as "IQ== 0", has a token's bytes in base64 and the token's rank
    cl100k_base.tiktoken:PATTERN    PATTERN, a name in PATTERNS or a regular expression, cuts a text before bytes are merged

A token's rank is its id. Another pattern gives other ids, and the file does not contain the pattern. So the pattern must be named,
unless the file name begins with a name from PATTERNS. PATTERNS, not the file, holds the special tokens. If a special token's id is
also a rank, the ranks belong to another encoding. Then the only special token is `<|endoftext|>`, with the first id after the
ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triaxis.engine.data.corpus.end_of_document import end_of_document
from triaxis.engine.data.corpus.optional import need
from triaxis.engine.data.corpus.tokenizer import Tokenizer
from triaxis.engine.errors import DataError
from triaxis.engine.storage.files import sha256_of_file

ENDING = ".tiktoken"
END = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression that cuts text, and the special tokens that may end a document."""

    regex: str
    ends: Mapping[str, int]
    """Special tokens and their ids, which the rank file does not contain."""


# Expressions and ids come from tiktoken_ext/openai_public.py; for Llama 3, from models/llama3/tokenizer.py.
_GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
_O200K = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "gpt2": Pattern(_GPT2, {END: 50256}),
    "r50k_base": Pattern(_GPT2, {END: 50256}),
    "p50k_base": Pattern(_GPT2, {END: 50256}),
    "cl100k_base": Pattern(_CL100K, {END: 100257}),
    "o200k_base": Pattern(_O200K, {END: 199999}),
    "llama3": Pattern(_LLAMA3, {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001}),
}


class TiktokenTokenizer(Tokenizer):
    """A tokenizer from a rank file.

    Args:
        path: path to the rank file.
        pattern: name in PATTERNS or a regular expression; None: the name in PATTERNS with which the file name begins. With a
            regular expression, `<|endoftext|>` is the first id after the ranks.
        eod_token: end-of-document token; None: the first name in END_OF_DOCUMENT_NAMES among the pattern's special tokens.

    Raises:
        DataError: the package tiktoken is missing, the file holds no ranks, no pattern is known, or there is no end-of-document
            token.
    """

    def __init__(self, path: Path, pattern: str | None = None, eod_token: str | None = None) -> None:
        tiktoken, load = (
            need("tiktoken", f"{path}, ranks of tiktoken,"),
            need("tiktoken.load", f"{path}, ranks of tiktoken,"),
        )
        chosen = pattern or next((name for name in PATTERNS if path.name.startswith(name)), None)
        if chosen is None:
            raise DataError(
                f"{path} holds ranks alone, and how a text is cut before they apply is not in the file: another pattern gives "
                f"other ids. Name it with --pattern, or after a colon ({path}:cl100k_base): {', '.join(PATTERNS)}, or a regular "
                f"expression."
            )
        try:
            # The path is absolute, so that a relative name is never taken for an address.
            ranks: dict[bytes, int] = load.load_tiktoken_bpe(str(path.absolute()))
            self._tokens = frozenset(ranks.values())
            own = Pattern(chosen, {END: max(self._tokens) + 1})
            known = PATTERNS.get(chosen, own)
            if not self._tokens.isdisjoint(known.ends.values()):
                known = Pattern(known.regex, own.ends)
            self._encoding: Any = tiktoken.Encoding(
                path.name, pat_str=known.regex, mergeable_ranks=ranks, special_tokens=dict(known.ends)
            )
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} with the pattern {chosen!r} is no tokenizer of tiktoken ({error}). Give a file of lines such as "
                f"'IQ== 0', and {', '.join(PATTERNS)} or a regular expression."
            ) from error
        self.vocab_size = self.text_size = max(*own.ends.values(), *(each + 1 for each in known.ends.values()))
        self.eod_id = end_of_document(path, known.ends.get, eod_token)
        self._content = f"{sha256_of_file(path)} {known.regex}"
        self.identity = self.identity_with(self.eod_id)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoding.encode_ordinary(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._encoding.decode([token for token in ids if token in self._tokens])
        return text
