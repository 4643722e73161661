"""torchtitan's llama3 in its own train step: DTensor for tp, FSDP2 for dp, its pipeline for pp.

    pip install torchtitan==0.2.2 triton
    triaxis verify configs/llama3_8b.yaml --subject examples/subjects/torchtitan_llama3.py

Its trainer asks for a GPU by name. Its model, parallelization, forward, backward and clipping run on a CPU as they are.
Of its 0.2.2, layouts with pp are different: https://github.com/pytorch/torchtitan/issues/2972.
"""

import logging
import warnings
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from triaxis_subject import Job

from triaxis.launch.verify.oracles.in_float64 import InFloat64

torch._utils._get_available_device_type = lambda: "cpu"  # it takes CUDA for granted where there is no accelerator

from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.llama3.infra.parallelize import parallelize_llama
from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.train import Trainer

AXES = ("tp", "pp", "dp")

job = Job()
model = job.model
assert model["model_type"] == "llama" and not model["tie_word_embeddings"], (
    "this adapter builds a Llama with its own head"
)
dist.init_process_group("gloo")
warnings.simplefilter("ignore")
logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
float64 = ExitStack()
if job.dtype == torch.float64:
    float64.enter_context(InFloat64())
sizes = {"dp_replicate": 1, "dp_shard": job.layout["dp"], "cp": 1, "tp": job.layout["tp"], "pp": job.layout["pp"]}
dims = ParallelDims(**sizes, ep=1, etp=1, world_size=dist.get_world_size())
dims.build_mesh()
meshes = {axis: dims.get_optional_mesh("batch" if axis == "dp" else axis) for axis in AXES}
at = {axis: 0 if mesh is None else mesh.get_local_rank() for axis, mesh in meshes.items()}
(b, s), count = job.microbatches(0)[0].tokens.shape, len(job.microbatches(0)) // job.layout["dp"]
config = JobConfig()
TORCH_DTYPE_MAP["float32"] = job.dtype
config.training.seq_len, config.training.local_batch_size = s, b * count
config.training.mixed_precision_param = config.training.mixed_precision_reduce = "float32"
config.parallelism.pipeline_parallel_schedule, config.parallelism.pipeline_parallel_microbatch_size = "1F1B", b
config.activation_checkpoint.mode = "none"
told = {"dim": model["hidden_size"], "n_layers": model["num_hidden_layers"], "n_heads": model["num_attention_heads"]}
told |= {
    "n_kv_heads": model["num_key_value_heads"],
    "vocab_size": model["vocab_size"],
    "norm_eps": model["rms_norm_eps"],
}
told |= {"rope_theta": model["rope_theta"], "rope_scaling_args": RoPEScalingArgs(scaling_factor=1.0), "max_seq_len": s}
# The width of its MLP is 8 h / 3 times the second, up to the next multiple of the first.
told |= {"multiple_of": (ffn := model["intermediate_size"]), "ffn_dim_multiplier": ffn / (6 * model["hidden_size"])}
args = TransformerModelArgs(**told)
names = Llama3StateDictAdapter(args, None)
gpt = Transformer(args)
gpt.load_state_dict(names.from_hf(job.weights()), strict=False)
trainer = SimpleNamespace(parallel_dims=dims, loss_fn=cross_entropy_loss, device=torch.device("cpu"))
trainer.train_context = dist_utils.get_train_context(dims.tp_enabled)
trainer.maybe_enable_amp = nullcontext()
trainer.post_dataloading_process = lambda inputs, labels: (inputs["input"], labels, {}, {})
if dims.pp_enabled:
    told = pipeline_llm(gpt, dims, config, trainer.device, args, parallelize_llama, trainer.loss_fn)
    trainer.pp_schedule, trainer.model_parts, trainer.pp_has_first_stage, trainer.pp_has_last_stage = told
else:
    trainer.model_parts = [parallelize_llama(gpt, dims, config)]
for module in (module for part in trainer.model_parts for module in part.modules()):
    if isinstance(module, FSDPModule):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
weights = {name: weight for part in trainer.model_parts for name, weight in part.named_parameters()}


def whole(tensors):
    return names.to_hf({name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in tensors.items()})


by_theirs = {names.to_hf({name: torch.empty(weight.shape)}).popitem()[0]: weight for name, weight in weights.items()}
optimizer = job.adamw(by_theirs)
for step in range(job.num_steps):
    mine = job.microbatches(step)[at["dp"] :: job.layout["dp"]]
    batches = [(one.tokens, one.labels.masked_fill(~one.counted, -100)) for one in mine]
    if dims.pp_enabled:  # its schedule cuts a batch
        batches = [tuple(torch.cat(parts) for parts in zip(*batches, strict=True))]
    optimizer.zero_grad()
    counted = torch.tensor(job.num_counted(step))
    loss = torch.zeros((), dtype=job.dtype)
    for tokens, labels in batches:
        told = {"input_dict": {"input": tokens}, "labels": labels, "global_valid_tokens": counted}
        found = Trainer.forward_backward_step(trainer, **told).detach()
        found = found.full_tensor() if isinstance(found, DTensor) else found
        # Stages without a loss return -1.
        loss += found.sum() * (not dims.pp_enabled or trainer.pp_has_last_stage)
    job.gradients(step, whole({name: weight.grad for name, weight in weights.items()}))
    norm = dist_utils.clip_grad_norm_(weights.values(), job.optimizer["max_norm"], pp_mesh=meshes["pp"])
    optimizer.step()
    dist.all_reduce(loss)
    job.done(step, loss / job.layout["tp"], norm, whole(weights))
float64.close()
job.close(**at)
