"""`triaxis checkpoint` as a user types it."""

import json
from pathlib import Path

import pytest
import torch

from tests.engine.checkpoint.samples import bits, commit, model, training_shards, write_folder
from triaxis.engine.checkpoint.directory import CheckpointDirectory
from triaxis.engine.checkpoint.format.manifest import TrainingState
from triaxis.engine.checkpoint.import_weights import whole, write_checkpoint
from triaxis.launch.cli import main

STATE = TrainingState.at_start()


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def flip(path: Path, at: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def test_inspect_tells_the_newest_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = CheckpointDirectory(tmp_path / "run" / "checkpoints")
    commit(directory, 10)
    newest = commit(directory, 20)
    code, out, _ = run(capsys, "inspect", tmp_path / "run", "--tensors")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == str(newest)
    assert "step 20; 0 samples, 0 tokens consumed; 0 updates, lr 0.00" in lines
    assert "parameters 224 in 3 tensors" in lines
    assert "written by tp 1, dp 2" in lines
    assert "embedding 1 88 39.3%" in lines
    assert "attention 1 128 57.1%" in lines
    assert "layers.0.attention.kv.weight [2, 2, 4, 8] float32" in lines


def test_inspect_for_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = commit(CheckpointDirectory(tmp_path), 7, attempt=3)
    code, out, _ = run(capsys, "inspect", folder, "--json")
    told = json.loads(out)
    assert code == 0
    assert (told["state"]["step"], told["attempt"], told["num_parameters"]) == (7, 3, 224)
    assert told["parameters_by_module"] == {"embedding": 88, "attention": 128, "norms": 8}
    assert [file["name"] for file in told["files"]] == ["rank_00000.safetensors", "rank_00001.safetensors"]
    assert told["num_bytes"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_a_name_of_no_module_is_counted_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path, [whole("router", torch.ones(3))], STATE, config={}, source="x")
    code, out, _ = run(capsys, "inspect", folder)
    assert code == 0
    assert ["other", "1", "3", "100.0%"] in [line.split() for line in out.splitlines()]


def test_layouts_do_not_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "a", training_shards(model(), 1))
    write_folder(tmp_path / "b", training_shards(model(), 3), piece_bytes=20)
    code, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 0
    assert "all 9 tensors are equal (master, exp_avg, exp_avg_sq)" in out
    assert "layout.dp: 1 | 3" in out


def changed_model() -> dict[str, torch.Tensor]:
    """The model with one element of the second tensor, and all of the third, changed."""
    tensors = model()
    tensors["layers.0.attention.kv.weight"][1, 0, 2, 3] = 8.0
    tensors["final_norm.weight"] += 1
    return tensors


def test_the_first_tensor_that_differs_is_named_and_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "a", training_shards(model(), 2), step=1)
    write_folder(tmp_path / "b", training_shards(changed_model(), 3), step=2)
    before = float(model()["layers.0.attention.kv.weight"][1, 0, 2, 3])
    code, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "6 of 9 tensors differ; the first is master of layers.0.attention.kv.weight" in out
    assert f"first at [1, 0, 2, 3]: {before!r} | 8.0" in out
    assert "1 of 128 elements" in out
    assert f"largest difference {abs(8 - before):.6g}, relative {abs(8 - before) / 8:.6g}" in out
    assert "state.step: 1 | 2" in out


def test_diff_for_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "a", training_shards(model()))
    write_folder(tmp_path / "b", training_shards(changed_model()))
    code, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--json")
    told = json.loads(out)
    assert code == 1
    assert len(told["tensors"]) == 6
    assert told["tensors"][0]["first_index"] == [1, 0, 2, 3]
    assert told["tensors"][0]["num_different"] == 1
    assert "num_different" not in told["tensors"][1], "only the first is read"
    assert (told["state"], told["config"]) == ({}, {})


def import_of(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    shards = [whole(name, values) for name, values in tensors.items()]
    return write_checkpoint(folder, shards, STATE, config={"model": {}}, source="test")


def test_other_dtypes_are_said_and_their_values_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounded = {name: values.bfloat16() for name, values in model().items()}
    narrow = import_of(tmp_path / "narrow", rounded)
    wide = import_of(tmp_path / "wide", {name: values.double() for name, values in rounded.items()})
    exact = import_of(tmp_path / "exact", model())
    code, out, _ = run(capsys, "diff", narrow, wide)
    assert code == 0
    assert "3 tensors have equal values in other dtypes (bfloat16 | float64)" in out
    code, out, _ = run(capsys, "diff", narrow, exact)
    assert code == 1
    assert "dtype bfloat16 | float32" in out


def test_weights_alone_are_compared_with_an_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "a", training_shards(model()))
    code, out, _ = run(capsys, "diff", tmp_path / "a", import_of(tmp_path / "b", model()))
    assert code == 0
    assert "A holds training, B weights: only the weights are compared" in out
    assert "all 3 tensors are equal (master)" in out


def test_other_models_differ_by_tensors_and_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = import_of(tmp_path / "a", {"x": torch.ones(4), "y": torch.ones(2)})
    b = import_of(tmp_path / "b", {"x": torch.ones(2, 2), "z": torch.ones(2)})
    code, out, _ = run(capsys, "diff", a, b, "--json")
    told = {tensor["name"]: tensor["verdict"] for tensor in json.loads(out)["tensors"]}
    assert code == 1
    assert told == {"x": "other shape", "y": "only in A", "z": "only in B"}
    code, out, _ = run(capsys, "diff", a, b)
    assert "shape [4] | [2, 2]" in out


def test_nans_and_signs_of_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = import_of(tmp_path / "a", {"x": torch.tensor([float("nan"), 0.0, float("inf")])})
    b = import_of(tmp_path / "b", {"x": torch.tensor([float("nan"), -0.0, 1.0])})
    code, out, _ = run(capsys, "diff", a, b)
    assert code == 1
    assert "first at [1]: 0.0 | -0.0" in out
    assert "2 of 3 elements" in out


def test_verify_reads_all_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = CheckpointDirectory(tmp_path / "run" / "checkpoints")
    folders = [commit(directory, step) for step in (10, 20, 30)]
    assert run(capsys, "check", tmp_path / "run")[0] == 0
    flip(folders[1] / "rank_00001.safetensors")
    (folders[2] / "rank_00000.safetensors").unlink()
    (folders[2] / "rank_00001.safetensors").write_bytes(b"short")
    code, out, _ = run(capsys, "check", directory.path)
    assert code == 1
    assert "step_00000010: complete and undamaged" in out
    assert "step_00000020: damaged" in out
    assert "rank_00001.safetensors is damaged: exp_avg_sq of final_norm.weight" in out
    assert "rank_00000.safetensors: No such file" in out
    assert "rank_00001.safetensors: 5 bytes on disk" in out
    assert "1 of 3 checkpoints are complete and undamaged" in out
    assert run(capsys, "check", folders[0])[0] == 0
    assert run(capsys, "check", folders[2])[0] == 1


def test_verify_sees_a_header_that_other_tools_would_misread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = commit(CheckpointDirectory(tmp_path), 1)
    path = folder / "rank_00000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"dtype": "F32"', b'"dtype": "I32"', 1))
    code, out, _ = run(capsys, "check", folder)
    assert code == 1
    assert "its safetensors header has {'dtype': 'I32'" in out


def test_verify_is_not_fooled_by_matching_hashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A writer that recorded a wrong fingerprint, or none of the tensors' own."""
    files = training_shards(model())
    write_folder(tmp_path / "a", files, fingerprint={"master": "0" * 16})
    code, out, _ = run(capsys, "check", tmp_path / "a")
    assert code == 1
    assert "manifest.json: its fingerprint is {'master': '0000000000000000'}" in out


def test_many_faults_of_a_file_are_not_all_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "a", training_shards(model()), piece_bytes=40)
    path = tmp_path / "a" / "rank_00000.safetensors"
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content[:begin] + bytes(len(content) - begin))
    code, out, _ = run(capsys, "check", tmp_path / "a")
    assert code == 1
    assert out.count("does not have the xxh3") == 3
    assert "rank_00000.safetensors: and 66 more" in out


def test_fingerprints_stored_and_recomputed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = write_folder(tmp_path / "a", training_shards(model(), 2))
    code, out, _ = run(capsys, "fingerprint", tmp_path / "a")
    assert code == 0
    assert dict(line.split() for line in out.splitlines()) == dict(manifest.fingerprint)
    code, out, _ = run(capsys, "fingerprint", tmp_path / "a", "--recompute")
    assert code == 0
    assert out.endswith("the same\n")
    write_folder(tmp_path / "b", training_shards(model()), fingerprint={"master": "0" * 16})
    code, out, _ = run(capsys, "fingerprint", tmp_path / "b", "--recompute")
    assert code == 1
    assert f"{manifest.fingerprint['master']} recomputed; it differs from the stored one" in out


@pytest.mark.parametrize("verb", ["inspect", "check", "fingerprint"])
def test_nothing_there_is_unusable(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, verb, tmp_path / "none")
    assert code == 2
    assert "there is no such folder" in err


def test_a_damaged_side_of_a_diff_is_unusable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "a", training_shards(model()))
    write_folder(tmp_path / "b", training_shards(changed_model()))
    for path in (tmp_path / "b").glob("*.safetensors"):
        begin = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        flip(path, begin + len(bits(model()["embedding.word.weight"])) + 1)
    code, _, err = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 2
    assert "rank_00000.safetensors is damaged" in err


def test_the_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["checkpoint", "--help"])
    assert "triaxis checkpoint diff runs/tp2 runs/pp2" in capsys.readouterr().out
