"""Read the inputs and write the reports of another engine's adapter.

This module needs torch and safetensors, and nothing from Triaxis.

`triaxis verify CONFIG --subject ADAPTER.py` starts `ADAPTER.py FOLDER` on every rank of a layout, with torchrun's RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and this file on PYTHONPATH. An adapter in 15 lines:

    AXES = ("tp", "pp", "dp")                                      # layout axes; a literal, since the file is not imported
    job = Job()
    dist.init_process_group("gloo")
    engine = MyEngine(job.model, **job.layout, dtype=job.dtype)    # a Hugging Face configuration, {"tp": 2, "pp": 1, "dp": 2}
    engine.load(job.weights())                                     # whole tensors by Hugging Face's names
    for step in range(job.num_steps):
        mine = job.microbatches(step)[engine.dp_rank :: job.layout["dp"]]
        loss = engine.forward_backward(mine)                       # over the counted labels of the global batch
        job.gradients(step, engine.whole_gradients())              # by name, as this rank has them, before they are clipped
        grad_norm = engine.update(**job.optimizer)
        job.done(step, loss, grad_norm, engine.whole_weights())
    job.close(tp=engine.tp_rank, pp=engine.pp_rank, dp=engine.dp_rank)

A rank reports the tensors that it holds, gathered if they are sharded. Other ranks report their own copies.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def gathered(part: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """Concatenate the ranks' equal parts of a tensor along `dim`, in rank order. All ranks in `group` call this."""
    parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, part.detach().contiguous(), group=group)
    return torch.cat(parts, dim)


class MicroBatch(NamedTuple):
    """Tokens and labels, int64 [b, s], and `counted`, bool [b, s]. `counted` is True for labels that count in the loss."""

    tokens: torch.Tensor
    labels: torch.Tensor
    counted: torch.Tensor


class Job:
    """One run in one layout, as this rank sees it.

    Attributes:
        layout: number of ranks on each of tp, pp, dp and cp; 1 on an axis that the adapter does not declare.
        model: keys of Hugging Face's `config.json`.
        optimizer: AdamW's settings, which are `lr`, `betas`, `eps`, `weight_decay`, `max_norm` and `no_decay` (names of weights
            without decay).
        num_steps: number of updates.
        dtype: dtype for weights, gradients and all sums.
    """

    def __init__(self) -> None:
        self._folder = Path(sys.argv[1])
        told: dict[str, Any] = json.loads((self._folder / "job.json").read_text())
        self.layout: dict[str, int] = told["layout"]
        self.model: dict[str, Any] = told["model"]
        self.optimizer: dict[str, Any] = told["optimizer"]
        self.num_steps: int = told["num_steps"]
        self.dtype: torch.dtype = getattr(torch, told["dtype"])
        self._inputs = Path(told["inputs"])
        self._rank = int(os.environ["RANK"])
        self._held: dict[str, torch.Tensor] = {}
        self._steps: list[dict[str, float]] = []

    def weights(self) -> dict[str, torch.Tensor]:
        """Load the weights from which step 0 starts, as whole tensors by Hugging Face's names."""
        return load_file(self._inputs / "weights.safetensors")

    def microbatches(self, step: int) -> list[MicroBatch]:
        """Load all microbatches of a step's global batch, in order. Each data-parallel rank must choose its share."""
        with safe_open(self._inputs / "batches.safetensors", framework="pt") as batches:
            parts = [batches.get_tensor(f"{step}.{name}") for name in MicroBatch._fields]
        return [MicroBatch(*each) for each in zip(*parts, strict=True)]

    def num_counted(self, step: int) -> int:
        """Return how many labels count in a step's global batch. The batch's loss is divided by this number."""
        return sum(int(one.counted.sum()) for one in self.microbatches(step))

    def adamw(self, weights: Mapping[str, torch.Tensor]) -> torch.optim.AdamW:
        """Build torch's AdamW for weights by name, with the job's settings."""
        plain, decayed = (
            [one for name, one in weights.items() if (name in self.optimizer["no_decay"]) is chosen]
            for chosen in (True, False)
        )
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        settings = {key: self.optimizer[key] for key in ("lr", "betas", "eps", "weight_decay")}
        return torch.optim.AdamW(groups, **settings)

    def gradients(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Report the loss's gradients by name, as the optimizer will read them, before clipping. `done` writes them."""
        self._keep("gradient", tensors)

    def done(self, step: int, loss: float, grad_norm: float, weights: Mapping[str, torch.Tensor]) -> None:
        """Report the end of a step, and write its gradients and weights.

        Args:
            step: number of the step, from 0.
            loss: mean loss of the counted labels.
            grad_norm: norm before clipping.
            weights: updated weights by name.
        """
        self._keep("parameter", weights)
        save_file(self._held, self._folder / f"rank_{self._rank:05d}.step_{step:02d}.safetensors")
        self._held = {}
        num_tokens = self.num_counted(step)
        self._steps.append({"loss": float(loss), "grad_norm": float(grad_norm), "num_tokens": num_tokens})

    def close(self, **place: int) -> None:
        """Write the rank's coordinates and step results, wait for all ranks, and end torch's process groups.

        A rank that exits without this call can break its peers' run.

        Args:
            place: the rank's index on each axis; an axis with one rank may be missing.

        Raises:
            ValueError: an axis with several ranks is missing.
        """
        if missing := [axis for axis, size in self.layout.items() if size > 1 and axis not in place]:
            raise ValueError(
                f"close({place}): {missing[0]} has {self.layout[missing[0]]} ranks, and this one's place is missing"
            )
        told = {"rank": self._rank, "place": place, "steps": self._steps}
        (self._folder / f"rank_{self._rank:05d}.json").write_text(json.dumps(told))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()

    def _keep(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            # A copy, because the engine reuses its memory and a safetensors file cannot hold tensors that share memory.
            self._held[f"{kind}:{name}"] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
