"""Let Linux kill a rank whose launcher has ended, since the rank would keep its GPU.

torchrun ends its ranks unless it is itself killed with SIGKILL.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""prctl(2) option: the signal that the kernel sends to this process when its parent is gone."""


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends. Does nothing on systems without prctl."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended between the two calls, so no signal will come
        os.kill(os.getpid(), signal.SIGKILL)
