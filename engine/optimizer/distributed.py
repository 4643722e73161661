"""AdamW whose state lives only on its owner (ZeRO-1, 1910.02054 section 5.1).

Each data-parallel rank owns an equal part of every bucket (`param_layout.py`) and keeps master weights and both moments there
(`state.py` says in what form).

A step multiplies the owned main grads by one factor (tokens and clipping), updates the masters in the accumulation dtype, lets the
parameters follow, and the buckets are all-gathered.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from engine.config import OptimizerConfig, PrecisionConfig
from engine.optimizer.grad_buffer import Bucket, FlatBuffer, GradBuffers
from engine.optimizer.kinds import StateKind
from engine.optimizer.param_layout import Segment
from engine.optimizer.state import OptimizerState
from engine.precision import STEP_DTYPE

_SUMMED_NUMEL = 2**16
"""Elements that a CPU may sum in fp32: BLAS adds each lane one by one, which would be 2e-6 off at four times as many."""


@dataclass
class OwnedBucket:
    """One bucket's optimizer state on its owner; all tensors are flat, [owned elements]."""

    buffer: FlatBuffer
    bucket: Bucket
    state: OptimizerState
    segments: tuple[Segment, ...]

    @property
    def grads(self) -> torch.Tensor:
        start, stop = self.bucket.owned
        return self.buffer.main_grads[start:stop]

    @property
    def parameters(self) -> torch.Tensor:
        start, stop = self.bucket.owned
        return self.buffer.parameters[start:stop]

    def runs(self) -> Iterator[tuple[slice, bool]]:
        """Owned elements that belong to parameters, as few runs as decay allows: (where, whether weights decay)."""
        origin = self.bucket.owned[0]
        run: tuple[int, int, bool] | None = None
        for segment in self.segments:
            start = segment.offset - origin
            stop = start + segment.stop - segment.start
            if run is not None and run[1] == start and run[2] == segment.record.spec.decay:
                run = (run[0], stop, run[2])
            else:
                if run is not None:
                    yield slice(run[0], run[1]), run[2]
                run = (start, stop, segment.record.spec.decay)
        if run is not None:
            yield slice(run[0], run[1]), run[2]


class DistributedOptimizer:
    """AdamW on the owned parts of the flat buffers.

    Args:
        buffers: parameters and main grads. The parameters must hold their initial values: masters start from them.
        config: hyperparameters.
        precision: the form of the state.
    """

    def __init__(self, buffers: GradBuffers, config: OptimizerConfig, precision: PrecisionConfig) -> None:
        self.buffers = buffers
        self.config = config
        self._num_updates = torch.zeros((), dtype=STEP_DTYPE, device=buffers.device)
        self.owned: list[OwnedBucket] = []
        for buffer in buffers.buffers:
            segments = list(buffer.layout.segments(buffers.dp.size, buffers.dp.index))
            for bucket in buffer.buckets:
                start, stop = bucket.owned
                self.owned.append(
                    OwnedBucket(
                        buffer=buffer,
                        bucket=bucket,
                        state=OptimizerState(buffer.parameters[start:stop], buffer.main_grads.dtype, precision),
                        segments=tuple(segment for segment in segments if start <= segment.offset < stop),
                    )
                )

    def grad_square_sum(self) -> torch.Tensor:
        """Sum of squares of the owned gradients, each element of the model counted once over the world (a scalar).

        Replicas are counted by the first of them; padding has gradient zero.
        """
        counted = [owned.grads for owned in self.owned if owned.buffer.replica_index == 0]
        total = self.owned[0].grads.new_zeros(())
        for grads in counted:
            # No squares are stored. (vector_norm adds all of a bucket one by one there: 1e-3 off at 1.5e7 elements.)
            for piece in grads.split(_SUMMED_NUMEL) if grads.device.type == "cpu" else (grads,):
                total += torch.dot(piece, piece)
        return total

    @property
    def num_updates(self) -> int:
        """Updates that the moments have seen; on a GPU, asking waits for it."""
        return int(self._num_updates)

    def step(self, lr: float, grad_scale: torch.Tensor, skip: torch.Tensor) -> None:
        """One update with gradients x `grad_scale`, then post the all-gathers of the new parameters.

        Args:
            grad_scale: a scalar on the device.
            skip: a bool on the device: leave masters, moments and parameters as they are.
        """
        skipped = skip.to(STEP_DTYPE)
        grad_scale = grad_scale.to(self.owned[0].grads.dtype)
        for owned in self.owned:
            owned.grads.mul_(grad_scale)
            state = owned.state.read_all()
            for decayed in (True, False):
                runs = [where for where, decays in owned.runs() if decays == decayed]
                if runs:
                    self._update(state, owned.grads, runs, lr, self.config.weight_decay if decayed else 0.0, skipped)
            owned.state.write(state)
        self._num_updates += 1 - skipped
        self.buffers.gather()

    def restored(self, num_updates: int) -> None:
        """Masters and moments were loaded: the owned parameters have followed, make those of every rank follow.

        Args:
            num_updates: updates that the moments have seen (Adam's bias correction).
        """
        self._num_updates.fill_(num_updates)
        self.buffers.gather()
        self.buffers.wait_all()

    def _update(
        self,
        state: Mapping[StateKind, torch.Tensor],
        grads: torch.Tensor,
        runs: list[slice],
        lr: float,
        weight_decay: float,
        skipped: torch.Tensor,
    ) -> None:
        # adamw adds one to each of these before it uses them.
        steps = [self._num_updates.clone() for _ in runs]
        adamw(
            [state["master"][where] for where in runs],
            [grads[where] for where in runs],
            [state["exp_avg"][where] for where in runs],
            [state["exp_avg_sq"][where] for where in runs],
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.config.eps,
            maximize=False,
            found_inf=skipped,
        )
