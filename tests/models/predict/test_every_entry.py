"""No entry of a layer's lists can be dropped unseen: each one counts in a configuration whose bytes or calls a test measures.

Those tests compare with an independent side, exactly: tensors that autograd keeps (`test_activation_memory`, `test_latent_memory`,
`test_fp8_inputs`, `experts/test_memory`), operands that wait (`test_deferred`), calls in the ledger (`tests/parity/
test_step_properties`), weights of the built model (`tests/engine/config/test_layer_products`). So what counts is missed.
"""

from collections.abc import Iterable, Iterator
from typing import get_args

from tests.engine.config.test_layer_products import MODELS, WEIGHTS
from tests.models.predict import test_activation_memory, test_deferred, test_fp8_inputs, test_latent_memory
from tests.models.predict.experts import test_memory
from tests.parity.test_step_properties import TRAFFIC
from triaxis.engine.config.quantities.layer_products import layer_products
from triaxis.engine.config.quantities.plan import parallel_sizes, stages_of
from triaxis.engine.config.tree import Config
from triaxis.models.predict.activation_memory import deferred_terms, end_terms
from triaxis.models.predict.layer_calls import Call, Moment, context_parallel_calls, tensor_parallel_calls
from triaxis.models.predict.layer_terms import block_terms
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.predict.terms import Term

MEASURED = [
    *(test_activation_memory.CI | test_activation_memory.BLOCKS | test_activation_memory.PARTS_OF_ROWS).values(),
    *(test_activation_memory.AHEAD | test_activation_memory.SLOW | test_latent_memory.CASES).values(),
    *test_fp8_inputs.CASES.values(),
    *(case.config() for case in test_memory.CI),
]
DEFERRED = [case.config() for case in (*test_deferred.IN_CI, *test_deferred.MORE)]
OWN_COSTS = ("block", "an extension's parts against ours")
"""Measured with extensions of a test's own, in `tests/launch/footprint`."""


def kept(config: Config) -> Iterator[Term]:
    sizes = parallel_sizes(config)
    config = resolve_recompute(config, sizes)
    for stage in stages_of(config):
        yield from end_terms(config, sizes, stage)
        for layer in stage.layers:
            yield from block_terms(config, sizes, layer)


def waiting(config: Config) -> Iterator[Term]:
    sizes = parallel_sizes(config)
    for stage in stages_of(config):
        for layer in stage.layers:
            yield from deferred_terms(config, sizes, layer)


def never_counted(terms: Iterable[Term]) -> set[tuple[str, str]]:
    """Tensors that no configuration keeps; the paper's alone are in the test of its equations."""
    listed = list(terms)
    found = {(term.module, term.tensor) for term in listed if not term.paper}
    return found - {(term.module, term.tensor) for term in listed if term.ours}


def test_each_tensor_is_kept_in_a_measured_configuration() -> None:
    assert never_counted(term for config in MEASURED for term in kept(config)) == {OWN_COSTS}
    assert never_counted(term for config in DEFERRED for term in waiting(config)) == set()


def test_each_product_has_the_weights_of_a_built_model() -> None:
    kinds = [(model, kind) for model in MODELS.values() for kind in set(model.kinds)]
    assert {product.name for model, kind in kinds for product in layer_products(model, kind)} == set(WEIGHTS)


def test_each_call_is_posted_in_a_measured_step() -> None:
    found = {"tp": set[Call](), "cp": set[Call]()}
    for config in (case.config() for case in TRAFFIC):
        sizes = parallel_sizes(config)
        for layer in range(config.model.num_layers if sizes.tp > 1 else 0):
            found["tp"] |= {call._replace(num_bytes=0) for call in tensor_parallel_calls(config, sizes, layer)}
        if sizes.cp > 1:
            found["cp"] |= {call._replace(num_bytes=0) for call in context_parallel_calls(config, sizes)}
    gathers = {call.moment for call in found["tp"] if call.op == "all_gather"}
    sums = {(call.moment, call.op) for call in found["tp"] if call.op != "all_gather"}
    assert gathers == {"forward", "entering", "regathered", "deferred"}
    assert sums == {(moment, op) for moment in ("forward", "leaving") for op in ("all_reduce", "reduce_scatter")}
    assert {(call.moment, call.op) for call in found["cp"]} == {
        *(("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")),
        *(("forward", "all_to_all"), ("backward", "all_to_all")),
    }
    assert {call.moment for calls in found.values() for call in calls} == set(get_args(Moment))
