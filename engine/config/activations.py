"""The `recompute`, `offload` and `kernels` sections and their rules: what is kept for the backward."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from triaxis.engine.config.attention_kernels import AttentionKernelName
from triaxis.engine.config.context_parallel import gathers_keys
from triaxis.engine.config.counts import Count
from triaxis.engine.config.model import MOST_LAYERS
from triaxis.engine.config.plan import stages_of
from triaxis.engine.config.section import LAYOUT, OnResume, Problem, Rule, Section, Subject


class RecomputeConfig(Section):
    """Activation recomputation in the backward, which saves memory."""

    on_resume: ClassVar[OnResume | None] = LAYOUT

    granularity: Literal["none", "selective", "full", "auto"] = Field(
        "none", description="selective: only `modules`; full: whole layers; auto: the cheapest that fits `memory_gb`"
    )
    modules: list[Literal["attention", "norm", "activation", "rope", "mlp"]] | None = Field(
        None, description="selective: parts to recompute (null: attention); full with block: parts of the other layers"
    )
    method: Literal["uniform", "block"] = Field(
        "uniform", description="full: recompute all layers, or (block) the first num_layers of each model chunk"
    )
    num_layers: int = Field(
        1, gt=0, le=MOST_LAYERS, description="uniform: layers per recomputed group; block: layers to recompute"
    )
    gathered_inputs: Literal["auto", "keep", "regather"] = Field(
        "auto", description="sequence parallelism: keep gathered inputs or regather; auto: keep if they fit `memory_gb`"
    )
    gathered_kv: Literal["auto", "keep", "regather"] = Field(
        "auto",
        description="cp by all_gather: keep gathered keys and values or regather; auto: keep if they fit",
    )
    memory_gb: float | None = Field(
        None, gt=0, description="auto: predicted memory that a rank may use, without communicators, in 10^9 bytes"
    )
    head_tokens: Count | None = Field(
        None, gt=0, description="tokens of the output head at a time, recomputed; null: all at once, their logits kept"
    )

    @property
    def is_resolved(self) -> bool:
        """Whether every `auto` has been resolved (`triaxis.models.predict.rank_memory.resolve_recompute`)."""
        return "auto" not in (self.granularity, self.gathered_inputs, self.gathered_kv)

    @property
    def is_any(self) -> bool:
        """Whether anything is recomputed."""
        return self.granularity != "none" or self.head_tokens is not None

    @property
    def parts(self) -> frozenset[str]:
        """Names of the parts that are recomputed in each layer that is not recomputed as a whole."""
        default = ["attention"] if self.granularity == "selective" else []
        return frozenset(default if self.modules is None else self.modules)

    @property
    def parts_made_again(self) -> frozenset[str]:
        """`parts`, plus `activation` if `mlp` is among them.

        Recomputing `mlp` provides the activation's input in the backward, so the activation's output need not be kept either.
        """
        return self.parts | ({"activation"} if "mlp" in self.parts else set())

    def __str__(self) -> str:
        """Format the choice as the configuration spells it; "none" if nothing is recomputed."""
        words: list[str] = []
        if self.granularity != "none":
            words.append(self.granularity)
        if self.granularity == "full":
            words.append(f"{self.method} num_layers={self.num_layers}")
        if self.parts:
            words.append(f"modules=[{', '.join(sorted(self.parts))}]")
        if self.head_tokens is not None:
            words.append(f"head_tokens={self.head_tokens}")
        return " ".join(words) or "none"


class OffloadConfig(Section):
    """Activations moved to host memory between forward and backward, while other layers are computed."""

    on_resume: ClassVar[OnResume | None] = LAYOUT

    num_layers: int = Field(
        0, ge=0, le=MOST_LAYERS, description="offload the first N layers of each model chunk; 0: none"
    )
    min_bytes: int = Field(2**20, gt=0, description="keep smaller tensors on the device: a copy has a fixed cost")


class KernelsConfig(Section):
    """The implementation for each operation. `auto` takes the fastest that runs on the device; the banner names it."""

    on_resume: ClassVar[OnResume | None] = LAYOUT

    attention: Literal["auto", AttentionKernelName] = Field(
        "auto",
        description="sdpa: torch chooses; flash, cudnn, efficient, varlen, te: that; blocks, explicit: operators",
    )
    elementwise: Literal["auto", "eager", "compiled"] = Field(
        "auto", description="norms, RoPE, gates, dropout, cross-entropy: eager operators, or fused by torch.compile"
    )
    weight_grad: Literal["auto", "separate", "fused"] = Field(
        "auto", description="fused: the GEMM adds to the fp32 main grad itself (CUDA); separate: a second pass adds"
    )
    linear: Literal["torch", "te"] = Field(
        "torch", description="GEMMs of the linear layers: torch's, or Transformer Engine's (CUDA; the extra `te`)"
    )
    optimizer: Literal["auto", "torch", "compiled", "apex"] = Field(
        "auto",
        description="torch's fused operator; one pass by torch.compile, for every form of state; apex's FusedAdam",
    )
    experts: Literal["auto", "loop", "grouped"] = Field(
        "auto", description="loop: a GEMM per expert; grouped: torch's grouped GEMM (bf16, fp16, fp32)"
    )
    dispatch: Literal["auto", "all_gather", "all_to_all"] = Field(
        "auto",
        description="tokens to experts: gather all of them, or exchange rows; auto: all_gather up to ep = top_k",
    )


def recompute_fits_chunk(subject: Subject) -> Iterator[Problem]:
    recompute = subject.config.recompute
    if recompute.granularity != "full":
        if recompute.method != "uniform" or recompute.num_layers != 1:
            yield subject.problem(
                "recompute.granularity",
                "method and num_layers belong to granularity = full: here they would have no effect",
                {"recompute.granularity": ["full"]},
                "Or leave them out.",
            )
        return
    if subject.config.schedule.defers_weight_gradients:
        yield subject.problem(
            "recompute.granularity",
            f"recomputes whole layers, but with {_schedule(subject)} the inputs of their GEMMs wait for "
            "the weight gradients: what is recomputed would be kept after all",
            {"recompute.granularity": ["selective", "none"], "schedule.name": ["auto"], "schedule.file": [None]},
        )
    per_chunk = _layers_of_the_largest_chunk(subject)
    if recompute.num_layers > per_chunk:
        yield subject.problem(
            "recompute.num_layers",
            f"must be at most {per_chunk}, the layers of the largest model chunk: there are no more to recompute",
            {"recompute.num_layers": [per_chunk]},
        )


def _schedule(subject: Subject) -> str:
    schedule = subject.config.schedule
    return f"schedule.name = {schedule.name}" if schedule.file is None else f"the W of schedule.file = {schedule.file}"


def _layers_of_the_largest_chunk(subject: Subject) -> int:
    config, parallel = subject.config, subject.config.parallel
    num_stages, given = parallel.pp * parallel.vpp, parallel.layers_per_stage
    more = config.model.num_mtp_layers
    if given == "auto" and config.model.num_layers >= num_stages:
        return max(len(stage.layers) for stage in stages_of(config))
    *before, last = given if isinstance(given, list) and given else [-(-config.model.num_layers // num_stages)]
    return max(*before, last + more) if before else last + more


def recompute_has_its_fields(subject: Subject) -> Iterator[Problem]:
    """Yield a problem if `modules` or `memory_gb` has no effect or is missing."""
    recompute = subject.config.recompute
    is_for_layers = recompute.granularity == "selective" or (
        recompute.granularity == "full" and recompute.method == "block"
    )
    if recompute.modules is not None and not is_for_layers:
        yield subject.problem(
            "recompute.modules",
            f"belongs to granularity = selective (or full with method = block, for the other layers), not to "
            f"{recompute.granularity}: it would have no effect",
            {"recompute.modules": [None], "recompute.granularity": ["selective"]},
        )
    elif recompute.modules is not None and len(recompute.modules) != len(recompute.parts):
        yield subject.problem(
            "recompute.modules",
            "must name each module once: it is recomputed or not",
            {"recompute.modules": [sorted(recompute.parts)]},
        )
    elif recompute.modules is not None and not recompute.modules and recompute.granularity == "selective":
        yield subject.problem(
            "recompute.modules",
            "must name a module with granularity = selective: nothing would be recomputed",
            {"recompute.modules": [["attention"], ["norm", "activation"]]},
            "Or set recompute.granularity=none and leave them out.",
        )
    needs = recompute.granularity == "auto"
    decides = needs or _decides_what_is_gathered(subject)
    if (recompute.memory_gb is None and needs) or (recompute.memory_gb is not None and not decides):
        yield subject.problem(
            "recompute.memory_gb",
            "must be given with granularity = auto: the memory to fit into would be unknown"
            if needs
            else f"is what granularity = auto (and gathered_inputs or gathered_kv = auto, where something is gathered) has to fit "
            f"into: with {recompute.granularity} it would have no effect",
            {"recompute.granularity": ["none"] if needs else ["auto"], "recompute.memory_gb": [] if needs else [None]},
            "Set recompute.memory_gb to what a device holds, less some GB for operators and communication."
            if needs
            else "",
        )


def _decides_what_is_gathered(subject: Subject) -> bool:
    """Whether `memory_gb` decides if gathered tensors are kept: the run gathers some whose field is `auto`."""
    config = subject.config
    return (config.recompute.gathered_inputs == "auto" and config.parallel.cuts_sequence) or (
        config.recompute.gathered_kv == "auto"
        and gathers_keys(config)
        and config.kernels.attention != "explicit"
        and config.model.mla is None
    )


def recomputed_parts_exist(subject: Subject) -> Iterator[Problem]:
    config = subject.config
    model, parallel, parts = config.model, config.parallel, config.recompute.parts
    others = [name for name in config.recompute.modules or [] if name != "rope"]
    without_rope = {"recompute.modules": [others]} if others else {"recompute.granularity": ["none"]}
    if "rope" in parts and not any(kind.rotary for kind in model.kinds) and not model.qk_norm:
        yield subject.problem(
            "recompute.modules",
            f"has rope, but with model.position = {model.position} and without qk_norm queries and keys are used as they are "
            "projected: there is nothing to recompute",
            without_rope,
        )
    elif "rope" in parts and config.kernels.attention == "explicit" and "attention" not in parts:
        yield subject.problem(
            "recompute.modules",
            "has rope, but kernels.attention = explicit keeps copies of queries and keys: recomputing what they were copied from "
            "would save nothing",
            {"kernels.attention": ["sdpa"], "recompute.modules": [[*(config.recompute.modules or []), "attention"]]},
        )
    # Latents are gathered before the recomputed part, which computes keys and values from them.
    starts_from_kept = gathers_keys(config) and config.kernels.attention != "explicit" and model.mla is None
    if "attention" in parts and starts_from_kept:
        without_attention = [name for name in config.recompute.modules or [] if name != "attention"]
        yield subject.problem(
            "recompute.modules",
            f"has attention, but with parallel.cp = {parallel.cp} its backward starts from what its forward kept: recomputing it "
            "would gather keys and values once more and save nothing",
            {"recompute.modules": [without_attention]} if without_attention else {"recompute.granularity": ["none"]},
        )
    if "norm" in parts and not model.norms_before:
        without_norm = [name for name in config.recompute.modules or [] if name != "norm"]
        yield subject.problem(
            "recompute.modules",
            "has norm, but with model.norm_placement = after no norm's output is kept: recomputing it would save nothing",
            {"recompute.modules": [without_norm]} if without_norm else {"recompute.granularity": ["none"]},
        )
    elif "norm" in parts and config.recompute.gathered_inputs == "keep" and parallel.cuts_sequence:
        without_norm = [name for name in config.recompute.modules or [] if name != "norm"]
        yield subject.problem(
            "recompute.modules",
            "has norm, but with gathered_inputs = keep the outputs of norms are not kept, only the gathered copies: "
            "recomputing them would save nothing",
            {"recompute.gathered_inputs": ["regather"]}
            | ({"recompute.modules": [without_norm]} if without_norm else {}),
        )
    if "mlp" in parts and parallel.cuts_sequence:
        yield subject.problem(
            "recompute.modules",
            "has mlp, but with parallel.sequence_parallel its input is cut over the tp ranks: recomputing it would gather the "
            "sequence once more",
            {
                "recompute.modules": [
                    [name if name != "mlp" else "activation" for name in config.recompute.modules or []]
                ],
                "parallel.sequence_parallel": [False],
            },
        )


def offload_is_of_layers(subject: Subject) -> Iterator[Problem]:
    num_layers = subject.config.offload.num_layers
    if num_layers and num_layers > (per_chunk := _layers_of_the_largest_chunk(subject)):
        yield subject.problem(
            "offload.num_layers",
            f"must be at most {per_chunk}, the layers of the largest model chunk: there are no more to offload",
            {"offload.num_layers": [per_chunk]},
        )


def apex_has_the_form(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each setting that apex's fp32 AdamW kernel does not support, if the run uses that kernel."""
    precision, name = subject.config.precision, subject.config.optimizer.name
    if subject.config.kernels.optimizer != "apex":
        return
    others = {"kernels.optimizer": ["auto"]}
    if name != "adamw":
        yield subject.problem("optimizer.name", "has no kernel of apex here: FusedAdam is AdamW", others)
    if precision.dtype == "float64":
        yield subject.problem(
            "precision.dtype",
            "is for exact comparisons, and kernels.optimizer = apex computes in fp32: they would not be exact",
            others,
        )
    for field, choice in (("masters", "split"), ("moments", "bf16")):
        if getattr(precision, field) == choice:
            yield subject.problem(
                f"precision.{field}",
                "is no form of state that kernels.optimizer = apex reads: its masters and moments are in fp32",
                {f"precision.{field}": ["full"], **others},
            )


ACTIVATION_RULES: tuple[Rule, ...] = (
    recompute_fits_chunk,
    recompute_has_its_fields,
    recomputed_parts_exist,
    offload_is_of_layers,
    apex_has_the_form,
)
