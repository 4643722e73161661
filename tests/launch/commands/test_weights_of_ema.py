"""`--weights ema`: what is evaluated, generated and exported is what a checkpoint with the average as its weights gives."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.launch.forked_ranks import fork_ranks_of
from tests.launch.small_checkpoint import LLAMA, say
from tests.oracle import oracle_weights
from triaxis.engine.checkpoint.directory import find
from triaxis.engine.checkpoint.format.manifest import TrainingState
from triaxis.engine.checkpoint.import_weights import whole, write_checkpoint
from triaxis.engine.checkpoint.inspect.weights import kind_to_read
from triaxis.engine.config.tree import Config
from triaxis.models.specs import model_specs

STATE = TrainingState(step=3, consumed_samples=24, consumed_tokens=768, num_updates=3, lr=1e-3, rng={}, data={})


@dataclass(frozen=True)
class Two:
    """A training checkpoint with an average, and one without whose weights are that average."""

    averaged: Path
    plain: Path


def saved(folder: Path, seeds: Sequence[int], *, has_ema: bool) -> Path:
    """A training checkpoint in fp32 of random tensors, a seed for each state kind."""
    config = Config.model_validate(
        {
            "model": LLAMA,
            "data": {"train": "gone", "tokenizer": "bytes"},
            "train": {"steps": 5, "global_batch_size": 8},
            "optimizer": {"ema": {} if has_ema else None},
            "precision": {"dtype": "fp32"},
        }
    )
    shapes = {spec.name: spec.shape for spec in model_specs(config.model)}
    shards = [
        whole(name, tensor.detach().float().abs() if kind == "exp_avg_sq" else tensor.detach().float(), kind)
        for kind, seed in zip(config.state_kinds, seeds, strict=True)
        for name, tensor in oracle_weights(shapes, seed=seed).items()
    ]
    tree = config.model_dump(mode="json")
    return write_checkpoint(folder, shards, STATE, config=tree, source="a test", has_moments=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    folder = tmp_path_factory.mktemp("two")
    return Two(
        saved(folder / "averaged", (5, 6, 7, 8), has_ema=True), saved(folder / "plain", (8, 6, 7), has_ema=False)
    )


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def run(*words: object) -> str:
        result = say(capsys, monkeypatch, *words)
        assert result.exit_code == 0, result.err
        return result.out

    return run


def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The average of the weights has a loss of its own. " * 2)
    return path


def test_the_loss_is_that_of_a_model_with_these_weights(two: Two, tmp_path: Path, said: Callable[..., str]) -> None:
    def loss(*words: object) -> Any:
        return json.loads(said("evaluate", *words, "--text", text(tmp_path), "--json"))["loss"]

    expected = loss(two.plain)
    assert loss(two.averaged, "--weights", "ema") == expected
    assert loss(two.averaged) == loss(two.averaged, "--weights", "trained") != expected
    assert "the moving average of its weights" in said(
        "evaluate", two.averaged, "--text", text(tmp_path), "--weights", "ema"
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_read_the_average_too(
    two: Two, tmp_path: Path, said: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks_of(monkeypatch, "triaxis.launch.inference.request")
    one, other = (
        json.loads(said("evaluate", *words, "--text", text(tmp_path), "--tp", 2, "--pp", 2, "--json"))["loss"]
        for words in ((two.plain,), (two.averaged, "--weights", "ema"))
    )
    assert one == other


def test_the_text_is_that_of_a_model_with_these_weights(two: Two, said: Callable[..., str]) -> None:
    words = ("--prompt", "a", "--max-new-tokens", 20, "--seed", 3)
    expected = said("generate", two.plain, *words)
    assert said("generate", two.averaged, *words, "--weights", "ema") == expected
    assert said("generate", two.averaged, *words) != expected


def test_the_export_to_hugging_face_has_these_weights(two: Two, tmp_path: Path, said: Callable[..., str]) -> None:
    said("export", two.plain, tmp_path / "plain")
    told = said("export", two.averaged, tmp_path / "ema", "--weights", "ema")
    said("export", two.averaged, tmp_path / "trained")
    files = [tmp_path / name / "model.safetensors" for name in ("plain", "ema", "trained")]
    expected, averaged, trained = (file.read_bytes() for file in files)
    assert averaged == expected != trained and "the moving average of its weights" in told


def test_the_export_to_megatron_has_these_weights(two: Two, tmp_path: Path, said: Callable[..., str]) -> None:
    said("export", "--to", "megatron", two.averaged, tmp_path / "theirs", "--weights-only", "--weights", "ema")
    said("import", tmp_path / "theirs", tmp_path / "back", "--vocab-size", 257)
    assert find(tmp_path / "back").manifest.fingerprint["master"] == find(two.plain).manifest.fingerprint["master"]
    assert "left behind" in said("export", "--to", "megatron", two.averaged, tmp_path / "training")
    # A run that keeps an average goes on from Megatron's state, which has none.
    config = tmp_path / "mine.yaml"
    config.write_text(json.dumps(find(two.averaged).manifest.config | {"data": {"synthetic": True}}))
    said("import", tmp_path / "training", tmp_path / "all", "--config", config)
    assert find(tmp_path / "all").manifest.kinds == ("master", "exp_avg", "exp_avg_sq")


def test_a_checkpoint_without_an_average_is_refused(
    two: Two, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (
        ("evaluate", two.plain, "--text", text(tmp_path)),
        ("generate", two.plain, "--prompt", "a"),
        ("export", two.plain, tmp_path / "out"),
        ("export", "--to", "megatron", two.plain, tmp_path / "out", "--weights-only"),
    ):
        result = say(capsys, monkeypatch, *words, "--weights", "ema")
        assert result.exit_code == 2 and "holds no moving average of the weights" in result.err, words
    result = say(capsys, monkeypatch, "export", "--to", "megatron", two.averaged, tmp_path / "out", "--weights", "ema")
    assert result.exit_code == 2 and "Export them alone: --weights-only" in result.err
    assert not (tmp_path / "out").exists()


def test_a_parameter_without_gradients_has_no_average(two: Two) -> None:
    manifest = find(two.averaged).manifest
    name = "final_norm.weight"
    assert kind_to_read(manifest, name, "ema") == "ema" and kind_to_read(manifest, name, "trained") == "master"
    untrained = manifest.tensors[name].model_copy(update={"is_trained": False})
    changed = manifest.model_copy(update={"tensors": {**manifest.tensors, name: untrained}})
    assert kind_to_read(changed, name, "ema") == "master"


def test_tools_show_the_average(
    two: Two, said: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "and the moving average of the weights" in said("checkpoint", "inspect", two.averaged)
    assert "moving average" not in said("checkpoint", "inspect", two.plain)
    assert "ema " in said("checkpoint", "fingerprint", two.averaged, "--recompute")
    assert "(master, exp_avg, exp_avg_sq, ema)" in said("checkpoint", "diff", two.averaged, two.averaged)
    told = say(capsys, monkeypatch, "checkpoint", "diff", two.plain, two.averaged).out
    assert "only B has a moving average of the weights, which is not compared" in told
