"""Contenders of the GPU benchmark on a CPU: the same model as ours, the same data, losses read a step behind (never timed)."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_contenders import megatron, ours, timed_loop, torch_models
from benchmarks.gpu_contenders.contenders import CONTENDERS, OURS
from benchmarks.gpu_contenders.records import Job, read
from benchmarks.gpu_contenders.shapes import resolve, write_config
from triaxis.engine.comm.topology import Topology
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.errors import ConfigError, OutOfMemoryError
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.launch.rank.out_of_memory import explaining_memory
from triaxis.models.specs import model_specs

OPTIONAL = {"torchtitan", "torchao", "transformer_engine"}
"""Packages of contenders that the extra `dev` does not install."""

TOY = Job(
    shape="tiny",
    contender=OURS,
    device="cpu",
    dtype="fp32",
    micro_batch_sizes=(2,),
    micro_batch_size=2,
    steps=3,
    warm_up=1,
    ceiling_size=64,
    ceiling_seconds=0.0,
)


@pytest.mark.slow
def test_the_loop_reads_losses_one_step_behind(tmp_path: Path) -> None:
    class Counting:
        def __init__(self) -> None:
            self.tokens: list[torch.Tensor] = []

        def step(self, microbatches: Sequence[MicroBatch]) -> torch.Tensor:
            assert len(microbatches) == 2 and microbatches[0].tokens.shape == (2, 32)
            self.tokens.append(microbatches[0].tokens)
            return torch.tensor(float(len(self.tokens)))

    corpus = timed_loop.write_corpus(tmp_path, TOY)
    path = write_config(tmp_path, TOY.sizes, corpus=corpus, micro_batch_size=2, num_steps=5, dtype="fp32", device="cpu")
    trainer = Counting()
    seconds, losses = timed_loop.train(trainer, resolve(path, []), TOY, tmp_path)
    assert len(seconds) == TOY.steps and losses == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert not torch.equal(trainer.tokens[0], trainer.tokens[1]) and int(torch.cat(trainer.tokens).max()) < 300
    logged = timed_loop.read_lines(tmp_path / "metrics.jsonl")
    assert [line["loss"] for line in logged] == [None, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gpt-1.3b", "llama-8b-4k-12l"])
@pytest.mark.parametrize("model", ["plain", "transformers"])
def test_a_contender_has_as_many_parameters_as_ours(model: str, shape: str) -> None:
    whole = torch_models.padded(replace(TOY, shape=shape).model)
    with torch.device("meta"):
        module, _ = torch_models.MODELS[model](whole, torch_models.Form())
    assert sum(parameter.numel() for parameter in module.parameters()) == sum(spec.numel for spec in model_specs(whole))


@pytest.mark.parametrize("masters", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_plain_contender_learns(masters: bool, tmp_path: Path) -> None:
    """In bf16: with masters the gradients of both microbatches go to fp32; under autocast the weights are fp32."""
    job = replace(TOY, shape="tiny-llama", dtype="bf16", steps=2)
    run = torch_models.run(job, tmp_path, model="plain", masters=masters, compiled=False)
    assert len(run.step_seconds) == 2 and run.peak_memory_bytes is None
    assert run.settings["weights"] == ("bfloat16" if masters else "float32")
    # Random tokens: at the start every one of the 384 columns is as likely as another.
    assert run.first_loss == pytest.approx(5.95, abs=0.1)


@pytest.mark.slow
def test_a_trainer_with_masters_takes_the_step_of_one_without(tmp_path: Path) -> None:
    path = write_config(
        tmp_path, TOY.sizes, corpus=tmp_path / "none", micro_batch_size=1, num_steps=9, dtype="bf16", device="cpu"
    )
    config, weights = resolve(path, []), []
    for held in (torch.bfloat16, torch.float32):
        module = torch.nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            module.weight.copy_(torch.arange(16.0).view(4, 4))
        module.to(held)
        trainer = torch_models.TorchTrainer(module, lambda *_, m=module: (m.weight * 2).float().mean(), config, None)
        none = torch.zeros(1, 4, dtype=torch.int64)
        batch = MicroBatch(none, none, none, none, sample_ids=[0], num_tokens=4)
        assert float(trainer.step([batch, batch])) == 15.0
        weights.append(trainer.weights.masters[0].detach())
    assert torch.allclose(weights[0], weights[1], rtol=0, atol=1e-7)
    assert float((weights[0] - torch.arange(16.0).view(4, 4)).abs().min()) > 0


@pytest.mark.slow
def test_what_says_out_of_memory_is_told_from_other_ends(tmp_path: Path) -> None:
    path = write_config(
        tmp_path, TOY.sizes, corpus=tmp_path / "none", micro_batch_size=2, num_steps=5, dtype="fp32", device="cpu"
    )
    config = resolve(path, [])
    topology = Topology(
        RankGrid(ParallelSizes()),
        0,
        torch.device("cpu"),
        kv_heads=config.model.kv_heads,
        has_experts=config.model.has_experts,
    )
    with pytest.raises(OutOfMemoryError) as told, explaining_memory(config, topology):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    log = tmp_path / "rank.log"
    stamp = "2026-11-26 14:03:36.123 "
    log.write_text(f"{stamp}error: an earlier one\n{stamp}some lines\n{stamp}error: {told.value}\n")
    assert ours.OUT_OF_MEMORY in ours.last_error(log) and "earlier" not in ours.last_error(log)
    log.write_text("\n".join(f"line {number}" for number in range(30)))
    assert ours.last_error(log).splitlines()[0] == "line 10"


@pytest.mark.slow
def test_settings_that_are_none_are_an_error_with_all_its_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kernels\.attention"):
        ours.run(replace(TOY, words=("kernels.attention=fastest",)), tmp_path)


@pytest.fixture
def torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install torchao for the test alone: transformers imports it wherever it is, a second of every process that uses it."""
    folder = tmp_path / "torchao"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-deps", "--target", str(folder)]
    got = subprocess.run([*pip, "torchao==0.18.0"], capture_output=True, text=True, timeout=120, check=False)
    assert got.returncode == 0, got.stderr[-2000:]
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny", "tiny-llama"])
@pytest.mark.usefixtures("torchao")
def test_the_plain_contender_runs_in_fp8(shape: str, tmp_path: Path) -> None:
    test_every_contender_runs("plain_fp8", shape, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("contender", ["plain_compile", "plain_autocast", "ours_fp8", "transformers", "megatron"])
def test_every_contender_runs(contender: str, shape: str, tmp_path: Path) -> None:
    words = ["--device", "cpu", "--shapes", shape, "--contenders", contender, "--steps", "2", "--warm-up", "1"]
    more = ["--ceiling-size", "64", "--ceiling-seconds", "0", "--results", str(tmp_path / "r"), "--logs", str(tmp_path)]
    assert gpu.main([*words, *more]) == 0
    (row,) = read(tmp_path / "r")
    assert row["status"] == "measured", row["reason"]
    # Ours leaves the 84 padded columns out of its sums: ln 300, where the others have ln 384.
    assert row["first_loss"] == pytest.approx(5.70 if CONTENDERS[contender].is_ours else 5.95, abs=0.1)
    whole = torch_models.padded(replace(TOY, shape=shape).model)
    if contender == "ours_fp8":
        assert "fp8: tensorwise (emulated) in 8 of 9 linears; bf16: head" in row["settings"]["kernels"]
    else:
        assert row["settings"]["parameters"] == sum(spec.numel for spec in model_specs(whole))
    if contender == "plain_fp8":
        assert row["settings"]["fp8_linears"] == 4 * 2
    has_fp8 = CONTENDERS[contender].has_fp8
    assert (row["r_fp8"] is not None) == (row["fp8_ceiling_tflops"] is not None) == has_fp8


@pytest.mark.slow
def test_megatron_in_fp8_has_the_scales_of_ours(tmp_path: Path) -> None:
    from megatron.core.enums import Fp8Recipe

    path = write_config(
        tmp_path, TOY.sizes, corpus=tmp_path / "none", micro_batch_size=2, num_steps=5, dtype="bf16", device="cpu"
    )
    config, device = resolve(path, []), torch.device("cpu")
    theirs = {
        fp8: megatron.transformer_config(config, device, transformer_engine=True, selective=False, fp8=fp8)
        for fp8 in (False, True)
    }
    assert theirs[False].fp8 is None
    # Its layers make Transformer Engine's recipe from these two.
    assert (theirs[True].fp8, theirs[True].fp8_recipe) == ("hybrid", Fp8Recipe.tensorwise.value)
    assert not theirs[True].first_last_layers_bf16 and theirs[True].params_dtype == torch.bfloat16


ON_A_GPU = [
    # Of ours, kernels are timed.
    pytest.param(name, marks=pytest.mark.card if name == OURS else ())
    for name, one in CONTENDERS.items()
    if not OPTIONAL & {*one.packages}
]


@pytest.mark.gpu
@pytest.mark.parametrize("contender", ON_A_GPU)
def test_every_contender_runs_on_a_gpu(contender: str, tmp_path: Path) -> None:
    words = ["--shapes", "tiny-llama", "--contenders", contender, "--steps", "2", "--warm-up", "1"]
    more = [
        "--ceiling-size",
        "1024",
        "--ceiling-seconds",
        "0.1",
        "--results",
        str(tmp_path / "r"),
        "--logs",
        str(tmp_path),
    ]
    assert gpu.main([*words, *more]) == 0
    (row,) = read(tmp_path / "r")
    assert row["status"] == "measured", row["reason"]
    assert row["peak_memory_bytes"] > 0
    if contender == OURS:
        assert row["breakdown"]["milliseconds"]["GEMM"] > 0
