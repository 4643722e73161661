"""Published command lines of Megatron-LM, their arguments without counterpart, and the parameters of their models.

Sources: examples/gpt3, examples/llama and examples/mixtral of Megatron-LM 0.19; DeepSeek-V2-Lite after its model card and
config.json. Parameters: the models' safetensors files, and for GPT-3 12 L h^2 + 13 L h + (V + s) h + 2 h.
"""

from dataclasses import dataclass

GPT3 = """
--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
--attention-backend auto --micro-batch-size 1 --global-batch-size 1536
--step-batch-size-schedule "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536" --train-iters 500000 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine
--min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000 --tensor-model-parallel-size 8
--pipeline-model-parallel-size 16 --data-path data_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
--split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --save ckpt --load ckpt --eval-iters 10
--tensorboard-dir logs
"""

LLAMA3 = """
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --use-mcore-models --num-layers 32 --hidden-size 4096
--ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
--seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
--attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --normalization RMSNorm --init-method-std 0.0134
--attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear
--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
--lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
--lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
--exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --fp8-format hybrid
--fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather --tensor-model-parallel-size 1
--context-parallel-size 1 --sequence-parallel --mock-data --tokenizer-type NullTokenizer --vocab-size 128256
--data-cache-path cache --tiktoken-pattern v2 --split '99,1,0' --no-create-attention-mask-in-dataloader
--no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000
--log-throughput --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
--distributed-timeout-minutes 60 --save ckpt --load ckpt --tensorboard-dir logs
"""

MIXTRAL = """
--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0
--hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
--no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce --tokenizer-type Llama2Tokenizer
--tokenizer-model tokenizer.model --data-path 30 web 70 code --split 99990,8,2 --micro-batch-size 1
--global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5
--weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16 --tensor-model-parallel-size 1
--pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel
--log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save ckpt --load ckpt
--tensorboard-dir ckpt/tensorboard --no-load-optim --no-load-rng
"""

DEEPSEEK = r"""
# DeepSeek-V2-Lite
--num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --kv-channels 128 \
--multi-latent-attention --kv-lora-rank 512 --v-head-dim 128 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --qk-layernorm \
--rotary-scaling-factor 40 --mscale 0.707 --mscale-all-dim 0.707 \
--num-experts 64 --moe-layer-freq '([0]+[1]*26)' --moe-ffn-hidden-size 1408 --moe-router-topk 6 \
--moe-shared-expert-intermediate-size 2816 --moe-router-pre-softmax --moe-router-load-balancing-type seq_aux_loss \
--moe-aux-loss-coeff 1e-3 --moe-grouped-gemm \
--seq-length 4096 --max-position-embeddings 163840 --position-embedding-type rope --rotary-base 10000 --swiglu \
--normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --untie-embeddings-and-output-weights \
--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.006 \
--micro-batch-size 1 --global-batch-size 4608 --train-samples 1394531250 --lr 4.2e-4 --lr-decay-style WSD \
--lr-wsd-decay-style cosine --lr-wsd-decay-samples 139453440 --lr-warmup-samples 9216000 --bf16 \
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --expert-model-parallel-size 8  # of its layout
--mock-data --vocab-size 102400 --make-vocab-size-divisible-by 1
"""


@dataclass(frozen=True)
class Published:
    """A command line, what has no counterpart in it, and its model.

    Attributes:
        vocab_size: tokens, where the arguments do not say them.
        model: fields of the model that distinguish it.
    """

    line: str
    missing: tuple[str, ...]
    vocab_size: int | None
    num_parameters: int
    model: dict[str, object]


PUBLISHED = {
    "gpt3_175b": Published(
        GPT3,
        ("step-batch-size-schedule",),
        50257,
        12 * 96 * 12288**2 + 13 * 96 * 12288 + (50257 + 2048) * 12288 + 2 * 12288,
        {"position": "learned", "norm": "layernorm", "activation": "gelu_tanh", "bias": "all", "tie_embeddings": True},
    ),
    "llama3_8b": Published(
        LLAMA3,
        ("fp8-format", "decoupled-lr"),
        128256,
        8_030_261_248,
        {"position": "rope", "norm": "rmsnorm_1p", "activation": "swiglu", "bias": "none", "num_kv_heads": 8},
    ),
    "mixtral_8x7b": Published(
        MIXTRAL,
        ("no-load-optim", "moe-aux-loss-coeff"),
        32000,
        46_702_792_704,
        {"position": "rope", "norm": "rmsnorm", "layers": ["moe*32"]},
    ),
    "deepseek_v2_lite": Published(
        DEEPSEEK, (), None, 15_706_484_224, {"position": "rope", "layers": ["dense", "moe*26"], "norm_eps": 1e-6}
    ),
}
