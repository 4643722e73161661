"""DeepSpeed's ZeRO around a model of Hugging Face's: stage 1, 2 or 3 by ZERO_STAGE, 3 without it.

    DS_BUILD_OPS=0 pip install deepspeed
    DS_ACCELERATOR=cpu ZERO_STAGE=2 triaxis verify configs/llama3_8b.yaml --subject examples/subjects/deepspeed_zero.py

Any causal language model that transformers builds. Its pipeline and its tensor parallelism are not asked for.
"""

import os
import warnings
from contextlib import ExitStack

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger, safe_get_full_fp32_param, safe_get_full_grad
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from triaxis_subject import Job

from triaxis.launch.verify.oracles.in_float64 import InFloat64

AXES = ("dp",)

job = Job()
warnings.simplefilter("ignore")
logger.setLevel("ERROR")
dist.init_process_group("gloo")
dp_rank, dp = dist.get_rank(), job.layout["dp"]
float64 = ExitStack()
if job.dtype == torch.float64:
    float64.enter_context(InFloat64())
gpt = AutoModelForCausalLM.from_config(AutoConfig.for_model(**job.model))
gpt.load_state_dict(job.weights(), strict=not job.model["tie_word_embeddings"])
weights = dict(gpt.named_parameters())
num_microbatches, size = len(job.microbatches(0)) // dp, len(job.microbatches(0)[0].tokens)
engine, *_ = deepspeed.initialize(
    model=gpt,
    optimizer=job.adamw(weights),
    config={
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": num_microbatches,
        "gradient_clipping": job.optimizer["max_norm"],
        "zero_optimization": {"stage": int(os.environ.get("ZERO_STAGE", "3"))},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    },
)
for step in range(job.num_steps):
    loss = torch.zeros((), dtype=job.dtype)
    for number, one in enumerate(job.microbatches(step)[dp_rank::dp]):
        logits = engine(input_ids=one.tokens, use_cache=False).logits
        losses = functional.cross_entropy(logits.flatten(0, 1), one.labels.flatten(), reduction="none")
        part = (losses * one.counted.flatten()).sum() / job.num_counted(step)
        engine.backward(part * dp, scale_wrt_gas=False)  # it averages over dp
        loss += part.detach()
        if number == num_microbatches - 1:
            job.gradients(step, {name: safe_get_full_grad(weight) for name, weight in weights.items()})
        engine.step()
    dist.all_reduce(loss)
    norm = engine.get_global_grad_norm()
    job.done(step, loss, norm, {name: safe_get_full_fp32_param(weight) for name, weight in weights.items()})
float64.close()
job.close(dp=dp_rank)
