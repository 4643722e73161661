"""The configuration: one tree of pydantic models, read from YAML, the environment and dotted overrides (no torch here).

A config is data. Nothing in it is rewritten after it was read. Sections compute what follows from their own fields, such as the
padded vocabulary; `engine/config/plan.py` computes what follows from several, such as the stages of the pipeline.
All problems are reported at once, before any process group exists: reading is `engine/config/load.py`, the rules are
`engine/config/rules.py`, the names that users of other engines type are `engine/config/foreign_names.py`.

    YAML  <  environment  <  section.key=value   ->   Config   ->   ParallelSizes, BatchPlan

A field that counts tokens, samples or steps may be written 8e12, 8T, 20B, 500M or 10k (`engine/config/counts.py`).
"""

from typing import Literal

from pydantic import Field, create_model

from engine.config import layer_kinds
from engine.config.counts import Count
from engine.config.limits import (
    LARGEST_VOCABULARY,
    LARGEST_WIDTH,
    LONGEST_SEQUENCE,
    LONGEST_TIMEOUT,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_STEPS,
    SHORTEST_TIMEOUT,
)
from engine.config.section import Section
from engine.config.telemetry import TelemetryConfig
from engine.layout.rank_grid import MOST_RANKS

FORMAT_VERSION = 1
"""Of the configuration as a file; raised when a key changes its meaning. A key that only changes its name is in RENAMED."""


class ModelConfig(Section):
    """The GPT itself; nothing here depends on how it is cut."""

    num_layers: int = Field(gt=0, le=MOST_LAYERS, description="transformer layers")
    hidden_size: int = Field(gt=0, le=LARGEST_WIDTH, description="width h of the residual stream")
    num_attention_heads: int = Field(gt=0, le=MOST_HEADS, description="query heads")
    num_kv_heads: int | None = Field(
        None, gt=0, le=MOST_HEADS, description="key/value heads (GQA); null: as many as query heads"
    )
    head_dim: int | None = Field(
        None, gt=0, le=LARGEST_WIDTH, description="size of one head; null: hidden_size / num_attention_heads"
    )
    ffn_hidden_size: int | None = Field(
        None, gt=0, le=LARGEST_WIDTH, description="width of the MLP; null: 4 x hidden_size"
    )
    seq_length: int = Field(gt=0, le=LONGEST_SEQUENCE, description="tokens in a training sample")
    vocab_size: int = Field(gt=0, le=LARGEST_VOCABULARY, description="tokens of the tokenizer, without padding")
    vocab_multiple: int = Field(
        128, gt=0, le=LARGEST_VOCABULARY, description="the vocabulary is padded to this multiple, whatever tp is"
    )
    norm: layer_kinds.NormName = Field("layernorm", description="before each branch and before the head")
    norm_eps: float = Field(1e-5, gt=0, description="added to the variance (layernorm) or mean square (rmsnorm)")
    activation: layer_kinds.ActivationName = Field("gelu", description="of the MLP; gelu_tanh is GPT-2's")
    position: layer_kinds.PositionName = Field("rope", description="a learned table, or rotation of queries and keys")
    rope_base: float = Field(10000.0, gt=0, description="theta of RoPE (2104.09864)")
    tie_embeddings: bool = Field(True, description="the output head is the input embedding")
    bias: Literal["all", "qkv", "none"] = Field("all", description="which linear layers have one")
    qk_norm: bool = Field(False, description="RMSNorm over each query and key head before RoPE")
    hidden_dropout: float = Field(0.0, ge=0, lt=1, description="after the embedding and on both residual branches")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="on the attention probabilities")
    init_std: float = Field(
        0.02, gt=0, description="normal init; residual projections use init_std / sqrt(2 num_layers)"
    )

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def norm_kind(self) -> layer_kinds.Norm:
        return layer_kinds.NORMS[self.norm]

    @property
    def activation_kind(self) -> layer_kinds.Activation:
        return layer_kinds.ACTIVATIONS[self.activation]

    @property
    def position_kind(self) -> layer_kinds.Position:
        return layer_kinds.POSITIONS[self.position]

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


class DataConfig(Section):
    """Where tokens come from. Prefixes name Megatron `.bin/.idx` pairs."""

    train: list[tuple[float, str]] = Field(default_factory=list, description="[[weight, prefix], ...]")
    valid: list[tuple[float, str]] | None = Field(None, description="null: cut from `train` by `split`")
    split: tuple[float, float, float] = Field((0.98, 0.02, 0.0), description="documents for train, valid, test")
    cache_dir: str | None = Field(None, description="index caches; null: beside each prefix")
    tokenizer: str = Field("bytes", description="`bytes`, or the path of a tokenizers .json")
    synthetic: bool = Field(False, description="random tokens instead of a corpus, a function of (seed, sample id)")
    skip_samples: list[tuple[Count, Count]] = Field(
        default_factory=list, description="training samples to leave out: [[first id, id after the last], ...]"
    )


class TrainConfig(Section):
    """How long, in what batches. Give `steps` or `tokens`, not both."""

    steps: Count | None = Field(None, gt=0, le=MOST_STEPS, description="optimizer steps")
    tokens: Count | None = Field(None, gt=0, description="rounded up to whole steps")
    global_batch_size: Count = Field(gt=0, description="samples per optimizer step, over all ranks")
    micro_batch_size: Count = Field(1, gt=0, description="samples per forward of one pipeline")
    seed: int = Field(1234, ge=0, description="of the initial weights, the data order and dropout")
    eval_interval: Count | None = Field(None, gt=0, description="steps between validations; null: no validation")
    eval_steps: Count = Field(8, gt=0, description="global batches per validation")


class ParallelConfig(Section):
    """The layout: only a matter of speed."""

    tp: int = Field(1, gt=0, le=MOST_RANKS, description="tensor parallel: each matrix is cut over tp ranks of one node")
    pp: int = Field(1, gt=0, le=MOST_RANKS, description="pipeline parallel: layers are cut into stages")
    vpp: int = Field(1, gt=0, le=MOST_LAYERS, description="model chunks per pipeline rank (interleaved schedule)")
    dp: int | None = Field(None, gt=0, le=MOST_RANKS, description="data parallel; null: world size / (tp pp)")
    cp: int = Field(1, gt=0, le=MOST_RANKS, description="context parallel: not built yet, 1 only")
    ep: int = Field(1, gt=0, le=MOST_RANKS, description="expert parallel: not built yet, 1 only")
    sequence_parallel: bool = Field(False, description="norms, dropout and residuals on 1/tp of the sequence")
    layers_per_stage: list[int] | None = Field(None, description="one entry per stage (pp x vpp), in stage order")
    allow_tp_across_nodes: bool = Field(False, description="accept tensor-parallel traffic on the slow network")

    @property
    def cuts_sequence(self) -> bool:
        """Return True where a rank holds less than the whole sequence outside of the tensor-parallel region."""
        return self.sequence_parallel and self.tp > 1


class OptimizerConfig(Section):
    """AdamW (1711.05101) with ZeRO-1 sharding."""

    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    lr_schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="shape of the decay to min_lr")
    warmup_steps: Count = Field(0, ge=0, description="steps of linear warm-up to lr")
    decay_steps: Count | None = Field(None, gt=0, description="step at which min_lr is reached; null: the last step")
    weight_decay: float = Field(0.1, ge=0, description="on matrices; norms and biases are not decayed")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the mean of gradients")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the mean of squared gradients")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    clip_grad: float | None = Field(1.0, gt=0, description="largest global gradient norm; null: no clipping")
    bucket_bytes: int = Field(64 * 2**20, gt=0, description="main-grad bytes per reduce-scatter")


class ScheduleConfig(Section):
    """In which order a pipeline rank runs forwards and backwards."""

    name: Literal["auto", "gpipe", "1f1b", "interleaved"] = Field(
        "auto", description="auto: 1f1b, interleaved when vpp > 1"
    )


class PrecisionConfig(Section):
    """The run's dtype; sums that must not lose bits use at least fp32."""

    dtype: Literal["bf16", "fp16", "fp32", "float64"] = Field("bf16", description="weights and activations")
    masters: Literal["full", "split"] = Field(
        "full",
        description="the exact weights beside those of bf16: in fp32, or (split) as 16 bits that make them exact",
    )
    moments: Literal["full", "bf16"] = Field(
        "full", description="Adam's two, in the accumulation dtype or rounded to bf16"
    )
    gradients: Literal["full", "bf16"] = Field(
        "full",
        description="what they are added up and reduced in: the accumulation dtype, or bf16 (each sum is rounded)",
    )


class RecomputeConfig(Section):
    """Recompute activations in the backward instead of keeping them."""

    granularity: Literal["none", "selective", "full", "auto"] = Field(
        "none", description="selective: `modules`; full: whole layers; auto: the cheapest of both that fits `memory_gb`"
    )
    modules: list[Literal["attention", "norm", "activation", "rope", "mlp"]] | None = Field(
        None,
        description="selective: parts of each layer (null: attention); full, block: parts of the others",
    )
    method: Literal["uniform", "block"] = Field("uniform", description="full: all layers, or the first N of a chunk")
    num_layers: int = Field(
        1, gt=0, le=MOST_LAYERS, description="uniform: layers per recomputed group; block: recomputed layers"
    )
    gathered_inputs: Literal["auto", "keep", "regather"] = Field(
        "auto",
        description="sequence parallelism: gathered inputs; auto: kept if they fit `memory_gb`, else regather",
    )
    memory_gb: float | None = Field(
        None, gt=0, description="auto: most that a rank may hold by prediction, without communicators; 10^9 bytes"
    )
    head_tokens: Count | None = Field(
        None,
        gt=0,
        description="tokens whose logits exist at a time, made again in the backward; null: all, kept for it",
    )

    @property
    def is_any(self) -> bool:
        """Whether anything is recomputed."""
        return self.granularity != "none" or self.head_tokens is not None

    @property
    def parts(self) -> frozenset[str]:
        """What is recomputed of each layer that is not recomputed whole."""
        default = ["attention"] if self.granularity == "selective" else []
        return frozenset(default if self.modules is None else self.modules)

    def __str__(self) -> str:
        """In the words of the configuration, without what says nothing; "none" where nothing is recomputed."""
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
    """Move activations to host memory between forward and backward, while other layers are computed."""

    num_layers: int = Field(0, ge=0, le=MOST_LAYERS, description="the first N layers of each model chunk; 0: none")
    min_bytes: int = Field(2**20, gt=0, description="smaller tensors stay on the device: a copy has a fixed cost")


class KernelsConfig(Section):
    """Which implementation computes what. `auto` takes the fastest that runs on the device; the banner names it."""

    attention: Literal["auto", "sdpa", "flash", "cudnn", "efficient", "explicit"] = Field(
        "auto", description="sdpa: torch's choice; flash, cudnn, efficient: that one; explicit: with probabilities"
    )
    elementwise: Literal["auto", "eager", "compiled"] = Field(
        "auto",
        description="norms, RoPE, SwiGLU, dropout, cross-entropy: operator by operator, or fused by torch.compile",
    )
    weight_grad: Literal["auto", "separate", "fused"] = Field(
        "auto", description="fused: the GEMM adds to the fp32 main grad itself (CUDA); separate: another pass does"
    )
    optimizer: Literal["auto", "torch", "compiled"] = Field(
        "auto", description="torch: its fused AdamW; compiled: the whole update of any form of state in one pass"
    )


# `async` is the word that users know, and a keyword of Python: it cannot be written as a field.
_InBackground = create_model(
    "_InBackground",
    __base__=Section,
    **{"async": (bool, Field(True, description="write while training goes on; false: training waits for the disk"))},  # type: ignore[call-overload]
)


class CheckpointConfig(_InBackground):
    """Saving and loading. A run directory with checkpoints resumes from them when the same command is given again."""

    dir: str | None = Field(
        None, description="folder of checkpoints, in no other run's directory; null: checkpoints/ in the run directory"
    )
    interval: Count | None = Field(
        None, gt=0, description="steps between saves (the last step too); null: none is saved"
    )
    keep_last: int | None = Field(3, gt=0, description="how many are kept; null: all")
    keep_every: Count | None = Field(None, gt=0, description="those at multiples of this step are kept for good")
    load: str | None = Field(None, description="a checkpoint, or a folder of them, to start from")
    load_what: Literal["all", "weights"] = Field("all", description="weights: step 0 with a fresh optimizer")
    accept: list[str] = Field(
        default_factory=list, description="fields or sections that may differ from what is loaded"
    )
    fingerprint_interval: Count | None = Field(None, gt=0, description="steps between logged fingerprints; null: none")

    @property
    def in_background(self) -> bool:
        """The value of `async`."""
        return bool(getattr(self, "async"))


class ResilienceConfig(Section):
    """What a run does about what goes wrong while it trains."""

    on_nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="skip: leave that update out; rollback: to the last checkpoint before it, without its samples",
    )
    loss_spike: float | None = Field(
        None, gt=1, description="a loss above so many times the running median is treated the same; null: none"
    )
    max_rollbacks: int = Field(3, gt=0, description="of a run over all its attempts; one more stops it")
    max_skips_in_a_row: int = Field(
        10, gt=0, description="updates left out one after the other; one more stops the run"
    )
    replica_check_interval: Count | None = Field(
        100, gt=0, description="steps between comparisons of what several ranks hold; null: none"
    )


class RuntimeConfig(Section):
    """Where and as what the run runs."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where there is a GPU; a GPU that torch cannot use is an error"
    )
    collectives: Literal["auto", "nccl", "gloo"] = Field(
        "auto", description="auto: nccl between GPUs, else gloo; gloo on GPUs: slow, but ranks may share one"
    )
    expandable_segments: bool = Field(
        True, description="CUDA memory in segments that grow; PYTORCH_ALLOC_CONF, if set, is left alone"
    )
    memory: Literal["error", "warn"] = Field(
        "error",
        description="error: refuse a run that is predicted to hold more than a GPU has; warn: only print it",
    )
    ranks_per_node: int | None = Field(None, gt=0, le=MOST_RANKS, description="null: LOCAL_WORLD_SIZE of the launcher")
    timeout_seconds: float = Field(
        600.0, ge=SHORTEST_TIMEOUT, le=LONGEST_TIMEOUT, description="a collective that waits longer ends the job"
    )
    hang_seconds: float | None = Field(
        None,
        gt=0,
        le=LONGEST_TIMEOUT,
        description="a rank that stands still for so long ends the job; null: half of timeout_seconds",
    )
    gc_interval: Count = Field(
        100, gt=0, description="steps between collections of Python's cyclic garbage; none otherwise"
    )
    deterministic: bool = Field(False, description="deterministic CUDA kernels (the CPU always is)")
    runs_dir: str = Field("runs", description="parent of the run directories")
    name: str | None = Field(None, description="run name; null: the config file's stem")

    @property
    def hangs_after_seconds(self) -> float:
        """How long a rank may stand still before it counts as hanging."""
        return self.timeout_seconds / 2 if self.hang_seconds is None else self.hang_seconds


class Config(Section):
    """The whole tree."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    train: TrainConfig
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    precision: PrecisionConfig = PrecisionConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    offload: OffloadConfig = OffloadConfig()
    kernels: KernelsConfig = KernelsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    runtime: RuntimeConfig = RuntimeConfig()
