"""Check and raise the open-file limit for a launcher and its ranks.

ulimit -Sn 64       raised as far as the hard limit allows, up to MOST
ulimit -n 24        refused, because a rank would fail in the middle of its start
"""

import resource

from triaxis.engine.errors import TriaxisError

LEAST = 256
"""Open files that one rank may need: gloo's connections to its peers, logs, a corpus, a checkpoint."""

MOST = 65_536
"""Highest limit to set, because some programs loop over all descriptors below their limit."""


def allow_open_files() -> None:
    """Raise this process's soft limit, which ranks inherit.

    Raises:
        TriaxisError: the hard limit is below `LEAST`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if allowed < LEAST:
        raise TriaxisError(
            f"{hard} files may be open at a time here (ulimit -Hn); a rank needs up to {LEAST}: connections to its peers, logs, "
            f"data. Ranks would fail while they connect. Raise the limit: `ulimit -n {LEAST}`, LimitNOFILE= of a service, "
            "--ulimit nofile= of a container."
        )
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
