"""A stand-in for apex's compiled kernels on a CPU: the two of FusedAdam that the engine calls, computed by torch in fp32."""

from typing import Any

import torch

calls: list[int] = []
"""The number of tensors of each call of this process."""


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[list[torch.Tensor]],
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    # The kernel reads these from raw pointers.
    assert (noop_flag.dtype, step.dtype) == (torch.int32, torch.int32) and lr.dtype == inv_scale.dtype == torch.float32
    assert len({len(tensors) for tensors in tensor_lists}) == 1 and mode == 1 and bias_correction == 1
    calls.append(len(tensor_lists[0]))
    if noop_flag.item():
        return
    bias1, bias2 = (1 - torch.tensor(beta).pow(step) for beta in (beta1, beta2))
    for grad, weight, mean, square, *master in zip(*tensor_lists, strict=True):
        (exact,) = master or (weight,)
        for tensor in (exact, mean, square):
            assert tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.numel() < 2**31
        assert grad.dtype == weight.dtype and grad.shape == weight.shape == exact.shape
        scaled = grad.float() * inv_scale
        grad.copy_(scaled)
        mean.copy_(beta1 * mean + (1 - beta1) * scaled)
        square.copy_(beta2 * square + (1 - beta2) * scaled * scaled)
        update = mean / bias1 / ((square / bias2).sqrt() + epsilon) + weight_decay * exact
        exact.copy_(exact - lr * update)
        weight.copy_(exact)


def multi_tensor_adam_capturable_master(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *others: Any
) -> None:
    """Update as above, with masters as the fifth list."""
    assert len(tensor_lists) == 5
    multi_tensor_adam_capturable(chunk_size, noop_flag, tensor_lists, *others)
