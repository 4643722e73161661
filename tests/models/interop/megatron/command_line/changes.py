"""Arguments of Megatron-LM by themselves: a command line, what is added to it, and the fields that differ then."""

from typing import Any

BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 --vocab-size 500 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 100 --lr 1e-3 --mock-data --attention-dropout 0"
)
BY_SAMPLES = BASE.replace("--train-iters 100", "--train-samples 805")
ROPE = f"{BASE} --position-embedding-type rope"
EXPERTS = f"{ROPE} --disable-bias-linear --num-experts 4"
LATENT = f"{ROPE} --disable-bias-linear --multi-latent-attention --qk-layernorm"
FP16, BF16 = f"{BASE} --fp16", f"{BASE} --bf16"
CORPUS = BASE.replace("--mock-data", "--data-path web")
SAVED = f"{BASE} --save ckpt --save-interval 50"
FP8 = f"{BF16} --fp8-recipe tensorwise --fp8-format hybrid"
WINDOW = f"{ROPE} --window-size 15,0"

Changed = dict[str, Any]
CHANGES: dict[str, tuple[str, str, Changed]] = {
    # name: (command line, what is added, fields that differ)
    "num-layers": (BASE.replace("--num-layers 8 ", ""), "--num-layers 6", {"model.num_layers": 6}),
    "encoder-num-layers": (BASE.replace("--num-layers 8 ", ""), "--encoder-num-layers 6", {"model.num_layers": 6}),
    "hidden-size": (
        BASE.replace("--hidden-size 64 ", "--ffn-hidden-size 9 "),
        "--hidden-size 32",
        {"model.hidden_size": 32},
    ),
    "ffn-hidden-size": (BASE, "--ffn-hidden-size 96", {"model.ffn_hidden_size": 96}),
    "num-attention-heads": (
        BASE.replace("--num-attention-heads 8 ", ""),
        "--num-attention-heads 4",
        {"model.num_attention_heads": 4},
    ),
    "kv-channels": (BASE, "--kv-channels 16", {"model.head_dim": 16}),
    "group-query-attention": (BASE, "--group-query-attention", {"model.num_kv_heads": 1}),
    "num-query-groups": (f"{BASE} --group-query-attention", "--num-query-groups 2", {"model.num_kv_heads": 2}),
    "seq-length": (BASE.replace("--seq-length 32 ", ""), "--seq-length 16", {"model.seq_length": 16}),
    "encoder-seq-length": (BASE.replace("--seq-length 32 ", ""), "--encoder-seq-length 16", {"model.seq_length": 16}),
    "position-embedding-type": (BASE, "--position-embedding-type none", {"model.position": "none"}),
    "use-rotary-position-embeddings": (BASE, "--use-rotary-position-embeddings", {"model.position": "rope"}),
    "rotary-base": (ROPE, "--rotary-base 500000", {"model.rope_base": 500000.0}),
    "rotary-percent": (ROPE, "--rotary-percent 0.5", {"model.rotary_share": 0.5}),
    "rotary-seq-len-interpolation-factor": (
        ROPE,
        "--rotary-seq-len-interpolation-factor 4",
        {"model.rope_scaling.type": "linear", "model.rope_scaling.factor": 4.0},
    ),
    "rope-scaling-factor": (
        f"{ROPE} --use-rope-scaling",
        "--rope-scaling-factor 32",
        {"model.rope_scaling.factor": 32.0},
    ),
    "window-size": (ROPE, "--window-size (15,0)", {"model.window": 16}),
    "window-attn-skip-freq": (
        WINDOW,
        "--window-attn-skip-freq 2",
        {"model.window": None, "model.layers": ["near*1", "far*1"] * 4, "model.layer_kinds.near.window": 16},
    ),
    "no-rope-freq": (
        ROPE,
        "--no-rope-freq ([0]*3+[1])*2",
        {"model.layers": ["far*3", "far_no_rope*1"] * 2, "model.layer_kinds.far_no_rope.position": "none"},
    ),
    "softmax-type": (BASE, "--softmax-type learnable", {"model.sinks": True}),
    "normalization": (BASE, "--normalization RMSNorm", {"model.norm": "rmsnorm"}),
    "norm-epsilon": (BASE, "--norm-epsilon 1e-6", {"model.norm_eps": 1e-6}),
    "apply-layernorm-1p": (f"{BASE} --normalization RMSNorm", "--apply-layernorm-1p", {"model.norm": "rmsnorm_1p"}),
    "swiglu": (f"{BASE} --ffn-hidden-size 96", "--swiglu", {"model.activation": "swiglu"}),
    "openai-gelu": (f"{BASE} --no-bias-gelu-fusion", "--openai-gelu", {"model.activation": "gelu_tanh"}),
    "squared-relu": (BASE, "--squared-relu", {"model.activation": "relu2"}),
    "no-bias-gelu-fusion": (BASE, "--no-bias-gelu-fusion", {"model.activation": "gelu"}),
    "untie-embeddings-and-output-weights": (
        BASE,
        "--untie-embeddings-and-output-weights",
        {"model.tie_embeddings": False},
    ),
    "disable-bias-linear": (f"{BASE} --swiglu", "--disable-bias-linear", {"model.bias": "none"}),
    "add-qkv-bias": (f"{BASE} --swiglu --disable-bias-linear", "--add-qkv-bias", {"model.bias": "qkv"}),
    "qk-layernorm": (f"{BASE} --normalization RMSNorm", "--qk-layernorm", {"model.qk_norm": True}),
    "init-method-std": (BASE, "--init-method-std 0.006", {"model.init_std": 0.006}),
    "hidden-dropout": (BASE, "--hidden-dropout 0.2", {"model.hidden_dropout": 0.2}),
    "attention-dropout": (
        BASE.replace("--attention-dropout 0", ""),
        "--attention-dropout 0.2",
        {"model.attention_dropout": 0.2},
    ),
    "make-vocab-size-divisible-by": (BASE, "--make-vocab-size-divisible-by 64", {"model.vocab_multiple": 64}),
    "vocab-size": (BASE.replace("--vocab-size 500 ", ""), "--vocab-size 600", {"model.vocab_size": 600}),
    "mtp-num-layers": (ROPE, "--mtp-num-layers 1", {"model.mtp.num_layers": 1, "model.mtp.loss_weight": 0.1}),
    "mtp-loss-scaling-factor": (
        f"{ROPE} --mtp-num-layers 1",
        "--mtp-loss-scaling-factor 0.3",
        {"model.mtp.loss_weight": 0.3},
    ),
    "num-experts": (EXPERTS.replace("--num-experts 4", ""), "--num-experts 8", {"model.moe.num_experts": 8}),
    "moe-router-topk": (EXPERTS, "--moe-router-topk 3", {"model.moe.top_k": 3}),
    "moe-ffn-hidden-size": (EXPERTS, "--moe-ffn-hidden-size 48", {"model.moe.ffn_hidden_size": 48}),
    "moe-shared-expert-intermediate-size": (
        f"{EXPERTS} --moe-ffn-hidden-size 48",
        "--moe-shared-expert-intermediate-size 96",
        {"model.moe.shared_experts": 2},
    ),
    "moe-router-score-function": (EXPERTS, "--moe-router-score-function sigmoid", {"model.moe.score": "sigmoid"}),
    "moe-router-pre-softmax": (EXPERTS, "--moe-router-pre-softmax", {"model.moe.normalize": False}),
    "moe-router-num-groups": (
        f"{EXPERTS} --moe-router-group-topk 2",
        "--moe-router-num-groups 2",
        {"model.moe.groups": 2, "model.moe.top_groups": 2, "model.moe.group_score": "max"},
    ),
    "moe-router-group-topk": (
        f"{EXPERTS} --moe-router-num-groups 2 --moe-router-score-function sigmoid",
        "--moe-router-group-topk 1",
        {"model.moe.top_groups": 1, "model.moe.group_score": "top2"},
    ),
    "moe-router-topk-scaling-factor": (EXPERTS, "--moe-router-topk-scaling-factor 2.5", {"model.moe.scaling": 2.5}),
    "moe-router-enable-expert-bias": (
        EXPERTS,
        "--moe-router-enable-expert-bias",
        {"model.moe.balance.bias_rate": 0.001},
    ),
    "moe-router-bias-update-rate": (
        f"{EXPERTS} --moe-router-enable-expert-bias",
        "--moe-router-bias-update-rate 0.01",
        {"model.moe.balance.bias_rate": 0.01},
    ),
    "moe-z-loss-coeff": (EXPERTS, "--moe-z-loss-coeff 1e-3", {"model.moe.balance.z_loss": 1e-3}),
    "moe-layer-freq": (EXPERTS, "--moe-layer-freq 2", {"model.layers": ["moe", "dense"] * 4}),
    "moe-aux-loss-coeff": (
        f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss",
        "--moe-aux-loss-coeff 1e-3",
        {"model.moe.balance.sequence_loss": 1e-3},
    ),
    "moe-router-force-load-balancing": (
        EXPERTS,
        "--moe-router-force-load-balancing",
        {"model.moe.force_balanced": True},
    ),
    "q-lora-rank": (LATENT, "--q-lora-rank 48", {"model.mla.q_lora_rank": 48}),
    "kv-lora-rank": (LATENT, "--kv-lora-rank 16", {"model.mla.kv_lora_rank": 16}),
    "qk-head-dim": (LATENT, "--qk-head-dim 96", {"model.mla.qk_nope_head_dim": 96}),
    "qk-pos-emb-head-dim": (LATENT, "--qk-pos-emb-head-dim 32", {"model.mla.qk_rope_head_dim": 32}),
    "v-head-dim": (LATENT, "--v-head-dim 64", {"model.mla.v_head_dim": 64}),
    "mscale": (
        f"{LATENT} --rotary-scaling-factor 40 --mscale-all-dim 0.7",
        "--mscale 0.7",
        {"model.rope_scaling.mscale": 0.7},
    ),
    "mscale-all-dim": (
        f"{LATENT} --rotary-scaling-factor 40",
        "--mscale-all-dim 0.7",
        {"model.rope_scaling.mscale_all_dim": 0.7, "model.rope_scaling.mscale": 1.0},
    ),
    "micro-batch-size": (
        BASE.replace("--micro-batch-size 1 ", ""),
        "--micro-batch-size 2",
        {"train.micro_batch_size": 2},
    ),
    "global-batch-size": (
        BASE.replace("--global-batch-size 8 ", ""),
        "--global-batch-size 16",
        {"train.global_batch_size": 16},
    ),
    "train-iters": (
        f"{BASE.replace('--train-iters 100 ', '')} --lr-decay-style constant",
        "--train-iters 7",
        {"train.steps": 7},
    ),
    "train-samples": (
        f"{BASE.replace('--train-iters 100 ', '')} --lr-decay-style constant",
        "--train-samples 85",
        {"train.steps": None, "train.tokens": 10 * 8 * 32},
    ),
    "eval-interval": (BASE, "--eval-interval 5", {"eval.interval": 5, "eval.steps": 100}),
    "eval-iters": (f"{BASE} --eval-interval 5", "--eval-iters 3", {"eval.steps": 3}),
    "seed": (BASE, "--seed 7", {"train.seed": 7}),
    "optimizer": (
        BASE,
        "--optimizer sgd",
        {"optimizer.name": "sgd", "optimizer.beta2": 0.95},
    ),
    "lr": (BASE.replace("--lr 1e-3 ", ""), "--lr 2e-3", {"optimizer.lr": 2e-3}),
    "min-lr": (BASE, "--min-lr 1e-5", {"optimizer.min_lr": 1e-5}),
    "lr-decay-style": (BASE, "--lr-decay-style cosine", {"optimizer.lr_schedule": "cosine"}),
    "lr-decay-iters": (BASE, "--lr-decay-iters 50", {"optimizer.decay_steps": 50}),
    "lr-decay-samples": (BY_SAMPLES, "--lr-decay-samples 400", {"optimizer.decay_steps": 50}),
    "lr-warmup-iters": (BASE, "--lr-warmup-iters 5", {"optimizer.warmup_steps": 5}),
    "lr-warmup-samples": (BY_SAMPLES, "--lr-warmup-samples 12", {"optimizer.warmup_tokens": 12 * 32}),
    "lr-warmup-fraction": (BASE, "--lr-warmup-fraction 0.1", {"optimizer.warmup_steps": 10}),
    "lr-wsd-decay-style": (
        f"{BASE} --lr-decay-style WSD --lr-wsd-decay-iters 10",
        "--lr-wsd-decay-style minus_sqrt",
        {"optimizer.cooldown_shape": "sqrt"},
    ),
    "lr-wsd-decay-iters": (
        f"{BASE} --lr-decay-style WSD --lr-wsd-decay-style linear",
        "--lr-wsd-decay-iters 20",
        {"optimizer.cooldown_tokens": 20 * 8 * 32},
    ),
    "lr-wsd-decay-samples": (
        f"{BY_SAMPLES} --lr-decay-style WSD --lr-wsd-decay-style linear",
        "--lr-wsd-decay-samples 100",
        {"optimizer.cooldown_tokens": 100 * 32},
    ),
    "weight-decay": (BASE, "--weight-decay 0.3", {"optimizer.weight_decay": 0.3}),
    "clip-grad": (BASE, "--clip-grad 0", {"optimizer.clip_grad": None}),
    "adam-beta1": (BASE, "--adam-beta1 0.8", {"optimizer.beta1": 0.8}),
    "adam-beta2": (BASE, "--adam-beta2 0.95", {"optimizer.beta2": 0.95}),
    "adam-eps": (BASE, "--adam-eps 1e-6", {"optimizer.eps": 1e-6}),
    "sgd-momentum": (f"{BASE} --optimizer sgd", "--sgd-momentum 0.8", {"optimizer.momentum": 0.8}),
    "ddp-bucket-size": (BASE, "--ddp-bucket-size 1000000", {"optimizer.bucket_bytes": 4_000_000}),
    "bf16": (BASE, "--bf16", {"precision.dtype": "bf16"}),
    "loss-scale": (
        FP16,
        "--loss-scale 128",
        {
            "precision.loss_scale.static": 128.0,
            "precision.loss_scale.initial": 65536.0,
        },
    ),
    "initial-loss-scale": (FP16, "--initial-loss-scale 4096", {"precision.loss_scale.initial": 4096.0}),
    "min-loss-scale": (FP16, "--min-loss-scale 2", {"precision.loss_scale.minimum": 2.0}),
    "loss-scale-window": (FP16, "--loss-scale-window 200", {"precision.loss_scale.window": 200}),
    "hysteresis": (FP16, "--hysteresis 4", {"precision.loss_scale.hysteresis": 4}),
    "fp8-format": (
        f"{BF16} --fp8-recipe tensorwise",
        "--fp8-format hybrid",
        {"precision.fp8.recipe": "tensorwise"},
    ),
    "first-last-layers-bf16": (FP8, "--first-last-layers-bf16", {"precision.fp8.bf16_layers": [1, 1]}),
    "num-layers-at-start-in-bf16": (
        f"{FP8} --first-last-layers-bf16",
        "--num-layers-at-start-in-bf16 2",
        {"precision.fp8.bf16_layers": [2, 1]},
    ),
    "num-layers-at-end-in-bf16": (
        f"{FP8} --first-last-layers-bf16",
        "--num-layers-at-end-in-bf16 3",
        {"precision.fp8.bf16_layers": [1, 3]},
    ),
    "grad-reduce-in-bf16": (BF16, "--grad-reduce-in-bf16", {"precision.gradients": "bf16"}),
    # Both, or neither.
    **dict.fromkeys(
        ("exp-avg-dtype", "exp-avg-sq-dtype"),
        (
            f"{BF16} --adam-beta2 0.95",
            "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
            {"precision.moments": "bf16"},
        ),
    ),
    "tensor-model-parallel-size": (
        BASE,
        "--tensor-model-parallel-size 2",
        {"parallel.tp": 2, "model.vocab_multiple": 256},
    ),
    "pipeline-model-parallel-size": (BASE, "--pipeline-model-parallel-size 4", {"parallel.pp": 4}),
    "num-layers-per-virtual-pipeline-stage": (
        f"{BASE} --pipeline-model-parallel-size 2",
        "--num-layers-per-virtual-pipeline-stage 1",
        {"parallel.vpp": 4},
    ),
    "num-virtual-stages-per-pipeline-rank": (
        f"{BASE} --pipeline-model-parallel-size 2",
        "--num-virtual-stages-per-pipeline-rank 2",
        {"parallel.vpp": 2},
    ),
    "pipeline-model-parallel-layout": (
        f"{BASE} --pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-layout Et|(tt|)*2,t*3L",
        {"parallel.vpp": 2, "parallel.layers_per_stage": [1, 2, 2, 3]},
    ),
    "decoder-first-pipeline-num-layers": (
        f"{BASE} --pipeline-model-parallel-size 4",
        "--decoder-first-pipeline-num-layers 2",
        {"parallel.layers_per_stage": [2, 2, 2, 2]},
    ),
    "decoder-last-pipeline-num-layers": (
        f"{BASE} --pipeline-model-parallel-size 4",
        "--decoder-last-pipeline-num-layers 5",
        {"parallel.layers_per_stage": [1, 1, 1, 5]},
    ),
    "account-for-embedding-in-pipeline-split": (
        f"{BASE} --pipeline-model-parallel-size 3",
        "--account-for-embedding-in-pipeline-split",
        {"parallel.layers_per_stage": [2, 3, 3]},
    ),
    "account-for-loss-in-pipeline-split": (
        f"{BASE} --pipeline-model-parallel-size 3",
        "--account-for-loss-in-pipeline-split",
        {"parallel.layers_per_stage": [3, 3, 2]},
    ),
    "context-parallel-size": (ROPE, "--context-parallel-size 2", {"parallel.cp": 2}),
    "cp-comm-type": (f"{ROPE} --context-parallel-size 2", "--cp-comm-type a2a", {"parallel.cp_method": "ulysses"}),
    "expert-model-parallel-size": (EXPERTS, "--expert-model-parallel-size 4", {"parallel.ep": 4}),
    "expert-tensor-parallel-size": (
        f"{EXPERTS} --tensor-model-parallel-size 2",
        "--expert-tensor-parallel-size 1",
        {"parallel.etp": 1},
    ),
    "sequence-parallel": (
        f"{BASE} --tensor-model-parallel-size 2",
        "--sequence-parallel",
        {"parallel.sequence_parallel": True},
    ),
    "recompute-activations": (
        BASE,
        "--recompute-activations",
        {"recompute.granularity": "selective", "recompute.modules": ["attention"]},
    ),
    "recompute-granularity": (BASE, "--recompute-granularity full", {"recompute.granularity": "full"}),
    "recompute-method": (
        f"{BASE} --recompute-granularity full",
        "--recompute-method block",
        {"recompute.method": "block"},
    ),
    "recompute-num-layers": (
        f"{BASE} --recompute-granularity full",
        "--recompute-num-layers 2",
        {"recompute.num_layers": 2},
    ),
    "recompute-modules": (
        f"{BASE} --recompute-granularity selective",
        "--recompute-modules layernorm mlp",
        {"recompute.modules": ["norm", "mlp"]},
    ),
    "cpu-offloading-num-layers": (BASE, "--cpu-offloading-num-layers 2", {"offload.num_layers": 2}),
    "data-path": (
        CORPUS.replace("--data-path web", ""),
        "--data-path 30 web 70 code",
        {
            "data.train": [{"path": "web", "weight": 30.0}, {"path": "code", "weight": 70.0}],
            "data.split": [969.0, 30.0, 1.0],
        },
    ),
    "train-data-path": (
        CORPUS.replace("--data-path web", ""),
        "--train-data-path web",
        {"data.train": [{"path": "web"}], "data.split": [1.0, 0.0, 0.0]},
    ),
    "valid-data-path": (
        CORPUS.replace("--data-path", "--train-data-path"),
        "--valid-data-path 1 a 3 b",
        {"data.valid": [{"path": "a"}, {"path": "b", "weight": 3.0}]},
    ),
    "split": (CORPUS, "--split '99,1'", {"data.split": [99.0, 1.0, 0.0]}),
    "data-cache-path": (CORPUS, "--data-cache-path cache", {"data.cache_dir": "cache"}),
    "mock-data": (BASE.replace("--mock-data ", ""), "--mock-data", {"data.synthetic": True}),
    "tokenizer-type": (BASE, "--tokenizer-type NullTokenizer", {"model.vocab_size": 501}),
    "tokenizer-model": (CORPUS, "--tokenizer-model tok.model", {"data.tokenizer": "tok.model"}),
    # Both, or a note.
    **dict.fromkeys(
        ("vocab-file", "merge-file"),
        (
            CORPUS,
            "--vocab-file a/gpt2-vocab.json --merge-file a/gpt2-merges.txt",
            {"data.tokenizer": "a/gpt2-vocab.json"},
        ),
    ),
    "reset-position-ids": (BASE, "--reset-position-ids", {"data.positions": "document"}),
    "reset-attention-mask": (BASE, "--reset-attention-mask", {"data.attention": "within"}),
    "eod-mask-loss": (BASE, "--eod-mask-loss", {"data.count_document_starts": False}),
    "save": (
        BASE,
        "--save ckpt --save-interval 50",
        {"checkpoint.dir": "ckpt", "checkpoint.interval": 50},
    ),
    "save-interval": (f"{BASE} --save ckpt", "--save-interval 9", {"checkpoint.interval": 9}),
    "persistent-save-interval": (f"{BASE} --save ckpt", "--persistent-save-interval 9", {"checkpoint.interval": 9}),
    "save-retain-interval": (
        SAVED,
        "--save-retain-interval 100",
        {"checkpoint.keep_every": 100, "checkpoint.keep_last": 1},
    ),
    "async-save": (SAVED, "--async-save", {"checkpoint.async": True}),
    "log-interval": (BASE, "--log-interval 7", {"telemetry.log_interval": 7}),
    "wandb-project": (BASE, "--wandb-project p", {"telemetry.wandb.project": "p"}),
    "wandb-entity": (f"{BASE} --wandb-project p", "--wandb-entity e", {"telemetry.wandb.entity": "e"}),
    "wandb-exp-name": (f"{BASE} --wandb-project p", "--wandb-exp-name n", {"telemetry.wandb.name": "n"}),
    "tensorboard-dir": (BASE, "--tensorboard-dir t", {"telemetry.tensorboard": True}),
    "check-weight-hash-across-dp-replicas-interval": (
        BASE,
        "--check-weight-hash-across-dp-replicas-interval 20",
        {"resilience.replica_check_interval": 20},
    ),
    "deterministic-mode": (BASE, "--deterministic-mode", {"runtime.deterministic": True}),
    "distributed-timeout-minutes": (BASE, "--distributed-timeout-minutes 60", {"runtime.timeout_seconds": 3600.0}),
}

OTHERWISE = {
    "max-position-embeddings": "a length of learned positions: refused where it is not the samples'",
    "no-position-embedding": "Megatron-LM reads it with RoPE alone, which has no table",
    "padded-vocab-size": "rows without a token are no part of a model here",
    "use-rope-scaling": "below",
    "lr-warmup-init": "below",
    "fp16": "below",
    "fp8-recipe": "below",
    "multi-latent-attention": "below",
    "rotary-scaling-factor": "below",
    "rope-type": "below",
    "moe-router-load-balancing-type": "below: without a factor it balances nothing",
    "calculate-per-token-loss": "the loss is always so here",
    "use-precision-aware-optimizer": "the dtypes of moments are arguments of their own",
    "load": "below",
}


# What a command line has to say, where a test leaves it out: the value that Megatron-LM would not accept.
FILLED = {
    "num-layers": "--num-layers 8",
    "encoder-num-layers": "--num-layers 8",
    "hidden-size": "--hidden-size 64",
    "num-attention-heads": "--num-attention-heads 8",
    "seq-length": "--seq-length 32",
    "encoder-seq-length": "--seq-length 32",
    "vocab-size": "--vocab-size 500",
    "num-experts": "--num-experts 4",
    "micro-batch-size": "--micro-batch-size 1",
    "global-batch-size": "--global-batch-size 8",
    "train-iters": "--train-iters 100",
    "train-samples": "--train-iters 100",
    "lr": "--lr 1e-3",
    "data-path": "--data-path 1 other",
    "train-data-path": "--data-path other",
    "mock-data": "--data-path other",
    "save-interval": "--save-interval 50",
    "persistent-save-interval": "--save-interval 50",
    "attention-dropout": "--attention-dropout 0.1",
    "lr-wsd-decay-style": "--lr-wsd-decay-style linear",
    "lr-wsd-decay-iters": "--lr-wsd-decay-iters 10",
    "lr-wsd-decay-samples": "--lr-wsd-decay-samples 80",
}
BESIDES = {
    # Fields that follow from the value, in Megatron-LM too.
    "num-experts": {"model.moe.ffn_hidden_size"},
    "seq-length": set(),
    "train-data-path": {"data.split"},
    "mock-data": {"data.train", "data.split"},
    "split": set(),
    "loss-scale": {"precision.loss_scale.initial"},
    "optimizer": {"optimizer.beta1", "optimizer.beta2", "optimizer.eps"},
}
