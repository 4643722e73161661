"""The `.bin/.idx` pair: token for token with megatron-core, whole or not there, and checked when opened."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lacking import need_package
from triaxis.engine.data.corpus.indexed import HEADER, IndexedTokens, IndexedWriter, bin_path, idx_path, smallest_dtype
from triaxis.engine.errors import DataError

DOCUMENTS = [np.array([1, 2, 3]), np.array([], np.int64), np.array([65535, 0]), np.arange(100)]


@pytest.fixture(scope="module")
def megatron() -> Any:
    need_package("megatron.core", "pip install 'megatron-core>=0.16,<0.17'")
    import torch  # noqa: F401  (megatron-core needs it loaded first)
    from megatron.core.datasets import indexed_dataset

    return indexed_dataset


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_megatron_reads_ours(write_corpus: Callable[..., str], megatron: Any, dtype: str) -> None:
    documents = [document % 100 for document in DOCUMENTS]
    theirs = megatron.IndexedDataset(write_corpus(documents, dtype=dtype))
    assert len(theirs) == len(documents)
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4]
    for index, document in enumerate(documents):
        if len(document):  # numpy.frombuffer, which it reads with, takes count 0 for an error
            assert theirs[index].dtype == dtype
            assert theirs[index].tolist() == document.tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint16])
def test_we_read_megatrons_documents_of_several_sequences(tmp_path: Path, megatron: Any, dtype: type) -> None:
    sequences = [np.arange(start, start + 2 + start % 5) % 120 for start in range(20)]
    prefix = str(tmp_path / "theirs")
    builder = megatron.IndexedDatasetBuilder(str(bin_path(prefix)), dtype=dtype)
    for index, sequence in enumerate(sequences):
        import torch

        builder.add_item(torch.from_numpy(sequence))
        if index % 4 == 3:
            builder.end_document()
    builder.finalize(str(idx_path(prefix)))

    ours = IndexedTokens(prefix)
    assert (ours.num_sequences, ours.num_documents, ours.dtype) == (20, 5, np.dtype(dtype))
    assert ours.num_tokens == sum(map(len, sequences))
    for document in range(5):
        expected = np.concatenate(sequences[4 * document : 4 * document + 4])
        assert ours.tokens(document).tolist() == expected.tolist()
        for start in range(len(expected) + 1):
            assert ours.tokens(document, start, start + 4).tolist() == expected[start : start + 4].tolist()
    assert ours.document_lengths(range(1, 4)).tolist() == [len(ours.tokens(document)) for document in range(1, 4)]


def test_smallest_dtype_is_megatrons(megatron: Any) -> None:
    for vocab_size in (257, 65499, 65500, 128_000):
        assert smallest_dtype(vocab_size) == megatron.DType.optimal_dtype(vocab_size)


def test_reads_what_it_wrote(write_corpus: Callable[..., str]) -> None:
    tokens = IndexedTokens(write_corpus(DOCUMENTS))
    assert (tokens.num_documents, tokens.num_tokens, tokens.dtype) == (4, 105, np.uint16)
    for index, document in enumerate(DOCUMENTS):
        assert tokens.sequence(index).tolist() == tokens.tokens(index).tolist() == document.tolist()


def test_fingerprint_follows_the_content_not_the_path(write_corpus: Callable[..., str]) -> None:
    other = [*DOCUMENTS[:3], DOCUMENTS[3] + 1]
    one, same, changed = (
        IndexedTokens(write_corpus(documents, name)).fingerprint
        for documents, name in ((DOCUMENTS, "a"), (DOCUMENTS, "b"), (other, "c"))
    )
    assert one == same != changed


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), IndexedWriter(tmp_path / "x", "uint16") as writer:
        writer.add_document([1, 2])
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_an_exception_keeps_the_older_pair(write_corpus: Callable[..., str]) -> None:
    prefix = write_corpus(DOCUMENTS)
    with pytest.raises(RuntimeError, match="stop"), IndexedWriter(prefix, "uint16") as writer:
        writer.add_document([1, 2])
        raise RuntimeError("stop")
    assert IndexedTokens(prefix).num_tokens == 105
    assert len(list(Path(prefix).parent.iterdir())) == 2


def test_no_old_index_ever_describes_a_new_bin(
    write_corpus: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_corpus(DOCUMENTS)
    rename = Path.replace

    def fail_for_the_index(path: Path, target: Path) -> Path:
        if target.suffix == ".idx":
            raise OSError("the machine stops between the two renames")
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", fail_for_the_index)
    with pytest.raises(OSError, match="between the two"), IndexedWriter(prefix, "uint16") as writer:
        for document in reversed(DOCUMENTS):  # the same size: only the index could tell
            writer.add_document(document)
    with pytest.raises(DataError, match=r"corpus\.idx does not exist"):
        IndexedTokens(prefix)


@pytest.mark.parametrize("token", [-1, 65536])
def test_a_token_that_does_not_fit_is_refused(tmp_path: Path, token: int) -> None:
    with pytest.raises(DataError, match="wrap around"), IndexedWriter(tmp_path / "x", "uint16") as writer:
        writer.add_document([1, token])


def test_floats_are_no_tokens(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="float32"):
        IndexedWriter(tmp_path / "x", "float32")


def test_a_path_that_means_a_corpus_is_told_its_prefix(write_corpus: Callable[..., str], tmp_path: Path) -> None:
    prefix = write_corpus([np.arange(3)], "corpus")
    for name in (f"{prefix}.bin", f"{prefix}.idx", f"{prefix}/", str(tmp_path)):
        with pytest.raises(DataError, match=rf"^{name} is not a corpus path.*: give {prefix}$"):
            IndexedTokens(name)
    with pytest.raises(DataError, match="Prepare one"):
        IndexedTokens(f"{prefix}2.bin")


def test_a_pointer_in_place_of_tokens_is_named(write_corpus: Callable[..., str]) -> None:
    prefix = write_corpus([np.arange(3)])
    bin_path(prefix).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0f' * 32}\nsize 6\n")
    with pytest.raises(DataError, match=r"\.bin is not there yet.*git lfs pull"):
        IndexedTokens(prefix)


def _change(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


POINTERS = HEADER.size + 4 * len(DOCUMENTS)
INDICES = POINTERS + 8 * len(DOCUMENTS)
DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "no bin": (lambda bin_, idx: bin_.unlink(), r"corpus\.bin does not exist"),
    "no idx": (lambda bin_, idx: idx.unlink(), r"corpus\.idx does not exist"),
    "bin truncated": (lambda bin_, idx: os.truncate(bin_, 150), r"150 bytes: its tokens would be noise"),
    "bin too long": (lambda bin_, idx: _change(bin_, 210, b"\0\0"), r"212 bytes; expected 210 bytes"),
    "bin empty": (lambda bin_, idx: os.truncate(bin_, 0), r"0 bytes"),
    "idx empty": (lambda bin_, idx: os.truncate(idx, 0), r"0 bytes; expected at least 34"),
    "idx header only": (lambda bin_, idx: os.truncate(idx, 20), r"20 bytes; expected at least 34"),
    "idx truncated": (lambda bin_, idx: os.truncate(idx, 100), r"100 bytes; expected 122 bytes"),
    "wrong magic": (lambda bin_, idx: _change(idx, 0, b"TNTIDX"), r"begins with b'TNTIDX"),
    "wrong version": (lambda bin_, idx: _change(idx, 9, b"\x02"), r"version 2"),
    "unknown dtype": (lambda bin_, idx: _change(idx, 17, b"\x63"), r"dtype code 99"),
    "float dtype": (lambda bin_, idx: _change(idx, 17, b"\x07"), r"dtype code 7"),
    "pointer beyond": (
        lambda bin_, idx: _change(idx, POINTERS + 24, struct.pack("<q", 500)),
        r"sequence 3 claims .* byte 500",
    ),
    "pointer that wraps": (
        lambda bin_, idx: _change(idx, POINTERS + 24, struct.pack("<q", 2**63 - 100)),
        r"sequence 3 claims .* byte 9,223,372,036,854,775,708",
    ),
    "pointer negative": (lambda bin_, idx: _change(idx, POINTERS, struct.pack("<q", -2)), r"sequence 0 claims"),
    "pointer odd": (lambda bin_, idx: _change(idx, POINTERS, struct.pack("<q", 1)), r"sequence 0 claims"),
    "length negative": (lambda bin_, idx: _change(idx, HEADER.size, struct.pack("<i", -3)), r"sequence 0 claims"),
    "indices fall": (lambda bin_, idx: _change(idx, INDICES + 8, struct.pack("<q", 3)), r"rising list from 0 to 4"),
    "indices end early": (
        lambda bin_, idx: _change(idx, INDICES + 32, struct.pack("<q", 3)),
        r"rising list from 0 to 4",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_name(write_corpus: Callable[..., str], damage: str) -> None:
    prefix = write_corpus(DOCUMENTS)
    IndexedTokens(prefix)
    action, message = DAMAGES[damage]
    action(bin_path(prefix), idx_path(prefix))
    with pytest.raises(DataError, match=message) as raised:
        IndexedTokens(prefix)
    assert prefix in str(raised.value)
    assert "repare" in str(raised.value)
