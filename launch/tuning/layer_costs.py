"""What a layer costs in a traced step: calls, the host's time and the device's, measured and predicted.

    trace    ->  instructions of the pipeline (`0F1`), ranges of layers in them, and what was launched in each range
             ->  a layer's forward and backward on one microbatch, the mean of all

A call is a kernel, copy or fill of a GPU. Without a GPU it is an operator of torch that is part of no other, and the host is the
device.
"""

import gzip
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.telemetry.trace.layer_ranges import LAYER
from triaxis.models.predict.step_time.cluster import Cluster
from triaxis.models.predict.step_time.estimate import Estimator

Pass = Literal["forward", "backward"]

_INSTRUCTION = re.compile(r"\d+([FBIW])\d+")
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Costs of one layer on one microbatch.

    Attributes:
        calls: number of calls.
        host_us, device_us: microseconds of the host and of the device.
    """

    calls: float
    host_us: float
    device_us: float

    def __add__(self, other: "LayerCosts") -> "LayerCosts":
        return LayerCosts(self.calls + other.calls, self.host_us + other.host_us, self.device_us + other.device_us)


def measured_costs(trace: Path) -> dict[Pass, LayerCosts] | None:
    """Read the mean layer's costs from a rank's trace (`telemetry.profile`).

    A forward that is recomputed counts in the backward, and so do deferred weight gradients.

    Returns:
        The costs by pass; None if no layer was called in the trace: its microbatches were replayed as CUDA graphs.
    """
    with gzip.open(trace, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    instructions = _Spans(event for event in ranges if _INSTRUCTION.fullmatch(event["name"]))
    layers: dict[Any, _Spans] = {
        thread: _Spans(event for event in ranges if event["tid"] == thread and LAYER.fullmatch(event["name"]))
        for thread in {event["tid"] for event in ranges}
    }
    totals: dict[Pass, LayerCosts] = {"forward": LayerCosts(0, 0, 0), "backward": LayerCosts(0, 0, 0)}
    num_layers = 0
    for spans in layers.values():
        for event in spans.outermost:
            if (kind := _kind(instructions, event)) is not None:
                totals[_pass_of(kind)] += LayerCosts(0, event["dur"], 0)
                num_layers += kind == "F"
    if not num_layers:
        return None
    for event in instructions.outermost:
        if _kind(instructions, event) == "W":
            totals["backward"] += LayerCosts(0, event["dur"], 0)
    for event, device_us in _calls(events):
        kind = _kind(instructions, event)
        if kind == "W" or (kind is not None and event["tid"] in layers and layers[event["tid"]].around(event)):
            totals[_pass_of(kind)] += LayerCosts(1, 0, device_us)
    return {
        each: LayerCosts(one.calls / num_layers, one.host_us / num_layers, one.device_us / num_layers)
        for each, one in totals.items()
    }


def predicted_costs(config: Config, sizes: ParallelSizes, cluster: Cluster | None) -> LayerCosts | None:
    """Predict the costs of the first pipeline rank's mean layer, forward and backward; None if there are no rates for them."""
    if cluster is None:
        return None
    estimator = Estimator(cluster)
    try:
        seconds = estimator.mean_layer(config, sizes)
    except ConfigError:
        return None
    return LayerCosts(seconds.calls, seconds.calls * estimator.device.host_us, seconds.total * 1e6)


class _Spans:
    """Events of one thread that do not overlap, but for those inside others."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self.outermost: list[Mapping[str, Any]] = []
        for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
            if not self.outermost or event["ts"] >= self.outermost[-1]["ts"] + self.outermost[-1]["dur"]:
                self.outermost.append(event)
        self._starts = [event["ts"] for event in self.outermost]

    def around(self, event: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the span in which an event begins."""
        place = bisect_right(self._starts, event["ts"]) - 1
        if place < 0:
            return None
        span = self.outermost[place]
        return span if event["ts"] < span["ts"] + span["dur"] else None


def _kind(instructions: _Spans, event: Mapping[str, Any]) -> str | None:
    """Return the kind of the instruction in which an event begins, F, B, I or W; None: it is outside of all."""
    span = instructions.around(event)
    found = None if span is None else _INSTRUCTION.fullmatch(span["name"])
    return None if found is None else found[1]


def _pass_of(kind: str | None) -> Pass:
    return "forward" if kind == "F" else "backward"


def _calls(events: Sequence[Mapping[str, Any]]) -> Iterable[tuple[Mapping[str, Any], float]]:
    """Yield each call's event on the host, and the device's microseconds."""
    on_device = {event["args"]["correlation"]: event["dur"] for event in events if event.get("cat") in _ON_DEVICE}
    if on_device:
        for event in events:
            if event.get("cat") in _LAUNCHES and (number := event["args"].get("correlation")) in on_device:
                yield event, on_device[number]
        return
    operators = [event for event in events if event.get("cat") == "cpu_op" and event["name"].startswith("aten::")]
    for thread in {event["tid"] for event in operators}:
        for event in _Spans(one for one in operators if one["tid"] == thread).outermost:
            yield event, event["dur"]
