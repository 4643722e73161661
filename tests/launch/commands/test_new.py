"""`triaxis new`: the config that it prints is legal and trains, from scratch or from a folder's weights, without an edit."""

import contextlib
import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from tests.documented import ROOT, section
from tests.lacking import need_package
from tests.launch.command_line import TRIAXIS, records, run
from triaxis.engine.checkpoint.directory import find
from triaxis.engine.config.load import load_config
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.sources import Source
from triaxis.engine.data.corpus.record import record_path
from triaxis.engine.data.datasets import open_datasets
from triaxis.launch.cli import main
from triaxis.launch.prepare.prepare import PrepareRequest, prepare
from triaxis.models.interop.huggingface.tokenizer import bytes_tokenizer_json
from triaxis.models.specs import num_parameters

MEGATRON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 10 --lr 1e-3 --lr-warmup-iters 1 --lr-decay-style constant"
)
TEXT = "the quick brown fox jumps over the lazy dog 0123456789"
LENGTH = 32
LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of transformers and a byte-level BPE, beside a corpus of its tokenizer."""
    need_package("transformers", "pip install -e '.[dev]'")
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = transformers.LlamaConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        vocab_size=301,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(1)
    random = transformers.LlamaForCausalLM(config)
    for parameter in random.parameters():  # far from uniform, so that the loss tells these weights from others
        torch.nn.init.normal_(parameter, std=0.3)
    random.save_pretrained(folder)
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([TEXT] * 3, vocab_size=290)
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(folder / "tokenizer.json"))
    with contextlib.chdir(folder.parent):
        make_corpus("corpus", "tiny")
    return folder


@pytest.fixture
def workplace(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the model and a corpus of its tokenizer, on a machine of two cores."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copytree(model.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path


def make_corpus(prefix: str, tokenizer: str, num_documents: int = 20) -> None:
    text = Path(f"{prefix}.jsonl")
    text.write_text("".join(json.dumps({"text": TEXT[number:] + TEXT}) + "\n" for number in range(num_documents)))
    prepare(PrepareRequest((text,), tokenizer, prefix), num_workers=1, progress=lambda done: None)


def new(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> tuple[str, str]:
    """Run the command; return stdout and stderr."""
    capsys.readouterr()
    assert main(["new", *map(str, words)]) == code
    said = capsys.readouterr()
    return said.out, said.err


def start_from(capsys: pytest.CaptureFixture[str], folder: object, *words: object, code: int = 0) -> tuple[str, str]:
    """Run the command for the weights of a folder."""
    return new(capsys, "--from", folder, "--weights", *words, code=code)


def read(text: str) -> Config:
    Path("run.yaml").write_text(text)
    return load_config(Path("run.yaml"), [], {})


def loss_of_transformers(folder: Path, config: Config) -> float:
    """The mean loss of the first step's samples under the folder's own weights."""
    import transformers

    theirs = transformers.LlamaForCausalLM.from_pretrained(folder).double()
    model = config.model
    samples = open_datasets(config.data, model.seq_length, config.train.seed, vocab_size=model.vocab_size).train
    first = [samples[number] for number in range(config.train.global_batch_size)]
    tokens = torch.tensor([sample.tokens.tolist() for sample in first])
    with torch.no_grad():
        logits = theirs(tokens[:, : model.seq_length]).logits
    labels = tokens[:, 1:].flatten()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels))


@pytest.mark.distributed
def test_what_it_prints_trains_from_the_folders_weights(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps on two ranks: the first loss is that of transformers with the folder's weights, the next is another."""
    out, err = start_from(capsys, "tiny", "--data", "corpus", "--tokens", "128")
    config = read(out)
    assert (config.parallel.dp, config.train.steps, config.train.global_batch_size) == (2, 2, 2)
    assert main(["config", "check", "run.yaml"]) == 0
    trained = run(workplace, *TRIAXIS, "train", "run.yaml", "runtime.name=first")
    assert trained.exit_code == 0, trained.err
    first, second = (record["loss"] for record in records(workplace / "runs" / "first" / "metrics.jsonl"))
    assert first == pytest.approx(loss_of_transformers(Path("tiny"), config), rel=1e-6)
    assert first != pytest.approx(second, rel=1e-6)
    assert "tiny: llama" in out and "llama, " in err


def test_the_commands_of_the_page_run_as_they_are_written(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder that has such a model and such text; the last one, which would train, without starting ranks."""
    part = section((ROOT / "docs" / "interop.md").read_text(), "## From a folder to a run")
    *lines, train = part.split("```")[1].strip().splitlines()
    shutil.copytree("tiny", "models/Llama-3.1-8B")
    Path("text").mkdir()
    Path("corpus.jsonl").rename("text/some.jsonl")
    for line in lines:
        capsys.readouterr()
        command, _, target = line.partition(" > ")
        assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
        if target:
            Path(target).write_text(capsys.readouterr().out)
    assert train == "triaxis train run.yaml"
    assert "imported/Llama-3.1-8B" in Path("run.yaml").read_text()
    assert main([*train.split()[1:], "--dry-run"]) == 0, capsys.readouterr().err


def test_stdout_is_the_config_and_stderr_says_what_was_chosen(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = start_from(capsys, "tiny", "--data", "corpus", "--tokens", "20B", "--gpus", "64x80GB")
    config = read(out)
    assert (config.parallel.dp, config.runtime.ranks_per_node, config.precision.dtype) == (64, 8, "bf16")
    assert config.data.train == [Source(path=str(workplace / "corpus"))]
    assert config.data.tokenizer == str(workplace / "imported" / "tiny" / "tokenizer.json")
    assert (config.checkpoint.load, config.checkpoint.load_what) == (str(workplace / "imported" / "tiny"), "weights")
    assert find(Path("imported/tiny")).manifest.config["model"] == config.model.model_dump(mode="json")
    assert "# Made by:  triaxis new --from tiny --weights --data corpus --tokens 20B --gpus 64x80GB\n" in out
    assert "the corpus records this tokenizer" in out and "the corpus records this tokenizer" in err
    assert f"begins: {TEXT[:6]!r}"[:-1] in err and "64 GPUs of 80.0 GB on 8 nodes of 8" in err
    assert "read more than four times" in err
    assert main(["config", "check", "run.yaml", "--gpu-memory", "80"]) == 0


def test_tokens_as_people_write_them(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tokens, number in {"20B": 20 * 10**9, "500M": 5 * 10**8, "1_000_000": 10**6, "1e6": 10**6}.items():
        out, _ = start_from(capsys, "tiny", "--data", "corpus", "--tokens", tokens)
        train = read(out).train
        assert train.steps is not None
        per_step = train.global_batch_size * LENGTH
        assert (train.steps - 1) * per_step < number <= train.steps * per_step, tokens


def test_samples_are_as_long_as_the_model_takes_but_not_endless(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_corpus("long", "tiny", num_documents=500)
    config = json.loads(Path("tiny/config.json").read_text())
    words = ("tiny", "--data", "long", "--tokens", "1M", "--gpus", "1x80GB")
    for longest, asked, length in ((100, None, 100), (131072, None, 8192), (131072, 9000, 9000)):
        Path("tiny/config.json").write_text(json.dumps(config | {"max_position_embeddings": longest}))
        more = () if asked is None else ("--seq-length", asked)
        out, err = start_from(capsys, *words, "--output", f"of_{longest}_{length}", *more)
        assert read(out).model.seq_length == length and f"of {length:,} tokens" in err


def test_an_import_is_used_again_until_the_folder_changes(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("tiny", "--data", "corpus", "--output", "ours", "--tokens")
    start_from(capsys, *words, "1M")
    kept = (find(Path("ours")).folder / "manifest.json").stat().st_ino
    out, err = start_from(capsys, *words, "2M")
    assert "imported before" in err and read(out).checkpoint.load == str(workplace / "ours")
    assert (find(Path("ours")).folder / "manifest.json").stat().st_ino == kept
    assert "ours is there already" in start_from(capsys, *words, "2M", "--seq-length", 16, code=2)[1]
    os.utime("tiny/model.safetensors")
    out, err = start_from(capsys, *words, "2M", code=2)
    assert "ours is there already" in err and out == ""


def test_a_corpus_of_another_tokenizer_is_refused_before_anything_is_imported(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_corpus("bytes", "bytes")
    out, err = start_from(capsys, "tiny", "--data", "bytes", "--tokens", "1M", code=2)
    assert "the same ids would mean other words" in err and "triaxis prepare --tokenizer tiny" in err
    assert out == "" and not Path("imported").exists()


def test_the_tokenizer_json_of_bytes_is_the_bytes_tokenizer(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_corpus("bytes", "bytes")
    Path("tiny/tokenizer.json").write_text(bytes_tokenizer_json())
    out, err = start_from(capsys, "tiny", "--data", "bytes", "--tokens", "1M")
    assert read(out).data.tokenizer == "bytes" and "the corpus records this tokenizer" in err


def test_a_folder_without_a_tokenizer_takes_that_of_the_corpus(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("tiny/tokenizer.json").rename("own.json")
    make_corpus("other", "own.json")
    out, err = start_from(capsys, "tiny", "--data", "other", "--tokens", "1M")
    assert read(out).data.tokenizer == str(workplace / "own.json")
    assert "the model came without one" in err
    record_path("other").unlink()
    assert "neither tiny nor other" in start_from(capsys, "tiny", "--data", "other", "--tokens", "1M", code=2)[1]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--tokens", "1.5"), "--tokens 1.5: must be a whole number"),
        (("--tokens", "0"), "--tokens 0: must be at least 1"),
        (("--tokens", "1M", "--gpus", "8"), "--gpus 8: must be a number of GPUs and the memory of each"),
        (("--tokens", "1M", "--seq-length", "90000"), "a sample takes 90,001"),
        (("--tokens", "1M", "--gpus", "8x0.001GB"), "It lacks"),
    ],
)
def test_what_cannot_be_is_refused_and_imports_nothing(
    workplace: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str
) -> None:
    out, err = start_from(capsys, "tiny", "--data", "corpus", *words, code=2)
    assert problem in err and out == "" and not Path("imported").exists()


def test_a_shipped_model_or_one_of_a_size_is_planned_for_the_corpus_and_the_machine(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_corpus("bytes", "bytes")
    out, err = new(capsys, "--from", "gpt_tiny", "--data", "bytes", "--tokens", "10k", "model.num_layers=2")
    config = read(out)
    shipped = load_config("gpt_tiny").model
    assert config.model == shipped.model_copy(update={"num_layers": 2})
    assert config.data.train == [Source(path=str(workplace / "bytes"))] and config.data.tokenizer == "bytes"
    assert config.checkpoint.load is None and config.parallel.dp == 2
    assert "tokenizer  bytes: " in err and "10,000" in err
    assert "# Made by:  triaxis new --from gpt_tiny --data bytes --tokens 10k model.num_layers=2\n" in out

    out, err = new(capsys, "--size", "1M", "--data", "bytes", "--seq-length", "64")
    config = read(out)
    assert config.model.vocab_size == 257 and config.model.seq_length == 64
    assert num_parameters(config.model) == pytest.approx(10**6, rel=0.05)
    tokens = 20 * num_parameters(config.model)
    assert f"{tokens:,}, 20 for each parameter" in err
    assert main(["config", "check", "run.yaml"]) == 0


def test_a_config_json_without_weights_starts_from_scratch(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = new(capsys, "--from", "tiny/config.json", "--data", "corpus", "--tokens", "1M")
    config = read(out)
    assert config.model.vocab_size == 301 and config.checkpoint.load is None
    assert config.data.tokenizer == str(workplace / "tiny" / "tokenizer.json")
    assert not Path("imported").exists() and "forgets" not in out
    folder, _ = new(capsys, "--from", "tiny", "--data", "corpus", "--tokens", "1M")
    assert folder.partition("# Check")[2] == out.partition("# Check")[2]


def test_without_a_corpus_a_run_has_random_tokens(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = new(capsys, "--from", "llama3_8b", "--gpus", "64x80GB", "--tokens", "1B")
    config = read(out)
    assert config.data.synthetic and config.eval.interval is None
    assert config.parallel.dp is not None and "random tokens" in err
    assert "or         parallel.zero=2 with dp=64 alone fits without recomputation, 59.3 GB" in err
    assert main(["config", "check", "run.yaml", "--gpu-memory", "80"]) == 0


def test_a_command_line_of_megatron_is_taken_whole(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("args.txt").write_text(MEGATRON)
    out, _ = new(capsys, "--from", "@args.txt", "--vocab-size", "301", "--data", "corpus")
    config = read(out)
    assert config.model.num_layers == 2 and config.data.train == [Source(path="corpus")]
    assert main(["train", "run.yaml", "--dry-run"]) == 0
    assert new(capsys, "--from", MEGATRON, "--vocab-size", "301", "--data", "corpus")[0] == out


def test_a_script_is_executed_when_the_user_says_so(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.sh").write_text(f"torchrun pretrain_gpt.py {MEGATRON} --vocab-size $1 --mock-data")
    out, _ = new(capsys, "--from", "run.sh 301", "--run-script")
    assert out == new(capsys, "--from", f"{MEGATRON} --vocab-size 301 --mock-data")[0]
    assert "Add --run-script to execute it in an empty folder" in new(capsys, "--from", "run.sh", code=2)[1]
    assert "--run-script with --size: it would do nothing" in new(capsys, "--size", "1M", "--run-script", code=2)[1]


@pytest.mark.parametrize(
    ("words", "explained"),
    [
        (("--from", "gpt_tiney"), "Did you mean gpt_tiny"),
        (("--from", "gpt_tiny", "--weights"), "--weights with a config: it would do nothing"),
        (("--from", "gpt_tiny", "train.steps=3"), "train.steps=3: model, kernels may be given here"),
        (("--from", "gpt_tiny", "--vocab-size", "5"), "--vocab-size with a config: it would do nothing"),
        (("--from", "gpt_tiny", "--output", "here"), "--output without --weights"),
        (("--from", "gpt_tiny", "--weights", "--output", "here", "--vocab-size", "0"), "has 2 problems"),
        (("--from", "tiny", "--weights", "model.num_layers=1"), "the weights are of the model as it is"),
        (
            ("--from", "--num-layers 2 --hidden-size 8", "--tokens", "1B"),
            "--tokens with a command line of Megatron-LM: it would do nothing",
        ),
        (("--size", "1M"), "--size 1000000: no model with a vocabulary of 50,257 tokens"),
        (("--size", "1M", "--weights"), "--weights with --size: it would do nothing"),
    ],
)
def test_words_that_do_not_fit_together(
    workplace: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], explained: str
) -> None:
    out, err = new(capsys, *words, code=2)
    assert explained in err and out == ""


def test_a_config_json_gives_the_model_of_the_shipped_config(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("config.json").write_text(json.dumps({**LLAMA_3_8B, "_model_name_or_path": "x", "strange": 1}))
    words = ("--from", "config.json", "--gpus", "64x80GB", "--tokens", "1B", "--ignore", "strange")
    out, err = new(capsys, *words)
    assert read(out).model == load_config("llama3_8b").model
    assert "keys of config.json without effect were ignored: _model_name_or_path" in err
    assert "keys of config.json that are not known here were ignored (--ignore): strange" in err
    assert read(new(capsys, *words, "model.num_layers=2")[0]).model.num_layers == 2
    _, err = new(capsys, *words, "model.hidden=2", "model.num_layers=x", code=2)
    assert "has 2 problems" in err and "Did you mean model.hidden_size?" in err and "model.num_layers = 'x'" in err


@pytest.mark.parametrize(
    ("content", "words"), [("{", "as JSON"), ("[1]", "no mapping"), ('{"model_type": "bert"}', "model_type = 'bert'")]
)
def test_what_is_no_config_json_is_refused(
    workplace: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    Path("config.json").write_text(content)
    assert words in new(capsys, "--from", "config.json", code=2)[1]
    assert "No such file" in new(capsys, "--from", "missing.json", code=2)[1]


def test_what_megatron_says_and_has_no_counterpart_is_listed(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"{MEGATRON} --mock-data --bf16 --log-throughput --fp8-format hybrid"
    _, err = new(capsys, "--from", line, code=2)
    assert "has 2 problems" in err and "--vocab-size is missing" in err and "--ignore fp8-format" in err
    text, _ = new(capsys, "--from", line, "--vocab-size", "500", "--ignore", "fp8-format")
    assert "# Without effect here (logging): log-throughput." in text and read(text).model.vocab_size == 500
    _, err = new(capsys, "--from", line, "--vocab-size", "500", "--ignore", "lr", "--ignore", "none", code=2)
    assert "--ignore none: not among" in err and "--ignore lr: it is no argument without a counterpart" in err
