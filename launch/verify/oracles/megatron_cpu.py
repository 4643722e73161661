"""Run Megatron-Core 0.16 on a CPU, in its own process.

`on_cpu` replaces CUDA calls that do not affect the results. They stay replaced, so the process can do nothing else.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def on_cpu(tp: int = 1, pp: int = 1) -> Iterator[None]:
    """Run a block with Megatron-Core on the CPU.

    Megatron-Core's tp x pp process groups lie inside torch's default group, which is created if it does not exist.
    """
    warnings.simplefilter("ignore")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch._dynamo.config.disable = True  # its fused functions would take seconds each to compile
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # there is no dropout here
    plain_type = torch.Tensor.type
    torch.Tensor.type = lambda self, *args: plain_type(self, *args) if args else _type_on_cuda(plain_type(self))  # type: ignore
    parallel_state.initialize_model_parallel(tp, pp)
    with _OnCpu():
        yield


class _OnCpu(torch.overrides.TorchFunctionMode):
    """A mode that creates tensors on the CPU if CUDA is requested."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "cpu")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        return function(*args, **kwargs)


def _type_on_cuda(name: str) -> str:
    """Return the CUDA type name that Megatron-Core's optimizer expects for a CPU tensor type.

    A double type becomes the float type, since the optimizer accepts no double.
    """
    name = name if "cuda" in name else name.replace("torch.", "torch.cuda.", 1)
    return name.replace("DoubleTensor", "FloatTensor")
