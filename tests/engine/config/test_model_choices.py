"""Records of activations, norms and positions: every name that the schema allows has one record."""

from collections.abc import Mapping
from typing import Any, get_args

import pytest

from triaxis.engine.config.values.model_choices import (
    ACTIVATIONS,
    NORMS,
    POSITIONS,
    ActivationName,
    NormName,
    PositionName,
)


@pytest.mark.parametrize(
    ("names", "records"),
    [(ActivationName, ACTIVATIONS), (NormName, NORMS), (PositionName, POSITIONS)],
    ids=["activations", "norms", "positions"],
)
def test_every_name_of_the_schema_has_one_record(names: Any, records: Mapping[str, Any]) -> None:
    assert get_args(names) == tuple(records)


def test_a_name_of_another_engine_means_one_activation() -> None:
    for is_gated in (True, False):
        kinds = [kind for kind in ACTIVATIONS.values() if kind.is_gated == is_gated]
        theirs = [name for kind in kinds for name in kind.hugging_face]
        assert len(theirs) == len(set(theirs))
    for records in (ACTIVATIONS, NORMS, POSITIONS):
        switches = [kind.megatron for kind in records.values() if kind.megatron is not None]
        assert len(switches) == len(set(switches))
