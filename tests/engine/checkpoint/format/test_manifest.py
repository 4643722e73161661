"""The manifest: what is written is read back; every field, hash, size and place is checked; nothing in it is ever executed."""

import hashlib
import json
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.checkpoint.samples import commit, empty, model, shard, training_shards, write_folder
from triaxis.engine.checkpoint.directory import Candidate, CheckpointDirectory, find
from triaxis.engine.checkpoint.format.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    MANIFEST_HASH,
    Ancestor,
    read_manifest,
    write_manifest,
)
from triaxis.engine.checkpoint.format.store import load
from triaxis.engine.checkpoint.resume import data_differences
from triaxis.engine.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "save", training_shards(model(), 2))
    return tmp_path / "save"


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as somebody would who also makes its hash right."""
    tree = json.loads((folder / MANIFEST).read_text())
    edit(tree)
    put(folder, json.dumps(tree).encode())


def put(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    (folder / MANIFEST_HASH).write_text(f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n")


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    ancestor = Ancestor(path="/elsewhere/step_00000001", step=1, loaded="weights", fingerprint={"master": "0" * 16})
    written = write_folder(
        tmp_path / "a", training_shards(model(), 3), lineage=(ancestor,), layout={"tp": [1, None, "x"]}
    )
    assert read_manifest(tmp_path / "a") == written


def test_a_secret_in_the_name_of_a_phase_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PAT", key := "abc_SECRET_42")
    written = write_folder(tmp_path / "a", training_shards(model(), 2))
    state = written.state.model_copy(update={"data": {f"samples of {key}": "1f"}})
    write_manifest(tmp_path / "a", written.model_copy(update={"state": state}))
    assert key not in (tmp_path / "a" / MANIFEST).read_text()
    found = Candidate(tmp_path / "a", read_manifest(tmp_path / "a"))
    assert data_differences(found, {f"samples of {key}": "1f"}, []) == []
    with pytest.raises(CheckpointError, match="training data differ from those"):
        data_differences(found, {f"samples of {key}": "2f"}, [])


def test_it_is_made_to_be_read_by_people_and_sha256sum(folder: Path) -> None:
    lines = (folder / MANIFEST).read_text().splitlines()
    assert lines[1] == f'  "format_version": {FORMAT_VERSION},'
    assert sum('"xxh3"' in line for line in lines) == sum(line.count('"xxh3"') for line in lines), "a line per piece"
    digest, name = (folder / MANIFEST_HASH).read_text().split()
    assert (digest, name) == (hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest(), MANIFEST)


def first_piece(tree: dict[str, Any]) -> dict[str, Any]:
    piece: dict[str, Any] = tree["files"][0]["pieces"][0]
    return piece


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "format_version": lambda tree: tree.update(format_version="1"),
    "content": lambda tree: tree.update(content="everything"),
    "run": lambda tree: tree.update(run=None),
    "attempt": lambda tree: tree.update(attempt=-1),
    "written_at": lambda tree: tree.pop("written_at"),
    "state.step": lambda tree: tree["state"].update(step=-1),
    "state.consumed_samples": lambda tree: tree["state"].update(consumed_samples=1.5),
    "state.num_updates": lambda tree: tree["state"].update(num_updates=True),
    "state.lr": lambda tree: tree["state"].update(lr="fast"),
    "state.consumed_tokens": lambda tree: tree["state"].update(consumed_tokens=10**25),
    "state.num_rollbacks": lambda tree: tree["state"].update(num_rollbacks=10**30),
    "state.loss_scale": lambda tree: tree["state"].update(loss_scale=math.nan),
    "config: Value error, config.model": lambda tree: tree.update(config={"model": [1]}),
    "config: Value error, config.phases": lambda tree: tree.update(config={"phases": {}}),
    "state.rng": lambda tree: tree["state"].update(rng=[]),
    "state.surprise": lambda tree: tree["state"].update(surprise=1),
    "fingerprint.master": lambda tree: tree["fingerprint"].update(master="xyz"),
    "the file: Value error, fingerprint has the state 'gradients'": lambda tree: tree["fingerprint"].update(
        gradients="0" * 16
    ),
    "layout": lambda tree: tree.update(layout=3),
    "config": lambda tree: tree.update(config=None),
    "lineage.0": lambda tree: tree.update(lineage=[{"path": "x"}]),
    "tensors": lambda tree: tree.update(tensors={}),
    "tensors.final_norm.weight.shape.0": lambda tree: tree["tensors"]["final_norm.weight"].update(shape=[-8]),
    "files.0.name": lambda tree: tree["files"][0].update(name="../secret.safetensors"),
    "files.0.num_bytes": lambda tree: tree["files"][0].update(num_bytes=-1),
    "files.0.pieces.0.name": lambda tree: first_piece(tree).update(name=5),
    "the file: Value error, files.0 has the state 'grad'": lambda tree: first_piece(tree).update(kind="grad"),
    "files.0.pieces.0.dtype": lambda tree: first_piece(tree).update(dtype="object"),
    "files.0.pieces.0.box": lambda tree: first_piece(tree).update(box=[[0, 1, 2]]),
    "files.0.pieces.0.start": lambda tree: first_piece(tree).update(start=-1),
    "files.0.pieces.0.stop": lambda tree: first_piece(tree).update(stop=0),
    "files.0.pieces.0.offset": lambda tree: first_piece(tree).update(offset=-8),
    "files.0.pieces.0.xxh3": lambda tree: first_piece(tree).update(xxh3="0"),
    "files.0.pieces.0.fingerprint": lambda tree: first_piece(tree).update(fingerprint=7),
    "surprise": lambda tree: tree.update(surprise=1),
}


@pytest.mark.parametrize("field", WRONG)
def test_every_field_is_checked(field: str, folder: Path) -> None:
    change(folder, WRONG[field])
    with pytest.raises(CheckpointError, match=r"is not a valid checkpoint manifest: ") as raised:
        read_manifest(folder)
    assert f": {field}" in str(raised.value)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "x.pt", "x.safetensors\n", "..", "X.safetensors", ""]
)
def test_file_names_cannot_leave_the_folder(name: str, folder: Path) -> None:
    change(folder, lambda tree: tree["files"][0].update(name=name))
    with pytest.raises(CheckpointError, match=r"files\.0\.name"):
        read_manifest(folder)


MISPLACED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "past its file": (lambda tree: first_piece(tree).update(offset=10**15), "lies outside of its tensor or file"),
    "past its box": (lambda tree: first_piece(tree).update(stop=10**12), "lies outside of its tensor or file"),
    "box past its tensor": (lambda tree: first_piece(tree).update(box=[[0, 99], [0, 8]]), "lies outside of its tensor"),
    "box of other dims": (lambda tree: first_piece(tree).update(box=[[0, 8]]), "lies outside of its tensor or file"),
    "empty box": (lambda tree: first_piece(tree).update(box=[[3, 3], [0, 8]]), "lies outside of its tensor or file"),
    "unknown tensor": (lambda tree: first_piece(tree).update(name="other"), "master:other@0 lies outside"),
    "a piece is missing": (lambda tree: tree["files"][1]["pieces"].pop(), r"exp_avg_sq:final_norm.weight: 4 elements"),
    "a tensor without pieces": (
        lambda tree: tree["tensors"].update(extra={"shape": [3]}),
        r"master:extra: 0 elements saved of 3",
    ),
    "a piece twice, another never": (
        lambda tree: tree["files"][1]["pieces"][0].update(start=0, stop=44),
        "master:embedding.word.weight: some elements are saved twice",
    ),
    "sizes": (
        lambda tree: tree["files"][0].update(num_bytes=10**9),
        "bytes on disk, 1,000,000,000 when it was written",
    ),
}


@pytest.mark.parametrize("what", MISPLACED)
def test_pieces_are_where_they_can_be_and_every_element_is_there_once(what: str, folder: Path) -> None:
    edit, words = MISPLACED[what]
    change(folder, edit)
    with pytest.raises(CheckpointError, match=words):
        read_manifest(folder)


def test_boxes_that_overlap_are_seen(tmp_path: Path) -> None:
    """As many elements as the tensor has, from two boxes that share a column and leave one out."""
    values = torch.arange(16.0).view(4, 4)
    boxes = [((0, 4), (0, 2)), ((0, 4), (1, 3))]
    write_folder(tmp_path / "a", [[shard("w", values, (box, 0, 8))] for box in boxes], content="weights")
    with pytest.raises(CheckpointError, match="master:w: some elements are saved twice"):
        read_manifest(tmp_path / "a")
    quarters = [((0, 2), (0, 2)), ((2, 4), (0, 2)), ((0, 2), (2, 4)), ((1, 3), (2, 4))]
    write_folder(tmp_path / "b", [[shard("w", values, (box, 0, 4)) for box in quarters]], content="weights")
    with pytest.raises(CheckpointError, match="some elements are saved twice"):
        read_manifest(tmp_path / "b")


def test_a_newer_format_is_refused_by_its_version(folder: Path) -> None:
    put(folder, b'{"format_version": 2, "everything": "else is new"}')
    with pytest.raises(CheckpointError, match=r"has format_version 2; this Triaxis reads versions up to 1"):
        read_manifest(folder)
    # Even where the newer format hashes in another way.
    (folder / MANIFEST_HASH).write_text("blake3 0000\n")
    with pytest.raises(CheckpointError, match="has format_version 2"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b'{"format_version": NaN}'],
    ids=lambda content: repr(content[:30]),
)
def test_what_is_no_manifest(content: bytes, folder: Path) -> None:
    put(folder, content)
    with pytest.raises(CheckpointError, match=r"is not a valid checkpoint manifest"):
        read_manifest(folder)


def test_an_edited_manifest_is_not_trusted(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(path.read_text().replace('"step": 0', '"step": 1'))
    with pytest.raises(CheckpointError, match=r"does not have the sha256 that manifest.sha256 records"):
        read_manifest(folder)


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xff", b"0" * 64])
def test_a_hash_file_that_is_none(content: bytes, folder: Path) -> None:
    (folder / MANIFEST_HASH).write_bytes(content)
    with pytest.raises(CheckpointError, match="sha256"):
        read_manifest(folder)


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_the_bomb_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("same_size", [False, True])
@pytest.mark.parametrize(
    "name", [MANIFEST, MANIFEST_HASH, "rank_00000.safetensors", "rank_00001.safetensors", "latest"]
)
def test_a_pickle_in_the_place_of_any_file_is_never_run(name: str, same_size: bool, tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    folder = commit(directory, 10)
    commit(directory, 20)
    path = directory.path / name if name == "latest" else directory.step_folder(20) / name
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    path.write_bytes(bomb.ljust(path.stat().st_size, b".") if same_size else bomb)
    damaged: list[str] = []
    loaded = []
    for candidate in directory.candidates(damaged):
        targets = [
            empty(key, values, (tuple((0, n) for n in values.shape), 0, values.numel()))
            for key, values in model().items()
        ]
        try:
            load(candidate.folder, candidate.manifest, targets)
            loaded.append(candidate.folder)
        except CheckpointError as error:
            damaged.append(str(error))
    assert not (tmp_path / "ran").exists()
    if name == "latest":
        assert len(loaded) == 2, "without a usable `latest` the newest complete one counts"
    else:
        assert loaded == [folder]
        assert len(damaged) == 1
        assert name in damaged[0]
    if name in (MANIFEST, MANIFEST_HASH):
        with pytest.raises(CheckpointError, match=r"newest complete one: .*step_00000010"):
            find(directory.path)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_with_a_right_hash_is_no_manifest_either(folder: Path, tmp_path: Path) -> None:
    put(folder, pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match="is not a valid checkpoint manifest"):
        read_manifest(folder)
    assert not (tmp_path / "ran").exists()
