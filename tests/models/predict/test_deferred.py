"""What weight gradients wait with between an `I` and its `W`: counted from live tensors, against the formula."""

from typing import Any

import pytest

from tests.harness import run_ranks
from tests.parity.cases import Case, build_rank
from triaxis.engine.config.quantities.plan import parallel_sizes, stages_of
from triaxis.engine.pipeline.actions import Action, Kind
from triaxis.engine.pipeline.executor import _Run
from triaxis.engine.pipeline.forwards import of_forward
from triaxis.models.predict.activation_memory import deferred_bytes

Waiting = list[tuple[Action, int]]
"""Each `I`, and the bytes of its own storages behind it."""


def waiting_after_each(rank: int, case: Case) -> Waiting:
    found: Waiting = []
    backward = _Run.backward

    def watched(self: Any, action: Action) -> None:
        backward(self, action)
        work = self.begun[action.chunk, action.microbatch]
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for each in work._deferred
            for tensor in (each.part, each.other)
        }
        found.append((action, sum(storages.values())))

    _Run.backward = watched  # type: ignore[method-assign]
    engine, batches = build_rank(rank, case)
    engine.train_step(batches.next_step(), 1e-3)
    batches.close()
    return found


SMALL: dict[str, Any] = {"pp": 2, "schedule": "zb_h1", "num_layers": 4, "global_batch_size": 2}
IN_CI = [
    Case("gpt", tp=2, sequence_parallel=True, **SMALL),
    Case("parallel", dtype="bf16", **SMALL),
    Case("gpt", **(SMALL | {"vpp": 2, "schedule": "zbv"})),
]
MORE = [
    Case("llama", tp=2, fp8="tensorwise", **SMALL),
    Case("qwen", tp=2, sequence_parallel=True, gathered_inputs="keep", fp8="tensorwise", **SMALL),
    Case("mla", tp=2, fp8="tensorwise", **SMALL),
    Case("mla", tp=2, sequence_parallel=True, fp8="tensorwise", fp8_gather=True, **SMALL),
    Case("parallel", tp=2, sequence_parallel=True, fp8="tensorwise", fp8_gather=True, dtype="bf16", **SMALL),
    Case("llama", fp8="tensorwise", recompute=("selective", "uniform", 1), modules=("norm", "activation"), **SMALL),
    Case("gpt_dropout", tp=2, sequence_parallel=True, **SMALL),
    Case("qwen", tp=2, sequence_parallel=True, gathered_inputs="keep", **SMALL),
    Case("llama", recompute=("selective", "uniform", 1), modules=("norm", "activation", "attention"), **SMALL),
    Case("mqa_rope_bias", tp=2, micro_batch_size=2, **(SMALL | {"global_batch_size": 4})),
    Case("llama", tp=2, offload=1, **SMALL),
    Case("ahead two", tp=2, sequence_parallel=True, **SMALL),
    Case("ahead deepseek", tp=2, recompute=("selective", "uniform", 1), modules=("norm", "activation"), **SMALL),
    Case("llama", cp=2, documents=True, **SMALL),
    Case("mla, queries from x", tp=2, sequence_parallel=True, gathered_inputs="keep", **SMALL),
    Case("mla, queries from x", cp=2, tp=2, **SMALL),
    Case("mla", tp=2, sequence_parallel=True, **SMALL),
    *(Case(model, tp=2, sequence_parallel=True, **SMALL) for model in ("olmo2", "gemma2", "neox", "granite")),
    *(Case(model, tp=2, sequence_parallel=True, **SMALL) for model in ("parallel", "norms before and after")),
]


@pytest.mark.distributed
@pytest.mark.parametrize("case", [*IN_CI, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=str)
def test_what_waits_is_what_the_formula_says(case: Case) -> None:
    config = case.config()
    sizes, stages = parallel_sizes(config), stages_of(config)
    placement = of_forward(sizes, 1).placement
    for rank, found in enumerate(run_ranks(waiting_after_each, case.world_size, case)):
        assert [action.kind for action, _ in found] == [Kind.I] * (
            case.vpp * case.global_batch_size // case.micro_batch_size
        )
        for action, num_bytes in found:
            stage = stages[placement.stage_of(rank // (case.tp * case.cp), action.chunk)]
            assert num_bytes == deferred_bytes(config, sizes, stage)
