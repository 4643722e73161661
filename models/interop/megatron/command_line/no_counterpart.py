"""List Megatron-LM's arguments without a counterpart here, with the reason.

An argument whose value switches its feature on is refused. `--ignore NAME` leaves the argument out, and a comment in the config
lists it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from triaxis.engine.config.foreign_names import NOT_BUILT, OF_THE_LAYOUT
from triaxis.models.interop.megatron.config import OFF_ONLY

Arity = Literal["", "=", "+", "?"]
"""Number of values that follow an argument: "" none, "=" one, "+" any number, "?" at most one."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Argument without a counterpart.

    Attributes:
        arity: number of values that follow the argument.
        why: why it has no counterpart, and what to do instead.
        off: values that leave the argument's feature off, so that it is accepted.
    """

    arity: Arity
    why: str
    off: tuple[str | float, ...] = ()


_ELSEWHERE = "Megatron-LM itself refuses it"
_OF_CHECKPOINTS = "it says what is taken from a checkpoint of Megatron-LM: `triaxis import` does so"
_OF_BATCHES = (
    "a batch size that grows is a list of stages here, each with a train.global_batch_size: give a few by hand"
)
_OF_CORPORA = "corpora are named in it: give them with --data-path"

_MORE: Mapping[str, Missing] = {
    # Numerics
    "fp4-format": Missing("=", f"{NOT_BUILT['fp4']} is not built"),
    "te-precision-config-file": Missing("=", "dtypes by module are not built"),
    "kitchen-config-file": Missing("=", "quantized layers are not built"),
    "kitchen-recipe-number": Missing("=", "quantized layers are not built"),
    "use-kitchen-attention": Missing("", "quantized layers are not built"),
    "fp32-residual-connection": Missing("", "the residual stream is in the run's dtype"),
    "fp16-lm-cross-entropy": Missing("", "the loss is computed in at least fp32"),
    "main-params-dtype": Missing("=", "exact weights are in at least fp32", ("fp32",)),
    "main-grads-dtype": Missing(
        "=", "gradients are summed in at least fp32, or with --grad-reduce-in-bf16 in bf16", ("fp32",)
    ),
    # Batches and the optimizer
    "rampup-batch-size": Missing("+", _OF_BATCHES),
    "step-batch-size-schedule": Missing("=", _OF_BATCHES),
    "decoupled-lr": Missing(
        "=", "embedding and head have the schedule of all; optimizer.groups with lr_factor scales it as a whole"
    ),
    "weight-decay-incr-style": Missing("=", "weight decay is constant", ("constant",)),
    "apply-wd-to-qk-layernorm": Missing("", "norms do not decay; optimizer.groups can name those of queries and keys"),
    "no-weight-decay-cond-type": Missing("=", "norms do not decay; optimizer.groups can name others"),
    "freeze-all-layers": Missing("", "every parameter is trained"),
    "use-mup": Missing("", "muP is a recipe of fields: leave it out and apply `triaxis config mup` to the config"),
    "qk-clip": Missing("", "clipping of attention's logits is not built"),
    # Initial weights
    "init-method-xavier-uniform": Missing("", "initial weights are normal"),
    "embedding-init-method-std": Missing("=", "all initial weights have one std"),
    "data-parallel-random-init": Missing("", "replicas begin with the same weights"),
    # Experts and tokens ahead
    "moe-input-jitter-eps": Missing("=", "noise on a router's input is not built", (0.0,)),
    "moe-expert-capacity-factor": Missing(
        "=", f"{OF_THE_LAYOUT['moe_expert_capacity_factor']}; no token is dropped here"
    ),
    "moe-expert-rank-capacity-factor": Missing("=", "no token is dropped here"),
    "moe-shared-expert-gate": Missing("", "shared experts behind a gate are not built"),
    "moe-latent-size": Missing("=", "experts in a smaller space are not built"),
    "moe-apply-probs-on-input": Missing("", "scores weigh the output of experts"),
    "moe-use-upcycling": Missing("", "experts made from a dense model are not built"),
    "moe-router-quantile-balancing-ema": Missing("=", "balance by quantiles is not built", (0.0,)),
    "moe-router-force-biased": Missing("=", "a router with forced choices is not built"),
    "mtp-detach-heads": Missing("", "gradients of tokens ahead reach the whole model"),
    "mtp-hybrid-override-pattern": Missing("=", "state-space layers are not built"),
    # Layers of other kinds
    "spec": Missing("+", "layers are those of the arguments; code of one's own is not read"),
    "hybrid-override-pattern": Missing("=", "state-space layers are not built"),
    "heterogeneous-layers-config-encoded-json": Missing("=", "layers of different shapes are not built"),
    # Data
    "fim-data": Missing("", "fill-in-the-middle is not built"),
    "sft": Missing("", "supervised fine-tuning is not built"),
    "perform-rl-step": Missing("", "reinforcement learning is not built"),
    "retro-project-dir": Missing("=", "retrieval is not built"),
    "retro-add-retriever": Missing("", "retrieval is not built"),
    "logits-load-dir": Missing("=", "distillation is not built"),
    "phase-transition-iterations": Missing("=", "phases of data are not taken over"),
    "per-dataset-sequences-path": Missing("=", "corpora are drawn by weights alone"),
    "data-args-path": Missing("=", _OF_CORPORA),
    "per-split-data-args-path": Missing("=", _OF_CORPORA),
    "dataloader-inter-document-masking": Missing("", "use --reset-attention-mask, which is data.attention=within"),
    "dataloader-type": Missing("=", "batches of code of one's own are not read", ("single", "cyclic")),
    "iterations-to-skip": Missing("+", "it names samples by Megatron-LM's order; data.skip_samples has ours"),
    "result-rejected-tracker-filename": Missing("=", "it names samples by Megatron-LM's order"),
    # Checkpoints, and whole command lines
    "pretrained-checkpoint": Missing("=", _OF_CHECKPOINTS),
    "finetune": Missing("", f"{_OF_CHECKPOINTS}, with --weights-only"),
    "no-load-optim": Missing("", f"{_OF_CHECKPOINTS}, with --weights-only"),
    "ckpt-step": Missing("=", _OF_CHECKPOINTS),
    "load-main-params-from-ckpt": Missing("", _OF_CHECKPOINTS),
    "override-ckpt-iteration": Missing("=", _OF_CHECKPOINTS),
    "use-checkpoint-args": Missing("", "`triaxis import` makes a config from a checkpoint's arguments"),
    "yaml-cfg": Missing("=", "arguments in a file of YAML are not read: give them as options"),
    "skip-train": Missing("", "nothing would be trained: `triaxis evaluate` evaluates a checkpoint"),
    "batch-size": Missing("=", f"{_ELSEWHERE}: it is --micro-batch-size"),
    "warmup": Missing("=", f"{_ELSEWHERE}: it is --lr-warmup-fraction"),
    "model-parallel-size": Missing("=", f"{_ELSEWHERE}: it is --tensor-model-parallel-size"),
    "checkpoint-activations": Missing("", f"{_ELSEWHERE}: it is --recompute-granularity"),
}

BUILT_HERE = frozenset({"num_experts", "multi_latent_attention"})
"""Arguments that a config supports, although checkpoint import and export refuse them."""

NO_COUNTERPART: Mapping[str, Missing] = {
    **{
        name.replace("_", "-"): Missing(
            "" if False in off else "=", why, tuple(value for value in off if isinstance(value, str | float | int))
        )
        for name, (off, why) in OFF_ONLY.items()
        if name not in BUILT_HERE
    },
    **_MORE,
}
"""Arguments by name, without leading dashes."""
