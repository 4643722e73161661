"""`triaxis import` of Hugging Face folders and `triaxis export` to them, as a person types them."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lacking import need_package
from tests.launch.forked_ranks import train_in
from triaxis.engine.checkpoint.directory import find
from triaxis.engine.checkpoint.format.manifest import Ancestor, TrainingState
from triaxis.engine.checkpoint.import_weights import read_tensor, whole, write_checkpoint
from triaxis.engine.config.load import load_config
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.engine.layout.shard_spec import localize
from triaxis.engine.tensor_parallel.initial_weights import initial_box
from triaxis.launch.cli import main
from triaxis.models.interop.huggingface.files import WeightFiles
from triaxis.models.specs import model_specs

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 40,
    "seq_length": 16,
    "vocab_size": 300,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": "none",
}
TEXT = "the quick brown fox jumps over  the lazy dog 0123456789 the end"


@pytest.fixture(scope="module", autouse=True)
def _transformers() -> None:
    """Transformers is the oracle of these tests."""
    need_package("transformers", "pip install -e '.[dev]'")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of at most 300 tokens, the last of which ends a document."""
    import tokenizers

    made: Any = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([TEXT] * 3, vocab_size=299)
    made.add_special_tokens(["<|endoftext|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def checkpoint(out: Path, model: dict[str, Any], tokenizer: str | None = None) -> Path:
    """A run's first weights in fp32, as a checkpoint in `out`."""
    specs = model_specs(ModelConfig.model_validate(model))
    records = [localize(spec, tp=1, tp_index=0, sequence_parallel=False) for spec in specs]
    shards = (whole(record.name, initial_box(record, seed=1).view(record.spec.shape)) for record in records)
    config = {"model": model} | ({} if tokenizer is None else {"data": {"tokenizer": tokenizer}})
    return write_checkpoint(out, shards, TrainingState.at_start(), config=config, source="test")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = WeightFiles(folder)
    return {name: files.read(name) for name in files.tensors}


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    return capsys.readouterr().err


def test_out_in_and_out_again(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours -> theirs, in several files -> ours -> theirs: the same weights, the same tokenizer, and a config to train with."""
    source = checkpoint(tmp_path / "ours", MODEL, str(tokenizer))
    one, two, back = tmp_path / "one", tmp_path / "two", tmp_path / "[back]"
    text = said(capsys, "export", source, one, "--max-shard-gb", "0.00002")
    assert "LlamaForCausalLM" in text and "float32" in text and str(one / "tokenizer.json") in text
    assert len(list(one.glob("*.safetensors"))) > 2
    assert json.loads((one / "config.json").read_text())["eos_token_id"] == 299

    text = said(capsys, "import", one, back)
    assert f"triaxis train {shlex.quote(str(back / 'train.yaml'))} data.train=PREFIX" in text
    assert f"checkpoint.load={back} checkpoint.load_what=weights" in text
    again = find(back)
    assert again.manifest.fingerprint == find(source).manifest.fingerprint
    assert (again.manifest.content, again.manifest.state.step) == ("weights", 0)
    assert (back / "tokenizer.json").read_bytes() == tokenizer.read_bytes()

    config = load_config(back / "train.yaml", ["data.train=corpus"])
    original = ModelConfig.model_validate(MODEL)
    assert config.model == original.model_copy(update={"head_dim": 6})
    assert config.data.tokenizer == str(back), "the folder, whose tokenizer_config.json names the end of a text"
    assert again.manifest.config["model"] == config.model.model_dump(mode="json"), "a run would say that it has changed"
    assert (config.checkpoint.load, config.checkpoint.load_what) == (str(back), "weights")
    assert main(["config", "check", str(back / "train.yaml"), "data.train=corpus"]) == 0

    said(capsys, "export", back, two)
    assert [path.name for path in two.glob("*.safetensors*")] == ["model.safetensors"]
    first, second = tensors_of(one), tensors_of(two)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.distributed
def test_a_run_starts_from_imported_weights(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One step at a learning rate that moves nothing, on two pipeline ranks: the run saves the weights that were imported.

    Its tokenizer is that of the corpus, since none is named; documents end with the token that the corpus was prepared with.
    """
    source = checkpoint(tmp_path / "ours", MODEL, str(tokenizer))
    said(capsys, "export", source, tmp_path / "theirs")
    said(capsys, "import", tmp_path / "theirs", tmp_path / "back")
    (tmp_path / "text.txt").write_text(TEXT * 9)
    words = ("prepare", "--input", tmp_path / "text.txt", "--output", tmp_path / "corpus", "--workers", 1)
    said(capsys, *words, "--tokenizer", tokenizer, "--eod-token", "!")
    overrides = (
        f"data.train={tmp_path / 'corpus'}",
        "data.split=[1,0,0]",
        "data.tokenizer=null",
        "train.steps=1",
        "train.global_batch_size=2",
        "parallel.pp=2",
        "runtime.device=cpu",
    )
    moving_nothing = ("optimizer.lr=1e-30", "optimizer.warmup_steps=0", "precision.dtype=fp32", "checkpoint.interval=1")
    ended = train_in(tmp_path, str(tmp_path / "back" / "train.yaml"), *overrides, *moving_nothing)
    assert ended.exit_code == 0, ended.err + ended.out
    saved = find(tmp_path / "runs" / "train").manifest
    assert saved.state.step == 1
    assert saved.fingerprint["master"] == find(source).manifest.fingerprint["master"]
    own = load_tokenizer(str(tokenizer))
    assert saved.config["data"]["tokenizer"] == str(tokenizer)
    assert f"tokenizer: {tokenizer}" in (tmp_path / "runs" / "train" / "config.yaml").read_text()
    [end] = own.encode("!")
    assert (saved.state.data["tokenizer"], saved.state.data["end of documents"]) == (own.identity, str(end))
    said(capsys, "export", tmp_path / "runs" / "train", tmp_path / "trained")
    assert json.loads((tmp_path / "trained" / "tokenizer_config.json").read_text())["eos_token"] == "!"
    assert json.loads((tmp_path / "trained" / "config.json").read_text())["eos_token_id"] == end
    assert json.loads((tmp_path / "trained" / "generation_config.json").read_text())["eos_token_id"] == end
    card = (tmp_path / "trained" / "README.md").read_text()
    loss = json.loads((tmp_path / "runs" / "train" / "metrics.jsonl").read_text())["loss"]
    for fact in (
        "`corpus` 100.0%",
        f"{loss:.4f} nats per token at step 1",
        "32 tokens",
        "tp 1, pp 2, dp 1, cp 1, ep 1 (ranks: 2)",
        "`back`",
    ):
        assert fact in card, fact
    assert str(tmp_path) not in card


def test_transformers_loads_the_folder_with_its_tokenizer(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Qwen3, whose AutoTokenizer would otherwise split text by Qwen's own rules instead of the file's."""
    import transformers

    source = checkpoint(tmp_path / "ours", {**MODEL, "qk_norm": True})
    said(capsys, "export", source, tmp_path / "out", "--tokenizer", tokenizer, "--dtype", "bf16")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16 and model.config.eos_token_id == 299
    master = read_tensor(source, find(source).manifest, "layers.1.mlp.down.weight")
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, master.to(torch.bfloat16))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXT)["input_ids"] == load_tokenizer(str(tokenizer)).encode(TEXT)
    assert theirs.decode(theirs(TEXT)["input_ids"]) == TEXT
    # Generation stops at the end of a document, and texts of several lengths make a batch.
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.model_max_length) == (299, 299, 16)
    batch = theirs([TEXT[:9], "the"], return_tensors="pt", padding=True)
    assert batch["attention_mask"].sum(1).tolist() == [len(theirs(text)["input_ids"]) for text in (TEXT[:9], "the")]
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (299, 299)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[299] = 1e3 * model.model.norm(model.model.embed_tokens.weight[[5]])[0]
    assert model.generate(torch.tensor([[5]]), do_sample=False, max_new_tokens=4).tolist() in (
        [[5, 299]],
        [[5, 0, 0, 0, 0]],
    )


def test_a_model_of_bytes_reads_text_in_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    source = checkpoint(tmp_path / "ours", MODEL, "bytes")
    text = said(capsys, "export", source, tmp_path / "out")
    assert f"tokenizer  {tmp_path / 'out' / 'tokenizer.json'}" in text
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("a  é\n")["input_ids"] == list("a  é\n".encode())
    assert (theirs.eos_token_id, theirs.pad_token_id) == (256, 256)
    assert theirs(["a", "bc"], padding=True)["input_ids"] == [[97, 256], [98, 99]]
    said(capsys, "import", tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").is_file()


def test_a_qwen2_says_how_its_tokenizer_is_loaded(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its AutoTokenizer does not read what a folder says; the class that does is named, and reads it."""
    import transformers

    source = checkpoint(tmp_path / "ours", {**MODEL, "bias": "qkv"})
    text = said(capsys, "export", source, tmp_path / "out", "--tokenizer", tokenizer)
    assert "PreTrainedTokenizerFast.from_pretrained" in text
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    assert theirs(TEXT)["input_ids"] == load_tokenizer(str(tokenizer)).encode(TEXT)


def test_what_is_known_of_tokenizers_is_said(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = checkpoint(tmp_path / "silent", MODEL)
    text = said(capsys, "export", silent, tmp_path / "a")
    assert "none was written" in text and "names no tokenizer; give one with --tokenizer" in text
    assert json.loads((tmp_path / "a" / "config.json").read_text())["eos_token_id"] is None
    in_bytes = checkpoint(tmp_path / "bytes", MODEL, "bytes")
    said(capsys, "export", in_bytes, tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["eos_token_id"] == 256
    moved = checkpoint(tmp_path / "moved", MODEL, str(tmp_path / "gone.json"))
    text = said(capsys, "export", moved, tmp_path / "c")
    assert "no tokenizer was written: there is no tokenizer at" in text and not (tmp_path / "c/tokenizer.json").exists()
    assert "there is no tokenizer at" in refused(
        capsys, "export", moved, tmp_path / "d", "--tokenizer", tmp_path / "gone.json"
    )
    small = checkpoint(tmp_path / "small", {**MODEL, "vocab_size": 43})
    assert "ids up to 299, and the model 43 tokens" in refused(
        capsys, "export", small, tmp_path / "d", "--tokenizer", tokenizer
    )
    assert not (tmp_path / "d").exists()
    synthetic = checkpoint(tmp_path / "synthetic", {**MODEL, "vocab_size": 43}, "bytes")
    assert "no tokenizer was written: the tokenizer bytes has ids up to 256" in said(
        capsys, "export", synthetic, tmp_path / "e"
    )
    # An import without one names the place where it must stand: a run from it would stop there, not go on with bytes.
    text = said(capsys, "import", tmp_path / "a", tmp_path / "back")
    assert f"has no tokenizer.json: put the model's own at {tmp_path / 'back' / 'tokenizer.json'}" in text
    config = load_config(tmp_path / "back" / "train.yaml", ["data.train=corpus"])
    assert config.data.tokenizer == str(tmp_path / "back" / "tokenizer.json")


def test_a_config_with_dropout_gets_the_kernel_that_can_do_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt = {**MODEL, "position": "learned", "norm": "layernorm", "activation": "gelu", "bias": "all", "num_kv_heads": 4}
    source = checkpoint(tmp_path / "ours", gpt | {"hidden_dropout": 0.1, "attention_dropout": 0.2})
    said(capsys, "export", source, tmp_path / "out")
    said(capsys, "import", tmp_path / "out", tmp_path / "back", "--seq-length", 8, "--dtype", "bf16")
    config = load_config(tmp_path / "back" / "train.yaml", ["data.train=corpus"])
    assert (config.kernels.attention, config.model.attention_dropout) == ("explicit", 0.2)
    assert (config.model.hidden_dropout, config.model.seq_length) == (0.1, 8)
    back = find(tmp_path / "back")
    assert back.manifest.tensors["embedding.position.weight"].shape == (8, 24)
    assert {piece.dtype for file in back.manifest.files for piece in file.pieces} == {"bfloat16"}


def test_what_exists_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "ours", MODEL)
    said(capsys, "export", source, tmp_path / "out")
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "ours").rglob("*"))
    for words in (("export", source, tmp_path / "out"), ("import", tmp_path / "out", tmp_path / "ours")):
        assert "is there already and is not empty" in refused(capsys, *words)
    assert sorted(path.stat().st_mtime_ns for path in (tmp_path / "ours").rglob("*")) == before


@pytest.mark.parametrize("command", ["import", "export"])
def test_what_breaks_half_way_leaves_nothing(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = checkpoint(tmp_path / "ours", MODEL)
    said(capsys, "export", ours, tmp_path / "theirs")
    source = {"import": tmp_path / "theirs", "export": ours}[command]

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("triaxis.models.interop.huggingface.files.write_text", full)
    assert main([command, str(source), str(tmp_path / "out")]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


def test_mistakes_are_answered_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "ours", {**MODEL, "qk_norm": True})
    out = tmp_path / "out"
    assert "there is no checkpoint to read" in refused(capsys, "export", tmp_path / "nowhere", out)
    assert "cannot be read as JSON" in refused(capsys, "import", tmp_path / "nowhere", out)
    error = refused(capsys, "export", source, out, "--family", "llama")
    assert "as llama: model.qk_norm = True, there it is False" in error
    assert "more than 0 bytes" in refused(capsys, "export", source, out, "--max-shard-gb", "0")
    nameless = write_checkpoint(
        tmp_path / "nameless", [whole("x", torch.ones(2))], TrainingState.at_start(), config={}, source="test"
    )
    assert "has an invalid model" in refused(capsys, "export", nameless, out)
    assert not out.exists()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(
    value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    said(capsys, "export", checkpoint(tmp_path / "ours", MODEL), tmp_path / "theirs")
    tensors = tensors_of(tmp_path / "theirs")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    save_file(tensors, str(tmp_path / "theirs" / "model.safetensors"))
    error = refused(capsys, "import", tmp_path / "theirs", tmp_path / "back")
    assert "model.layers.1.mlp.down_proj.weight has 1 of 960 elements that are NaN or infinite" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


def test_a_tokenizer_that_is_none_or_does_not_fit_is_refused(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import random

    said(capsys, "export", checkpoint(tmp_path / "ours", {**MODEL, "vocab_size": 43}), tmp_path / "theirs")
    beside = tmp_path / "theirs" / "tokenizer.json"
    for content, words in (
        (random.Random(1).randbytes(1000), "is no tokenizer of the Hugging Face"),
        (b"[" * 10_000, "is no tokenizer of the Hugging Face"),
        (tokenizer.read_bytes(), "has ids up to 298, and the model 43 tokens"),
    ):
        beside.write_bytes(content)
        assert words in refused(capsys, "import", tmp_path / "theirs", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_special_ids_and_the_generation_config_come_out_as_they_went_in(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through an import that was moved, typed in one folder and exported in another, with a key that nobody knows."""
    theirs, there = tmp_path / "theirs", tmp_path / "there"
    said(capsys, "export", checkpoint(tmp_path / "ours", MODEL), theirs, "--tokenizer", tokenizer)
    keys = json.loads((theirs / "config.json").read_text())
    ids = {"bos_token_id": 7, "eos_token_id": [299, 3], "pad_token_id": None, "unk_token_id": 0}
    (theirs / "config.json").write_text(json.dumps({**keys, **ids, "strange": [1]}))
    generation = b'{"eos_token_id": [299, 3],\r\n "temperature": 0.60}'
    (theirs / "generation_config.json").write_bytes(generation)
    assert "--ignore strange" in refused(capsys, "import", theirs, tmp_path / "back")
    there.mkdir()
    monkeypatch.chdir(tmp_path)
    text = said(capsys, "import", "theirs", "back", "--ignore", "strange")
    assert "were ignored (--ignore): strange" in text and "without effect were ignored: unk_token_id" in text
    assert json.loads((tmp_path / "back" / "hugging_face.json").read_text())["ignored"] == {"strange": [1]}
    (tmp_path / "back").rename(there / "moved")
    monkeypatch.chdir(there)
    text = said(capsys, "export", "moved", "out")
    assert "tokenizer  out/tokenizer.json" in text
    assert (there / "out" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert (there / "out" / "generation_config.json").read_bytes() == generation
    written = json.loads((there / "out" / "config.json").read_text())
    assert {key: written.get(key, "absent") for key in ids} == ids
    # With another tokenizer the ids would name other tokens.
    said(capsys, "export", "moved", "bytes", "--tokenizer", "bytes")
    written = json.loads((there / "bytes" / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (None, 256)
    assert json.loads((there / "bytes" / "generation_config.json").read_text()) == {
        "eos_token_id": 256,
        "pad_token_id": 256,
    }


def test_a_run_from_an_import_exports_its_special_ids(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "export", checkpoint(tmp_path / "ours", MODEL, str(tokenizer)), tmp_path / "theirs")
    keys = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({**keys, "bos_token_id": 5}))
    said(capsys, "import", tmp_path / "theirs", tmp_path / "back")
    manifest = find(tmp_path / "back").manifest
    ancestor = Ancestor(
        path=str(tmp_path / "back" / "step_00000000"), step=0, loaded="weights", fingerprint=manifest.fingerprint
    )
    model = ModelConfig.model_validate(manifest.config["model"])
    shards = (whole(spec.name, torch.ones(spec.shape)) for spec in model_specs(model))
    run_config = {**manifest.config, "data": {"tokenizer": str(tmp_path / "back" / "tokenizer.json")}}
    write_checkpoint(
        tmp_path / "run", shards, TrainingState.at_start(), config=run_config, source="run", lineage=[ancestor]
    )
    said(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["bos_token_id"] == 5
