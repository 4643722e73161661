"""The bytes tokenizer as a tokenizer.json, so that a model trained on bytes reads text in transformers too.

    text  --UTF-8-->  bytes  --GPT-2's letters for bytes-->  "Ġ" for 32, ..  --a vocabulary without merges-->  ids 0 .. 255

The `tokenizers` library works on letters, so GPT-2 gave every byte one: itself where it can be printed, else the next letter from
U+0100 on. Here the letter of byte b has the id b, and 256 ends a document.
"""

from engine.data.corpus.end_of_document import END_OF_DOCUMENT_NAMES
from engine.data.corpus.tokenizers import BytesTokenizer

_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))


def bytes_tokenizer_json() -> str:
    """Build a tokenizer.json that gives the ids of `engine.data.corpus.tokenizers.BytesTokenizer`."""
    import tokenizers  # 10 MB of native code: only for those who export a model of bytes
    from tokenizers import decoders, models, pre_tokenizers

    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    letters = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_DOCUMENT_NAMES[0]])
    assert tokenizer.token_to_id(END_OF_DOCUMENT_NAMES[0]) == BytesTokenizer().eod_id, "special tokens follow the bytes"
    content: str = tokenizer.to_str()
    return content
