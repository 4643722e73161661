"""Every kind of tokenizer gives the ids of its own library, on text in many scripts, and no special token."""

import base64
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tests.engine.data.corpus.conftest import many_scripts
from triaxis.engine.data.corpus.findings import Findings
from triaxis.engine.data.corpus.indexed import IndexedTokens
from triaxis.engine.data.corpus.tiktoken_ranks import PATTERNS
from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.engine.errors import DataError
from triaxis.launch.inference.evaluate import bytes_of
from triaxis.launch.inference.text_stream import TextStream
from triaxis.launch.prepare.prepare import PrepareRequest, look_at, plan, prepare
from triaxis.launch.prepare.train_bpe import SMALLEST_VOCABULARY, size_to_train, train_bpe
from triaxis.models.inference.evaluate import ListedTokens

VOCABULARY = 3000
SPECIAL = ["<unk>", "<|begin|>", "<|turn|>", "<|endoftext|>"]
SIZES = [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)]
SPELLED = "spells <|endoftext|>, </s> and <|turn|> <|added|>"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of each library, trained on the same text; that of tokenizers adds a beginning of text where it is asked."""
    folder = tmp_path_factory.mktemp("tokenizers")
    texts = many_scripts(60_000)
    own = tokenizers.Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    own.train_from_iterator(texts, trainer)
    own.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 1)])
    (folder / "hf").mkdir()
    own.save(str(folder / "hf" / "tokenizer.json"))
    write_config(folder / "hf", eos_token="<|turn|>", added=["<|turn|>", "<|added|>"])
    shutil.copy(folder / "hf" / "tokenizer.json", folder / "tokenizer.json")
    write_ranks(folder / "gpt2.tiktoken", own)
    # Its alphabet would fill the vocabulary: other scripts become bytes.
    alphabetic = ["".join(letter for letter in text if letter < "\u0500") for text in texts]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in alphabetic for line in text.split("\n")),
        model_prefix=str(folder / "sp"),
        vocab_size=2000,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        minloglevel=2,
    )
    return folder


def write_config(folder: Path, eos_token: str, added: Sequence[str]) -> None:
    known = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    numbers = {name: known.token_to_id(name) or known.get_vocab_size() for name in added}
    decoder = {str(number): {"content": name, "special": name == eos_token} for name, number in numbers.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token, "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_ranks(path: Path, bpe: Any) -> None:
    """The same merges as tiktoken's ranks: a token per line, in the order in which they were learned."""
    letters = {letter: bytes([byte]) for byte in range(256) for letter in [letter_of(byte)]}
    vocabulary = sorted(bpe.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    names = [name for name, _ in vocabulary if name not in SPECIAL]
    tokens = [b"".join(letters[letter] for letter in name) for name in names]
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))


def letter_of(byte: int) -> str:
    """GPT-2's letter of a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [other for other in range(256) if other not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def own_json(path: Path) -> Callable[[str], list[int]]:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def own_folder(path: Path) -> Callable[[str], list[int]]:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def own_sentencepiece(path: Path) -> Callable[[str], list[int]]:
    return sentencepiece.SentencePieceProcessor(model_file=str(path)).EncodeAsIds


def own_tiktoken(path: Path) -> Callable[[str], list[int]]:
    lines = [line.split() for line in path.read_bytes().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    pattern = tiktoken_ext.openai_public.r50k_pat_str
    return tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}).encode_ordinary


KINDS = {
    "tokenizer.json": (own_json, "<|endoftext|>"),
    "hf": (own_folder, "<|turn|>"),
    "sp.model": (own_sentencepiece, "</s>"),
    "gpt2.tiktoken": (own_tiktoken, "<|endoftext|>"),
}


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_of_the_library(files: Path, name: str, num_bytes: int) -> None:
    tokenizer = load_tokenizer(str(files / name))
    own, _ = KINDS[name]
    own_ids = own(files / name)
    texts = many_scripts(num_bytes)
    expected = [own_ids(text) for text in texts]
    assert tokenizer.encode_batch(texts) == expected
    assert [tokenizer.encode(text) for text in texts[:5]] == expected[:5]
    assert max(max(ids) for ids in expected) < tokenizer.vocab_size
    assert sum(map(len, expected)) < 0.95 * sum(len(text.encode()) for text in texts), "they are no bytes alone"


@pytest.mark.parametrize("name", KINDS)
def test_text_comes_back_and_ends_no_document(files: Path, name: str) -> None:
    tokenizer = load_tokenizer(str(files / name))
    text = f"Wörter, слова, 単語 🙂. {SPELLED}"
    ids = tokenizer.encode(text)
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode([*ids, tokenizer.eod_id, 10**6]) == text
    assert tokenizer.json_file == {"tokenizer.json": files / name, "hf": files / name / "tokenizer.json"}.get(name)


@pytest.mark.parametrize("name", KINDS)
def test_generate_and_evaluate_read_every_kind(files: Path, name: str) -> None:
    """A stream shows a text as its tokens come, and an evaluation counts its bytes, document by document."""
    tokenizer = load_tokenizer(str(files / name))
    texts = ["Größe 3,5 km", "слова и 🙂 слова", "単語"]
    stream = TextStream(tokenizer, tokenizer.encode(texts[0]))
    shown = "".join(stream.add(token) for token in tokenizer.encode(" and more 単語 🙂")) + stream.finish()
    assert shown.strip() == "and more 単語 🙂"
    ids = [token for text in texts for token in (*tokenizer.encode(text), tokenizer.eod_id)]
    assert bytes_of(ListedTokens(ids), tokenizer) == sum(len(text.encode()) for text in texts)


def test_each_kind_has_its_own_end_of_document(files: Path) -> None:
    bpe = tokenizers.Tokenizer.from_file(str(files / "tokenizer.json"))
    assert load_tokenizer(str(files / "tokenizer.json")).eod_id == bpe.token_to_id("<|endoftext|>") == 3
    assert load_tokenizer(str(files / "hf")).eod_id == bpe.token_to_id("<|turn|>") == 2
    assert load_tokenizer(str(files / "hf"), "<|endoftext|>").eod_id == 3
    assert load_tokenizer(str(files / "hf")).vocab_size == VOCABULARY + 1, "with the token that only the config names"
    assert load_tokenizer(str(files / "sp.model")).eod_id == 2
    assert load_tokenizer(str(files / "gpt2.tiktoken")).eod_id == 50256
    ranks = VOCABULARY - len(SPECIAL)
    assert load_tokenizer(f"{files / 'gpt2.tiktoken'}:\\w+|\\W+").eod_id == ranks
    with pytest.raises(DataError, match="<missing>"):
        load_tokenizer(str(files / "sp.model"), "<missing>")


def test_ranks_of_another_encoding_end_documents_behind_the_ranks(tmp_path: Path) -> None:
    """Under a known pattern's name, whose own id for the end of a document is an ordinary token of these ranks."""
    ranks = [(bytes([byte]), byte) for byte in range(256)] + [(b"ab", PATTERNS["gpt2"].ends["<|endoftext|>"])]
    path = tmp_path / "mine.tiktoken"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks))
    tokenizer = load_tokenizer(f"{path}:gpt2")
    assert tokenizer.encode("ab") == [50256]
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (50257, 50258)
    assert tokenizer.decode([50256, tokenizer.eod_id]) == "ab"


def test_a_folder_with_a_sentencepiece_model_alone(files: Path, tmp_path: Path) -> None:
    """It is that model, and its tokenizer_config.json names the end of a document; a tokenizer.json beside it comes first."""
    shutil.copy(files / "sp.model", tmp_path / "tokenizer.model")
    named = load_tokenizer(str(tmp_path / "tokenizer.model"))
    found = load_tokenizer(str(tmp_path))
    assert (found.identity, found.eod_id) == (named.identity, 2)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<s>"}}')
    found = load_tokenizer(str(tmp_path))
    assert (found.encode("some text"), found.eod_id) == (named.encode("some text"), 1)
    assert found.identity == named.identity_with(1)
    (tmp_path / "tokenizer_config.json").unlink()
    shutil.copy(files / "tokenizer.json", tmp_path)
    assert load_tokenizer(str(tmp_path)).vocab_size == VOCABULARY


@pytest.mark.parametrize(
    "content",
    [
        *("[]", "null", '"text"', "{", '{"eos_token": 3}', '{"eos_token": ["</s>"]}', '{"eos_token": {"content": 3}}'),
        '{"eos_token": "</s>", "eos_token": "<s>"}',
        *('{"eos_token": {"special": true}}', '{"added_tokens_decoder": [1]}', '{"added_tokens_decoder": "x"}'),
        *('{"added_tokens_decoder": {"x": {}}}', '{"added_tokens_decoder": {"1": "x"}}'),
        *('{"added_tokens_decoder": {"1": {}}}', '{"added_tokens_decoder": {"1": {"content": 1}}}'),
        '{"added_tokens_decoder": {"1": {"content": "<x>", "special": "yes"}}}',
        '{"added_tokens_decoder": {"²": {"content": "<x>"}}}',
    ],
)
def test_files_of_a_folder_with_values_of_a_wrong_type(files: Path, tmp_path: Path, content: str) -> None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(files / "tokenizer.json", tmp_path)
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=f"{name}(:| cannot be read as a JSON object)"):
            load_tokenizer(str(tmp_path))
        if "added_tokens" in content:
            break
        (tmp_path / name).unlink()


def test_a_file_of_a_folder_that_cannot_be_read_is_not_passed_over(files: Path, tmp_path: Path) -> None:
    shutil.copy(files / "tokenizer.json", tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.symlink_to("blobs/gone")
    with pytest.raises(DataError, match=r"tokenizer_config\.json cannot be read as a JSON object \(.*No such file"):
        load_tokenizer(str(tmp_path))
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=r"tokenizer_config\.json cannot be read as a JSON object \(.*Is a directory"):
        load_tokenizer(str(tmp_path))
    path.rmdir()
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0f' * 32}\nsize 6\n")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not there yet.*git lfs pull"):
        load_tokenizer(str(tmp_path))


def test_a_model_needs_embeddings_for_what_text_can_be(files: Path, tmp_path: Path) -> None:
    """A special token that text never spells needs none, unless it ends documents; other added tokens are found in text."""
    for special, eod_token, size in (
        (True, "<|turn|>", VOCABULARY),
        (True, "<image>", VOCABULARY + 1),
        (False, "<|turn|>", VOCABULARY + 1),
    ):
        own = tokenizers.Tokenizer.from_file(str(files / "tokenizer.json"))
        own.add_tokens([tokenizers.AddedToken("<image>", special=special)])
        own.save(str(tmp_path / "tokenizer.json"))
        tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"), eod_token)
        assert (tokenizer.vocab_size, tokenizer.text_size) == (VOCABULARY + 1, size)
        assert (VOCABULARY in tokenizer.encode("an <image> of")) is not special
    assert load_tokenizer("bytes").text_size == 257
    assert load_tokenizer(str(files / "sp.model")).text_size == 2000


def test_identities_differ_where_ids_do(files: Path) -> None:
    names = [*KINDS, "gpt2.tiktoken:cl100k_base"]
    identities = {load_tokenizer(str(files / name)).identity for name in names}
    identities.add(load_tokenizer(str(files / "hf"), "<|endoftext|>").identity)
    assert len(identities) == len(names) + 1
    again = load_tokenizer(f"{files / 'gpt2.tiktoken'}:gpt2").identity
    assert again == load_tokenizer(str(files / "gpt2.tiktoken")).identity


def test_the_patterns_are_tiktokens_own(monkeypatch: pytest.MonkeyPatch) -> None:
    public = tiktoken_ext.openai_public
    for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(public, name, lambda *_, **__: {})
    for name in ("gpt2", "r50k_base", "p50k_base", "cl100k_base", "o200k_base"):
        own = getattr(public, name)()
        assert PATTERNS[name].regex == own["pat_str"]
        assert PATTERNS[name].ends.items() <= own["special_tokens"].items()


def test_ranks_without_a_pattern_are_refused(files: Path, tmp_path: Path) -> None:
    shutil.copy(files / "gpt2.tiktoken", tmp_path / "mine.tiktoken")
    with pytest.raises(DataError, match=r"--pattern.*mine\.tiktoken:cl100k_base"):
        load_tokenizer(str(tmp_path / "mine.tiktoken"))
    by_name = load_tokenizer(f"{tmp_path / 'mine.tiktoken'}:gpt2")
    assert by_name.encode("some text") == load_tokenizer(str(files / "gpt2.tiktoken")).encode("some text")
    with pytest.raises(DataError, match="is no tokenizer of tiktoken"):
        load_tokenizer(f"{tmp_path / 'mine.tiktoken'}:(")
    with pytest.raises(DataError, match="there is no tokenizer at bytes:gpt2"):
        load_tokenizer("bytes:gpt2")


@pytest.mark.parametrize(("name", "package"), [("sp.model", "sentencepiece"), ("gpt2.tiktoken", "tiktoken")])
def test_a_missing_package_is_named(files: Path, name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(DataError, match=rf"needs the package {package}.* -m pip install -e .*\[text\]"):
        load_tokenizer(str(files / name))


def test_what_is_no_tokenizer_is_refused(files: Path, tmp_path: Path) -> None:
    shutil.copy(files / "gpt2.tiktoken", tmp_path / "tokenizer.model")
    with pytest.raises(DataError, match=r"no model of the sentencepiece library.*tokenizer\.model:llama3"):
        load_tokenizer(str(tmp_path / "tokenizer.model"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"there is no tokenizer at .*train-bpe:32000"):
        load_tokenizer(str(tmp_path / "empty"))
    shutil.copytree(files / "hf", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"]["7"] = {"content": "<|turn|>"}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"gives '<\|turn\|>' the id 7"):
        load_tokenizer(str(tmp_path / "hf"))


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in many_scripts(50_000)))
    return path


def test_a_trained_tokenizer_lies_beside_its_corpus(text_file: Path, tmp_path: Path, in_process: None) -> None:
    def request(tokenizer: str, output: str) -> PrepareRequest:
        return PrepareRequest((text_file,), tokenizer, str(tmp_path / output))

    def made(tokenizer: str, output: str) -> Any:
        return prepare(request(tokenizer, output), num_workers=1, progress=lambda done: None)

    record = made("train-bpe:1000", "trained").record
    path = tmp_path / "trained.tokenizer.json"
    assert record.tokenizer == str(path)
    assert load_tokenizer(str(path)).identity == record.tokenizer_identity
    assert (record.vocab_size, record.eod_id) == (1000, 0)
    given = made(str(path), "given").record
    assert given.bin_sha256 == record.bin_sha256 and given.idx_sha256 == record.idx_sha256
    assert IndexedTokens(tmp_path / "given").num_documents == len(text_file.read_text().splitlines())
    assert made("train-bpe:1000", "trained").already_there
    path.unlink()
    assert made("train-bpe:1000", "trained").record == record, (
        "a tokenizer that is lost is trained again, to the same ids"
    )
    assert load_tokenizer(str(path)).identity == record.tokenizer_identity
    (tmp_path / "taken.tokenizer.json").write_text("mine")
    with pytest.raises(DataError, match=r"taken\.tokenizer\.json exists and is another tokenizer"):
        made("train-bpe:1000", "taken")


def test_training_is_deterministic(text_file: Path) -> None:
    findings = Findings("stop")
    units = plan(look_at(PrepareRequest((text_file,), "bytes", "out"), findings), findings)
    first, *others = [train_bpe(units, 2000, "<|end|>", "stop") for _ in range(3)]
    assert others == [first, first]
    tokenizer = tokenizers.Tokenizer.from_str(first.decode())
    assert (tokenizer.get_vocab_size(), tokenizer.token_to_id("<|end|>")) == (2000, 0)
    text = many_scripts(10_000)[0]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text, "every byte has an id, and no space is added"


def test_training_reads_an_evenly_spread_sample(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triaxis.launch.prepare.prepare.UNIT_BYTES", 2000)
    findings = Findings("stop")
    units = plan(look_at(PrepareRequest((text_file,), "bytes", "out"), findings), findings)
    whole, spread = (train_bpe(chosen, 1000, None, "stop") for chosen in (units, units[::4]))
    monkeypatch.setattr("triaxis.launch.prepare.train_bpe.TRAINING_BYTES", -(-text_file.stat().st_size // 4))
    part = train_bpe(units, 1000, None, "stop")
    assert len(units) > 12 and whole != part == spread


@pytest.mark.parametrize(
    "name", ["train-bpe:", "train-bpe:many", f"train-bpe:{SMALLEST_VOCABULARY - 1}", "train-bpe:" + "9" * 30]
)
def test_a_vocabulary_is_a_number(name: str) -> None:
    with pytest.raises(DataError, match="a number of 257 tokens"):
        size_to_train(name)
    assert size_to_train("tokenizer.json") is None
