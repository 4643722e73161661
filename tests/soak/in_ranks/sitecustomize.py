"""Python imports this by itself at the start of each process of a soak; in a rank it installs what disturbs it from within.

The product knows nothing of it. In launchers, and where no soak is, nothing happens.
"""

import os

if "RANK" in os.environ and "TRIAXIS_SOAK" in os.environ:
    from tests.soak.disturb import install

    install(os.environ["TRIAXIS_SOAK"], int(os.environ["RANK"]))
