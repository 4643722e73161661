"""The lines of a rank's log without the time at the head of each."""

import re

_TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ", re.MULTILINE)


def without_times(log: str) -> str:
    return _TIME.sub("", log)
