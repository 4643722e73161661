"""Disturbances inside of a rank: each forward takes a while; a NaN, a flipped bit and others come when a file asks for them.

    plan.json     {"number": 7, "kind": "nan", "rank": 2, ...}     written by the supervisor; no file: no fault
    acts.jsonl    {"number": 7, "samples": [...], ...}             one line when it was done, by the rank that did it

A NaN belongs to its samples: the step that is made again under hooks has it too, and the samples that take their place do not.
"""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from tests.soak.scene import ACTS, PACE_SECONDS, PLAN, PRINTED_LINE_BYTES, PRINTED_LINES, SLOW_PACE_SECONDS
from triaxis.engine.resilience.nonfinite import module_title
from triaxis.engine.step import Engine
from triaxis.engine.step_result import BatchLosses


def install(folder: str, rank: int) -> None:
    """From now on every step of this process goes through a `Disturber`."""
    disturber, forward_backward = Disturber(Path(folder), rank), Engine.forward_backward

    def disturbed(engine: Engine, microbatches: Sequence[Any], **named: Any) -> BatchLosses:
        disturber.before_step(engine, microbatches)
        return forward_backward(engine, microbatches, **named)

    Engine.forward_backward = disturbed  # type: ignore[method-assign]


class Disturber:
    """Of one rank.

    Args:
        folder: of the soak.
        rank: this one.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._plan = folder / PLAN
        self._acts = folder / ACTS
        self._rank = rank
        self._pause_seconds = PACE_SECONDS
        self._has_hooks = False
        self._is_validating = False
        self._done: set[int] = set()
        self._poisoned: dict[str, set[int]] = {}
        self._current: Sequence[int] = ()

    def before_step(self, engine: Engine, microbatches: Sequence[Any]) -> None:
        """A step is about to be made on this rank's microbatches."""
        if not self._has_hooks:
            self._add_hooks(engine)
        self._pause_seconds = PACE_SECONDS
        plan = self._read()
        if plan is None or plan["kind"] == "stop-in-validation":
            return
        if plan["kind"] == "slow-rank":
            self._pause_seconds = SLOW_PACE_SECONDS
        if plan["number"] in self._done:
            return
        self._done.add(plan["number"])
        samples: list[int] = []
        if plan["kind"] == "nan":
            samples = list(microbatches[plan["microbatch"]].sample_ids)
            self._poisoned.setdefault(plan["module"], set()).update(samples)
        elif plan["kind"] == "flip-bit":
            engine.buffers.wait_all()  # a gathered weight must not be written over the flipped bit
            bits = engine.parameters[plan["weight"]].value.detach().view(-1).view(torch.int32)
            bits[0] ^= 1 << plan["bit"]
        elif plan["kind"] == "paused-terminal":
            begin = f"line of fault {plan['number']}, "
            print(
                "\n".join(f"{begin}{number:.>{PRINTED_LINE_BYTES - len(begin) - 1}}" for number in range(PRINTED_LINES))
            )
        first = microbatches[0].sample_ids[0]
        self._tell({"number": plan["number"], "first_sample": first, "samples": samples})

    def _read(self) -> Mapping[str, Any] | None:
        try:
            plan = cast(Mapping[str, Any], json.loads(self._plan.read_bytes()))
        except FileNotFoundError:
            return None
        return plan if plan["rank"] == self._rank else None

    def _tell(self, act: dict[str, Any]) -> None:
        line = json.dumps({**act, "unix_time_seconds": time.time()}) + "\n"
        with self._acts.open("ab", buffering=0) as file:
            file.write(line.encode())

    def _add_hooks(self, engine: Engine) -> None:
        self._has_hooks = True
        for each in engine.chunks:
            chunk = cast(nn.Module, each)
            chunk.register_forward_pre_hook(self._begins)
            for path, module in chunk.named_modules():
                title = module_title(chunk, path)
                if title.startswith("layers.") and title.count(".") == 2:
                    module.register_forward_hook(self._spoiler(title))

    def _begins(self, chunk: nn.Module, arguments: Any) -> None:
        # Validations number their samples from 0 again, and the samples of a NaN are training samples.
        self._current = arguments[1].sample_ids if chunk.training else ()
        if not chunk.training and not self._is_validating:
            self._begin_validation()
        self._is_validating = not chunk.training
        time.sleep(self._pause_seconds)

    def _begin_validation(self) -> None:
        plan = self._read()
        if plan is None or plan["kind"] != "stop-in-validation" or plan["number"] in self._done:
            return
        self._done.add(plan["number"])
        self._tell({"number": plan["number"]})
        os.kill(os.getpid(), plan["signal"])

    def _spoiler(self, title: str) -> Any:
        def spoil(_: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor | None:
            return output * math.nan if self._poisoned.get(title, set()) & set(self._current) else None

        return spoil
