"""List the supported Megatron-LM arguments, with their types and defaults.

The tables below have a line for each argument, such as these (left) with their meaning (right):

    tensor-model-parallel-size int 1      an integer, with its default
    swiglu switch                         true if given
    disable-bias-linear off @add_bias_linear      false if given; the parsed value has another name, add_bias_linear

`@name` gives the `dest` if it differs from the argument's name. A typed value without a default, or with the default `-`, is None
if it is not given.

Sources: megatron/training/arguments.py in core_v0.16.1, and the TransformerConfig from which Megatron-LM generates more arguments.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["int", "float", "str", "switch", "off", "ints", "floats", "strs", "pattern"]
"""`ints`, `floats`, `strs`: one or more values. `pattern`: an integer, or a Python list expression such as `([0]*3+[1])*4`."""

MANY: tuple[Kind, ...] = ("ints", "floats", "strs")
SWITCHES: tuple[Kind, ...] = ("switch", "off")


@dataclass(frozen=True, slots=True)
class Flag:
    """Supported Megatron-LM argument.

    Attributes:
        name: flag without leading dashes.
        kind: type of its value.
        default: value if the flag is not given.
        dest: name of the parsed value, as in argparse.
    """

    name: str
    kind: Kind
    default: Any
    dest: str


_MODEL = """
num-layers int
encoder-num-layers int - @num_layers
hidden-size int
ffn-hidden-size int
num-attention-heads int
kv-channels int
group-query-attention switch
num-query-groups int 1
seq-length int
encoder-seq-length int - @seq_length
max-position-embeddings int
position-embedding-type str learned_absolute
use-rotary-position-embeddings switch
no-position-embedding off @add_position_embedding
rotary-base int 10000
rotary-percent float 1.0
rotary-seq-len-interpolation-factor int
use-rope-scaling switch
rope-scaling-factor float 8.0
window-size pair
window-attn-skip-freq pattern
no-rope-freq pattern
softmax-type str vanilla
normalization str LayerNorm
norm-epsilon float 1e-05
apply-layernorm-1p switch
swiglu switch
openai-gelu switch
squared-relu switch
no-bias-gelu-fusion off @bias_gelu_fusion
untie-embeddings-and-output-weights switch
disable-bias-linear off @add_bias_linear
add-qkv-bias switch
qk-layernorm switch
init-method-std float 0.02
hidden-dropout float 0.1
attention-dropout float 0.1
make-vocab-size-divisible-by int 128
vocab-size int
padded-vocab-size int
mtp-num-layers int
mtp-loss-scaling-factor float 0.1
num-experts int
moe-router-topk int 2
moe-ffn-hidden-size int
moe-shared-expert-intermediate-size int
moe-router-score-function str softmax
moe-router-pre-softmax switch
moe-router-num-groups int
moe-router-group-topk int
moe-router-topk-scaling-factor float
moe-router-enable-expert-bias switch
moe-router-bias-update-rate float 0.001
moe-z-loss-coeff float
moe-layer-freq pattern 1
moe-router-load-balancing-type strs aux_loss
moe-aux-loss-coeff floats 0.0
moe-router-force-load-balancing switch
multi-latent-attention switch
q-lora-rank int
kv-lora-rank int 32
qk-head-dim int 128
qk-pos-emb-head-dim int 64
v-head-dim int 128
rotary-scaling-factor float 1.0
mscale float 1.0
mscale-all-dim float 0.0
rope-type str
"""

_TRAINING = """
micro-batch-size int
global-batch-size int
train-iters int
train-samples int
eval-interval int
eval-iters int 100
seed int 1234
optimizer str adam
lr float
min-lr float 0.0
lr-decay-style str linear
lr-decay-iters int
lr-decay-samples int
lr-warmup-iters int 0
lr-warmup-samples int 0
lr-warmup-fraction float
lr-warmup-init float 0.0
lr-wsd-decay-style str exponential
lr-wsd-decay-iters int
lr-wsd-decay-samples int
weight-decay float 0.01
clip-grad float 1.0
adam-beta1 float 0.9
adam-beta2 float 0.999
adam-eps float 1e-08
sgd-momentum float 0.9
ddp-bucket-size int
bf16 switch
fp16 switch
loss-scale float
initial-loss-scale float 4294967296
min-loss-scale float 1.0
loss-scale-window float 1000
hysteresis int 2
fp8-format str
fp8-recipe str delayed
first-last-layers-bf16 switch
num-layers-at-start-in-bf16 int 1
num-layers-at-end-in-bf16 int 1
grad-reduce-in-bf16 switch
use-precision-aware-optimizer switch
exp-avg-dtype str fp32
exp-avg-sq-dtype str fp32
calculate-per-token-loss switch
"""

_LAYOUT = """
tensor-model-parallel-size int 1
pipeline-model-parallel-size int 1
num-layers-per-virtual-pipeline-stage int
num-virtual-stages-per-pipeline-rank int
pipeline-model-parallel-layout str
decoder-first-pipeline-num-layers int
decoder-last-pipeline-num-layers int
account-for-embedding-in-pipeline-split switch
account-for-loss-in-pipeline-split switch
context-parallel-size int 1
cp-comm-type strs p2p
expert-model-parallel-size int 1
expert-tensor-parallel-size int
sequence-parallel switch
recompute-activations switch
recompute-granularity str
recompute-method str
recompute-num-layers int
recompute-modules strs
cpu-offloading-num-layers int 0
"""

_RUN = """
data-path strs
train-data-path strs
valid-data-path strs
split str
data-cache-path str
mock-data switch
tokenizer-type str
tokenizer-model str
vocab-file str
merge-file str
reset-position-ids switch
reset-attention-mask switch
eod-mask-loss switch
save str
save-interval int
persistent-save-interval int - @save_interval
save-retain-interval int
async-save switch
load str
log-interval int 100
wandb-project str
wandb-entity str
wandb-exp-name str
tensorboard-dir str
check-weight-hash-across-dp-replicas-interval int
deterministic-mode switch
distributed-timeout-minutes int 10
"""


def _flag(line: str) -> Flag:
    words = line.split()
    dest = words.pop()[1:] if words[-1].startswith("@") else words[0].replace("-", "_")
    name, kind, *default = words
    if kind == "pair":
        # Two comma-separated numbers, as in 127,0 or (127,0).
        return Flag(name, "pattern", None, dest)
    assert kind in get_args(Kind)
    given = None if not default or default == ["-"] else default[0]
    value: Any = {"switch": False, "off": True}.get(kind, given)
    if given is not None:
        value = _typed(kind, given)
    return Flag(name, kind, value, dest)  # type: ignore[arg-type]


def _typed(kind: str, text: str) -> Any:
    convert = {"int": int, "float": float, "pattern": int}.get(kind.removesuffix("s") if kind in MANY else kind, str)
    return [convert(text)] if kind in MANY else convert(text)


FLAGS: dict[str, Flag] = {
    flag.name: flag for table in (_MODEL, _TRAINING, _LAYOUT, _RUN) for flag in map(_flag, table.strip().splitlines())
}
"""Flags by name, without leading dashes."""
