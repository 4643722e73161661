"""The contenders and their requirements (no torch here; each imports its packages in its own process)."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_contenders.records import Job, Run

OURS = "ours"


@dataclass(frozen=True, slots=True)
class Contender:
    """A training program for a shape.

    Attributes:
        what: one line for people.
        module: has `run(job, folder, **options) -> Run`; `folder` is empty and goes away afterwards.
        options: passed on.
        package: must be installed; None: torch alone.
        needs_cuda: refuses a CPU.
        models: positions ("learned", "rope") of the shapes that it has a model for.
    """

    what: str
    module: str
    options: Mapping[str, Any]
    package: str | None = None
    needs_cuda: bool = False
    models: tuple[str, ...] = ("learned", "rope")

    def refusal(self, name: str, job: Job) -> str | None:
        """Return the reason why it cannot run this job here; None: it can."""
        if self.needs_cuda and job.device != "cuda":
            return f"{name} needs CUDA, and device = {job.device}"
        if self.package is not None and find_spec(self.package) is None:
            return f"{name} needs {self.package}, which is not installed"
        if job.model.position not in self.models:
            return f"{name} has no model with {job.model.position} positions, which {job.shape} has"
        if job.sizes.ours_alone and name != OURS:
            return f"{job.shape} is for {OURS} alone: no contender holds it on one GPU with fp32 masters"
        return None

    def run(self, job: Job, folder: Path) -> Run:
        """Train it, in this process."""
        run: Run = import_module(f"benchmarks.gpu_contenders.{self.module}").run(job, folder, **self.options)
        return run


CONTENDERS: Mapping[str, Contender] = {
    OURS: Contender("this engine, as `launch.pretrain_gpt` runs it", "ours", {}),
    "plain_compile": Contender(
        "a plain GPT, torch.compile over model and loss, bf16 weights, fp32 masters, fused AdamW",
        "torch_models",
        {"model": "plain", "masters": True, "compiled": True},
    ),
    "plain_autocast": Contender(
        "the same with fp32 weights under autocast",
        "torch_models",
        {"model": "plain", "masters": False, "compiled": True},
    ),
    "transformers": Contender(
        "LlamaForCausalLM or GPT2LMHeadModel in a plain eager loop, bf16 weights, fp32 masters, fused AdamW",
        "torch_models",
        {"model": "transformers", "masters": True, "compiled": False},
        package="transformers",
    ),
    "torchtitan": Contender(
        "torchtitan's Llama, torch.compile over each block and the loss as its recipe has it, bf16 weights, fp32 masters",
        "torch_models",
        {"model": "torchtitan", "masters": True, "compiled": True},
        package="torchtitan",
        models=("rope",),
    ),
    "megatron": Contender(
        "Megatron-Core's GPTModel, local layers, its distributed optimizer",
        "megatron",
        {"transformer_engine": False, "selective": False},
        package="megatron",
    ),
    "megatron_selective": Contender(
        "the same, recomputing attention in the backward",
        "megatron",
        {"transformer_engine": False, "selective": True},
        package="megatron",
        needs_cuda=True,
    ),
    "megatron_te": Contender(
        "Megatron-Core's GPTModel, layers of Transformer Engine",
        "megatron",
        {"transformer_engine": True, "selective": False},
        package="transformer_engine",
        needs_cuda=True,
    ),
}
