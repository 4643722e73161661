"""A store of torch's that counts what it is asked."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

REQUESTS = ("set", "get", "add", "wait", "check", "compare_set", "delete_key", "num_keys")


class CountingStore(dist.Store):  # type: ignore[misc]
    """A store that counts what a rank asks it, from Python and from the backends of torch.

    Args:
        store: answers.
        requests: by name of the request; added to.
    """

    def __init__(self, store: dist.Store, requests: Counter[str]) -> None:
        super().__init__()
        for name in REQUESTS:
            setattr(self, name, self._counted(requests, name, getattr(store, name)))

    @staticmethod
    def _counted(requests: Counter[str], name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def request(*arguments: Any) -> Any:
            requests[name] += 1
            return answer(*arguments)

        return request
