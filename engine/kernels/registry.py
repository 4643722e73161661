"""Chooses a run's kernels, and tries every choice before anything is built.

    kernels.      operation                                     choices                                   reference, in float64
    attention     scaled dot-product attention                  sdpa, flash, cudnn, efficient, varlen,
                                                                flex, te, blocks, explicit                    explicit
    elementwise   norms, RoPE, SwiGLU, dropout, cross-entropy   eager, compiled                           plain torch
    weight_grad   dW += dY^T X                                  separate, fused                           separate
    linear        GEMMs in linear layers                        torch, te                                 torch
    optimizer     updates to the owned shards                   torch, compiled, apex                     torch
    experts       GEMMs for a rank's experts                    loop, grouped                             loop
    dispatch      tokens to experts and back                    all_gather, all_to_all                    all_gather
    (decoding)    attention from one query to the cached keys   flash, math, sdpa, blocks, explicit       explicit

Decoding has no setting. The kernels are chosen in these steps:

    resolve            replaces each `auto` with a choice for the device, without a trial
    try_out            runs each choice once; if a choice fails, `auto` falls back to the next in `ORDER`
    agree_on_choices   gives all ranks the slowest of the ranks' choices
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Literal

import torch

from triaxis.engine.comm.texts import gather_text
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.attention_pattern import PLAIN, AttentionPattern, attention_pattern
from triaxis.engine.config.quantities.context_parallel import gathers_keys, local_kv_heads
from triaxis.engine.config.quantities.expert_rows import dispatch_of
from triaxis.engine.config.schema.kernels import KernelsConfig
from triaxis.engine.config.schema.moe import DispatchName
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.attention_kernels import ATTENTION_KERNELS, AttentionKernel, Auto
from triaxis.engine.errors import ConfigError
from triaxis.engine.kernels.apex import Apex, apex_failure, apex_refusal, open_apex
from triaxis.engine.kernels.attention_trials import (
    AttentionShape,
    attention_failure,
    attention_refusal,
    chosen,
    decoding_failure,
)
from triaxis.engine.kernels.fp8.products import Fp8, open_fp8
from triaxis.engine.kernels.fusion import EAGER, Form, Fusion, compiler_failure, compiler_refusal
from triaxis.engine.kernels.grouped_gemm import ExpertKernel, grouped_gemm_failure, grouped_gemm_refusal
from triaxis.engine.kernels.te import TransformerEngine, gemm_failure, gemm_refusal, open_te
from triaxis.engine.kernels.te_attention import TeAttention
from triaxis.engine.kernels.weight_grad import WeightGradKernel, weight_grad_failure, weight_grad_refusal
from triaxis.engine.numerics.precision import DTYPES, main_grad_dtype

OptimizerKernel = Literal["torch", "compiled", "apex"]
LinearKernel = Literal["torch", "te"]
Graphs = Literal["off", "on"]

ORDER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention": tuple(name for name, each in ATTENTION_KERNELS.items() if each.auto is not None),
        "decoding": ("flash", "math", "sdpa", "blocks"),
        "elementwise": ("compiled", "eager"),
        "weight_grad": ("fused", "separate"),
        "linear": ("torch",),
        "optimizer": ("compiled", "torch"),
        "experts": ("grouped", "loop"),
        "dispatch": ("all_gather", "all_to_all"),
        "graphs": ("off",),
    }
)
"""`auto`'s choices for each kernel, fastest first; the last one runs anywhere."""

GROUPED_FIRST = ((9, 0), (10, 0))
"""Compute capabilities on which torch's grouped GEMM is a single kernel, in bf16 only. Elsewhere it copies the ends to the host and
loops, so the host waits at each product (`_grouped_mm_cuda` in torch's `GroupedBlas.cpp`)."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The facts that decide `auto`'s choices.

    Attributes:
        capability: GPU's compute capability, (9, 0) for an H100; None for a CPU.
        torch_version: version as (major, minor).
        cudnn_version: version in torch's form, 91900 for 9.19.0; 0 if there is none.
        dtype: weight and activation dtype.
        main_grad_bytes: bytes per main-grad element.
        is_deterministic: value of `runtime.deterministic`.
        may_compile: whether the configuration leaves elementwise functions to the compiler.
        pattern: features that the model's attention needs.
        dispatch: token dispatch that the configuration implies; None if the model has no experts.
    """

    capability: tuple[int, int] | None
    torch_version: tuple[int, int]
    cudnn_version: int
    dtype: torch.dtype
    main_grad_bytes: int
    is_deterministic: bool
    may_compile: bool = True
    pattern: AttentionPattern = PLAIN
    dispatch: DispatchName | None = None

    @classmethod
    def of(cls, config: Config, device: torch.device) -> "DeviceFacts":
        """Read the GPU's capability and the versions of torch and cuDNN from torch, the other facts from `config`.

        On a CPU, `cudnn_version` is 0.
        """
        is_cuda = device.type == "cuda"
        dtype = DTYPES[config.precision.dtype]
        major, minor = torch.__version__.split(".")[:2]
        return cls(
            capability=torch.cuda.get_device_capability(device) if is_cuda else None,
            torch_version=(int(major), int(minor)),
            cudnn_version=(torch.backends.cudnn.version() or 0) if is_cuda else 0,
            dtype=dtype,
            main_grad_bytes=main_grad_dtype(dtype, config.precision.gradients).itemsize,
            is_deterministic=config.runtime.deterministic,
            may_compile=config.kernels.elementwise != "eager",
            pattern=attention_pattern(config),
            dispatch=dispatch_of(config) if config.model.has_experts else None,
        )


@dataclass(frozen=True, slots=True)
class Choices:
    """Each kernel's name, never `auto`. `experts` and `dispatch` are None in a model without experts."""

    attention: str
    decoding: str
    elementwise: Form
    weight_grad: WeightGradKernel
    optimizer: OptimizerKernel
    linear: LinearKernel = "torch"
    experts: ExpertKernel | None = None
    dispatch: DispatchName | None = None
    graphs: Graphs = "off"

    def named(self) -> dict[str, str]:
        """Map each operation that the model has, such as `attention`, to its kernel's name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def config(self) -> KernelsConfig:
        """Build the `kernels` section that asks for these choices by name."""
        return KernelsConfig.model_validate({name: one for name, one in self.named().items() if name != "decoding"})


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels that an engine and its model share.

    Attributes:
        choices: kernel names.
        fusion: runner for elementwise functions; one object, so that each function is compiled once.
        fp8: FP8 for the linear layers, or None if their GEMMs are in the run's dtype.
        te: Transformer Engine, if `linear` is te, else None.
        te_attention: Transformer Engine's attention, if `attention` is te, else None.
        apex: FusedAdam's update, if `optimizer` is apex, else None.
    """

    choices: Choices
    fusion: Fusion
    fp8: Fp8 | None = None
    te: TransformerEngine | None = None
    te_attention: TeAttention | None = None
    apex: Apex | None = None

    def for_any_length(self) -> "Kernels":
        """Return the kernels for a text that grows: nothing is compiled, since no shape comes twice."""
        choices = self.choices
        if ATTENTION_KERNELS[choices.attention].is_compiled:
            choices = replace(choices, attention=choices.decoding)
        return replace(self, choices=choices, fusion=EAGER)


def resolve(config: KernelsConfig, facts: DeviceFacts) -> Choices:
    """Replace each `auto` with the fastest choice that should run on a device, without trying it.

    If attention is `explicit`, decoding is `explicit` too; else decoding is the fastest kernel. A model without experts has None
    for `experts` and `dispatch`.
    """
    fastest = asdict(_fastest(facts))
    asked = config.model_dump()
    taken = {
        name: fastest[name] if choice == "auto" or fastest[name] is None else choice for name, choice in asked.items()
    }
    # Explicit attention needs no plan per length, so decoding uses it too and has the same bits as training.
    taken["decoding"] = "explicit" if taken["attention"] == "explicit" else fastest["decoding"]
    return Choices(**taken)


def _fastest(facts: DeviceFacts) -> Choices:
    pattern, attention = facts.pattern, _fastest_attention(facts)
    if facts.capability is None:
        loop: ExpertKernel | None = None if facts.dispatch is None else "loop"
        return Choices(attention, attention, "eager", "separate", "torch", experts=loop, dispatch=facts.dispatch)
    is_half = facts.dtype.itemsize == 2
    has_flash = is_half and facts.capability >= (8, 0)
    # A float64 run serves comparisons, so it uses the reference's operators.
    is_float64 = facts.dtype == torch.float64
    # A compiled reduction may choose block sizes, hence the order in which it adds, by timing. The optimizer has no reduction.
    is_eager = is_float64 or facts.is_deterministic
    has_grouped = facts.dtype == torch.bfloat16 and facts.capability in GROUPED_FIRST
    experts: ExpertKernel = "grouped" if has_grouped else "loop"
    decoding = "blocks" if pattern.softcap or pattern.sinks else "flash" if has_flash else "math"
    return Choices(
        attention=attention,
        decoding=decoding,
        elementwise="eager" if is_eager else "compiled",
        weight_grad="fused" if is_half and facts.main_grad_bytes > facts.dtype.itemsize else "separate",
        optimizer="torch" if is_float64 else "compiled",
        experts=None if facts.dispatch is None else experts,
        dispatch=facts.dispatch,
    )


def _fastest_attention(facts: DeviceFacts) -> str:
    device, asked = "cpu" if facts.capability is None else "cuda", facts.pattern.asked
    return next(
        name
        for name, each in ATTENTION_KERNELS.items()
        if each.auto is not None and device in each.has and asked <= each.has[device] and _takes(each, each.auto, facts)
    )


def _takes(kernel: AttentionKernel, auto: Auto, facts: DeviceFacts) -> bool:
    capability = facts.capability
    return (
        (facts.may_compile or not kernel.is_compiled)
        and (facts.dtype.itemsize == 2 or not auto.is_half)
        and (auto.capability is None or (capability is not None and capability >= auto.capability))
        and (not auto.capabilities or capability in auto.capabilities)
        and facts.torch_version >= auto.torch
        and facts.cudnn_version > auto.above_cudnn
        and (auto.in_deterministic_mode or not facts.is_deterministic)
        and (auto.for_plain or not facts.pattern.is_plain)
    )


@dataclass(frozen=True, slots=True)
class Trials:
    """Functions that try kernels on this device.

    Attributes:
        failure: function (operation, choice), as in ("attention", "flash") -> the reason why this kernel does not run, or "".
        refusal: function (operation, choice, reason) -> the error message for a configured kernel that does not run.
        pattern: features that the attention needs.
    """

    failure: Callable[[str, str], str]
    refusal: Callable[[str, str, str], str]
    pattern: AttentionPattern = PLAIN

    def slower(self, name: str, choice: str) -> str:
        """Return the kernel to which `auto` falls if `choice` does not run."""
        others = ORDER[name][ORDER[name].index(choice) + 1 :]
        if name != "attention":
            return others[0]
        return next(one for one in others if not self.pattern.is_plain or ATTENTION_KERNELS[one].suits_plain)


def device_trials(shape: AttentionShape, main_grad: torch.dtype, decoding: AttentionShape | None = None) -> Trials:
    """Build trials that run the kernels on small tensors.

    `decoding` is a single query's attention shape; None means `shape`.
    """
    device = shape.device
    dtype = shape.dtype
    # By choice: a function that tries it, and one that writes the message for a reason.
    tried: dict[str, tuple[Callable[[], str], Callable[[str], str]]] = {
        "fused": (
            lambda: weight_grad_failure("fused", dtype, main_grad, device),
            lambda reason: weight_grad_refusal("fused", dtype, main_grad, device, reason),
        ),
        "grouped": (
            lambda: grouped_gemm_failure(dtype, device),
            lambda reason: grouped_gemm_refusal(dtype, device, reason),
        ),
        "te": (lambda: gemm_failure(dtype, main_grad, device), lambda reason: gemm_refusal(dtype, device, reason)),
        "on": (
            lambda: "" if device.type == "cuda" else "CUDA graphs run on GPUs only",
            lambda reason: f"kernels.graphs = on does not run here: {reason}. Set it to auto, or train on GPUs.",
        ),
        "apex": (lambda: apex_failure(device), lambda reason: apex_refusal(device, reason)),
        "compiled": (cache(lambda: compiler_failure(device)), lambda reason: compiler_refusal(device, reason)),
    }

    def failure(name: str, choice: str) -> str:
        if name == "attention":
            return attention_failure(choice, shape)
        if name == "decoding":
            return decoding_failure(choice, decoding or shape)
        return tried[choice][0]() if choice in tried else ""

    def refusal(name: str, choice: str, reason: str) -> str:
        if name == "attention":
            return attention_refusal(choice, shape, reason)
        return tried[choice][1](reason)

    return Trials(failure, refusal, shape.pattern)


def try_out(config: KernelsConfig, choices: Choices, trials: Trials) -> tuple[Choices, list[str]]:
    """Try each choice, and replace those from `auto` that fail with the next in `ORDER` that runs.

    Returns:
        The choices that run, and a line for each choice that did not.

    Raises:
        ConfigError: kernels that the configuration names do not run here; the error lists all of them.
    """
    notes: list[str] = []
    problems: list[str] = []
    taken = asdict(choices)
    for name, choice in choices.named().items():
        if getattr(config, name, "auto") != "auto":
            if reason := trials.failure(name, choice):
                problems.append(trials.refusal(name, choice, reason))
            continue
        while choice in ORDER[name] and (reason := trials.failure(name, choice)):
            slower = trials.slower(name, choice)
            notes.append(f"{_label(name)}: {choice} does not run here (torch says: {reason}), so it is {slower}.")
            choice = slower
        taken[name] = choice
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))  # a missing compiler is one problem of two fields
    return Choices(**taken), notes


def agree_on_choices(
    choices: Choices,
    notes: Sequence[str],
    try_from: Callable[[Choices], tuple[Choices, list[str]]],
    gather_text: Callable[[str], list[str]],
) -> tuple[Choices, list[str]]:
    """Find choices that run on every rank.

    Args:
        choices: this rank's choices.
        notes: lines about choices that did not run on this rank.
        try_from: function (slower choices) -> `try_out`'s result for these choices on this rank.
        gather_text: collective (text) -> every rank's text, in rank order.

    Returns:
        The choices, and a line for each choice that some rank lacks; both are equal on every rank.
    """
    # A slower choice may itself fail on some rank, so the ranks repeat until all have the same.
    notes = list(notes)
    by_rank = alone = _gather_choices(choices, gather_text)
    while len(set(by_rank)) > 1:
        choices, more = try_from(slowest(by_rank))
        notes += more
        by_rank = _gather_choices(choices, gather_text)
    lines = list(dict.fromkeys(line for text in gather_text("\n".join(notes)) for line in text.splitlines()))
    for each in fields(Choices):
        names = [getattr(of_rank, each.name) for of_rank in alone]
        if len(set(names)) > 1:
            of_ranks = ", ".join(f"{name} on {names.count(name)}" for name in dict.fromkeys(names))
            taken = getattr(choices, each.name)
            lines.append(f"{_label(each.name)}: ranks differ ({of_ranks}), so it is {taken} on all.")
    return choices, lines


def _label(name: str) -> str:
    return f"kernels.{name} = auto" if name in KernelsConfig.model_fields else name


def _gather_choices(choices: Choices, gather_text: Callable[[str], list[str]]) -> list[Choices]:
    texts = gather_text(" ".join(choices.named().values()))
    # A model has the same kernels on every rank, so only the values are sent, in this rank's name order.
    return [Choices(**dict(zip(choices.named(), text.split(), strict=True))) for text in texts]  # type: ignore[arg-type]


def slowest(all_choices: Sequence[Choices]) -> Choices:
    """Combine the ranks' choices: for each kernel, take the slowest; `ORDER` lists fastest first."""
    found = all_choices[0]
    for each in fields(Choices):
        names = [getattr(choices, each.name) for choices in all_choices]
        if len(set(names)) > 1:
            found = replace(found, **{each.name: max(names, key=ORDER[each.name].index)})
    return found


def attention_shape(config: Config, topology: Topology) -> AttentionShape:
    """Compute this rank's attention shape. When cp ranks exchange tokens for heads, each rank has 1 / cp of the heads."""
    model = config.model
    ranks_of_heads = 1 if gathers_keys(config) else topology.sizes.cp
    return AttentionShape(
        num_heads=model.num_attention_heads // topology.sizes.tp // ranks_of_heads,
        num_kv_heads=local_kv_heads(config) // ranks_of_heads,
        head_dim=model.head_size,
        dtype=DTYPES[config.precision.dtype],
        device=topology.device,
        pattern=attention_pattern(config),
        value_dim=model.value_size,
    )


def decoding_shape(config: Config, topology: Topology) -> AttentionShape:
    """Compute one query's attention shape in decoding. In MLA the query reads latents that all heads share."""
    shape, mla = attention_shape(config, topology), config.model.mla
    if mla is None:
        return shape
    return replace(shape, num_kv_heads=1, head_dim=mla.cached_size, value_dim=mla.kv_lora_rank)


def open_kernels(config: Config, topology: Topology, *, is_alone: bool = False) -> Kernels:
    """Resolve and try a run's kernels.

    On GPUs, if any kernel is `auto`, all ranks call this together and agree. On CPUs, or with `is_alone`, each process decides
    alone. Rank 0, or a process alone, prints on stderr which of `auto`'s choices did not run.

    Args:
        config: the run's configuration.
        topology: the run's ranks and device.
        is_alone: whether this process runs without the other ranks, and so decides alone.

    Raises:
        ConfigError: kernels that the configuration names do not run here; the error lists all of them.
    """
    device, asked = topology.device, config.kernels
    dtype = DTYPES[config.precision.dtype]
    fp8 = open_fp8(config.precision.fp8, dtype, device)
    main_grad = main_grad_dtype(dtype, config.precision.gradients)
    trials = device_trials(attention_shape(config, topology), main_grad, decoding_shape(config, topology))
    choices, notes = try_out(asked, resolve(asked, DeviceFacts.of(config, device)), trials)
    if "auto" in asked.model_dump().values() and device.type == "cuda" and not is_alone:
        choices, notes = agree_on_choices(
            choices,
            notes,
            lambda slower: try_out(asked, slower, trials),
            lambda text: gather_text(topology.axis("world"), text, device, "kernels"),
        )
    if topology.rank == 0 or is_alone:
        for note in notes:
            print(note, file=sys.stderr)
    fusion = Fusion(choices.elementwise)
    return Kernels(
        choices,
        fusion,
        None if fp8 is None else replace(fp8, fusion=fusion),
        te=open_te() if choices.linear == "te" else None,
        te_attention=TeAttention(open_te()) if choices.attention == "te" else None,
        apex=open_apex() if choices.optimizer == "apex" else None,
    )


def describe(kernels: Kernels, shape: AttentionShape) -> str:
    """Describe a training step's kernels in one line. Include the kernel that torch picks for `sdpa`; omit `linear: torch`."""
    attention = kernels.choices.attention
    if attention == "sdpa":
        attention = f"sdpa ({chosen(shape)})"
    others = {name: choice for name, choice in kernels.choices.named().items() if name not in ("attention", "decoding")}
    for name, usual in (("linear", "torch"), ("graphs", "off")):
        if others[name] == usual:
            del others[name]
    if kernels.te is not None:
        others["linear"] = f"te {kernels.te.version}"
    return "; ".join(
        [f"attention: {attention}", *(f"{name.replace('_', ' ')}: {choice}" for name, choice in others.items())]
    )
