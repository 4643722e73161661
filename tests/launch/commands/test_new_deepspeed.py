"""`triaxis new --from ds_config.json`: a run with DeepSpeed's values and another source's model."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.commands.test_new import LLAMA_3_8B, new, read
from triaxis.launch.cli import main

DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 544,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.98], "weight_decay": 0.05}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 200, "total_num_steps": 5000, "cos_min_ratio": 0.1, "warmup_type": "linear"},
    },
}


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write({})


def write(more: dict[str, Any], path: str = "ds_config.json") -> None:
    Path(path).write_text(json.dumps(DEEPSPEED | more))


def test_a_run_has_deepspeeds_values_and_another_sources_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--from", "ds_config.json", "--from", "gpt_125m", "--gpus", "8x80GB")
    out, err = new(capsys, *words)
    config = read(out)
    train, optimizer = config.train, config.optimizer
    assert (train.steps, train.global_batch_size, train.micro_batch_size) == (5000, 544, 4)
    assert (config.parallel.zero, config.parallel.dp, config.precision.dtype) == (3, 8, "bf16")
    assert (optimizer.lr, optimizer.min_lr, optimizer.lr_schedule) == (2e-4, 2e-5, "cosine")
    assert (optimizer.warmup_steps, optimizer.decay_steps, optimizer.clip_grad) == (200, 5000, 0.5)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.98, 0.05)
    left_out = "Could not be carried over: zero_optimization.offload_param: weights in host memory are not built"
    assert f"# {left_out}" in out and left_out in err
    assert f"# Made by:  triaxis new {' '.join(words)}\n" in out
    assert "zero: 3                             # zero_optimization.stage = 3\n" in out
    assert "GPT-3's" not in out and f"tokens     {5000 * 544 * config.model.seq_length:,}\n" in err
    assert main(["config", "check", "run.yaml", "--gpu-memory", "80"]) == 0
    longer = read(new(capsys, *words, "--tokens", "2B")[0])
    assert longer.train.steps == -(-(2 * 10**9) // (544 * config.model.seq_length))
    assert longer.optimizer.decay_steps == 5000


def test_open_values_are_chosen_as_without_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"), "auto")
    write(
        auto | {"bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}}
    )
    words = ("--size", "125M", "--gpus", "8x80GB", "--tokens", "2B")
    there, plain = read(new(capsys, "--from", "ds_config.json", *words)[0]), read(new(capsys, *words)[0])
    assert there.train == plain.train and there.precision == plain.precision
    assert (there.optimizer.lr, there.optimizer.beta2) == (plain.optimizer.lr, plain.optimizer.beta2)
    write(auto | {"train_micro_batch_size_per_gpu": 3, "scheduler": {}})
    one = read(new(capsys, "--from", "ds_config.json", *words)[0])
    assert (one.train.micro_batch_size, one.train.global_batch_size % 24) == (3, 0)
    assert (one.optimizer.lr, one.optimizer.min_lr) == (2e-4, 2e-5), "a tenth of the file's peak"


def test_keys_to_ignore_go_to_the_file_that_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.json").write_text(json.dumps(LLAMA_3_8B | {"odd": 1}))
    write({"strange": 1})
    words = ("--from", "config.json", "--from", "ds_config.json", "--gpus", "8x80GB", "--ignore", "odd")
    assert "strange: unknown key" in new(capsys, *words, code=2)[1]
    out, err = new(capsys, *words, "--ignore", "strange")
    assert read(out).model.num_layers == 32 and "strange: unknown (--ignore)" in out and "(--ignore): odd" in err


@pytest.mark.parametrize(
    ("words", "explained"),
    [
        (("--from", "ds_config.json"), "a DeepSpeed configuration has no model: there would be nothing to train. Add"),
        ((), "neither --from nor --size: there would be nothing to train"),
        (("--from", "gpt_tiny", "--size", "1M"), "--from gpt_tiny and --size 1M: each describes a model"),
        (("--from", "ds_config.json", "--from", "two.json", "--size", "125M"), "a run has one DeepSpeed configuration"),
        (("--from", "ds_config.json", "--from", "--num-layers 2"), "with a command line of Megatron-LM: both say"),
        (("--from", "ds_config.json", "--size", "125M", "--gpus", "5x80GB"), "544 is not 4 x 27 x 5"),
        (("--from", "broken.json", "--size", "125M"), "as JSON"),
    ],
)
def test_sources_that_do_not_fit_together(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], explained: str
) -> None:
    write({}, "two.json")
    Path("broken.json").write_text("{")
    out, err = new(capsys, *words, code=2)
    assert explained in err and out == ""
