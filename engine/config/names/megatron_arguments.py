"""Megatron-LM's arguments: one table for hints, command lines and checkpoints.

A line has an argument's name, its kind, and more that may be missing:

    num-layers int = model.num_layers                 the value is the field's
    swiglu switch -> model.activation=swiglu          a hint for people; code converts the value
    seed int 1234                                     1234 is the default
    disable-bias-linear off @add_bias_linear          false if given; the parsed value has another name, add_bias_linear
    rope-type str {rope,yarn}                         any other value is a mistake; {WSD=wsd}: it is wsd here
    dataloader-type str {single,cyclic} ! WHY         any other value has no counterpart here; why
    fp4-format str ! WHY                              no value has one

An indented line continues the one before it. `megatron_without_effect.py` has the arguments without effect.

Sources: the parsers in Megatron-LM core_v0.8.0, 0.12.2, 0.16.1 (also of defaults) and 0.19.0; for old arguments those before 0.8.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from triaxis.engine.config.names.megatron_without_effect import WITHOUT_EFFECT

READ: Mapping[str, str] = {
    "model": """
num-layers int = model.num_layers
encoder-num-layers int @num_layers = model.num_layers
hidden-size int = model.hidden_size
ffn-hidden-size int = model.ffn_hidden_size
num-attention-heads int = model.num_attention_heads
kv-channels int = model.head_dim
group-query-attention switch -> model.num_kv_heads
num-query-groups int 1 -> model.num_kv_heads
seq-length int = model.seq_length
encoder-seq-length int @seq_length = model.seq_length
max-position-embeddings int -> model.seq_length
position-embedding-type str learned_absolute -> model.position
use-rotary-position-embeddings switch -> model.position=rope
no-position-embedding off @add_position_embedding
rotary-base int 10000 = model.rope_base
rotary-percent float 1.0 -> model.rotary_share (a share, 1 is all)
rotary-seq-len-interpolation-factor int
use-rope-scaling switch
rope-scaling-factor float 8.0
window-size pattern -> model.window (Megatron's left + 1)
window-attn-skip-freq pattern
no-rope-freq pattern
softmax-type str vanilla
normalization str LayerNorm -> model.norm
norm-epsilon float 1e-05 -> model.norm_eps
apply-layernorm-1p switch
swiglu switch -> model.activation=swiglu
openai-gelu switch
squared-relu switch
no-bias-gelu-fusion off @bias_gelu_fusion
untie-embeddings-and-output-weights switch -> model.tie_embeddings=false
disable-bias-linear off @add_bias_linear -> model.bias=none
add-qkv-bias switch -> model.bias=qkv
qk-layernorm switch -> model.qk_norm=true
init-method-std float 0.02 = model.init_std
hidden-dropout float 0.1 = model.hidden_dropout
attention-dropout float 0.1 = model.attention_dropout
make-vocab-size-divisible-by int 128 -> model.vocab_multiple
vocab-size int
padded-vocab-size int -> model.vocab_size (without padding) and model.vocab_multiple
mtp-num-layers int = model.mtp.num_layers
mtp-loss-scaling-factor float 0.1 = model.mtp.loss_weight
num-experts int = model.moe.num_experts
moe-router-topk int 2 = model.moe.top_k
moe-ffn-hidden-size int -> model.moe.ffn_hidden_size
moe-shared-expert-intermediate-size int -> model.moe.shared_experts (a number, not a width)
moe-router-score-function str softmax {softmax,sigmoid} = model.moe.score !
moe-router-pre-softmax switch
moe-router-num-groups int -> model.moe.groups
moe-router-group-topk int -> model.moe.top_groups
moe-router-topk-scaling-factor float = model.moe.scaling
moe-router-enable-expert-bias switch -> model.moe.balance.bias_rate
moe-router-bias-update-rate float 0.001 -> model.moe.balance.bias_rate
moe-z-loss-coeff float -> model.moe.balance.z_loss
moe-layer-freq pattern -> model.layers
moe-router-load-balancing-type strs aux_loss {aux_loss,seq_aux_loss,global_aux_loss,none} !
moe-aux-loss-coeff floats 0.0
moe-router-force-load-balancing switch = model.moe.force_balanced
multi-latent-attention switch -> model.mla
q-lora-rank int = model.mla.q_lora_rank
kv-lora-rank int 32 = model.mla.kv_lora_rank
qk-head-dim int 128 = model.mla.qk_nope_head_dim
qk-pos-emb-head-dim int 64 = model.mla.qk_rope_head_dim
v-head-dim int 128 = model.mla.v_head_dim
rotary-scaling-factor float 1.0
mscale float 1.0
mscale-all-dim float 0.0
rope-type str {rope,yarn}
""",
    "training": """
micro-batch-size int = train.micro_batch_size
global-batch-size int = train.global_batch_size
train-iters int = train.steps
train-samples int -> train.tokens (samples x model.seq_length)
eval-interval int = eval.interval
eval-iters int 100 = eval.steps
seed int 1234 = train.seed
optimizer str adam {adam,sgd} !
lr float = optimizer.lr
min-lr float 0.0
lr-decay-style str linear {constant,linear,cosine,inverse-square-root=inverse_sqrt,WSD=wsd} -> optimizer.lr_schedule
lr-decay-iters int -> optimizer.decay_steps
lr-decay-samples int
lr-warmup-iters int 0 -> optimizer.warmup_steps
lr-warmup-samples int 0
lr-warmup-fraction float
lr-warmup-init float 0.0
lr-wsd-decay-style str exponential {linear,cosine,exponential,minus_sqrt=sqrt} -> optimizer.cooldown_shape
lr-wsd-decay-iters int -> optimizer.cooldown_tokens (of tokens, not of iterations)
lr-wsd-decay-samples int
weight-decay float 0.01 = optimizer.weight_decay
clip-grad float 1.0
adam-beta1 float 0.9 = optimizer.beta1
adam-beta2 float 0.999 = optimizer.beta2
adam-eps float 1e-08 = optimizer.eps
sgd-momentum float 0.9 = optimizer.momentum
ddp-bucket-size int -> optimizer.bucket_bytes (bytes, not elements)
bf16 switch -> precision.dtype=bf16
fp16 switch -> precision.dtype=fp16
loss-scale float -> precision.loss_scale.static (null for a dynamic one, which is 0 in DeepSpeed)
initial-loss-scale float 4294967296 = precision.loss_scale.initial
min-loss-scale float 1.0 = precision.loss_scale.minimum
loss-scale-window float 1000 = precision.loss_scale.window
hysteresis int 2 = precision.loss_scale.hysteresis
fp8-format str -> precision.fp8
fp8-recipe str delayed -> precision.fp8.recipe
first-last-layers-bf16 switch
num-layers-at-start-in-bf16 int 1
num-layers-at-end-in-bf16 int 1
grad-reduce-in-bf16 switch
use-precision-aware-optimizer switch
exp-avg-dtype dtype fp32
exp-avg-sq-dtype dtype fp32
calculate-per-token-loss switch
""",
    "layout": """
tensor-model-parallel-size int 1 = parallel.tp
pipeline-model-parallel-size int 1 = parallel.pp
num-layers-per-virtual-pipeline-stage int -> parallel.vpp (a number of chunks, not of layers)
num-virtual-stages-per-pipeline-rank int -> parallel.vpp
pipeline-model-parallel-layout str -> parallel.layers_per_stage
decoder-first-pipeline-num-layers int -> parallel.layers_per_stage
decoder-last-pipeline-num-layers int -> parallel.layers_per_stage
account-for-embedding-in-pipeline-split switch
account-for-loss-in-pipeline-split switch
context-parallel-size int 1 = parallel.cp
cp-comm-type strs p2p {p2p=auto,all_gather,a2a=ulysses,a2a+p2p=auto}
expert-model-parallel-size int 1 -> parallel.ep
expert-tensor-parallel-size int -> parallel.etp
sequence-parallel switch
recompute-activations switch -> recompute.granularity=selective
recompute-granularity str -> recompute.granularity
recompute-method str = recompute.method
recompute-num-layers int = recompute.num_layers
recompute-modules strs -> recompute.modules
cpu-offloading-num-layers int 0 = offload.num_layers
""",
    "run": """
data-path strs -> data.train
train-data-path strs -> data.train
valid-data-path strs -> data.valid
split str
data-cache-path str = data.cache_dir
mock-data switch -> data.synthetic=true
tokenizer-type str -> data.tokenizer
tokenizer-model str = data.tokenizer
vocab-file str
merge-file str
reset-position-ids switch -> data.positions=document
reset-attention-mask switch -> data.attention=within
eod-mask-loss switch -> data.count_document_starts=false
save str = checkpoint.dir
save-interval int = checkpoint.interval
persistent-save-interval int @save_interval = checkpoint.interval
save-retain-interval int -> checkpoint.keep_every
async-save switch = checkpoint.async
load str -> checkpoint.load
log-interval int 100 = telemetry.log_interval
wandb-project str = telemetry.wandb.project
wandb-entity str = telemetry.wandb.entity
wandb-exp-name str = telemetry.wandb.name
tensorboard-dir str -> telemetry.tensorboard=true
check-weight-hash-across-dp-replicas-interval int = resilience.replica_check_interval
deterministic-mode switch -> runtime.deterministic=true
distributed-timeout-minutes int 10 -> runtime.timeout_seconds
""",
}
"""Arguments that are read, by the part of the config that they become."""

REFUSED: Mapping[str, str] = {
    "another model": """
mtp-use-repeated-layer switch ! one layer that predicts several tokens ahead in turn is not built
heterogeneous-layers-config-path str ! layers of different shapes are not built
is-hybrid-model switch ! state-space layers are not built
hybrid-layer-pattern str ! state-space layers are not built
experimental-attention-variant str ! other kinds of attention are not built
linear-attention-freq str ! linear attention is not built
attention-output-gate switch ! gated attention output is not built
qk-l2-norm switch ! L2 norm of queries and keys is not built
quick-geglu switch ! a gate of x sigmoid(1.702 x) is not built
glu-linear-offset str {0} ! an offset in the gated MLP is not built
activation-func-clamp-value str ! clamped activations are not built
apply-residual-connection-post-layernorm switch ! residuals after the norm are not built
rotary-interleaved switch ! RoPE that pairs neighbours is not built: pairs are i and i + head_dim / 2
""",
    "no counterpart": """
fp4-format str ! FP4 is not built
te-precision-config-file str ! dtypes by module are not built
kitchen-config-file str ! quantized layers are not built
kitchen-recipe-number str ! quantized layers are not built
use-kitchen-attention switch ! quantized layers are not built
fp32-residual-connection switch ! the residual stream is in the run's dtype
fp16-lm-cross-entropy switch ! the loss is computed in at least fp32
main-params-dtype str {fp32} ! exact weights are in at least fp32
main-grads-dtype str {fp32} ! gradients are summed in at least fp32, or with --grad-reduce-in-bf16 in bf16
rampup-batch-size any -> phases (a few, each with a train.global_batch_size) ! a batch size that grows is a list of stages
    here, each with a train.global_batch_size: give a few by hand
step-batch-size-schedule str -> phases (each with a train.global_batch_size) ! a batch size that grows is a list of stages
    here, each with a train.global_batch_size: give a few by hand
decoupled-lr str ! embedding and head have the schedule of all; optimizer.groups with lr_factor scales it as a whole
weight-decay-incr-style str {constant} ! weight decay is constant
apply-wd-to-qk-layernorm switch ! norms do not decay; optimizer.groups can name those of queries and keys
no-weight-decay-cond-type str ! norms do not decay; optimizer.groups can name others
freeze-all-layers switch ! every parameter is trained
use-mup switch ! muP is a recipe of fields: leave it out and apply `triaxis config mup` to the config
qk-clip switch ! clipping of attention's logits is not built
init-method-xavier-uniform switch ! initial weights are normal
embedding-init-method-std str ! all initial weights have one std
data-parallel-random-init switch ! replicas begin with the same weights
moe-input-jitter-eps str {0} ! noise on a router's input is not built
moe-expert-capacity-factor str ! which tokens are dropped follows from the tokens that a rank has; no token is dropped
    here
moe-expert-rank-capacity-factor str ! no token is dropped here
moe-shared-expert-gate switch ! shared experts behind a gate are not built
moe-latent-size str ! experts in a smaller space are not built
moe-apply-probs-on-input switch ! scores weigh the output of experts
moe-use-upcycling switch ! experts made from a dense model are not built
moe-router-quantile-balancing-ema str {0} ! balance by quantiles is not built
moe-router-force-biased str ! a router with forced choices is not built
mtp-detach-heads switch ! gradients of tokens ahead reach the whole model
mtp-hybrid-override-pattern str ! state-space layers are not built
spec any ! layers are those of the arguments; code of one's own is not read
hybrid-override-pattern str ! state-space layers are not built
heterogeneous-layers-config-encoded-json str ! layers of different shapes are not built
fim-data switch ! fill-in-the-middle is not built
sft switch ! supervised fine-tuning is not built
perform-rl-step switch ! reinforcement learning is not built
retro-project-dir str ! retrieval is not built
retro-add-retriever switch ! retrieval is not built
logits-load-dir str ! distillation is not built
phase-transition-iterations str ! phases of data are not taken over
per-dataset-sequences-path str ! corpora are drawn by weights alone
data-args-path str ! corpora are named in it: give them with --data-path
per-split-data-args-path str ! corpora are named in it: give them with --data-path
dataloader-inter-document-masking switch ! use --reset-attention-mask, which is data.attention=within
dataloader-type str {single,cyclic} ! batches of code of one's own are not read
iterations-to-skip any ! it names samples by Megatron-LM's order; data.skip_samples has ours
result-rejected-tracker-filename str ! it names samples by Megatron-LM's order
pretrained-checkpoint str ! it says what is taken from a checkpoint of Megatron-LM: `triaxis import` does so
finetune switch -> checkpoint.load_what (weights) ! it says what is taken from a checkpoint of Megatron-LM: `triaxis
    import` does so, with --weights-only
no-load-optim switch ! it says what is taken from a checkpoint of Megatron-LM: `triaxis import` does so, with
    --weights-only
ckpt-step str ! it says what is taken from a checkpoint of Megatron-LM: `triaxis import` does so
load-main-params-from-ckpt switch ! it says what is taken from a checkpoint of Megatron-LM: `triaxis import` does so
override-ckpt-iteration str ! it says what is taken from a checkpoint of Megatron-LM: `triaxis import` does so
use-checkpoint-args switch ! `triaxis import` makes a config from a checkpoint's arguments
yaml-cfg str ! arguments in a file of YAML are not read: give them as options
skip-train switch ! nothing would be trained: `triaxis evaluate` evaluates a checkpoint
""",
    "old": """
batch-size str ! an old name of --micro-batch-size
warmup str ! an old name of --lr-warmup-fraction
model-parallel-size str ! an old name of --tensor-model-parallel-size
checkpoint-activations switch ! an old name of --recompute-granularity
layernorm-epsilon str ! an old name of --norm-epsilon
min-scale str ! an old name of --min-loss-scale
fp8-e4m3 switch ! an old form of --fp8-format e4m3
fp8-hybrid switch ! an old form of --fp8-format hybrid
activations-checkpoint-method str ! an old name of --recompute-method
activations-checkpoint-num-layers str ! an old name of --recompute-num-layers
checkpoint-num-layers str ! an old name of --recompute-num-layers
moe-token-dropping switch ! no token is dropped here
""",
}
"""Arguments without a counterpart here, by what they would change."""

SWITCHES = ("switch", "off")
LISTS = ("ints", "floats", "strs", "any")
"""Kinds of arguments without a value, and with several. `any` and `optional` may have none."""

_LINE = re.compile(
    r"(?P<name>\S+) (?P<kind>\w+)( (?P<default>\w\S*))?( @(?P<dest>\w+))?( {(?P<accepted>.*)})?"
    r"( (?P<form>=|->) (?P<ours>[^!]+?))?( ! ?(?P<why>.*))?"
)
_PAIR = re.compile(r"([^,=]+)=?([^,]*)")
_WORD = re.compile(r"(?P<name>[\w-]+)(?P<kind>[=+?]?)(>(?P<ours>\S+))?")
_KINDS = {"": "switch", "=": "str", "+": "any", "?": "optional"}


@dataclass(frozen=True, slots=True)
class Argument:
    """Argument of Megatron-LM.

    Attributes:
        name: name without leading dashes.
        kind: type of its value: int, float, str, or one of `SWITCHES` and `LISTS`. A `dtype` is a word, in
            checkpoints an object. A `pattern` is an integer or a Python list expression such as
            `([0]*3+[1])*4`.
        group: group in `READ` or `REFUSED`, or topic in `WITHOUT_EFFECT`.
        default: value if the argument is not given; None: no value.
        dest: name of the parsed value, also in checkpoints.
        ours: field here, as `FOREIGN_NAMES` has it.
        is_equal: whether the value is that field's.
        accepted: the only values that are read, with ours; empty: any value.
        why: reason why other values have no counterpart here, "" if they are not built; None: they are mistakes.
    """

    name: str
    kind: str
    group: str
    default: Any = None
    dest: str = ""
    ours: str | None = None
    is_equal: bool = False
    accepted: Mapping[str, str] = field(default_factory=dict)
    why: str | None = None

    def other_values(self, values: list[Any]) -> list[str]:
        """List those of the values, or their words, that are not `accepted`."""
        return [str(value) for value in values if plain_text(value) not in self.accepted]


def typed(kind: str, words: list[str]) -> Any:
    """Convert an argument's words to its value.

    Raises:
        ValueError: a word is no number.
    """
    if kind in SWITCHES:
        return kind == "switch"
    of_one = {"int": int, "float": float}.get(kind.removesuffix("s"), str)
    values = [of_one(word) for word in words]
    return values if kind in LISTS else values[0]


def plain_text(value: object) -> str:
    """Write a value as text; equal numbers have equal texts."""
    try:
        return f"{float(str(value)):g}"
    except ValueError:
        return str(value)


def _lines(groups: Mapping[str, str]) -> Iterator[Argument]:
    for group, text in groups.items():
        for line in text.strip().replace("\n    ", " ").splitlines():
            found = _LINE.fullmatch(line)
            assert found is not None, line
            name, kind, default = found["name"], found["kind"], found["default"]
            yield Argument(
                name,
                kind,
                group,
                default={"switch": False, "off": True}.get(kind) if default is None else typed(kind, [default]),
                dest=found["dest"] or name.replace("-", "_"),
                ours=found["ours"],
                is_equal=found["form"] == "=",
                accepted={theirs: ours or theirs for theirs, ours in _PAIR.findall(found["accepted"] or "")},
                why=found["why"],
            )


def _words(topics: Mapping[str, str]) -> Iterator[Argument]:
    for topic, text in topics.items():
        for word in text.split():
            found = _WORD.fullmatch(word)
            assert found is not None, word
            ours = found["ours"] and found["ours"].replace("(", " (")
            yield Argument(found["name"], _KINDS[found["kind"]], topic, ours=ours)


ARGUMENTS: Mapping[str, Argument] = {
    argument.name: argument for argument in (*_lines(READ), *_lines(REFUSED), *_words(WITHOUT_EFFECT))
}
"""Arguments by name."""


def equal_fields(section: str) -> dict[str, str]:
    """Map arguments, by `dest`, to the fields of a section, such as `model.mla`, that have the same value."""
    fields = {each.dest: each.ours.rpartition(".") for each in ARGUMENTS.values() if each.ours and each.is_equal}
    return {dest: field for dest, (above, _, field) in fields.items() if above == section}


def taken_over(args: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Build the fields of a section whose values are those of given arguments."""
    return {ours: args[theirs] for theirs, ours in equal_fields(section).items() if args.get(theirs) is not None}
