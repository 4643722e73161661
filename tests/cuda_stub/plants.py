"""What is taken out of the engine's order of streams, one at a time, and a layout that has it; waits.txt has more rows."""

import dis
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from triaxis.engine.checkpoint.writer import RankWriter
from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.staging import Staging
from triaxis.engine.context_parallel import attention
from triaxis.engine.device.copy_lane import SideStream
from triaxis.engine.device.host_copy import FromCuda, HostCopy
from triaxis.engine.device.pinned_memory import PinnedPool
from triaxis.engine.optimizer.bucket import Bucket, ReplicaSums, Slot
from triaxis.engine.pipeline.p2p import Transport

Plant = Callable[[pytest.MonkeyPatch], None]


def no_wait(function: str, call: str = "") -> Plant:
    """Nobody waits for calls in `function` that are written as "operation axis purpose" and match `call`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        wait = Pending.wait

        def at_once(pending: Pending) -> torch.Tensor:
            if pending._written and sys._getframe(1).f_code.co_qualname == function:
                event = pending._written[1]
                if re.search(call, f"{event.op} {event.axis} {event.purpose}"):
                    pending._work = ()
            return wait(pending)

        patch.setattr(Pending, "wait", at_once)

    return plant


def no_lane_wait(function: str, number: int = 0) -> Plant:
    """The computation does not wait for copies at one of the waits in `function`, by its number."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        wait = SideStream.wait

        def at_once(lane: SideStream, mark: Any) -> None:
            frame = sys._getframe(1)
            is_in = frame.f_code.co_qualname == function
            if not is_in or _lines_of_waits(frame.f_code).index(frame.f_lineno) != number:
                wait(lane, mark)

        patch.setattr(SideStream, "wait", at_once)

    return plant


def _lines_of_waits(code: Any) -> list[int]:
    uses = (each.positions for each in dis.get_instructions(code) if each.argval == "wait")
    return sorted({each.lineno for each in uses if each is not None and each.lineno is not None})


def put(owner: Any, name: str, method: Callable[..., Any]) -> Plant:
    """A method is another one, which gets the method that it replaces before its arguments."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        was = owner.__dict__[name]
        patch.setattr(owner, name, lambda *given, **named: method(was, *given, **named))

    return plant


def without(owner: Any, name: str) -> Callable[..., Any]:
    """Return a method for `put`, during which another one does nothing."""

    def method(was: Any, *given: Any) -> Any:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(owner, name, lambda *ignored: None)
            return was(*given)

    return method


def then_zero(post: Any, axis: Axis, what: Any, *given: Any) -> Any:
    """Overwrite what a call sends once it is posted."""
    posted = post(axis, what, *given)
    for sent in [what] if isinstance(what, torch.Tensor) else [each.tensor for each in what if each.kind == "send"]:
        sent.detach().zero_()
    return posted


def save_beside_a_step(save: Any, writer: RankWriter, folder: Any) -> Any:
    """Copy in a side stream, for which the thread that writes waits after a while, and the computation does not."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        mark = writer._to_host.post(writer._copies)

    def write() -> None:
        time.sleep(0.5)
        mark.synchronize()
        writer._write(folder)

    return writer._thread.submit(write)


def one_host_buffer_for_two_streams(patch: pytest.MonkeyPatch) -> None:
    buffers: dict[Any, torch.Tensor] = {}
    streams: list[Any] = []

    def same(take: Any, pool: PinnedPool, *size: Any) -> torch.Tensor:
        return buffers[size] if size in buffers else buffers.setdefault(size, take(pool, *size))

    def in_turn(post: Any, lane: SideStream, copies: Any) -> Any:
        streams[:] = streams or [lane.stream, torch.cuda.Stream(lane.device)]
        streams.reverse()
        lane.stream = streams[0]
        return post(lane, copies)

    put(PinnedPool, "take", same)(patch)
    put(SideStream, "post", in_turn)(patch)


def sum_at_once(sent: Any, sums: ReplicaSums, bucket: Bucket | None) -> None:
    if bucket is not None:
        sums._summing.append(sums._axis.all_reduce(bucket.owned_grads, "replica gradients"))


def reduce_experts_early(added: Any, bucket: Bucket, parameter: Any) -> None:
    """Post the reduction of a bucket of experts when its last gradient is missing."""
    if bucket.owners.name != "expert_dp" or bucket.num_missing > 2:
        added(bucket, parameter)
    elif bucket.num_missing == 2:
        bucket.num_missing = 1
        added(bucket, parameter)
        bucket.num_missing = 1
    else:
        bucket.missing[parameter] -= 1
        bucket.num_missing = 0


def one_receive_buffer(patch: pytest.MonkeyPatch) -> None:
    buffers: dict[str, torch.Tensor] = {}

    def reusing(exchange: Any, axis: Axis, messages: Any, purpose: str) -> Any:
        own = [
            replace(each, tensor=buffers.setdefault(axis.name, each.tensor)) if each.kind == "recv" else each
            for each in messages
        ]
        return exchange(axis, own, purpose)

    put(Axis, "exchange", reusing)(patch)


def one_buffer_for_pieces(patch: pytest.MonkeyPatch) -> None:
    pack, buffers = attention.pack_keys_and_values, dict[Any, torch.Tensor]()

    def packed(*given: Any) -> torch.Tensor:
        piece = pack(*given)
        shared = buffers.setdefault(piece.shape, torch.empty_like(piece)).data
        shared.copy_(piece.data)
        return shared

    for name, module in list(sys.modules.items()):
        if name.startswith("triaxis.") and getattr(module, "pack_keys_and_values", None) is pack:
            patch.setattr(module, "pack_keys_and_values", packed)


def call_gloo_at_once(copying: Any, staging: Staging, copies: Any) -> Callable[[], None]:
    copying(staging, copies)
    return lambda: None


def forget_sends(post: Any, transport: Transport, each: Any) -> None:
    post(transport, each)
    transport._sent.clear()


PLANTS: dict[str, tuple[str, Plant]] = {
    "offload: copies do not wait": ("offload", put(SideStream, "post", without(torch.cuda.Stream, "wait_stream"))),
    "offload: one buffer, two streams": ("offload", one_host_buffer_for_two_streams),
    "state on the host: a place": ("offload", no_lane_wait("InHostMemory.__iter__", 0)),
    "state on the host: before it has come": ("offload", no_lane_wait("InHostMemory.__iter__", 1)),
    "state on the host: at the end": ("offload", no_lane_wait("InHostMemory.__iter__", 2)),
    "numbers of a step": ("tp", put(HostCopy, "arrived", lambda was, copy: copy._values)),
    "a checkpoint, at once": ("offload", put(RankWriter, "save", without(FromCuda, "finish"))),
    "zero 2: a slot": ("zero 2", put(Slot, "free", lambda was, slot: setattr(slot, "sending", None))),
    "replicas: before the reduction": ("replicas", put(ReplicaSums, "sent", sum_at_once)),
    "pp: one receive buffer": ("pp", one_receive_buffer),
    "pp: what is sent is written": ("pp", put(Axis, "exchange", then_zero)),
    "gloo: before the copies": ("gloo", put(Staging, "_copying", call_gloo_at_once)),
    "gloo: copies do not wait": ("gloo", put(Staging, "_copying", without(torch.cuda.Stream, "wait_stream"))),
    "gloo: buffers used again": (
        "gloo",
        put(PinnedPool, "give", lambda give, pool, vector, events=(): give(pool, vector)),
    ),
    "cp1: one buffer for all packed pieces": ("cp", one_buffer_for_pieces),
    "ep3: results into the sent rows": ("ep", put(Axis, "all_to_all_rows", then_zero)),
    "ep6: experts before their gradient": ("expert dp", put(Bucket, "grad_added", reduce_experts_early)),
    "off1: freed before the copy": ("offload", no_lane_wait("HostMemory.let_go")),
    "off2: backward without the wait": ("offload", no_lane_wait("HostMemory.arrived")),
    "save1: a step goes on during a save's copy": ("offload", put(RankWriter, "save", save_beside_a_step)),
}
"""Layout, and what is taken out. Names with a number are an audit's."""

BY_TORCH = "torch keeps the tensors of a call of NCCL until it is over, also if nobody waits for it"
BY_ORDER = "a later call of the same communicator is waited for first"

NEEDLESS: dict[str, tuple[str, Plant, str]] = {
    "pp: last sends": ("pp", no_wait("Transport.finish"), BY_TORCH),
    "pp: sends are over at once": ("pp", lambda patch: patch.setattr(Pending, "completed", True), BY_TORCH),
    "pp: what is sent is let go": ("pp", put(Transport, "post", forget_sends), BY_TORCH),
    "ep2: sent rows are not kept": (
        "ep",
        put(Pending, "__init__", lambda init, self, *given, **named: init(self, *given, **named | {"keep": ()})),
        BY_TORCH,
    ),
    "step: load of experts": ("ep", no_wait("Engine.update", "load"), BY_ORDER),
}
"""The same, and why no order sees it."""


for _line in Path(__file__).with_name("waits.txt").read_text().splitlines():
    _name, _layout, *_words = (each.strip() for each in _line.split("|"))
    PLANTS[_name] = (_layout, no_wait(*_words))
