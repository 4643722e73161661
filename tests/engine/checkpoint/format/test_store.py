"""Tensors saved in one layout and loaded in another: the same bits, whatever the two; and other tools read the files."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.engine.checkpoint.samples import (
    bits,
    cuts,
    dtypes,
    empty,
    model,
    shapes,
    shard,
    training_shards,
    whole_of,
    write_folder,
)
from triaxis.engine.checkpoint.format.manifest import DataFile, read_manifest
from triaxis.engine.checkpoint.format.store import PieceReader, Shard, load, write_file
from triaxis.engine.checkpoint.import_weights import whole
from triaxis.engine.errors import CheckpointError


@st.composite
def relayouts(draw: st.DrawFn) -> tuple[torch.Tensor, list, list, int, int]:
    """(tensor, cut of the saving layout, cut of the loading layout, number of files, bytes of a piece)."""
    shape = draw(shapes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(draw(dtypes))
    return (
        values,
        draw(cuts(shape)),
        draw(cuts(shape)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 16, 40, 2**20])),
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(relayouts())
def test_what_one_layout_saves_any_other_loads(tmp_path_factory: pytest.TempPathFactory, case) -> None:
    values, saved, loaded, num_files, piece_bytes = case
    folder = tmp_path_factory.mktemp("save")
    files = [[shard("w", values, cut) for cut in saved[number::num_files]] for number in range(num_files)]
    write_folder(folder, files, piece_bytes=piece_bytes, content="weights")
    manifest = read_manifest(folder)
    targets = [empty("w", values, cut) for cut in loaded]
    load(folder, manifest, targets)
    assert bits(whole_of(values.shape, targets, values.dtype)) == bits(values)
    assert max(piece.num_bytes for file in manifest.files for piece in file.pieces) <= max(
        piece_bytes, values.element_size()
    )


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(relayouts())
def test_safetensors_reads_the_same_values(tmp_path_factory: pytest.TempPathFactory, case) -> None:
    values, saved, _, _, piece_bytes = case
    folder = tmp_path_factory.mktemp("save")
    entry = write_folder(
        folder, [[shard("w", values, cut) for cut in saved]], piece_bytes=piece_bytes, content="weights"
    ).files[0]
    flat_shards = [shard("w", values, (piece.box, piece.start, piece.stop)) for piece in entry.pieces]
    with safe_open(folder / entry.name, framework="pt") as file:
        names = list(file.keys())
        assert len(names) == len(entry.pieces)
        read = {name: file.get_tensor(name) for name in names}
    assert sorted(map(bits, read.values())) == sorted(bits(part.values) for part in flat_shards)
    first = next(iter(read.values()))
    assert first.dtype == values.dtype
    for name in names:
        # A name says where the first element stands in the row-major global tensor.
        at = int(name.removeprefix("master:w@"))
        assert bits(read[name][:1]) == bits(values.reshape(-1)[at : at + 1])


def test_a_file_without_tensors_is_legal(tmp_path: Path) -> None:
    entry = write_file(tmp_path / "rank_00000.safetensors", [])
    assert entry.pieces == ()
    with safe_open(tmp_path / "rank_00000.safetensors", framework="pt") as file:
        assert list(file.keys()) == []


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.safetensors"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        write_file(path, [whole("w", torch.ones(3))])
    assert path.read_bytes() == b"precious"


def test_values_are_converted_where_dtypes_differ(tmp_path: Path) -> None:
    tensors = model(dtype=torch.bfloat16)
    manifest = write_folder(
        tmp_path / "a", [[whole(name, values) for name, values in tensors.items()]], content="weights"
    )
    targets = [whole(name, torch.zeros(values.shape, dtype=torch.float64)) for name, values in tensors.items()]
    load(tmp_path / "a", manifest, targets)
    for target in targets:
        assert torch.equal(target.values.view(target.shape), tensors[target.name].double())


def test_only_the_pieces_that_are_needed_are_read(tmp_path: Path) -> None:
    """A rank of a large run reads its part: damage elsewhere is none of its business."""
    values = torch.arange(64, dtype=torch.float64).view(8, 8)
    files = [[shard("w", values, (((0, 8), (0, 8)), start, start + 32))] for start in (0, 32)]
    manifest = write_folder(tmp_path / "a", files, content="weights")
    damaged = tmp_path / "a" / manifest.files[1].name
    damaged.write_bytes(b"\0" * damaged.stat().st_size)
    target = empty("w", values, (((0, 4), (0, 8)), 0, 32))
    load(tmp_path / "a", manifest, [target])
    assert torch.equal(target.values, values[:4].flatten())
    with pytest.raises(CheckpointError, match=manifest.files[1].name):
        load(tmp_path / "a", manifest, [empty("w", values, (((0, 5), (0, 8)), 0, 40))])


def test_pieces_in_a_row_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks take one long request faster than many short ones; what is not wanted ends a row, and so does the bound."""
    values = torch.arange(2**20, dtype=torch.float64).view(8, -1)
    quarter = 2**18
    names = ["a", "b", "c", "d"]
    files = [[shard(name, values, (((0, 8), (0, 2**17)), 0, 2**20)) for name in names]]
    manifest = write_folder(tmp_path / "a", files, content="weights", piece_bytes=quarter * 8)
    reads: list[int] = []

    def counted(reader: PieceReader, file: DataFile, offset: int, num_bytes: int) -> torch.Tensor:
        reads.append(num_bytes)
        return fetch(reader, file, offset, num_bytes)

    fetch = PieceReader.fetch
    monkeypatch.setattr(PieceReader, "fetch", counted)
    targets = [empty(name, values, (((0, 8), (0, 2**17)), 0, 2**20)) for name in ("a", "b", "d")]
    load(tmp_path / "a", manifest, targets)
    # a and b stand in a row, 8 MiB each; c, which is not wanted, ends it.
    assert reads == [2 * values.nbytes, values.nbytes]
    assert all(torch.equal(target.values, values.flatten()) for target in targets)
    reads.clear()
    monkeypatch.setattr("triaxis.engine.checkpoint.format.store.PIECE_BYTES", 3 * quarter * 8)
    load(tmp_path / "a", manifest, targets)
    assert reads == [6 * 2**20, 6 * 2**20, 4 * 2**20, 6 * 2**20, 2 * 2**20]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Shard("other", "master", (2,), ((0, 2),), 0, torch.zeros(2)), "other is not in it"),
        (Shard("final_norm.weight", "master", (9,), ((0, 9),), 0, torch.zeros(9)), r"has the shape \[8\] there"),
    ],
)
def test_a_tensor_of_another_model_is_named(tmp_path: Path, target: Shard, words: str) -> None:
    manifest = write_folder(tmp_path / "a", training_shards(model()))
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path / "a", manifest, [target])


def test_a_part_that_was_never_saved_is_named(tmp_path: Path) -> None:
    weights = [whole(name, values) for name, values in model().items()]
    manifest = write_folder(tmp_path / "a", [weights], content="weights")
    target = whole("final_norm.weight", torch.zeros(8), "exp_avg")
    with pytest.raises(CheckpointError, match=r"exp_avg of final_norm.weight is there only in part: 0 of 8"):
        load(tmp_path / "a", manifest, [target])
