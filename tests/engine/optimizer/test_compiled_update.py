"""The update that inductor makes of one function, against torch's fused operator, in every form of the state."""

from dataclasses import replace

import pytest
import torch

from tests.harness import compiler
from tests.parity.cases import Case
from tests.parity.test_step_properties import build_rank
from triaxis.engine.step import Engine

STEPS, SKIPPED = 6, 3
FORMS = {
    "float64": (Case("gpt", dtype="float64"), 1e-14),
    "sgd in float64, averaged": (Case("gpt", dtype="float64", optimizer="sgd", ema=0.9), 1e-14),
    "an extension's rule": (Case("gpt", dtype="float64", optimizer="extension"), 1e-14),
    "bf16": (Case("gpt", dtype="bf16"), 2e-6),
    "narrow, averaged": (
        Case("gpt", dtype="bf16", narrow=True, ema=0.9),
        2e-3,
    ),  # a moment may be rounded the other way
    "narrow with gradients in bf16": (Case("gpt", dtype="bf16", narrow=True, bf16_gradients=True), 2e-3),
}


def updated(case: Case) -> Engine:
    """An engine after some steps with gradients that do not depend on its weights; one of them is skipped."""
    engine, batches = build_rank(0, case)
    batches.close()
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        for owned in engine.optimizer.owned:
            owned.grads.copy_(torch.randn(owned.grads.shape, generator=generator, dtype=torch.float64))
        before = _bits(engine)
        engine.optimizer.step(1e-2 / (step + 1), torch.tensor(0.7), skip=torch.tensor(step == SKIPPED))
        changed = [not torch.equal(a, b) for a, b in zip(before, _bits(engine), strict=True)]
        assert not any(changed) if step == SKIPPED else any(changed)
    return engine


def _bits(engine: Engine) -> list[torch.Tensor]:
    owned = engine.optimizer.owned
    return [tensor.clone() for each in owned for tensor in (each.parameters, *each.state.beside.values())]


@compiler()
@pytest.mark.parametrize(
    "form",
    ["float64", "sgd in float64, averaged", *(pytest.param(form, marks=pytest.mark.slow) for form in list(FORMS)[2:])],
)
def test_the_compiled_update_is_torchs(form: str) -> None:
    case, near = FORMS[form]
    plain, compiled = updated(case), updated(replace(case, compiled=True))
    assert plain.optimizer.num_updates == compiled.optimizer.num_updates == STEPS - 1
    for one, other in zip(plain.optimizer.owned, compiled.optimizer.owned, strict=True):
        for kind in plain.optimizer.state_kinds:
            wanted, got = one.state.read(kind), other.state.read(kind)
            assert float((got - wanted).norm()) <= near * float(wanted.norm()), kind
        assert torch.equal(other.parameters, other.state.read("master").to(other.parameters.dtype)) or case.narrow
