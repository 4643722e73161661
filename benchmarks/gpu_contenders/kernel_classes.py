"""Time of a traced step by class of kernel, from a trace of torch's profiler.

A kernel's class is what launched it where that says more than its name (the optimizer's part of a step; cross-entropy, norms and
attention by their operator), else its name. Idle is what is left of a step that was not traced: tracing makes the host slow, not
the kernels.
"""

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

CLASSES = (
    "GEMM",
    "attention",
    "norm",
    "elementwise",
    "cross-entropy",
    "optimizer",
    "communication",
    "copy",
    "other",
)
IDLE = "idle"


def _rule(kind: str, pattern: str) -> tuple[str, re.Pattern[str]]:
    return kind, re.compile(pattern)


# Tried in order. Classes that follow from the name precede those that follow from the launcher.
BY_NAME_FIRST = (
    _rule("communication", r"(?i)^nccl"),
    _rule("copy", r"^Mem(?:cpy|set)\b"),
    _rule(
        "attention",
        r"(?i)sdpa|flash_(?:fwd|bwd|attn)|\bflash::|pytorch_flash|fmha|AttentionKernel|flex_attention|mha_(?:fwd|bwd)|dot_do_o",
    ),
    _rule(
        "GEMM",
        r"(?i)gemm|^nvjet|cutlass_\d+_\w*tensorop|s\d+_?cudnn|hgmma|\bgemv|splitK|cublasLt|triton_tem_fused\w*_(?:add)?mm|xmma_",
    ),
)
"""A GEMM or a collective is one for any launcher but the optimizer."""

BY_LAUNCHER = (
    _rule("cross-entropy", r"(?i)cross_?entropy|nll_loss|log_softmax"),
    _rule("norm", r"(?i)layer_?norm|rms_?norm"),
    _rule("attention", r"(?i)scaled_dot_product|_(?:flash|efficient|cudnn)_attention"),
)
"""Names of operators and of autograd functions, on the thread that launched the kernel."""

OPTIMIZER_PART = re.compile(r"^optimizer$")
"""The part of a step (`triaxis.engine.train`)."""

BY_NAME = (
    _rule("optimizer", r"(?i)multi_tensor_apply|fused_?adam|adam_?w?_"),
    _rule("cross-entropy", r"(?i)cross_?entropy|nll_loss|log_?softmax|SoftMax(?:Forward|Backward)"),
    _rule("norm", r"(?i)layer_?norm|rms_?norm|GammaBeta|RowwiseMoments|rsqrt"),
    _rule("attention", r"(?i)softmax"),
    _rule("copy", r"(?i)CatArrayBatchedCopy|direct_copy_kernel|copy_kernel|bfloat16_copy|_copy_device"),
    _rule(
        "elementwise",
        r"(?i)elementwise|reduce_kernel|reduction|triton_(?:poi|red|per|for)_|dropout|gelu|silu|swiglu|rope|rotary",
    ),
)


def classify(name: str, launchers: Sequence[str] = ()) -> str:
    """Return the class of a kernel, one of `CLASSES`.

    Args:
        name: as the profiler has it.
        launchers: names of the ranges and operators around its launch.
    """
    certain = _first(BY_NAME_FIRST, [name])
    if certain == "communication":
        return certain
    if any(OPTIMIZER_PART.search(each) for each in launchers):
        return "optimizer"
    return certain or _first(BY_LAUNCHER, launchers) or _first(BY_NAME, [name]) or "other"


def _first(rules: Iterable[tuple[str, re.Pattern[str]]], names: Iterable[str]) -> str | None:
    known = list(names)
    return next((kind for kind, pattern in rules if any(pattern.search(name) for name in known)), None)


class _Ranges:
    """Named ranges that are open on a thread at a time; a name counts once however deep it is nested."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        open_ranges: dict[Any, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for event in events:
            open_ranges[event["tid"]][event["name"]].append((event["ts"], event["ts"] + event["dur"]))
        self._of_thread = {
            thread: {name: _merged(spans) for name, spans in names.items()} for thread, names in open_ranges.items()
        }

    def at(self, thread: Any, time: float) -> list[str]:
        return [name for name, spans in self._of_thread.get(thread, {}).items() if _holds(spans, time)]


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge sorted spans, so that none overlap or touch."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _holds(spans: Sequence[tuple[float, float]], time: float) -> bool:
    place = bisect_right(spans, (time, float("inf"))) - 1
    return place >= 0 and time <= spans[place][1]


def breakdown(path: Path, num_steps: int, step_seconds: float) -> dict[str, Any] | None:
    """Sum milliseconds per step by class, from a chrome trace of `num_steps` steps.

    Args:
        path: a `.json` or `.json.gz`.
        num_steps: steps in the trace.
        step_seconds: of a step that was not traced; what no kernel covers of it is idle.

    Returns:
        `milliseconds` by class and `idle`, `kernels` by class (per step), and `unknown`, the dearest names of class other; None
        where the trace has no kernel (a CPU's).
    """
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    # Numbers rise: what has a smaller one than the first launch in the trace is the end of the step before it.
    first = min(launches, default=0)
    kernels = [event for event in kernels if event["args"]["correlation"] >= first]
    if not kernels:
        return None
    telling = [*(pattern for _, pattern in BY_LAUNCHER), OPTIMIZER_PART]
    ranges = _Ranges(
        event
        for event in events
        if event.get("cat") in ("cpu_op", "user_annotation") and any(p.search(event["name"]) for p in telling)
    )
    microseconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    unknown: dict[str, float] = defaultdict(float)
    for event in kernels:
        launch = launches.get(event["args"]["correlation"])
        launchers = [] if launch is None else ranges.at(launch["tid"], launch["ts"])
        kind = classify(event["name"], launchers)
        microseconds[kind] += event["dur"]
        counts[kind] += 1
        if kind == "other":
            unknown[event["name"][:120]] += event["dur"]
    busy = sum(end - start for start, end in _merged((event["ts"], event["ts"] + event["dur"]) for event in kernels))
    milliseconds = {kind: microseconds[kind] / num_steps / 1e3 for kind in CLASSES}
    milliseconds[IDLE] = max(0.0, step_seconds * 1e3 - busy / num_steps / 1e3)
    dearest = sorted(unknown.items(), key=lambda item: -item[1])[:5]
    return {
        "milliseconds": milliseconds,
        "kernels": {kind: counts[kind] / num_steps for kind in CLASSES},
        "unknown": {name: duration / num_steps / 1e3 for name, duration in dearest},
    }
