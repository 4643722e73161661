"""The registry of kernels: `auto` by device, what is chosen is tried, said and used; what does not run here is refused."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch._inductor

from tests.parity.cases import Case
from tests.parity.test_step_properties import build_rank
from triaxis.engine.checkpoint.environment import describe_environment
from triaxis.engine.config.quantities.attention_pattern import AttentionPattern
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.schema.kernels import KernelsConfig
from triaxis.engine.config.values.attention_kernels import ATTENTION_KERNELS, AttentionKernelName
from triaxis.engine.errors import ConfigError
from triaxis.engine.kernels import registry
from triaxis.engine.kernels.attention_trials import AttentionShape, attention_failure
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.kernels.norms import NormKernel
from triaxis.engine.kernels.registry import (
    ORDER,
    Choices,
    DeviceFacts,
    Kernels,
    Trials,
    agree_on_choices,
    describe,
    device_trials,
    resolve,
    try_out,
)
from triaxis.engine.kernels.te import TransformerEngine
from triaxis.engine.kernels.te_storage import Storages
from triaxis.engine.tensor_parallel.norm import Norm
from triaxis.models.gpt.chunk import GPTChunk
from triaxis.models.inference.decoding import DecodingChunk

SHAPE = AttentionShape(4, 2, 16, torch.bfloat16, torch.device("cpu"))

H100 = DeviceFacts((9, 0), (2, 13), 92000, dtype=torch.bfloat16, main_grad_bytes=4, is_deterministic=False)
ON_H100 = Choices("cudnn", "flash", "compiled", "fused", "compiled")
ON_CPU = Choices("sdpa", "sdpa", "eager", "separate", "torch")


def test_kernels_are_tried_where_gradients_are_off() -> None:
    """As where a model is built for its forwards alone."""
    shape = replace(SHAPE, dtype=torch.float64, pattern=AttentionPattern(windows=True, documents=True, sinks=True))
    with torch.no_grad():
        chosen, notes = try_out(KernelsConfig(), ON_CPU, device_trials(shape, torch.float64))
    assert (chosen, notes) == (ON_CPU, [])


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (replace(H100, capability=None, cudnn_version=0), ON_CPU),
        (H100, ON_H100),
        (replace(H100, capability=(10, 0)), ON_H100),
        (replace(H100, capability=(8, 0)), replace(ON_H100, attention="flash")),
        (replace(H100, capability=(12, 0)), replace(ON_H100, attention="flash")),
        (replace(H100, capability=(7, 5)), replace(ON_H100, attention="sdpa", decoding="math")),
        (replace(H100, torch_version=(2, 10)), replace(ON_H100, attention="flash")),
        (replace(H100, cudnn_version=91500), replace(ON_H100, attention="flash")),
        (replace(H100, main_grad_bytes=2), replace(ON_H100, weight_grad="separate")),
        (
            replace(H100, dtype=torch.float32),
            replace(ON_H100, attention="sdpa", decoding="math", weight_grad="separate"),
        ),
        (replace(H100, dtype=torch.float64, main_grad_bytes=8), replace(ON_CPU, decoding="math")),
        (replace(H100, is_deterministic=True), replace(ON_H100, attention="flash", elementwise="eager")),
    ],
    ids=[
        "CPU",
        "sm90",
        "sm100",
        "sm80",
        "sm120",
        "sm75",
        "torch 2.10",
        "cuDNN 9.15",
        "bf16 main grads",
        "fp32",
        "float64",
        "deterministic",
    ],
)
def test_auto_takes_what_is_fast_on_the_device(facts: DeviceFacts, expected: Choices) -> None:
    assert resolve(KernelsConfig(), facts) == expected


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        (None, torch.bfloat16, "loop"),
        ((8, 0), torch.bfloat16, "loop"),
        *(((9, 0), dtype, "loop") for dtype in (torch.float16, torch.float32, torch.float64)),
        *((capability, torch.bfloat16, "grouped") for capability in ((9, 0), (10, 0))),
        # torch has no kernel for them: one call would be a copy to the host and a wait for each product.
        *((capability, torch.bfloat16, "loop") for capability in ((10, 3), (12, 0))),
    ],
)
def test_auto_takes_the_grouped_product_where_it_is_one_kernel(
    capability: tuple[int, int] | None, dtype: torch.dtype, expected: str
) -> None:
    facts = replace(H100, capability=capability, dtype=dtype, main_grad_bytes=max(4, dtype.itemsize))
    assert resolve(KernelsConfig(), replace(facts, dispatch="all_gather")).experts == expected
    assert resolve(KernelsConfig(), facts).experts is None


@pytest.mark.parametrize(
    ("facts", "pattern", "expected"),
    [
        (H100, AttentionPattern(windows=True), ("varlen", "flash")),
        (H100, AttentionPattern(documents=True), ("varlen", "flash")),
        (H100, AttentionPattern(windows=True, sinks=True), ("varlen", "blocks")),
        (H100, AttentionPattern(parts=True), ("cudnn", "flash")),
        (H100, AttentionPattern(parts=True, documents=True), ("varlen", "flash")),
        (replace(H100, capability=(8, 0)), AttentionPattern(parts=True), ("varlen", "flash")),
        (H100, AttentionPattern(softcap=True, windows=True, sinks=True), ("flex", "blocks")),
        (H100, AttentionPattern(softcap=True, documents=True), ("blocks", "blocks")),
        (replace(H100, may_compile=False), AttentionPattern(softcap=True), ("blocks", "blocks")),
        (replace(H100, is_deterministic=True), AttentionPattern(softcap=True), ("blocks", "blocks")),
        (replace(H100, capability=(8, 0)), AttentionPattern(windows=True), ("varlen", "flash")),
        (replace(H100, capability=(7, 5)), AttentionPattern(windows=True), ("blocks", "math")),
        (replace(H100, dtype=torch.float32), AttentionPattern(documents=True), ("blocks", "math")),
        (replace(H100, capability=None), AttentionPattern(windows=True, documents=True, sinks=True), ("sdpa", "sdpa")),
        (replace(H100, capability=None), AttentionPattern(windows=True, softcap=True), ("blocks", "blocks")),
    ],
)
def test_auto_takes_what_has_the_pattern(
    facts: DeviceFacts, pattern: AttentionPattern, expected: tuple[str, str]
) -> None:
    choices = resolve(KernelsConfig(), replace(facts, pattern=pattern))
    assert (choices.attention, choices.decoding) == expected


def test_a_growing_text_compiles_nothing() -> None:
    """Attention that exists compiled alone gives its place to that of one query."""
    for attention, expected in (("flex", "blocks"), ("varlen", "varlen")):
        choices = Choices(attention, "blocks", "compiled", "fused", "compiled")
        found = Kernels(choices, Fusion("compiled")).for_any_length()
        assert found.choices == replace(choices, attention=expected) and not found.fusion.is_compiled


ASKED = [each.name for each in fields(AttentionPattern)]


@pytest.mark.parametrize("asked", ["", *ASKED])
@pytest.mark.parametrize("kernel", ATTENTION_KERNELS)
def test_a_record_says_what_its_kernel_has_on_the_cpu(kernel: str, asked: str) -> None:
    has = ATTENTION_KERNELS[kernel].has.get("cpu")
    pattern = AttentionPattern(**({asked: True} if asked else {}))
    failure = attention_failure(kernel, AttentionShape(4, 2, 16, torch.float32, torch.device("cpu"), pattern))
    assert (not failure) == (has is not None and pattern.asked <= has), failure


def test_each_choice_has_a_record() -> None:
    """`math` is for decoding alone."""
    assert {*get_args(AttentionKernelName), "math"} == set(ATTENTION_KERNELS)


def test_a_pattern_is_tried_with_the_kernel() -> None:
    """On the CPU, what a GPU takes for windows falls to torch's kernel, and for a cap to blocks."""
    windows = replace(SHAPE, pattern=AttentionPattern(windows=True, documents=True, sinks=True))
    choices, notes = try_out(
        KernelsConfig(), replace(ON_CPU, attention="varlen"), device_trials(windows, torch.float32)
    )
    assert choices.attention == "flash" and "varlen does not run here" in notes[0] and "'CPU' backend)" in notes[0]
    capped = replace(SHAPE, pattern=AttentionPattern(softcap=True))
    choices, notes = try_out(KernelsConfig(), ON_CPU, device_trials(capped, torch.float32))
    assert (choices.attention, choices.decoding) == ("blocks", "blocks")
    asked = KernelsConfig(attention="flash")
    with pytest.raises(ConfigError, match=r"cannot cap the logits.*kernels\.attention=auto"):
        try_out(asked, resolve(asked, replace(H100, capability=None)), device_trials(capped, torch.float32))


def test_a_named_kernel_is_taken_on_every_device() -> None:
    asked = {"attention": "efficient", "elementwise": "eager", "weight_grad": "separate", "optimizer": "torch"}
    named = KernelsConfig.model_validate(asked | {"graphs": "off"})
    for capability in (None, (8, 0), (9, 0)):
        choices = resolve(named, replace(H100, capability=capability))
        assert choices.config() == named
    assert resolve(KernelsConfig(attention="explicit"), H100).decoding == "explicit"


def test_this_machine_has_facts() -> None:
    """On the CPU every default is what it was before there was an `auto`."""
    config = Case("gpt").config()
    facts = DeviceFacts.of(config, torch.device("cpu"))
    assert facts.capability is None and f"{facts.torch_version[0]}.{facts.torch_version[1]}." in torch.__version__
    assert (facts.dtype, facts.main_grad_bytes, facts.is_deterministic) == (torch.float64, 8, False)
    assert resolve(KernelsConfig(), facts) == ON_CPU


def trials(*broken: str) -> Trials:
    """A device on which `broken` do not run."""
    return Trials(
        lambda name, choice: "no such kernel" if choice in broken else "",
        lambda name, choice, reason: f"kernels.{name} = {choice} does not run here: {reason}",
    )


def test_auto_falls_to_the_next_choice_with_a_line() -> None:
    choices, notes = try_out(KernelsConfig(), ON_H100, trials("cudnn", "flash", "compiled"))
    assert choices == Choices("sdpa", "math", "eager", "fused", "torch")
    assert notes == [
        "kernels.attention = auto: cudnn does not run here (torch says: no such kernel), so it is flash.",
        "kernels.attention = auto: flash does not run here (torch says: no such kernel), so it is sdpa.",
        "decoding: flash does not run here (torch says: no such kernel), so it is math.",
        "kernels.elementwise = auto: compiled does not run here (torch says: no such kernel), so it is eager.",
        "kernels.optimizer = auto: compiled does not run here (torch says: no such kernel), so it is torch.",
    ]
    assert try_out(KernelsConfig(), ON_H100, trials()) == (ON_H100, [])


def test_a_named_kernel_is_never_replaced() -> None:
    asked = KernelsConfig(attention="flash", elementwise="compiled")
    with pytest.raises(ConfigError) as caught:
        try_out(asked, resolve(asked, H100), trials("flash", "compiled"))
    assert list(caught.value.problems) == [
        "kernels.attention = flash does not run here: no such kernel",
        "kernels.elementwise = compiled does not run here: no such kernel",
    ]


def test_what_auto_prefers_on_a_gpu_is_tried_on_the_device_itself() -> None:
    """The CPU has neither cuDNN nor a GEMM of bf16 that adds to fp32."""
    preferred = replace(ON_H100, elementwise="eager", optimizer="torch")
    choices, notes = try_out(KernelsConfig(), preferred, device_trials(SHAPE, torch.float32))
    assert (choices.attention, choices.decoding, choices.weight_grad) == ("flash", "flash", "separate")
    assert len(notes) == 2 and "cudnn does not run here (torch says: No" in notes[0]


def agreed(by_rank: list[tuple[Choices, Trials]]) -> list[tuple[Choices, list[str]]]:
    """Every rank's result; each is a thread."""
    size = len(by_rank)
    barrier, texts = threading.Barrier(size, timeout=30), [""] * size

    def run(rank: int) -> tuple[Choices, list[str]]:
        first, here = by_rank[rank]

        def tell(text: str) -> list[str]:
            texts[rank] = text
            barrier.wait()
            found = list(texts)
            barrier.wait()
            return found

        choices, notes = try_out(KernelsConfig(), first, here)
        return agree_on_choices(choices, notes, lambda slower: try_out(KernelsConfig(), slower, here), tell)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_all_ranks_take_what_runs_on_every_rank() -> None:
    """One rank has no cuDNN, another no compiler, and the third cannot run the flash kernel that the first falls to."""
    found = agreed([(ON_H100, trials("cudnn")), (ON_H100, trials("compiled")), (ON_H100, trials("flash"))])
    assert [choices for choices, _ in found] == 3 * [Choices("sdpa", "math", "eager", "fused", "torch")]
    (lines,) = {tuple(lines) for _, lines in found}
    assert "kernels.attention = auto: cudnn does not run here (torch says: no such kernel), so it is flash." in lines
    assert "kernels.attention = auto: ranks differ (flash on 1, cudnn on 2), so it is sdpa on all." in lines
    assert agreed([(ON_H100, trials())] * 2) == 2 * [(ON_H100, [])]


def test_of_unlike_gpus_the_slowest_decides_and_a_line_says_so() -> None:
    found = agreed([(ON_H100, trials()), (replace(ON_H100, attention="flash"), trials())])
    line = "kernels.attention = auto: ranks differ (cudnn on 1, flash on 1), so it is flash on all."
    assert found == 2 * [(replace(ON_H100, attention="flash"), [line])]


def test_the_slowest_choice_of_each_kernel_needs_nothing_special() -> None:
    here = device_trials(SHAPE, torch.float32)
    assert [here.failure(name, order[-1]) for name, order in ORDER.items()] == len(ORDER) * [""]


def test_a_fall_is_printed_and_what_was_resolved_is_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "resolve", lambda config, facts: replace(ON_CPU, attention="cudnn"))
    engine, batches = build_rank(0, Case("gpt", num_layers=1, dtype="bf16", attention="auto"))
    batches.close()
    assert engine.config.kernels.attention == "auto", "the configuration stays as it was asked"
    layout = describe_environment(engine)
    assert layout["kernels"] == {
        "attention": "flash",
        "elementwise": "eager",
        "weight_grad": "separate",
        "optimizer": "torch",
        "linear": "torch",
        "graphs": "off",
    }
    assert capsys.readouterr().err.startswith("kernels.attention = auto: cudnn does not run here (torch says: No")


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_auto_prefers_runs_on_this_gpu(deterministic: bool) -> None:
    device = torch.device("cuda")
    config = with_value(Case("llama_wide", dtype="bf16").config(), "runtime.deterministic", deterministic)
    choices = resolve(KernelsConfig(), DeviceFacts.of(config, device))
    shape = AttentionShape(8, 2, 128, torch.bfloat16, device)
    assert try_out(KernelsConfig(), choices, device_trials(shape, torch.float32)) == (choices, [])


def test_every_problem_is_reported_at_once() -> None:
    asked = KernelsConfig(attention="cudnn", weight_grad="fused")
    with pytest.raises(ConfigError) as caught:
        try_out(asked, resolve(asked, replace(H100, capability=None)), device_trials(SHAPE, torch.float32))
    assert [problem.split(" does")[0] for problem in caught.value.problems] == [
        "kernels.attention = cudnn",
        "kernels.weight_grad = fused",
    ]


def test_the_banner_names_the_choices_of_a_step() -> None:
    kernels = Kernels(replace(ON_CPU, weight_grad="fused", elementwise="compiled"), EAGER)
    said = describe(kernels, SHAPE)
    assert said.startswith("attention: sdpa (")
    assert said.endswith("); elementwise: compiled; weight grad: fused; optimizer: torch")
    te = TransformerEngine(len, len, Storages(len, len, len, {}), "2.20.2")  # type: ignore[arg-type]
    assert describe(replace(kernels, te=te), SHAPE).endswith("linear: te 2.20.2")


def test_modules_use_what_was_chosen_and_decoding_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, **options: graph)
    engine, batches = build_rank(0, Case("qwen", compiled=True))
    batches.close()
    (chunk,) = engine.chunks
    assert isinstance(chunk, GPTChunk)
    compiled, eager = (
        {module.kernel.forward for module in each.modules() if isinstance(module, Norm)}
        for each in (chunk, DecodingChunk(chunk))
    )
    assert len(compiled) == 1, "one for all modules: each function is compiled once"
    assert eager == {NormKernel("rmsnorm", 1e-5, EAGER).forward}
    assert not eager & compiled


def test_eager_is_the_function_itself() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    assert Fusion("eager")(function) is function


@pytest.mark.slow
def test_without_a_compiler_the_choice_is_refused(tmp_path: Path) -> None:
    program = (
        "import torch; from triaxis.engine.kernels.fusion import compiler_failure, compiler_refusal\n"
        "cpu = torch.device('cpu'); reason = compiler_failure(cpu)\n"
        "print(compiler_refusal(cpu, reason) if reason else '')\n"
    )
    environment = os.environ | {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert "apt-get install g++ python3-dev" in done.stdout and "kernels.elementwise=eager" in done.stdout
