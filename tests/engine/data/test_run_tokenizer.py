"""The tokenizer of a run is that of its corpora: taken from their records, wherever they have moved, and never contradicted."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.data.corpus.test_matching import corpus, make_tokenizer
from tests.launch.prepare.conftest import in_process as in_process
from triaxis.engine.config.quantities.run_phases import at_phase
from triaxis.engine.config.tree import Config
from triaxis.engine.data.corpus.indexed import IndexedWriter
from triaxis.engine.data.corpus.record import read_record, record_path
from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.engine.data.run_tokenizer import recorded_end, with_tokenizer
from triaxis.engine.errors import DataError
from triaxis.launch.prepare.prepare import PrepareRequest, prepare

pytestmark = pytest.mark.usefixtures("in_process")
MODEL = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8, "vocab_size": 300}
OTHER = "pack my box with five dozen liquor jugs"


def config(*prefixes: str, tokenizer: str | None = None, **changed: Any) -> Config:
    data = {"train": list(prefixes), "tokenizer": tokenizer}
    train = {"steps": 2, "global_batch_size": 1, "micro_batch_size": 1}
    return Config.model_validate({"model": MODEL, "data": data, "train": train} | changed)


def named(*prefixes: str, tokenizer: str | None = None) -> str | None:
    resolved, note = with_tokenizer(config(*prefixes, tokenizer=tokenizer))
    assert note is None
    return resolved.data.tokenizer


def refused(*prefixes: str, tokenizer: str | None = None) -> str:
    with pytest.raises(DataError) as error:
        with_tokenizer(config(*prefixes, tokenizer=tokenizer))
    return str(error.value)


def test_it_is_the_recorded_one_where_none_is_named(tmp_path: Path) -> None:
    model = make_tokenizer(tmp_path / "model")
    for name in (str(model), str(model / "tokenizer.json"), "bytes"):
        prefix, _ = corpus(tmp_path / f"{Path(name).stem}-corpus", name)
        assert named(prefix) == name
    assert with_tokenizer(config(tokenizer=None, data={"synthetic": True}))[0].data.tokenizer is None


def test_another_one_is_refused_and_the_same_under_another_name_is_not(tmp_path: Path) -> None:
    model, other = make_tokenizer(tmp_path / "model"), make_tokenizer(tmp_path / "other", OTHER)
    prefix, _ = corpus(tmp_path / "corpus", str(model))
    assert named(prefix, tokenizer=str(model)) == str(model)
    assert named(prefix, tokenizer=str(model / "tokenizer.json")) == str(model / "tokenizer.json"), (
        "only the end differs"
    )
    shutil.copytree(model, tmp_path / "copy")
    assert named(prefix, tokenizer=str(tmp_path / "copy")) == str(tmp_path / "copy")
    for wrong in ("bytes", str(other)):
        error = refused(prefix, tokenizer=wrong)
        assert f"prepared with the tokenizer {model}" in error and f"data.tokenizer = {wrong}" in error
        assert "the same ids would mean other words" in error and f"triaxis prepare --tokenizer {wrong}" in error
    assert "there is no tokenizer at gone.json" in refused(prefix, tokenizer="gone.json")


def test_the_corpora_of_a_blend_and_of_phases_must_agree(tmp_path: Path) -> None:
    model, other = make_tokenizer(tmp_path / "model"), make_tokenizer(tmp_path / "other", OTHER)
    one, _ = corpus(tmp_path / "one", str(model))
    two, _ = corpus(tmp_path / "two", str(model), "<|endoftext|>")
    third, _ = corpus(tmp_path / "third", str(other))
    assert named(one, two) == str(model), "whichever of its tokens ends documents"
    assert str(other) in refused(one, third) and f"data.tokenizer = {model}" in refused(one, third)
    phases = [
        {"name": name, "until": until, "data.train": prefix}
        for name, until, prefix in (("a", 8, one), ("b", 16, third))
    ]
    with pytest.raises(DataError, match="the same ids would mean other words"):
        with_tokenizer(at_phase(config(one, phases=phases), "a"))


def test_a_corpus_that_has_moved_keeps_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded relative to the folder of `triaxis prepare`; found from there, beside the corpus, and above it, by its identity."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "data").mkdir(parents=True)
    elsewhere.mkdir()
    make_tokenizer(project / "tok")
    monkeypatch.chdir(project)
    corpus(Path("data/web"), "tok/tokenizer.json")
    assert named("data/web") == "tok/tokenizer.json"
    monkeypatch.chdir(elsewhere)
    assert named(str(project / "data" / "web")) == str(project / "tok" / "tokenizer.json")
    make_tokenizer(elsewhere / "tok", OTHER)
    assert named(str(project / "data" / "web")) == str(project / "tok" / "tokenizer.json"), (
        "not another one of that name"
    )
    moved = shutil.move(project / "data", elsewhere / "corpora")
    error = refused(f"{moved}/web")
    assert "prepared with the tokenizer tok/tokenizer.json" in error and "data.tokenizer=PATH" in error
    shutil.copy(project / "tok" / "tokenizer.json", moved)
    assert named(f"{moved}/web") == f"{moved}/tokenizer.json"


def test_a_trained_tokenizer_moves_with_its_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog " * 20)
    request = PrepareRequest((Path("text.txt"),), "train-bpe:270", "data/web")
    prepare(request, num_workers=1, progress=lambda done: None)
    assert named("data/web") == "data/web.tokenizer.json"
    shutil.move("data", "moved")
    for path in Path("moved").glob("web*"):
        path.rename(path.with_name(path.name.replace("web", "text")))
    assert named("moved/text") == "moved/text.tokenizer.json"


def test_without_a_record_bytes_are_assumed_and_that_is_said(tmp_path: Path) -> None:
    prefix = str(tmp_path / "theirs")
    with IndexedWriter(prefix, "<u2") as writer:
        writer.add_document([1, 2])
    resolved, note = with_tokenizer(config(prefix))
    assert resolved.data.tokenizer == "bytes"
    assert note is not None and prefix in note and "bytes are assumed" in note and "data.tokenizer=PATH" in note
    assert named(prefix, tokenizer="bytes") == "bytes"
    mine, _ = corpus(tmp_path / "mine", str(make_tokenizer(tmp_path / "model")))
    assert named(prefix, mine) == str(tmp_path / "model"), "one record is enough"
    with pytest.raises(DataError, match=r"vocab_size = 100 is less than their 257.*data\.tokenizer=PATH"):
        with_tokenizer(config(prefix, model={**MODEL, "vocab_size": 100}))


def test_records_of_earlier_versions_are_compared_by_their_sizes(tmp_path: Path) -> None:
    model = make_tokenizer(tmp_path / "model")
    prefix, record = corpus(tmp_path / "corpus", str(model))
    old = json.loads(replace(record, tokenizer_identity="").to_json())
    old.pop("text_size")
    record_path(prefix).write_text(json.dumps(old))
    assert named(prefix) == str(model)
    assert "the same ids" in refused(prefix, tokenizer="bytes")
    found = read_record(prefix)
    assert found is not None and found.num_embeddings == found.vocab_size


def test_the_end_of_documents_is_that_of_the_corpus(tmp_path: Path) -> None:
    model = make_tokenizer(tmp_path / "model")
    prefix, record = corpus(tmp_path / "corpus", str(model), "<|endoftext|>")
    resolved, _ = with_tokenizer(config(prefix))
    tokenizer = load_tokenizer(resolved.data.tokenizer_name)
    assert recorded_end(resolved, tokenizer) == record.eod_id != tokenizer.eod_id
    record_path(prefix).write_text(replace(record, append_eod=False).to_json())
    assert recorded_end(resolved, tokenizer) == tokenizer.eod_id
