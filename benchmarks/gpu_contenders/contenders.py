"""The contenders and their requirements (each imports its packages in its own process)."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_contenders.records import Job, Run

OURS, GRAPHS = "ours", "ours_graphs"


@dataclass(frozen=True, slots=True)
class Contender:
    """A training program for a shape.

    Attributes:
        what: one line for people.
        module: has `run(job, folder, **options) -> Run`; `folder` is empty and goes away afterwards.
        options: passed on.
        packages: must be installed; none: torch alone.
        needs_cuda: refuses a CPU.
        models: positions ("learned", "rope") of the shapes that it has a model for.
        words: settings of ours, `section.key=value`.
        beside: the same contender in bf16, where this one has FP8 linear layers; None: it has none.
    """

    what: str
    module: str
    options: Mapping[str, Any]
    packages: tuple[str, ...] = ()
    needs_cuda: bool = False
    models: tuple[str, ...] = ("learned", "rope")
    words: tuple[str, ...] = ()
    beside: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.module == OURS

    @property
    def has_fp8(self) -> bool:
        return self.beside is not None

    def runs_on(self, device: str, dtype: str) -> bool:
        """Return whether it runs on a device and beside contenders of a dtype; FP8 is a choice beside bf16."""
        return (device == "cuda" or not self.needs_cuda) and (dtype == "bf16" or not self.has_fp8)

    def refusal(self, name: str, job: Job) -> str | None:
        """Return the reason why it cannot run this job here; None: it can."""
        if self.needs_cuda and job.device != "cuda":
            return f"{name} needs CUDA, and device = {job.device}"
        if missing := [package for package in self.packages if find_spec(package) is None]:
            return f"{name} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
        if job.model.position not in self.models:
            return f"{name} has no model with {job.model.position} positions, which {job.shape} has"
        if job.sizes.ours_alone and not self.is_ours:
            return f"{job.shape} is for {OURS} alone: no contender holds it on one GPU with fp32 masters"
        return None

    def run(self, job: Job, folder: Path) -> Run:
        """Train it, in this process."""
        run: Run = import_module(f"benchmarks.gpu_contenders.{self.module}").run(job, folder, **self.options)
        return run


CONTENDERS: Mapping[str, Contender] = {
    OURS: Contender("this engine, as `triaxis.launch.pretrain_gpt` runs it", OURS, {}),
    GRAPHS: Contender(
        "the same, replaying CUDA graphs of each microbatch", OURS, {}, needs_cuda=True, words=("kernels.graphs=on",)
    ),
    "ours_fp8": Contender(
        "the same with FP8 linear layers, one scale per tensor, torch's scaled GEMM",
        OURS,
        {},
        words=("precision.fp8.recipe=tensorwise",),
        beside=OURS,
    ),
    "ours_fp8_te": Contender(
        "the same by Transformer Engine's GEMM",
        OURS,
        {},
        packages=("transformer_engine",),
        needs_cuda=True,
        words=("precision.fp8.recipe=tensorwise", "precision.fp8.backend=te"),
        beside=OURS,
    ),
    "ours_fp8_blocks": Contender(
        "the same with a scale for every 128 numbers, torch's scaled GEMM",
        OURS,
        {},
        needs_cuda=True,
        words=("precision.fp8.recipe=blockwise",),
        beside=OURS,
    ),
    "plain_compile": Contender(
        "a plain GPT, torch.compile over model and loss, bf16 weights, fp32 masters, fused AdamW",
        "torch_models",
        {"model": "plain", "masters": True, "compiled": True},
    ),
    "plain_fp8": Contender(
        "the same with torchao's FP8 linear layers, one scale per tensor",
        "torch_models",
        {"model": "plain", "masters": True, "compiled": True, "fp8": True},
        packages=("torchao",),
        beside="plain_compile",
    ),
    "plain_autocast": Contender(
        "plain_compile with fp32 weights under autocast",
        "torch_models",
        {"model": "plain", "masters": False, "compiled": True},
    ),
    "transformers": Contender(
        "LlamaForCausalLM or GPT2LMHeadModel in a plain eager loop, bf16 weights, fp32 masters, fused AdamW",
        "torch_models",
        {"model": "transformers", "masters": True, "compiled": False},
        packages=("transformers",),
    ),
    "torchtitan": Contender(
        "torchtitan's Llama, torch.compile over each block and the loss as its recipe has it, bf16 weights, fp32 masters",
        "torch_models",
        {"model": "torchtitan", "masters": True, "compiled": True},
        packages=("torchtitan",),
        models=("rope",),
    ),
    "torchtitan_fp8": Contender(
        "the same with torchao's FP8 linear layers, one scale per tensor",
        "torch_models",
        {"model": "torchtitan", "masters": True, "compiled": True, "fp8": True},
        packages=("torchtitan", "torchao"),
        models=("rope",),
        beside="torchtitan",
    ),
    "megatron": Contender(
        "Megatron-Core's GPTModel, local layers, its distributed optimizer",
        "megatron",
        {"transformer_engine": False, "selective": False},
        packages=("megatron",),
    ),
    "megatron_selective": Contender(
        "the same, recomputing attention in the backward",
        "megatron",
        {"transformer_engine": False, "selective": True},
        packages=("megatron",),
        needs_cuda=True,
    ),
    "megatron_te": Contender(
        "Megatron-Core's GPTModel, layers of Transformer Engine",
        "megatron",
        {"transformer_engine": True, "selective": False},
        packages=("megatron", "transformer_engine"),
        needs_cuda=True,
    ),
    "megatron_fp8": Contender(
        "the same in FP8, one scale per tensor",
        "megatron",
        {"transformer_engine": True, "selective": False, "fp8": True},
        packages=("megatron", "transformer_engine"),
        needs_cuda=True,
        beside="megatron_te",
    ),
}
