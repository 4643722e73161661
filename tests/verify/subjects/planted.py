"""Mistakes in two peers, planted by another hand than the judge's author: each is a change of an adapter's text."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Planted:
    """A mistake in parallel code: one process trains as before, unless `axis` is None.

    Attributes:
        name: what an engineer got wrong.
        adapter: the file in examples/subjects, without its suffix.
        layout: one in which it shows.
        axis: the guilty one; None: random numbers.
        parameters: fragments of names, one of which a good judge shows; empty: all or none are meant.
        changes: old and new text of the adapter; an old text occurs once.
        overrides: of the config.
    """

    name: str
    adapter: str
    layout: str
    axis: str | None
    parameters: tuple[str, ...]
    changes: tuple[tuple[str, str], ...]
    overrides: tuple[str, ...] = ()


WRAPPED = "wrapped = DistributedDataParallel(config,"
"""Where Megatron-Core's model is complete, and nothing is built on it yet."""

STEPS = "for step in range(job.num_steps):\n"

PLANTED: tuple[Planted, ...] = (
    Planted(
        name="norm gradients not summed over tp",
        adapter="torch_fsdp2",
        layout="tp=2,dp=2",
        axis="tp",
        parameters=("input_layernorm", "post_attention_layernorm", "model.norm"),
        changes=(
            (
                "modeling_llama.LlamaRMSNorm = nn.RMSNorm  #",
                """

class LocalNorm(nn.RMSNorm):
    \"\"\"On this rank's part of the sequence, without DTensor's dispatch.\"\"\"

    def forward(self, x):
        weight = self.weight.to_local()
        y = F.rms_norm(x.to_local(), self.normalized_shape, weight, self.eps)
        return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False)


modeling_llama.LlamaRMSNorm = LocalNorm  #""",
            ),
        ),
    ),
    Planted(
        name="gradients averaged over dp, of a loss already divided",
        adapter="torch_fsdp2",
        layout="tp=2,pp=2,dp=2",
        axis="dp",
        parameters=(),
        changes=(("set_gradient_divide_factor(1.0)", 'set_gradient_divide_factor(float(mesh["dp"].size()))'),),
    ),
    Planted(
        name="clipping by the norm of a stage",
        adapter="torch_fsdp2",
        layout="pp=2,dp=2",
        axis="pp",
        parameters=(),
        changes=(('    dist.all_reduce(square, group=mesh.get_group("pp"))\n', ""),),
    ),
    Planted(
        name="positions start again on each tp rank's part of the sequence",
        adapter="torch_fsdp2",
        layout="tp=2,pp=2",
        axis="tp",
        parameters=(),
        changes=(
            (
                "torch.arange(seq_length)",
                'torch.arange(seq_length // job.layout["tp"]).repeat(job.layout["tp"])',
            ),
        ),
    ),
    Planted(
        name="dp rank 1 begins one microbatch early",
        adapter="torch_fsdp2",
        layout="pp=2,dp=2",
        axis="dp",
        parameters=(),
        changes=(
            (
                '    own = job.microbatches(step)[at["dp"] :: job.layout["dp"]]\n',
                """    every = job.microbatches(step)
    count = len(every) // job.layout["dp"]
    own = every[max(at["dp"] * count - 1, 0) :][:count]
""",
            ),
        ),
    ),
    Planted(
        name="gradient of the mlp's input not summed over tp",
        adapter="torch_fsdp2",
        layout="tp=2,dp=2",
        axis="tp",
        parameters=("post_attention_layernorm", "self_attn", "input_layernorm", "embed_tokens"),
        changes=(
            (
                "import DTensor, Replicate, Shard",
                "import DTensor, Partial, Replicate, Shard",
            ),
            (
                "BLOCK = {\n",
                """
class LocalMLP(modeling_llama.LlamaMLP):
    \"\"\"On local tensors, one message for all three.\"\"\"

    def forward(self, x):
        x = x.to_local()
        gate, up, down = (one.weight.to_local() for one in (self.gate_proj, self.up_proj, self.down_proj))
        y = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        y = DTensor.from_local(y, mesh["tp"], [Partial()], run_check=False)
        return y.redistribute(placements=[Shard(1)]).to_local()


modeling_llama.LlamaMLP = LocalMLP

BLOCK = {
""",
            ),
        ),
    ),
    Planted(
        name="layers gathered over dp for the next step before the update",
        adapter="torch_fsdp2",
        layout="tp=2,dp=2",
        axis="dp",
        parameters=(),
        changes=(
            (
                "    optimizer.step()\n",
                """    if mesh["dp"].size() > 1:
        for layer in stage.model.layers.values():
            layer.unshard()
    optimizer.step()
""",
            ),
        ),
    ),
    Planted(
        name="gradients between stages rounded to bf16",
        adapter="torch_fsdp2",
        layout="tp=2,pp=2",
        axis="pp",
        parameters=("model.layers.0.", "model.layers.1.", "embed_tokens"),
        changes=(
            (
                "        x = self.model.embed_tokens(x)\n",
                """        if at["pp"] > 0 and x.requires_grad:
            x.register_hook(lambda grad: grad.bfloat16().to(grad.dtype))
        x = self.model.embed_tokens(x)
""",
            ),
        ),
    ),
    Planted(
        name="norms of later stages decay",
        adapter="torch_fsdp2",
        layout="pp=2,dp=2",
        axis="pp",
        parameters=("input_layernorm", "post_attention_layernorm", "model.norm"),
        changes=(
            (
                "job.adamw(weights)",
                """job.adamw({f"{at['pp'] or ''}{name}": weight for name, weight in weights.items()})""",
            ),
        ),
    ),
    Planted(
        name="attention dropout of a seed per rank",
        adapter="torch_fsdp2",
        layout="tp=2,dp=2",
        axis=None,
        parameters=(),
        changes=(
            ("for_model(**job.model)", 'for_model(**(job.model | {"attention_dropout": 0.1}))'),
            (STEPS, f"torch.manual_seed(1234 + dist.get_rank())\n{STEPS}"),
        ),
    ),
    Planted(
        name="gradients of tied embeddings not summed over first and last stage",
        adapter="megatron_core",
        layout="pp=2,dp=2",
        axis="pp",
        parameters=("embed_tokens",),
        changes=(
            (
                WRAPPED,
                f"""finalize_model_grads.__globals__["_allreduce_word_embedding_grads"] = lambda *_, **__: None
{WRAPPED}""",
            ),
        ),
        overrides=("model.tie_embeddings=true",),
    ),
    Planted(
        name="norms counted once per tp rank in the gradient norm",
        adapter="megatron_core",
        layout="tp=2,pp=2",
        axis="tp",
        parameters=(),
        changes=(
            (
                WRAPPED,
                f"""from megatron.core import tensor_parallel

tensor_parallel.param_is_not_tensor_parallel_duplicate = lambda *_, **__: True
{WRAPPED}""",
            ),
        ),
    ),
    Planted(
        name="gradient of the head's input not summed over tp",
        adapter="megatron_core",
        layout="tp=2,pp=2",
        axis="tp",
        parameters=("model.norm", "model.layers.", "embed_tokens"),
        changes=(
            (
                WRAPPED,
                f"""if tp > 1 and mpu.is_pipeline_last_stage():
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    def gather_once(_, args):
        return gather_from_sequence_parallel_region(args[0], tensor_parallel_output_grad=False), *args[1:]

    gpt.output_layer.sequence_parallel, gpt.output_layer.disable_grad_reduce = False, True
    gpt.output_layer.register_forward_pre_hook(gather_once)
{WRAPPED}""",
            ),
        ),
    ),
    Planted(
        name="gradients divided by the labels of this dp rank",
        adapter="megatron_core",
        layout="tp=2,dp=2",
        axis="dp",
        parameters=(),
        changes=(
            (
                WRAPPED,
                f"""
def finalize(chunks, num_tokens, **told):
    finalize_model_grads(chunks, None, **told)
    dist.broadcast(num_tokens, mpu.get_pipeline_model_parallel_last_rank(), group["pp"])
    for chunk in chunks:
        chunk.scale_gradients(1.0 / num_tokens)


config.finalize_model_grads_func = finalize
{WRAPPED}""",
            ),
        ),
    ),
    Planted(
        name="keys and values of every tp-th group",
        adapter="megatron_core",
        layout="tp=2,dp=2",
        axis="tp",
        parameters=("k_proj", "v_proj"),
        changes=(
            (
                "        weight.copy_(joined(name, parts))\n",
                """        if "linear_qkv" in name:
            groups = [weights[part].view(kv_heads, -1, h) for part in names[1:]]
            parts[1:] = [one[at["tp"] :: tp].flatten(0, 1) for one in groups]
        weight.copy_(joined(name, parts))
""",
            ),
        ),
    ),
    Planted(
        name="gate and up swapped on the last tp rank",
        adapter="megatron_core",
        layout="tp=2,pp=2",
        axis="tp",
        parameters=("gate_proj", "up_proj"),
        changes=(("    return torch.cat(parts)\n", '    return torch.cat(parts[::-1] if at["tp"] > 0 else parts)\n'),),
    ),
    Planted(
        name="weights gathered over dp before the update",
        adapter="megatron_core",
        layout="tp=2,pp=2,dp=2",
        axis="dp",
        parameters=(),
        changes=(
            (STEPS, f"gather, wrapped.start_param_sync = wrapped.start_param_sync, lambda *_, **__: None\n{STEPS}"),
            ("    _, norm, _ = optimizer.step()\n", "    gather()\n    _, norm, _ = optimizer.step()\n"),
        ),
    ),
    Planted(
        name="clipping by the norm of a dp rank's shard",
        adapter="megatron_core",
        layout="pp=2,dp=2",
        axis="dp",
        parameters=(),
        changes=(
            (
                STEPS,
                f"""for one in getattr(optimizer, "chained_optimizers", [optimizer]):
    one.grad_stats_parallel_group = mpu.get_model_parallel_group()
{STEPS}""",
            ),
        ),
    ),
    Planted(
        name="first row of the embedding one too far on tp rank 1",
        adapter="megatron_core",
        layout="tp=2,dp=2",
        axis="tp",
        parameters=("embed_tokens",),
        changes=(
            (
                WRAPPED,
                f"""if mpu.is_pipeline_first_stage():
    gpt.embedding.word_embeddings.vocab_start_index += at["tp"]
{WRAPPED}""",
            ),
        ),
    ),
    Planted(
        name="a stage goes backward through its newest microbatch",
        adapter="megatron_core",
        layout="pp=2,dp=2",
        axis="pp",
        parameters=("model.layers.0.", "model.layers.1.", "embed_tokens"),
        changes=(
            (
                WRAPPED,
                f"""import inspect

from megatron.core.pipeline_parallel import schedules

source = inspect.getsource(schedules.forward_backward_pipelining_without_interleaving)
exec(source.replace("put_tensors.pop(0)", "put_tensors.pop()"), schedules.__dict__)
{WRAPPED}""",
            ),
        ),
    ),
)
