"""`triaxis evaluate`: the oracle's loss, per token and per UTF-8 byte, of texts and corpora, in every layout."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.launch.forked_ranks import fork_ranks_of
from tests.launch.small_checkpoint import END_OF_DOCUMENT, GPT, LLAMA, Saved, save, say
from tests.oracle import oracle_loss_sum
from triaxis.engine.data.corpus.indexed import IndexedWriter
from triaxis.engine.data.corpus.tokenizers import load_tokenizer

TEXT = "Loss is counted per byte: € has three of them, ß two. " * 3
"""Longer than five windows, and no multiple of one."""


def oracle_loss(saved: Saved, tokens: list[int], stride: int | None = None) -> float:
    """Sum of the losses of all tokens: for each the last window that begins at a multiple of the stride and predicts it first."""
    model, stream = saved.config.model, torch.tensor([END_OF_DOCUMENT, *tokens])
    length, stride = model.seq_length, stride or model.seq_length
    total, done = 0.0, 0
    for start in range(0, len(tokens), stride):
        inputs = stream[start : min(start + length, len(tokens))]
        labels = stream[start + 1 : start + 1 + len(inputs)]
        mask = torch.arange(start, start + len(inputs)) >= done
        if mask.any():
            position_ids = torch.arange(len(inputs)).unsqueeze(0)
            loss = oracle_loss_sum(
                model, saved.weights, inputs[None], labels[None], mask[None], position_ids, sample_ids=[0]
            )
            total += float(loss)
            done = start + len(inputs)
    assert done == len(tokens)
    return total


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def evaluate(capsys, monkeypatch):
    def result(saved: Saved, *words: object) -> dict[str, Any]:
        said = say(capsys, monkeypatch, "evaluate", saved.folder, "--json", *words)
        assert said.exit_code == 0, said.err
        return dict(json.loads(said.out))

    return result


def check(result: dict[str, Any], loss_sum: float, num_tokens: int, num_bytes: int) -> None:
    assert (result["tokens"], result["bytes"]) == (num_tokens, num_bytes)
    assert result["loss"] == pytest.approx(loss_sum / num_tokens, rel=1e-12)
    assert result["perplexity"] == pytest.approx(math.exp(loss_sum / num_tokens), rel=1e-11)
    assert result["loss_per_byte"] == pytest.approx(loss_sum / num_bytes, rel=1e-12)
    assert result["perplexity_per_byte"] == pytest.approx(math.exp(loss_sum / num_bytes), rel=1e-11)
    assert result["bits_per_byte"] == pytest.approx(loss_sum / num_bytes / math.log(2), rel=1e-12)


# Results ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [None, 1, 20])
@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_text_has_the_oracle_s_loss(model, stride, tmp_path, text, evaluate):
    saved, tokens = save(tmp_path, model), list(TEXT.encode())
    result = evaluate(saved, "--text", text, *(() if stride is None else ("--stride", stride)))
    check(result, oracle_loss(saved, tokens, stride), len(tokens), len(tokens))


def test_a_short_text_and_the_beginning_of_a_text(llama, tmp_path, text, evaluate):
    short = tmp_path / "short.txt"
    short.write_text("€")
    check(evaluate(llama, "--text", short), oracle_loss(llama, [*"€".encode()]), 3, 3)
    tokens = list(TEXT.encode())[:70]
    check(evaluate(llama, "--text", text, "--max-tokens", 70), oracle_loss(llama, tokens), 70, 70)


@pytest.mark.distributed
def test_every_layout_has_the_loss_of_one_process(llama, text, evaluate, monkeypatch):
    """Real ranks of a command that reads a checkpoint: tests/launch/commands/test_generate.py."""
    alone = evaluate(llama, "--text", text)
    fork_ranks_of(monkeypatch, "triaxis.launch.inference.request")
    layouts = (
        ("--pp", "2", "--dp", "2", "--batch-size", "1"),
        ("--tp", "2", "--batch-size", "3", "parallel.sequence_parallel=true"),
    )
    for layout in layouts:
        result = evaluate(llama, "--text", text, *layout)
        assert result["loss"] == pytest.approx(alone["loss"], rel=1e-12), layout
        assert result["tokens"] == alone["tokens"]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_model_with_experts_has_the_oracle_s_loss_in_every_layout(tmp_path, text, evaluate, monkeypatch):
    moe = {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 12, "score": "sigmoid", "balance": {"bias_rate": 0.01}}
    saved, tokens = save(tmp_path, LLAMA | {"layers": ["dense", "moe"], "moe": moe}), list(TEXT.encode())
    check(evaluate(saved, "--text", text), oracle_loss(saved, tokens), len(tokens), len(tokens))
    fork_ranks_of(monkeypatch, "triaxis.launch.inference.request")
    layouts = (
        ("--dp", "2", "--batch-size", "1", "parallel.ep=2", "kernels.dispatch=all_to_all"),
        ("--tp", "2", "--pp", "2", "--batch-size", "3", "parallel.ep=2", "parallel.sequence_parallel=true"),
        ("--tp", "2", "--dp", "2", "--batch-size", "2", "parallel.ep=2", "parallel.etp=2"),
    )
    for layout in layouts:
        check(evaluate(saved, "--text", text, *layout), oracle_loss(saved, tokens), len(tokens), len(tokens))


def test_a_corpus_counts_the_ends_of_documents_as_tokens_without_bytes(llama, tmp_path, evaluate):
    documents = [[*document.encode(), END_OF_DOCUMENT] for document in ("first €", "second", "", "third " * 10)]
    with IndexedWriter(tmp_path / "corpus", "<u2") as writer:
        for document in documents:
            writer.add_document(document)
    tokens = [token for document in documents for token in document]
    result = evaluate(llama, "--bin", tmp_path / "corpus")
    check(result, oracle_loss(llama, tokens), len(tokens), len(tokens) - len(documents))
    first = tokens[:12]
    check(evaluate(llama, "--bin", tmp_path / "corpus", "--max-tokens", 12), oracle_loss(llama, first), 12, 11)


def test_bytes_are_counted_whatever_the_tokenizer(tmp_path, text, evaluate):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator([TEXT], trainer)
    path = tmp_path / "tokenizer.json"
    trained.save(str(path))
    tokenizer = load_tokenizer(str(path))
    saved = save(tmp_path, {**LLAMA, "vocab_size": 300}, tokenizer=str(path))
    tokens = tokenizer.encode(TEXT)
    result = evaluate(saved, "--text", text)
    assert result["tokens"] == len(tokens) < result["bytes"] == len(TEXT.encode())
    assert result["loss_per_byte"] * result["bytes"] == pytest.approx(result["loss"] * result["tokens"], rel=1e-12)
    with IndexedWriter(tmp_path / "corpus", "<u2") as writer:
        writer.add_document(np.array([*tokens, tokenizer.eod_id]))
        writer.add_document(np.array([*tokenizer.encode("ß"), tokenizer.eod_id]))
    corpus = evaluate(saved, "--bin", tmp_path / "corpus")
    assert corpus["bytes"] == len(TEXT.encode()) + 2
    assert corpus["tokens"] == len(tokens) + len(tokenizer.encode("ß")) + 2


def test_it_prints_a_table(llama, text, capsys, monkeypatch):
    said = say(capsys, monkeypatch, "evaluate", llama.folder, "--text", text)
    assert said.exit_code == 0
    lines = said.out.splitlines()
    assert lines[0].split() == ["checkpoint", str(llama.folder / "checkpoints" / "step_00000000")]
    assert f"{len(TEXT.encode()):,} tokens, {len(TEXT.encode()):,} bytes" in lines[1]
    assert lines[3].split() == ["nats", "bits", "perplexity"]
    loss = oracle_loss(llama, list(TEXT.encode())) / len(TEXT.encode())
    for line, name in ((lines[4], "token"), (lines[5], "byte")):
        assert line.split() == ["per", name, f"{loss:.4f}", f"{loss / math.log(2):.4f}", f"{math.exp(loss):,.4f}"]
    assert "tokens/s" in said.err


# Mistakes, before anything runs -----------------------------------------------------------------------------------------


@pytest.fixture
def refused(capsys, monkeypatch):
    monkeypatch.setattr("triaxis.launch.commands.evaluate.start", lambda *_: pytest.fail("it started"))

    def refuse(*words: object) -> str:
        said = say(capsys, monkeypatch, "evaluate", *words)
        assert (said.exit_code, said.out) == (2, "")
        return said.err

    return refuse


def test_mistakes_are_said_before_the_start(llama, text, tmp_path, refused):
    err = refused(llama.folder, "--text", text, "--stride", 0, "--max-tokens", 0, "--batch-size", 0)
    assert "3 problems" in err
    assert "--stride 33: must be at most model.seq_length = 32" in refused(llama.folder, "--text", text, "--stride", 33)
    assert "cannot be read as text" in refused(llama.folder, "--text", tmp_path / "gone.txt")
    assert "does not exist" in refused(llama.folder, "--bin", tmp_path / "gone")
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert "holds no text" in refused(llama.folder, "--text", empty)
    latin = tmp_path / "latin.txt"
    latin.write_bytes("ß".encode("latin-1"))
    assert "cannot be read as text in UTF-8" in refused(llama.folder, "--text", latin)


def test_a_corpus_of_another_tokenizer_is_refused(llama, text, tmp_path, refused, capsys, monkeypatch):
    prefix = tmp_path / "corpus"
    assert say(capsys, monkeypatch, "prepare", "--input", text, "--output", prefix, "--workers", 1).exit_code == 0
    record = prefix.with_suffix(".json")
    mine = load_tokenizer("bytes").identity
    record.write_text(record.read_text().replace(mine, "0" * len(mine)))
    assert "would mean other words" in refused(llama.folder, "--bin", prefix)
