"""The traffic formula alone; `tests/parity/test_step_properties.py` compares it with what was sent."""

from typing import Any

from tests.models.predict.test_activation_memory import LLAMA, config_of
from tests.models.predict.test_rank_memory import deeper
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.partition import partition
from triaxis.engine.layout.rank_grid import Coordinates
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.predict.traffic import Flow, Volume, expected_traffic

TP_OPS = ("all_gather", "reduce_scatter")


def traffic(config: Config, pp: int) -> dict[Flow, Volume]:
    """The traffic of a rank at the head of tp and dp."""
    stages = partition(config.model.num_layers, config.parallel.pp, config.parallel.vpp, None)
    return expected_traffic(config, parallel_sizes(config), Coordinates(pp=pp, dp=0, cp=0, tp=0), stages)


def middle_stage_bytes(**recompute: Any) -> int:
    """Bytes that tensor parallelism sends for the layers of a stage without embedding and head."""
    config = deeper(config_of(LLAMA, tp=4, sp=True, recompute=recompute), model={"num_layers": 6}, parallel={"pp": 3})
    found = traffic(config, 1)
    return sum(found[Flow("tp", "activations", op)].wire_bytes for op in TP_OPS)


def test_keeping_gathered_inputs_saves_a_fifth_of_what_layers_send() -> None:
    """Two of ten transfers of a layer, two of fourteen where its forward is repeated."""
    regather, keep = (middle_stage_bytes(gathered_inputs=choice) for choice in ("regather", "keep"))
    assert keep * 10 == regather * 8
    again = {"granularity": "full"}
    regather, keep = (middle_stage_bytes(**again, gathered_inputs=choice) for choice in ("regather", "keep"))
    assert keep * 14 == regather * 12


def test_what_auto_comes_to_is_counted() -> None:
    recompute = {"granularity": "auto", "memory_gb": 0.0568}
    config = config_of({**LLAMA, "seq_length": 256}, tp=2, sp=True, recompute=recompute)
    chosen = resolve_recompute(config, parallel_sizes(config))
    assert chosen.recompute.granularity == "full", "or the step sends what it would send anyway"
    for pp in range(2):
        assert traffic(config, pp) == traffic(chosen, pp)
