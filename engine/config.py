"""The configuration: one tree of pydantic models, read from YAML, the environment and dotted overrides (no torch here).

A config is data. Nothing in it is rewritten after it was read: what is derived (the data-parallel size, the number of
microbatches, the padded vocabulary) comes from the functions and properties of this file, each computed in one place.
All problems are reported at once, before any process group exists (`engine/config_rules.py`).
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of the tree: unknown keys are refused, values cannot be changed after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """The GPT itself; nothing here depends on how it is cut."""

    num_layers: int = Field(gt=0, description="transformer layers")
    hidden_size: int = Field(gt=0, description="width h of the residual stream")
    num_attention_heads: int = Field(gt=0, description="query heads")
    num_kv_heads: int | None = Field(None, gt=0, description="key/value heads (GQA); none: as many as query heads")
    head_dim: int | None = Field(None, gt=0, description="size of one head; none: hidden_size / num_attention_heads")
    ffn_hidden_size: int | None = Field(None, gt=0, description="width of the MLP; none: 4 x hidden_size")
    seq_length: int = Field(gt=0, description="tokens in a training sample")
    vocab_size: int = Field(gt=0, description="tokens of the tokenizer, without padding")
    vocab_multiple: int = Field(128, gt=0, description="the vocabulary is padded to this multiple, whatever tp is")
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = Field(1e-5, gt=0)
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    position: Literal["learned", "rope"] = "rope"
    rope_base: float = Field(10000.0, gt=0, description="theta of RoPE (2104.09864)")
    tie_embeddings: bool = Field(True, description="the output head is the input embedding")
    bias: Literal["all", "qkv", "none"] = "all"
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
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


class DataConfig(Section):
    """Where tokens come from. Prefixes name Megatron `.bin/.idx` pairs."""

    train: list[tuple[float, str]] = Field(default_factory=list, description="[[weight, prefix], ...]")
    valid: list[tuple[float, str]] | None = Field(None, description="none: cut from `train` by `split`")
    split: tuple[float, float, float] = Field((0.98, 0.02, 0.0), description="documents for train, valid, test")
    cache_dir: str | None = Field(None, description="index caches; none: beside each prefix")
    tokenizer: str = Field("bytes", description="`bytes`, or the path of a tokenizers .json")
    synthetic: bool = Field(False, description="random tokens instead of a corpus, a function of (seed, sample id)")


class TrainConfig(Section):
    """How long, in what batches. Give `steps` or `tokens`, not both."""

    steps: int | None = Field(None, gt=0)
    tokens: int | None = Field(None, gt=0, description="rounded up to whole steps")
    global_batch_size: int = Field(gt=0, description="samples per optimizer step, over all ranks")
    micro_batch_size: int = Field(1, gt=0, description="samples per forward of one pipeline")
    seed: int = Field(1234, ge=0)
    eval_interval: int | None = Field(None, gt=0, description="steps between validations; none: no validation")
    eval_steps: int = Field(8, gt=0, description="global batches per validation")


class ParallelConfig(Section):
    """The layout: only a matter of speed."""

    tp: int = Field(1, gt=0, description="tensor parallel: each matrix is cut over tp ranks of one node")
    pp: int = Field(1, gt=0, description="pipeline parallel: layers are cut into stages")
    vpp: int = Field(1, gt=0, description="model chunks per pipeline rank (interleaved schedule)")
    dp: int | None = Field(None, gt=0, description="data parallel; none: world size / (tp pp)")
    cp: int = Field(1, gt=0, description="context parallel: not built yet, 1 only")
    ep: int = Field(1, gt=0, description="expert parallel: not built yet, 1 only")
    sequence_parallel: bool = Field(False, description="norms, dropout and residuals on 1/tp of the sequence")
    layers_per_stage: list[int] | None = Field(None, description="one entry per stage (pp x vpp), in stage order")
    allow_tp_across_nodes: bool = Field(False, description="accept tensor-parallel traffic on the slow network")


class OptimizerConfig(Section):
    """AdamW (1711.05101) with ZeRO-1 sharding."""

    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = Field(0, ge=0)
    decay_steps: int | None = Field(None, gt=0, description="step at which min_lr is reached; none: the last step")
    weight_decay: float = Field(0.1, ge=0, description="on matrices; norms and biases are not decayed")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float | None = Field(1.0, gt=0, description="largest global gradient norm; none: no clipping")
    bucket_bytes: int = Field(64 * 2**20, gt=0, description="main-grad bytes per reduce-scatter")


class ScheduleConfig(Section):
    name: Literal["auto", "gpipe", "1f1b", "interleaved"] = "auto"


class PrecisionConfig(Section):
    dtype: Literal["bf16", "fp16", "fp32", "float64"] = Field("bf16", description="weights and activations")


class RecomputeConfig(Section):
    """Recompute activations in the backward instead of keeping them."""

    granularity: Literal["none", "selective", "full"] = Field("none", description="selective: attention only")
    method: Literal["uniform", "block"] = Field("uniform", description="full: all layers, or the first N of a chunk")
    num_layers: int = Field(1, gt=0, description="uniform: layers per recomputed group; block: recomputed layers")


class KernelsConfig(Section):
    attention: Literal["sdpa", "explicit"] = Field("sdpa", description="explicit: probabilities are materialised")


class WandbConfig(Section):
    project: str
    entity: str | None = None
    name: str | None = Field(None, description="none: the run's name")
    tags: list[str] = Field(default_factory=list)


class TelemetryConfig(Section):
    log_interval: int = Field(10, gt=0, description="steps between lines on the terminal")
    wandb: WandbConfig | None = None
    tensorboard: bool = False
    peak_tflops: float | None = Field(
        None, gt=0, description="per device, for MFU; none: from a table of GPUs, or no MFU"
    )


class RuntimeConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    ranks_per_node: int | None = Field(None, gt=0, description="none: LOCAL_WORLD_SIZE of the launcher")
    timeout_seconds: float = Field(600.0, gt=0, description="a collective that waits longer ends the job")
    deterministic: bool = Field(False, description="deterministic CUDA kernels (the CPU always is)")
    runs_dir: str = Field("runs", description="parent of the run directories")
    name: str | None = Field(None, description="run name; none: the config file's stem")


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
    kernels: KernelsConfig = KernelsConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    runtime: RuntimeConfig = RuntimeConfig()
