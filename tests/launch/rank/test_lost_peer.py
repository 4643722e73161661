"""The words on a lost peer, from what backends say."""

import io
from types import SimpleNamespace
from typing import Any

import pytest

from triaxis.engine.errors import PeerLostError
from triaxis.launch.rank.lost_peer import naming_lost_peers

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (f"{GLOO}Connection closed by peer [10.77.0.2]:42121. This is", "Connection closed by peer [10.77.0.2]:42121"),
        (
            f"{GLOO}Read error [10.77.0.2]:31947: Connection reset by peer. This is",
            "[10.77.0.2]:31947: Connection reset by peer",
        ),
        (
            f"{GLOO}Read error [fe80::1]:31947: Connection reset by peer. This is",
            "[fe80::1]:31947: Connection reset by peer",
        ),
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
            "ncclRemoteError",
        ),
    ],
)
def test_the_address_of_a_lost_peer_is_told_wherever_a_backend_has_it(said: str, cause: str) -> None:
    topology: Any = SimpleNamespace(rank=0, device=SimpleNamespace(index=None))
    posts: Any = SimpleNamespace(read=lambda: SimpleNamespace(op=""))
    log = io.StringIO()
    with pytest.raises(PeerLostError) as error, naming_lost_peers(topology, posts, log, lambda: "go on"):
        raise RuntimeError(said)
    assert f" lost a peer: {cause}. The output of" in str(error.value) and said in log.getvalue()
