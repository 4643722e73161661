"""Variables that another launcher has set are taken, refused or cleared, and each is named."""

import pytest

from triaxis.engine.errors import TopologyError
from triaxis.launch.start.other_launchers import without_other_launchers

OPERATOR = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "auto",
    "PET_MASTER_ADDR": "job-0",
    "PET_MASTER_PORT": "23456",
}


def test_an_operators_variables_are_taken_under_our_names() -> None:
    """Kubeflow sets WORLD_SIZE and RANK of its pods beside them."""
    found = without_other_launchers(
        OPERATOR | {"PET_RDZV_BACKEND": "c10d", "WORLD_SIZE": "2", "RANK": "1", "HOME": "/"}
    )
    assert found.variables == {
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "job-0",
        "MASTER_PORT": "23456",
        "HOME": "/",
    }
    assert set(found.removed) == {*OPERATOR, "PET_RDZV_BACKEND", "WORLD_SIZE", "RANK"}
    taken, cleared = found.notes
    assert taken == "taken from PET_*: NNODES=2 NODE_RANK=1 MASTER_ADDR=job-0 MASTER_PORT=23456"
    assert cleared == "cleared: PET_NPROC_PER_NODE, PET_RDZV_BACKEND, RANK, WORLD_SIZE"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, r"WORLD_SIZE=2 and RANK=0: another launcher has started"),
        ({"RANK": "1"}, "WORLD_SIZE=unset and RANK=1"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE=4"),
        ({"PMI_SIZE": "4", "PMI_RANK": "2"}, "PMI_SIZE=4"),
        ({"NODE_RANK": "1", "MASTER_ADDR": "a"}, "NODE_RANK=1 without NNODES"),
        ({"PET_NODE_RANK": "1"}, "NODE_RANK=1 without NNODES"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4: a run here has a fixed number"),
        ({"PET_NNODES": "2", "NNODES": "4"}, "NNODES=4 and PET_NNODES=2 contradict each other"),
    ],
)
def test_what_would_train_several_times_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        without_other_launchers(variables)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
        {"NODE_RANK": "0"},
        {"PET_NNODES": "2:2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a"},
    ],
)
def test_what_is_clear_is_accepted(variables: dict[str, str]) -> None:
    left = without_other_launchers(variables).variables
    assert not [name for name in left if name.startswith("PET_") or name in ("RANK", "WORLD_SIZE")]
