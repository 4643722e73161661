"""A small engine of plain torch, a GPT-2 in tensor and data parallel by hand, and the adapter by which `verify` judges it."""

import os

import torch
import torch.distributed as dist
from torch.nn import functional as F
from triaxis_subject import Job

AXES = ("tp", "dp")

job = Job()
dist.init_process_group("gloo")
rank, tp, dp = dist.get_rank(), job.layout["tp"], job.layout["dp"]
at_tp, at_dp = rank % tp, rank // tp
tp_group = [dist.new_group(list(range(i * tp, (i + 1) * tp))) for i in range(dp)][at_dp]
dp_group = [dist.new_group(list(range(i, tp * dp, tp))) for i in range(tp)][at_tp]
h, heads = job.model["n_embd"], job.model["n_head"]
eps, layers = job.model["layer_norm_epsilon"], job.model["n_layer"]
MISTAKE = os.environ.get("MISTAKE", "")


class Copied(torch.autograd.Function):
    """f: identity forward, the gradient is summed over tp."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if MISTAKE != "no sum in backward":
            dist.all_reduce(grad, group=tp_group)
        return grad


class Summed(torch.autograd.Function):
    """g: the sum over tp forward, identity backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=tp_group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def cut(name, tensor):
    """This rank's part: heads of q, k and v, columns of the MLP; matrices are [in, out]."""
    if name.endswith(("c_attn.weight", "c_attn.bias")):
        return torch.cat([part.chunk(tp, -1)[at_tp] for part in tensor.chunk(3, -1)], -1)
    if name.endswith(("c_fc.weight", "c_fc.bias")):
        return tensor.chunk(tp, -1)[at_tp]
    return tensor.chunk(tp, 0)[at_tp] if name.endswith(("attn.c_proj.weight", "mlp.c_proj.weight")) else tensor


def whole(name, part):
    """The inverse of `cut`."""
    if cut(name, start[name]).shape == start[name].shape:
        return part
    parts = [torch.empty_like(part) for _ in range(tp)]
    dist.all_gather(parts, part.contiguous(), group=tp_group)
    if "c_attn" in name:
        return torch.cat([torch.cat(same, -1) for same in zip(*(one.chunk(3, -1) for one in parts), strict=True)], -1)
    return torch.cat(parts, 0 if name.endswith("c_proj.weight") else -1)


start = job.weights()
weights = {name: cut(name, tensor).clone().requires_grad_() for name, tensor in start.items()}


def losses(tokens, labels):
    def w(name):
        return weights[f"transformer.{name}"]

    def norm(x, name):
        return F.layer_norm(x, (h,), w(f"{name}.weight"), w(f"{name}.bias"), eps)

    (b, s), n = tokens.shape, heads // tp
    x = w("wte.weight")[tokens] + w("wpe.weight")[:s]
    for i in range(layers):
        y = Copied.apply(norm(x, f"h.{i}.ln_1"))
        q, k, v = (y @ w(f"h.{i}.attn.c_attn.weight") + w(f"h.{i}.attn.c_attn.bias")).chunk(3, -1)
        q, k, v = (each.view(b, s, n, -1).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
        x = x + Summed.apply(y @ w(f"h.{i}.attn.c_proj.weight")) + w(f"h.{i}.attn.c_proj.bias")
        y = Copied.apply(norm(x, f"h.{i}.ln_2"))
        y = F.gelu(y @ w(f"h.{i}.mlp.c_fc.weight") + w(f"h.{i}.mlp.c_fc.bias"), approximate="tanh")
        x = x + Summed.apply(y @ w(f"h.{i}.mlp.c_proj.weight")) + w(f"h.{i}.mlp.c_proj.bias")
    logits = norm(x, "ln_f") @ w("wte.weight").T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(b, s)


names = {True: [], False: []}
for name in weights:
    names[name in job.optimizer["no_decay"]].append(weights[name])
optimizer = torch.optim.AdamW(
    [{"params": names[False]}, {"params": names[True], "weight_decay": 0.0}],
    **{key: job.optimizer[key] for key in ("lr", "betas", "eps", "weight_decay")},
)
for step in range(job.num_steps):
    every = job.microbatches(step)
    counted = sum(int(one.counted.sum()) for one in (every[at_dp::dp] if MISTAKE == "local tokens" else every))
    total = torch.zeros((), dtype=job.dtype)
    optimizer.zero_grad()
    for one in every[at_dp::dp]:
        loss = (losses(one.tokens, one.labels) * one.counted).sum() / counted
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total, group=dp_group)
    for weight in weights.values():
        dist.all_reduce(weight.grad, group=dp_group)
        if MISTAKE == "averaged":
            weight.grad /= dp
    gradients = {name: whole(name, weight.grad) for name, weight in weights.items()}
    job.gradients(step, gradients)
    squares = sum(float(grad.square().sum()) for grad in gradients.values())
    if MISTAKE == "local norm":
        squares = sum(float(weight.grad.square().sum()) for weight in weights.values())
    grad_norm = squares**0.5
    for weight in weights.values():
        weight.grad *= min(1.0, job.optimizer["max_norm"] / (grad_norm + 1e-6))
    optimizer.step()
    job.done(step, float(total), grad_norm, {name: whole(name, weight) for name, weight in weights.items()})
job.close(tp=at_tp, dp=at_dp)
