"""`triaxis generate` from its words to the text: the same text in every layout, clean output, mistakes said before the start."""

import json
from pathlib import Path

import pytest
import torch

from tests.launch.command_line import TRIAXIS, run
from tests.launch.small_checkpoint import END_OF_DOCUMENT, GPT, LLAMA, Saved, save, say

pytestmark = pytest.mark.distributed

SAMPLED = ("--prompt", "def", "--temperature", "0.8", "--top-k", "50", "--top-p", "0.95", "--seed", "3")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(tmp_path_factory.mktemp("gpt"), GPT)


# What it writes ---------------------------------------------------------------------------------------------------------


def test_text_goes_to_stdout_and_the_rest_to_stderr(llama, capsys, monkeypatch):
    words = ("generate", llama.folder, *SAMPLED, "--max-new-tokens", 20)
    said, as_json = say(capsys, monkeypatch, *words), say(capsys, monkeypatch, *words, "--json")
    assert said.exit_code == as_json.exit_code == 0
    record = json.loads(as_json.out)
    assert record["prompt"] == "def"
    assert record["prompt_tokens"] == list(b"def")
    assert len(record["tokens"]) == 20
    assert record["finish"] == "length"
    assert record["text"] == bytes(token for token in record["tokens"] if token < 256).decode(errors="replace")
    assert (record["temperature"], record["top_k"], record["top_p"], record["seed"]) == (0.8, 50, 0.95, 3)
    assert said.out == f"def{record['text']}\n"
    assert as_json.err == ""
    assert "20 tokens (as many as were asked for); prompt of 3 tokens read in" in said.err
    assert "tokens/s" in said.err


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_write_the_text_of_one_process(llama, capsys, monkeypatch, tmp_path):
    words = ("generate", str(llama.folder), *SAMPLED, "--prompt", "class €", "--json")
    alone = say(capsys, monkeypatch, *words)
    with_ranks = run(tmp_path, *TRIAXIS, *words, "--tp", "2", "--pp", "2", "parallel.vpp=2")
    assert with_ranks.exit_code == 0, with_ranks.err
    for one, other in zip(alone.out.splitlines(), with_ranks.out.splitlines(), strict=True):
        assert json.loads(one)["tokens"] == json.loads(other)["tokens"]
    # What the launcher says is for people.
    assert "tp=2 pp=2 vpp=2 dp=1" in with_ranks.err
    assert list(tmp_path.iterdir()) == []


def test_several_prompts_are_continued_as_if_alone(llama, capsys, monkeypatch):
    both = say(capsys, monkeypatch, "generate", llama.folder, "--prompt", "ab", "--prompt", "class C", "--json")
    records = [json.loads(line) for line in both.out.splitlines()]
    for record in records:
        single = say(capsys, monkeypatch, "generate", llama.folder, "--prompt", record["prompt"], "--json")
        assert json.loads(single.out)["tokens"] == record["tokens"]
        # Without --max-new-tokens the text fills the window.
        assert len(record["prompt_tokens"]) + len(record["tokens"]) == LLAMA["seq_length"]


def test_seed_and_temperature_matter(llama, capsys, monkeypatch):
    def tokens(*words: object) -> list[int]:
        said = say(capsys, monkeypatch, "generate", llama.folder, "--prompt", "x", "--json", *words)
        return list(json.loads(said.out)["tokens"])

    assert tokens("--temperature", 0) == tokens("--temperature", 0, "--seed", 1) == tokens("--top-k", 1)
    assert tokens() == tokens("--seed", 0)
    assert len({tuple(tokens("--seed", seed)) for seed in range(3)}) == 3


def test_a_text_ends_where_the_model_ends_the_document(tmp_path, capsys, monkeypatch):
    changed = {"embedding.word.weight": torch.zeros(257, 16), "final_norm.bias": torch.ones(16)}
    changed = {name: value.double() for name, value in changed.items()}
    changed["embedding.word.weight"][END_OF_DOCUMENT] = 100.0
    saved = save(tmp_path, GPT, changed)
    said = say(capsys, monkeypatch, "generate", saved.folder, "--prompt", "the end", "--temperature", 0)
    assert (said.exit_code, said.out) == (0, "the end\n")
    assert "0 tokens (the model ended the document)" in said.err
    record = json.loads(say(capsys, monkeypatch, "generate", saved.folder, "--prompt", "", "--json").out)
    assert (record["finish"], record["tokens"], record["prompt_tokens"]) == ("end_of_document", [], [END_OF_DOCUMENT])


def test_rope_goes_on_when_told_to(llama, capsys, monkeypatch):
    words = ("generate", llama.folder, "--prompt", "x", "--max-new-tokens", 50, "--json")
    refused = say(capsys, monkeypatch, *words)
    assert refused.exit_code == 2
    assert "ask for at most --max-new-tokens 31" in refused.err
    assert "--max-length" in refused.err
    record = json.loads(say(capsys, monkeypatch, *words, "--max-length", 51).out)
    assert len(record["tokens"]) == 50


def test_an_override_changes_how_the_model_is_read(llama, capsys, monkeypatch):
    words = ("generate", llama.folder, "--prompt", "x", "--temperature", 0, "--json")
    read = [
        say(capsys, monkeypatch, *words, *more) for more in ((), ("precision.dtype=fp32",), ("model.rope_base=10",))
    ]
    tokens = [json.loads(said.out)["tokens"] for said in read]
    assert tokens[0] == tokens[1] != tokens[2]


# Mistakes, before anything runs -----------------------------------------------------------------------------------------


@pytest.fixture
def refused(capsys, monkeypatch):
    """Runs a command that must be refused before ranks are started, and returns what it says."""
    monkeypatch.setattr("triaxis.launch.commands.generate.start", lambda *_: pytest.fail("it started"))

    def refuse(*words: object) -> str:
        said = say(capsys, monkeypatch, "generate", *words)
        assert (said.exit_code, said.out) == (2, "")
        return said.err

    return refuse


def test_all_mistakes_of_the_words_are_said_at_once(llama, refused):
    err = refused(
        llama.folder, "--prompt", "abc", "--temperature", -1, "--top-k", 0, "--top-p", 1.5, "--max-new-tokens", 100
    )
    assert "4 problems" in err
    for given in ("--temperature -1.0", "--top-k 0", "--top-p 1.5", "the prompt has 3 tokens, and 100 more make 103"):
        assert given in err


def test_learned_positions_end(gpt, refused):
    err = refused(gpt.folder, "--prompt", "x", "--max-new-tokens", 32)
    assert "1 tokens, and 32 more make 33" in err
    assert "--max-length" not in err
    assert "32 positions" in refused(gpt.folder, "--prompt", "x", "--max-length", 33)
    assert "shorten the prompt" in refused(gpt.folder, "--prompt", "x" * 32)
    assert "prompt 2 has 40 tokens" in refused(gpt.folder, "--prompt", "x", "--prompt", "x" * 40)


def test_a_layout_that_the_model_does_not_fit_is_refused(llama, refused):
    err = refused(llama.folder, "--prompt", "x", "--tp", 3)
    assert f"the configuration for {llama.folder / 'checkpoints' / 'step_00000000'} has" in err
    assert "parallel.tp = 3" in err
    assert "'tp2' is not an existing checkpoint, an override" in refused(llama.folder, "tp2", "--prompt", "x")


def test_no_checkpoint_and_no_tokenizer(llama, tmp_path, refused):
    assert "there is no checkpoint to read" in refused(tmp_path / "runs", "--prompt", "x")
    moved = save(tmp_path, LLAMA, tokenizer=str(tmp_path / "gone.json"))
    err = refused(moved.folder, "--prompt", "x")
    assert "say where it is now: data.tokenizer=PATH" in err
    small = save(tmp_path / "small", {**LLAMA, "vocab_size": 200})
    assert "257 ids" in refused(small.folder, "--prompt", "x")


def test_a_model_that_is_not_the_checkpoint_s_is_refused_by_the_rank(llama, capsys, monkeypatch):
    said = say(capsys, monkeypatch, "generate", llama.folder, "--prompt", "x", "model.num_layers=3")
    assert (said.exit_code, said.out) == (2, "")
    assert "tensors that this model has no place for: layers.3." in said.err


def test_damage_is_found_before_a_word_is_written(tmp_path, capsys, monkeypatch):
    saved = save(tmp_path, LLAMA)
    (file,) = Path(saved.folder).rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    said = say(capsys, monkeypatch, "generate", saved.folder, "--prompt", "x")
    assert (said.exit_code, said.out) == (2, "")
    assert "is damaged" in said.err
