"""The forms of the optimizer's state: what is exact is exact to the bit, what is rounded is rounded once a step."""

from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.optim.adamw import adamw

from tests.harness import run_ranks
from tests.parity.cases import Case
from tests.parity.test_step_properties import build_rank
from triaxis.engine.config.quantities.state_plan import state_rows
from triaxis.engine.config.schema.training import PrecisionConfig
from triaxis.engine.config.values.optimizer_kinds import OPTIMIZERS, StateKind, state_kinds
from triaxis.engine.layout.param_layout import BufferKey
from triaxis.engine.optimizer.state import OptimizerState
from triaxis.engine.step import Engine

STATE_KINDS = OPTIMIZERS["adamw"].state_kinds
FULL = PrecisionConfig(dtype="bf16")
SPLIT = PrecisionConfig(dtype="bf16", masters="split")
NARROW = PrecisionConfig(dtype="bf16", masters="split", moments="bf16")


def made(precision: PrecisionConfig, weights: torch.Tensor) -> tuple[torch.Tensor, OptimizerState]:
    parameters = weights.to(torch.bfloat16)
    return parameters, state_of(parameters, precision)


def state_of(
    parameters: torch.Tensor, precision: PrecisionConfig, kinds: Sequence[StateKind] = STATE_KINDS
) -> OptimizerState:
    return OptimizerState.initial(parameters, kinds, state_rows(BufferKey(None, None), precision, kinds))


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


FINITE = st.integers(0, 0x7F7F_FFFF) | st.integers(-(2**31), -(2**31) + 0x7F7F_FFFF)
"""Bits of the finite numbers of fp32."""


@settings(deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=40))
def test_a_split_master_comes_back_to_the_bit(patterns: list[int]) -> None:
    master = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    parameters, state = made(SPLIT, torch.zeros(len(patterns)))
    state.write({"master": master})
    assert torch.equal(bits_of(state.read("master")), bits_of(master))
    cast = master.to(torch.bfloat16)
    is_tie = (bits_of(master) & 0xFFFF) == 0x8000
    assert torch.equal(parameters.view(torch.int16)[~is_tie], cast.view(torch.int16)[~is_tie]), (
        "the weight is the master, rounded"
    )
    away = (bits_of(master)[is_tie] >> 16) + 1
    assert torch.equal(parameters.view(torch.int16)[is_tie].to(torch.int32), away.to(torch.int16).to(torch.int32))


def test_the_hardest_numbers() -> None:
    values = torch.tensor(
        [0.0, -0.0, 1.0, 1.0 + 2**-8, 1.0 + 2**-9, -1.0 - 2**-8, 2**-149, 3.4028234663852886e38, -1e-40]
    )
    _, state = made(SPLIT, torch.zeros(len(values)))
    state.write({"master": values})
    assert torch.equal(bits_of(state.read("master")), bits_of(values))


def train(state: OptimizerState, steps: int, skip_at: int | None = None) -> None:
    """AdamW with gradients that do not depend on the weights."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        values = {kind: state.read(kind) for kind in ("master", "exp_avg", "exp_avg_sq")}
        grad = torch.randn(len(values["master"]), generator=generator)
        adamw(
            [values["master"]],
            [grad],
            [values["exp_avg"]],
            [values["exp_avg_sq"]],
            [],
            [torch.tensor(float(step))],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.95,
            lr=1e-2,
            weight_decay=0.1,
            eps=1e-8,
            maximize=False,
            found_inf=torch.tensor(float(step == skip_at)),
        )
        state.write(values)


def test_split_masters_are_those_of_fp32_after_many_updates() -> None:
    weights = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    states = {}
    for precision in (FULL, SPLIT):
        _, states[precision.masters] = made(precision, weights)
        train(states[precision.masters], 50, skip_at=20)
    for kind in STATE_KINDS:
        assert torch.equal(states["full"].read(kind), states["split"].read(kind))


def test_rounded_moments_are_near_and_a_skipped_step_changes_no_bit() -> None:
    weights = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    (_, full), (parameters, narrow) = made(FULL, weights), made(NARROW, weights)
    train(full, 50)
    train(narrow, 50)
    for kind, near in (("exp_avg", 0.01), ("exp_avg_sq", 0.02), ("master", 0.01)):
        wanted, got = full.read(kind), narrow.read(kind)
        assert 0 < float((got - wanted).norm() / wanted.norm()) < near, kind
    before = [tensor.clone() for tensor in (parameters, *narrow.beside.values())]
    train(narrow, 1, skip_at=0)
    assert all(torch.equal(a, b) for a, b in zip(before, (parameters, *narrow.beside.values()), strict=True))


def test_bytes_per_parameter() -> None:
    for precision, expected in ((FULL, 12), (SPLIT, 10), (NARROW, 6)):
        _, state = made(precision, torch.zeros(64))
        assert sum(tensor.nbytes for tensor in state.beside.values()) == 64 * expected
        kinds = state_kinds("adamw", (), has_ema=True)
        averaged = state_of(torch.zeros(64, dtype=torch.bfloat16), precision, kinds)
        assert sum(tensor.nbytes for tensor in averaged.beside.values()) == 64 * (expected + 4)
    exact = torch.zeros(64)
    state = state_of(exact, PrecisionConfig(dtype="fp32"))
    assert sum(tensor.nbytes for tensor in state.beside.values()) == 64 * 8 and state.read("master") is exact


def masters(rank: int, case: Case) -> list[torch.Tensor]:
    engine, batches = build_rank(rank, case)
    for _ in range(4):
        engine.train_step(batches.next_step(), 1e-3)
    engine.buffers.wait_all()
    _every_rank_holds_the_same(engine)
    batches.close()
    return [owned.state.read("master").double() for owned in engine.optimizer.owned]


def _every_rank_holds_the_same(engine: Engine) -> None:
    """Parameters are what the owners' masters are rounded to, on the other ranks too."""
    for buffer in engine.buffers.buffers:
        copies = engine.topology.axis("dp").all_gather(buffer.weights[0].float(), "test").wait()
        parts = copies.view(engine.topology.sizes.dp, -1)
        assert torch.equal(parts, parts[:1].expand_as(parts))


@pytest.mark.distributed
def test_layouts_agree_with_narrow_state_as_they_do_without() -> None:
    case = Case("llama_wide", dtype="bf16", bucket_bytes=2**24, num_layers=2, global_batch_size=4)
    for narrow in (False, True):
        whole = run_ranks(masters, 1, replace(case, narrow=narrow))[0]
        parts = run_ranks(masters, 2, replace(case, narrow=narrow, dp=2))
        for index, flat in enumerate(whole):
            joined = torch.cat([rank[index] for rank in parts])[: len(flat)]
            assert float((joined - flat[: len(joined)]).norm() / flat.norm()) < 1e-3, narrow


def reduced_gradients(rank: int, case: Case) -> list[torch.Tensor]:
    engine, batches = build_rank(rank, case)
    engine.forward_backward(batches.next_step())
    batches.close()
    assert all(
        buffer.grads[0].dtype == (torch.bfloat16 if case.bf16_gradients else torch.float32)
        for buffer in engine.buffers.buffers
    )
    sent = [event for event in engine.topology.ledger.posted if event.purpose == "gradients"]
    assert {event.dtype for event in sent} <= {engine.buffers.buffers[0].grads[0].dtype} and bool(sent) == (case.dp > 1)
    # Norms are summed in fp32 whatever gradients are kept in.
    square_sum = engine.optimizer.grad_square_sum()
    assert square_sum.dtype == torch.float32
    exact = sum(float(owned.grads.double().square().sum()) for owned in engine.optimizer.owned)
    assert float(square_sum) == pytest.approx(exact, rel=1e-5)
    return [owned.grads.double() for owned in engine.optimizer.owned]


@pytest.mark.distributed
def test_gradients_in_bf16_are_those_of_fp32_rounded_at_each_sum() -> None:
    case = Case("llama_wide", dtype="bf16", bucket_bytes=2**24, micro_batch_size=2, num_layers=2)
    exact = run_ranks(reduced_gradients, 1, case)[0]
    whole = run_ranks(reduced_gradients, 1, replace(case, bf16_gradients=True))[0]
    parts = run_ranks(reduced_gradients, 2, replace(case, bf16_gradients=True, dp=2))
    for index, wanted in enumerate(exact):
        joined = torch.cat([rank[index] for rank in parts])[: len(wanted)]
        for found in (whole[index], joined):
            # Four microbatches: each sum is rounded to 8 bits.
            assert 1e-5 < float((found - wanted[: len(found)]).norm() / wanted.norm()) < 1e-2
