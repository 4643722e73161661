"""The tokenizer of an exported folder: found, whole, and that of the training, through an import too."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lacking import need_package
from tests.launch.commands.test_convert import MODEL, TEXT, checkpoint, refused, said
from tests.launch.commands.test_convert import tokenizer as tokenizer
from triaxis.engine.checkpoint.directory import find
from triaxis.engine.checkpoint.format.manifest import TrainingState
from triaxis.engine.checkpoint.import_weights import whole, write_checkpoint
from triaxis.engine.checkpoint.inspect.recorded import recorded_tokenizer
from triaxis.engine.config.load import load_config
from triaxis.engine.config.schema.data import DataConfig
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.values.optimizer_kinds import OPTIMIZERS
from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.engine.data.datasets import open_datasets
from triaxis.models.specs import model_specs


@pytest.fixture(scope="module", autouse=True)
def _transformers() -> None:
    """Transformers is the oracle of these tests."""
    need_package("transformers", "pip install 'triaxis[dev]'")


CONFIG_OF_CHAT: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": {"__type": "AddedToken", "content": "<|turn|>", "special": True},
    "bos_token": "<|begin|>",
    "pad_token": "<|pad|>",
    "chat_template": "{{ messages }}",
    "model_max_length": 77,
    "added_tokens_decoder": {
        str(300 + number): {"content": name, "special": True}
        for number, name in enumerate(("<|turn|>", "<|begin|>", "<|pad|>"))
    },
}


@pytest.fixture
def chat(tmp_path: Path, tokenizer: Path) -> Path:
    """A folder whose special tokens are in its configuration alone, and whose template is a file."""
    folder = tmp_path / "chat"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (folder / "tokenizer_config.json").write_bytes(json.dumps(CONFIG_OF_CHAT, indent=1).encode())
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|turn|>"}')
    (folder / "chat_template.jinja").write_text("{{ messages }} ")
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    return folder


def test_the_tokenizer_of_a_folder_leaves_whole(tmp_path: Path, chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a run on the folder, where its own end of a text ended documents; and through an import, to the bit."""
    import transformers

    model = {**MODEL, "vocab_size": 303}
    said(capsys, "export", checkpoint(tmp_path / "ours", model, str(chat)), tmp_path / "theirs")
    said(capsys, "import", tmp_path / "theirs", tmp_path / "back")
    said(capsys, "export", tmp_path / "back", tmp_path / "again")
    own = transformers.AutoTokenizer.from_pretrained(chat)
    files = sorted(path for path in chat.rglob("*") if path.is_file())
    for folder in (tmp_path / "theirs", tmp_path / "again"):
        assert all((folder / path.relative_to(chat)).read_bytes() == path.read_bytes() for path in files), folder
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert (len(theirs), theirs.chat_template) == (303, own.chat_template)
        assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id) == (300, 301, 302)
        ids = {"bos_token_id": 301, "eos_token_id": 300, "pad_token_id": 302}
        assert json.loads((folder / "generation_config.json").read_text()) == ids
        written = json.loads((folder / "config.json").read_text())
        assert {key: written[key] for key in ids} == ids | {"pad_token_id": None}


def test_the_end_of_documents_in_training_is_the_end_of_a_text(
    tmp_path: Path, chat: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the folder says, and in all of its files; an import's word counts, because its model learned it elsewhere."""
    source = checkpoint(tmp_path / "ours", {**MODEL, "vocab_size": 303}, str(chat / "tokenizer.json"))
    text = said(capsys, "export", source, tmp_path / "out")
    assert "eos_token is <|endoftext|>, which ended documents in training, and no longer <|turn|>" in text
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token"] == "<|endoftext|>"
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["pad_token"] == "<|pad|>"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 299


def test_a_special_token_beyond_the_model_is_no_other_tokenizer(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gemma 3 1B's: no text is encoded to its token for images. It is imported, prepared for, and exported."""
    import tokenizers

    said(capsys, "export", checkpoint(tmp_path / "ours", MODEL, str(tokenizer)), tmp_path / "theirs")
    path = tmp_path / "theirs" / "tokenizer.json"
    more: Any = tokenizers.Tokenizer.from_file(str(path))
    more.add_special_tokens(["<image>"])
    more.save(str(path))
    text = said(capsys, "import", tmp_path / "theirs", tmp_path / "back")
    assert "no embedding for <image>: no text is encoded" in text
    (tmp_path / "text.txt").write_text("an <image> of " + TEXT * 9)
    words = ("prepare", "--input", tmp_path / "text.txt", "--output", tmp_path / "corpus", "--workers", 1)
    assert "301 tokens" in said(capsys, *words, "--tokenizer", tmp_path / "back")
    data = DataConfig(train=[str(tmp_path / "corpus")], split=(1.0, 0.0, 0.0))
    assert open_datasets(data, 16, 1, vocab_size=300).train[0].tokens.max() < 300
    said(capsys, "export", tmp_path / "back", tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == path.read_bytes()


def test_a_sentencepiece_model_goes_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without tokenizer.json keeps its tokenizer.model, which is the tokenizer of what is trained from it."""
    import sentencepiece

    said(capsys, "export", checkpoint(tmp_path / "ours", MODEL), tmp_path / "theirs")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 20),
        model_prefix=str(tmp_path / "theirs" / "tokenizer"),
        vocab_size=50,
        model_type="bpe",
        minloglevel=2,
    )
    said(capsys, "import", tmp_path / "theirs", tmp_path / "back")
    config = load_config(tmp_path / "back" / "train.yaml", ["data.train=corpus"])
    assert config.data.tokenizer == str(tmp_path / "back" / "tokenizer.model")
    text = said(capsys, "export", tmp_path / "back", tmp_path / "again")
    assert f"tokenizer  {tmp_path / 'again' / 'tokenizer.model'}" in text and "compare its ids" in text
    own = (tmp_path / "theirs" / "tokenizer.model").read_bytes()
    assert (tmp_path / "again" / "tokenizer.model").read_bytes() == own


def test_another_tokenizer_than_that_of_the_training_is_refused(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the corpus' record where it is found, else by the checkpoint; the folder around the right file is no other one."""
    (tmp_path / "text.txt").write_text(TEXT * 9)
    words = ("prepare", "--input", tmp_path / "text.txt", "--output", tmp_path / "corpus", "--workers", 1)
    said(capsys, *words, "--tokenizer", tokenizer)
    identities = {name: load_tokenizer(name).identity for name in ("bytes", str(tokenizer))}
    model = ModelConfig.model_validate(MODEL).model_dump(mode="json")

    def saved(name: str, tokenizer: str, prefix: Path) -> Path:
        specs = model_specs(ModelConfig.model_validate(MODEL))
        kinds = OPTIMIZERS["adamw"].state_kinds
        shards = (whole(spec.name, torch.ones(spec.shape), kind) for spec in specs for kind in kinds)
        state = TrainingState.at_start().model_copy(update={"data": {"tokenizer": identities[tokenizer]}})
        config = {"model": model, "data": {"tokenizer": tokenizer, "train": [{"path": str(prefix)}]}}
        return write_checkpoint(tmp_path / name, shards, state, config=config, source=name, has_moments=True)

    assumed = saved("assumed", "bytes", tmp_path / "corpus")
    proven = saved("proven", str(tokenizer), tmp_path / "gone")
    lost = saved("lost", "bytes", tmp_path / "gone")
    for source, wrong, given in ((assumed, "bytes", ()), (proven, "bytes", ("bytes",))):
        export = ("export", source, tmp_path / "out", *(("--tokenizer", *given) if given else ()))
        option = [f"data.tokenizer={name}" for name in given]
        for command, advice in (
            (export, "--tokenizer "),
            (("generate", source, "--prompt", "a", *option), "data.tokenizer="),
            (("evaluate", source, "--text", tmp_path / "text.txt", *option), "data.tokenizer="),
        ):
            error = refused(capsys, *command)
            assert f"the tokenizer {wrong} is not that of" in error and f"Give that one: {advice}{tokenizer}" in error
    for number, source in enumerate((assumed, proven, lost)):
        said(capsys, "export", source, tmp_path / f"{number}", "--tokenizer", tokenizer)
        ids = json.loads((tmp_path / f"{number}" / "generation_config.json").read_text())
        assert ids["eos_token_id"] == 299


def test_the_tokenizer_of_a_run_is_found_above_it_or_asked_for(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path was typed in the folder where the run was started; a file of the same name and other content is not taken."""
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    for folder in (start / "tok", elsewhere):
        folder.mkdir(parents=True)
    (start / "tok" / "t.json").write_bytes(tokenizer.read_bytes())
    model = ModelConfig.model_validate(MODEL)
    state = TrainingState.at_start().model_copy(update={"data": {"tokenizer": load_tokenizer(str(tokenizer)).identity}})
    shards = (
        whole(spec.name, torch.ones(spec.shape), kind)
        for spec in model_specs(model)
        for kind in OPTIMIZERS["adamw"].state_kinds
    )
    config = {"model": model.model_dump(mode="json"), "data": {"tokenizer": "tok/t.json"}}
    write_checkpoint(start / "runs/a/checkpoints", shards, state, config=config, source="a", has_moments=True)
    monkeypatch.chdir(elsewhere)
    said(capsys, "export", start / "runs/a/checkpoints", "out")
    assert Path("out/tokenizer.json").read_bytes() == tokenizer.read_bytes()
    (start / "tok" / "t.json").write_bytes(tokenizer.read_bytes() + b" ")
    error = refused(capsys, "export", start / "runs/a/checkpoints", "more")
    assert "names the tokenizer tok/t.json, which is not there" in error and not Path("more").exists()
    text = said(capsys, "export", start / "runs/a/checkpoints", "more", "--tokenizer", "none")
    assert "none was written" in text and "no tokenizer was written, because --tokenizer none was given" in text


def test_a_folder_and_ranks_are_tokenizers_of_a_checkpoint(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's tokenizer.json is copied; ranks have none, and are still found by the path that was typed."""
    start = tmp_path / "start"
    (start / "tok").mkdir(parents=True)
    (start / "tok" / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    lines = [b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]
    (start / "tok" / "mine.tiktoken").write_bytes(b"".join(lines))
    monkeypatch.chdir(start)
    folder = checkpoint(start / "runs" / "folder", MODEL, "tok")
    assert str(start / "tok" / "tokenizer.json") not in said(capsys, "export", folder, "of_folder")
    assert Path("of_folder/tokenizer.json").read_bytes() == tokenizer.read_bytes()
    ranks = find(checkpoint(start / "runs" / "ranks", MODEL, r"tok/mine.tiktoken:\w+|\W+"))
    assert recorded_tokenizer(ranks) == rf"{start}/tok/mine.tiktoken:\w+|\W+"
    text = said(capsys, "export", ranks.folder, "of_ranks")
    assert "mine.tiktoken" in text and "is no tokenizer.json, which transformers reads" in text
    assert json.loads(Path("of_ranks/config.json").read_text())["eos_token_id"] == 256
    assert not Path("of_ranks/tokenizer.json").exists()
