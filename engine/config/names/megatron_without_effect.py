"""Megatron-LM's arguments that do not affect training here, by topic; `megatron_arguments.py` reads them.

A word is a name, and says how many values follow the argument. It may also have a field of ours that does the same:

    name  none, a switch      name=  one      name+  any number      name?  at most one      name>FIELD or name>FIELD(REMARK)

Layout, overlap and kernel settings change results only by rounding. A setting for an optional feature has no effect without the
feature's switch.
"""

from collections.abc import Mapping

WITHOUT_EFFECT: Mapping[str, str] = {
    "logging": """
    app-tag-run-name= app-tag-run-version= disable-log-loss-scale-to-tensorboard disable-straggler-on-startup
    log-batch-size-to-tensorboard log-device-memory-used log-energy log-max-attention-logit log-memory-interval=
    log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm log-progress log-straggler log-throughput
    log-timers-to-tensorboard log-validation-ppl-to-tensorboard log-world-size-to-tensorboard logging-level=
    memory-snapshot-path= moe-per-layer-logging moe-routing-trace-capture-hidden-states moe-routing-trace-capture-logits
    moe-routing-trace-dump-weights moe-routing-trace-max-training-iters= moe-routing-trace-path=
    no-barrier-with-level-1-timing no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard no-one-logger
    nvtx-ranges one-logger-async one-logger-project= one-logger-run-name= profile profile-ranks+ profile-step-end=
    profile-step-start= pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra pytorch-profiler-collect-shapes
    record-memory-history record-shapes run-workload-inspector-server straggler-ctrlr-port= straggler-minmax-count=
    tensorboard-log-interval= tensorboard-queue-size= timing-log-level= timing-log-option= use-pytorch-profiler
    wandb-save-dir=
""",
    "speed, memory and rounding": """
    accumulate-allreduce-grads-in-fp32 activation-offload-fraction= apply-query-key-layer-scaling
    attention-backend=>kernels.attention attention-softmax-in-fp32 batch-invariant-mode cache-mla-latents
    check-for-large-grads config-logger-dir= cpu-offloading-retain-pinned-cpu-buffers create-all-gather-group
    cross-entropy-fusion-impl= cross-entropy-loss-fusion cuda-graph-impl= cuda-graph-warmup-steps=
    data-parallel-sharding-strategy=>parallel.zero ddp-average-in-collective ddp-num-buckets= ddp-pad-buckets-for-high-nccl-busbw
    ddp-param-name-patterns-for-fp32-local-accumulation+ ddp-reduce-scatter-with-fp32-accumulation decoder-num-layers=
    decrease-batch-size-if-needed defer-embedding-wgrad-compute delay-offload-until-cuda-graph delay-param-gather
    delay-wgrad-compute delta-offload-bytes-across-pp-ranks= disable-align-grad-reduce
    disable-async-tensor-model-parallel-allreduce disable-bf16-reduced-precision-matmul
    disable-clone-scatter-output-in-embedding disable-flight-recorder-dump-on-timeout
    disable-flight-recorder-extra-dump-on-exec disable-flight-recorder-include-only-active disable-gloo-process-groups
    disable-jit-fuser disable-mamba-mem-eff-path disable-manual-gc-eval disable-symmetric-registration
    disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs
    disable-tp-comm-split-ag disable-tp-comm-split-rs distribute-saved-activations distributed-backend=>runtime.collectives
    distributed-timeout-seconds-after-init= dump-param-to-param-group-map= empty-unused-memory-level= enable-cuda-graph
    enable-experimental enable-full-sharding-in-hsdp encoder-pipeline-model-parallel-size= encoder-tensor-model-parallel-size=
    ep-overlap-early-attn-memory-release expert-tensor-parallel-num-weight-shards= external-cuda-graph fake-process-group
    fine-grained-activation-offloading>offload.num_layers fine-grained-offloading-max-inflight-offloads=
    flash-attention-version= flight-recorder-dump-path= flight-recorder-include-stack-trace flight-recorder-trace-buffer-size=
    fsdp-db-use-persist-buf-on-alloc-fail fsdp-double-buffer fsdp-manual-registration fused-residual-rmsnorm
    gpu-sniff-test-interval= hierarchical-context-parallel-sizes+ high-priority-a2a-comm-stream high-priority-stream-groups+
    init-model-with-meta-device keep-fp8-transpose-cache keep-fp8-transpose-cache-when-using-custom-fsdp lazy-mpu-init?
    local-rank= local_rank= manual-gc manual-gc-interval= max-seqlen-per-dp-cp-rank=
    megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-grad-comm-dtype= megatron-fsdp-max-pool-double-buffer
    microbatch-group-size-per-virtual-pipeline-stage= min-offloaded-tensor-size= mla-down-proj-fusion mlp-chunks-for-training=
    moe-deepep-num-sms= moe-enable-deepep moe-enable-routing-replay moe-extended-tp moe-flex-dispatcher-backend=
    moe-flex-dispatcher-num-sms= moe-grouped-gemm>kernels.experts(grouped) moe-hybridep-num-blocks-permute=
    moe-hybridep-num-blocks-unpermute= moe-hybridep-num-sms-preprocessing= moe-hybridep-num-sms=
    moe-hybridep-pad-uneven-dispatch-inputs moe-layer-recompute moe-mlp-glu-interleave-size= moe-ncclep-static-shape
    moe-ncclep-zero-copy moe-paged-stash moe-paged-stash-buffer-size-factor-cpu= moe-paged-stash-buffer-size-factor-cuda=
    moe-paged-stash-page-size= moe-permute-fusion moe-permute-fusion-into-hybridep moe-router-dtype= moe-router-fusion
    moe-router-padding-for-fp8 moe-router-padding-for-quantization moe-shared-expert-glu-interleave-size=
    moe-shared-expert-overlap moe-single-grouped-bias moe-single-grouped-weight moe-token-dispatcher-type=>kernels.dispatch
    moe-use-legacy-grouped-gemm mtp-standalone nccl-communicator-config-path= no-align-grad-reduce no-align-param-gather
    no-async-tensor-model-parallel-allreduce no-bias-dropout-fusion no-bias-swiglu-fusion no-check-for-nan-in-loss-and-grad
    no-clone-scatter-output-in-embedding no-delay-grad-reduce no-flight-recorder-dump-on-timeout
    no-flight-recorder-extra-dump-on-exec no-flight-recorder-include-only-active no-gradient-accumulation-fusion
    no-gradient-reduce-div-fusion no-initialization no-manual-gc-eval no-masked-softmax-fusion no-overlap-p2p-communication
    no-persist-layer-norm no-pin-cpu-grads no-pin-cpu-params no-rope-fusion no-scatter-gather-tensors-in-pipeline
    no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad no-tp-comm-overlap-ag no-tp-comm-overlap-rs no-tp-comm-split-ag
    no-tp-comm-split-rs no-use-layer-wise-param-layout num-distributed-optimizer-instances=>parallel.dp_replicas
    offload-modules+ onnx-safe= optimizer-cpu-offload>optimizer.offload=cpu optimizer-cuda-graph optimizer-offload-fraction=
    outer-dp-sharding-strategy= overlap-cpu-optimizer-d2h-h2d overlap-dispatch-backward-with-experts-wgrad overlap-grad-reduce
    overlap-moe-expert-parallel-comm overlap-p2p-communication-warmup-flush overlap-param-gather
    overlap-param-gather-with-optimizer-step override-opt-param-scheduler override-opt_param-scheduler
    pipeline-model-parallel-comm-backend= pipeline-model-parallel-split-rank= reuse-grad-buf-for-mxfp8-param-ag
    sharp-enabled-group= standalone-embedding-stage suggested-communication-unit-size= symmetric-ar-type= te-rng-tracker
    tensor-parallel-num-weight-shards= torch-fsdp2-no-reshard-after-forward tp-comm-bootstrap-backend= tp-comm-overlap
    tp-comm-overlap-cfg= tp-comm-overlap-rs-dgrad train-sync-interval= transformer-impl=>kernels.linear=te
    use-checkpoint-opt-param-scheduler use-checkpoint-opt_param-scheduler use-cpu-initialization
    use-custom-fsdp>parallel.zero=3 use-distributed-optimizer use-flash-attn>kernels.attention=sdpa
    use-fused-weighted-squared-relu use-grouped-gemm-for-dense-mlp use-grouped-gemm-for-shared-expert use-legacy-models
    use-mcore-models use-megatron-fsdp>parallel.zero=3 use-nccl-ub use-ring-exchange-p2p use-sharp use-te-activation-func
    use-torch-fsdp2>parallel.zero=3 use-torch-optimizer-for-cpu-offload use-tp-pp-dp-mapping use-transformer-engine-op-fuser
    wgrad-deferral-limit=
""",
    "a job's end, failures and restarts": """
    adlr-autoresume adlr-autoresume-interval= calc-ft-timeouts check-for-spiky-loss enable-ft-package error-injection-rate=
    error-injection-type= exit-duration-in-mins= exit-interval= exit-signal-handler exit-signal-handler-for-dataloader
    exit-signal-handler-for-training exit-signal= fault-injector-delay-start-iteration= fault-injector-fault-delay=
    fault-injector-fault-probabilities= fault-injector-fault-types= fault-injector-mtti-seconds= fault-injector-num-ranks=
    fault-injector-offset-seconds= fault-injector-ranks= fault-injector-seed= ft-num-warmup-iters=
    inprocess-active-world-size= inprocess-barrier-timeout= inprocess-completion-timeout= inprocess-empty-cuda-cache
    inprocess-granularity= inprocess-hard-timeout= inprocess-heartbeat-interval= inprocess-heartbeat-timeout=
    inprocess-last-call-wait= inprocess-max-iterations= inprocess-monitor-process-interval= inprocess-monitor-thread-interval=
    inprocess-progress-watchdog-interval= inprocess-restart inprocess-soft-timeout= inprocess-termination-grace-time=
    rerun-mode=
""",
    "files of checkpoints": """
    async-ckpt-cpu-priority= async-ckpt-io-priority= async-ckpt-use-cpu-shm async-strategy= auto-detect-ckpt-format
    ckpt-assume-constant-structure ckpt-convert-format= ckpt-convert-save= ckpt-convert-update-legacy-dist-opt-format
    ckpt-format= ckpt-fully-parallel-load ckpt-fully-parallel-load-exchange-algo= ckpt-fully-parallel-load-process-group=
    ckpt-fully-parallel-save ckpt-fully-parallel-save-process-group= disable-ckpt-fully-parallel-save
    disable-ckpt-load-validate-sharding-integrity disable-stream-ckpt-dequant disable-strict-fsdp-dtensor-load
    disable-use-tokenizer-model-from-checkpoint-args dist-ckpt-format= dist-ckpt-optim-fully-reshardable
    dist-ckpt-save-pre-mcore-014 dist-ckpt-strictness= dist-ckpt-workers= distrib-optim-fully-reshardable-mem-efficient
    exit-on-missing-checkpoint no-ckpt-fully-parallel-save no-ckpt-load-validate-sharding-integrity no-load-rng no-save-optim
    no-save-rng no-stream-ckpt-dequant no-strict-fsdp-dtensor-load no-use-tokenizer-model-from-checkpoint-args
    non-persistent-ckpt-type= non-persistent-global-ckpt-dir= non-persistent-local-ckpt-algo= non-persistent-local-ckpt-dir=
    non-persistent-save-interval= replication replication-factor= replication-jump= save-activations-interval=
    save-dgrads-interval= save-params-interval= save-tokens-per-expert-interval= save-wgrads-interval= use-dist-ckpt
    use-mp-args-from-checkpoint-args use-persistent-ckpt-worker verify-integrity
""",
    "validation": """
    eval-global-batch-size= eval-micro-batch-size= full-validation multiple-validation-sets start-eval-at-iter= test-mode
    validation-set-names+
""",
    "reading of data": """
    allow-ambiguous-pad-tokens dataloader-defer-npy-index-mmap dataloader-fast-cache-load decoder-seq-length= disable-msc
    enable-msc mask-prob= mid-level-dataset-surplus= no-create-attention-mask-in-dataloader no-mmap-bin-files
    num-dataset-builder-threads= num-workers= object-storage-cache-path= retriever-seq-length= s3-cache-path= sample-rate=
    short-seq-prob= test-data-path+
""",
    "the tokenizer's own settings": """
    chat-template= disable-pad-vocab-size disable-tokenizer-sentencepiece-ignore-extra-whitespaces legacy-tokenizer
    no-pad-vocab-size no-tokenizer-sentencepiece-ignore-extra-whitespaces null-tokenizer-eod-id= null-tokenizer-pad-id=
    tokenizer-hf-include-special-tokens tokenizer-hf-no-include-special-tokens tokenizer-hf-no-use-fast tokenizer-hf-use-fast
    tokenizer-metadata= tokenizer-sentencepiece-legacy tokenizer-special-tokens+ trust-remote-code vocab-extra-ids=
""",
    "settings of features that their own switch turns on": """
    bert-no-binary-head decoupled-min-lr= disable-dsa-indexer-rotate-activation disable-dsa-indexer-scoring-relu
    disable-fp8-wgrad dsa-indexer-head-dim= dsa-indexer-k-norm-epsilon= dsa-indexer-k-norm-fp32 dsa-indexer-loss-coeff=
    dsa-indexer-n-heads= dsa-indexer-rope-interleaved dsa-indexer-skip-topk-offset= dsa-indexer-topk-freq= dsa-indexer-topk=
    dsa-indexer-use-sparse-loss dsa-kernel-backend= end-weight-decay= fim-eod-token= fim-fragment-rate= fim-middle-token=
    fim-no-prefix= fim-pad-token= fim-prefix-token= fim-rate= fim-split-sample= fim-spm-rate= fim-suffix-token=
    fp4-param-gather fp4-quantizer-factory= fp4-recipe= fp8-amax-compute-algo= fp8-amax-history-len= fp8-interval= fp8-margin=
    fp8-output-proj fp8-param-gather fp8-quantizer-factory= hybrid-attention-ratio= hybrid-context-parallel hybrid-mlp-ratio=
    kitchen-attention-backend= linear-conv-kernel-dim= linear-key-head-dim= linear-num-key-heads= linear-num-value-heads=
    linear-value-head-dim= lion-beta1= lion-beta2= mamba-head-dim= mamba-inference-conv-states-dtype=
    mamba-inference-ssm-states-dtype= mamba-num-groups= mamba-num-heads= mamba-state-dim= mamba-training-ssm-states-dtype=
    megatron-fsdp-main-grads-dtype= megatron-fsdp-main-params-dtype= moe-pad-expert-input-to-capacity
    moe-pad-experts-for-cuda-graph-inference moe-token-drop-policy= moe-upcycling-granularity= mrope-section+
    muon-coefficient-type= muon-extra-scale-factor= muon-fp32-matmul-prec= muon-momentum= muon-nesterov muon-no-split-qkv
    muon-num-ns-steps= muon-scalar-optimizer= muon-scale-mode= muon-tp-mode= muon-use-nesterov mup-attn-scale-power=
    mup-base-head-dim= mup-base-hidden-size= mup-embedding-mult= mup-output-mult= mup-width-mult=
    no-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu no-fp8-wgrad no-yarn-correction-range-round-to-int
    qk-clip-alpha= qk-clip-threshold= relative-attention-max-distance= relative-attention-num-buckets= start-weight-decay=
    tiktoken-num-special-tokens= tiktoken-pattern= tiktoken-special-tokens+ yarn-beta-fast= yarn-beta-slow=
    yarn-correction-range-round-to-int yarn-original-max-position-embeddings=
""",
    "inference": """
    bert-embedder-type= cuda-graph-modules+ cuda-graph-scope+ decode-only-cuda-graphs disable-chunked-prefill
    enable-chunked-prefill flash-decode inference-batch-times-seqlen-threshold= inference-coordinator-port=
    inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens= inference-cuda-graph-scope=
    inference-disable-ep-consensus inference-disable-triton-nvls-kernels inference-dynamic-batching
    inference-dynamic-batching-async-sched-mode= inference-dynamic-batching-block-size=
    inference-dynamic-batching-buffer-guaranteed-fraction= inference-dynamic-batching-buffer-overflow-factor=
    inference-dynamic-batching-buffer-size-gb= inference-dynamic-batching-cuda-graph-max-tokens=
    inference-dynamic-batching-cuda-graph-mixed-prefill-count= inference-dynamic-batching-cuda-graph-sizing-distribution=
    inference-dynamic-batching-logprobs-mode= inference-dynamic-batching-mamba-memory-ratio=
    inference-dynamic-batching-max-requests-override= inference-dynamic-batching-max-requests=
    inference-dynamic-batching-max-tokens-override= inference-dynamic-batching-max-tokens=
    inference-dynamic-batching-num-cuda-graphs= inference-dynamic-batching-paused-buffer-size-gb=
    inference-dynamic-batching-prefix-caching inference-dynamic-batching-prefix-caching-coordinator-policy=
    inference-dynamic-batching-prefix-caching-eviction-policy= inference-dynamic-batching-prefix-caching-mamba-gb=
    inference-dynamic-batching-prefix-caching-routing-alpha= inference-dynamic-batching-sampling-backend=
    inference-dynamic-batching-track-generated-token-events inference-dynamic-batching-track-paused-request-events
    inference-dynamic-batching-unified-memory-level= inference-fuse-tp-communication inference-grouped-gemm-backend=
    inference-logging-step-interval= inference-max-batch-size= inference-max-requests= inference-max-seq-length=
    inference-moe-disable-fused-quant-kernels inference-moe-token-dispatcher-type= inference-rng-tracker inference-shards=
    inference-text-gen-server-logging inference-use-synchronous-zmq-collectives inference-wandb-logging max-tokens-to-oom=
    mlp-chunks-for-prefill= nccl-all-reduce-for-prefill no-inference-disable-ep-consensus
    no-inference-dynamic-batching-prefix-caching no-inference-text-gen-server-logging
    no-inference-use-synchronous-zmq-collectives no-inference-wandb-logging num-speculative-tokens= output-bert-embeddings
    use-legacy-static-engine use-same-sampling-seed-across-dp-ranks
""",
    "other models and tasks": """
    bert-load= biencoder-projection-dim= biencoder-shared-query-context-model block-data-path= classes-fraction=
    data-per-class-fraction= dino-bottleneck-size= dino-freeze-last-layer= dino-head-hidden-size= dino-local-crops-number=
    dino-local-img-size= dino-norm-last-layer dino-teacher-temp= dino-warmup-teacher-temp-epochs= dino-warmup-teacher-temp=
    embedding-path= evidence-data-path= grpo-clamp-eps-lower= grpo-clamp-eps-upper= grpo-entropy-term-weight=
    grpo-filter-groups-with-same-reward grpo-group-size= grpo-iterations= grpo-kl-beta= grpo-prompts-per-step= head-lr-mult=
    ict-head-size= ict-load= img-h= img-w= indexer-batch-size= indexer-log-interval= iter-per-epoch= langrl-env-config=
    langrl-external-server langrl-inference-server-conversation-template= langrl-inference-server-type=
    logits-load-decode-threads= logits-load-ignore-errors logits-load-kd-loss-alpha= logits-load-msc-prefetch-depth=
    logits-load-prefetch-factor= logits-save-dir= logits-save-dtype= logits-save-top-k= logits-save-top-p-min-k=
    logits-save-top-p= mask-factor= mask-type= no-data-sharding no-langrl-external-server
    no-rl-inference-logprobs-is-correction no-rl-offload-inference-model-weights-when-idle
    no-rl-offload-kv-cache-during-training no-rl-partial-rollouts no-rl-persist-cuda-graphs
    no-rl-remove-kv-cache-during-training no-rl-reset-cuda-graphs no-rl-skip-bos-token no-rl-training-cuda-graphs
    no-rl-use-sequence-packing no-rl-verify-model-weights-swap num-channels= num-classes= patch-dim= query-in-block-prob=
    refit-method= retriever-report-topk-accuracies+ retriever-score-scaling retro-attention-gate= retro-cyclic-train-iters=
    retro-encoder-attention-dropout= retro-encoder-hidden-dropout= retro-encoder-layers= retro-no-verify-neighbor-count
    retro-num-neighbors= retro-num-retrieved-chunks= rl-consumption-granularity= rl-default-temperature= rl-default-top-k=
    rl-default-top-p= rl-generation-lag= rl-importance-sampling-truncation-coef= rl-inference-expert-model-parallel-size=
    rl-inference-expert-tensor-model-parallel-size= rl-inference-logprobs-is-correction
    rl-inference-model-unified-memory-level= rl-inference-parsers+ rl-inference-pipeline-model-parallel-size=
    rl-inference-tensor-model-parallel-size= rl-kv-cache-management-mode= rl-offload-inference-model-weights-when-idle
    rl-offload-kv-cache-during-training rl-offload-optimizer-during-inference rl-parallel-generation-tasks=
    rl-partial-rollouts rl-persist-cuda-graphs rl-profile rl-profile-dir= rl-prompts-per-eval=
    rl-remove-kv-cache-during-training rl-reset-cuda-graphs rl-sequence-packing-algo=
    rl-sequence-packing-max-sequences-per-bin= rl-skip-bos-token rl-submission-granularity= rl-training-cuda-graphs
    rl-use-sequence-packing rl-verify-model-weights-swap sft-tokenizer-prompt-format= swin-backbone-type= titles-data-path=
    use-one-sent-docs vision-backbone-type= vision-pretraining vision-pretraining-type=
""",
    "old arguments": """
    data-impl= DDP-impl= distribute-checkpointed-activations embedding-weights-in-fp32 enable-one-logger faiss-use-gpu
    fp32-allreduce img-dim= mmap-warmup no-contiguous-buffers-in-local-ddp no-query-key-layer-scaling
    no-scaled-masked-softmax-fusion one-logger-entity= overlap-p2p-communication override-lr-scheduler report-topk-accuracies+
    retro-return-doc-ids retro-workdir= scaled-upper-triang-masked-softmax-fusion= use-checkpoint-lr-scheduler
    use-contiguous-buffers-in-ddp
""",
}
