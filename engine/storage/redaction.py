"""Removes the environment's secrets from everything that is written.

    WANDB_API_KEY=0123abcd.., HF_TOKEN=hf_..    ->    [redacted] in every line, event, metric, page and recorded configuration

All text output is redacted here; `blotted_streams` covers Python's prints. Direct writes of C++ libraries to descriptors 1 and 2
are not covered.
"""

import errno
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO, cast
from urllib.parse import quote

from triaxis.engine.errors import OutputError

_NAMES = re.compile(
    r"(?!(OLD)?PWD$)(?!.*_(FILE|PATH|DIR|SOCK)$)"
    r".*((API_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|WEBHOOK)S?(?![A-Z])"
    r"|(?<![A-Z])(KEY|PASS|PAT|PWD|DSN|AUTH|BEARER)(?![A-Z])).*",
    re.IGNORECASE,
)
"""Names of variables that hold a secret: the name contains one of these words and does not name a file."""

_SHAPES = re.compile(
    r"(?<=://)[^\s/@:'\"]*:[^\s/@'\"]+(?=@)"  # user and password in an address
    r"|(?<=hooks\.slack\.com/services/)[\w/]+|(?<=/api/webhooks/)[\w/-]+"
    r"|\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|wandb_v1_\w{20,}"
    r"|sk-(?:proj-|ant-[a-z0-9]+-)?\w{32,}|AKIA[0-9A-Z]{16}|xox[abeprs]-[\w-]{20,})"
)
"""Secrets recognised by their form, whichever variable or file they come from."""

_PASSWORD = re.compile(r"://[^\s/@:]*:(.+)@")
"""The password in a variable's value that is an address; in database and proxy addresses it may contain any character."""

LEAST_LENGTH = 8
"""Minimum characters in a secret; shorter values are not redacted, because other text may contain them by chance."""

REDACTED = "[redacted]"


def without_secrets(text: str, variables: Mapping[str, str] | None = None) -> str:
    """Redact values of variables like HF_TOKEN, and texts in the format of a known API key.

    Passwords in addresses (scheme://user:password@host) are redacted too. Variables' values shorter than `LEAST_LENGTH` stay.

    Args:
        text: text to be written.
        variables: environment; None: this process's own.
    """
    for form in sorted(_forms(variables), key=len, reverse=True):
        text = text.replace(form, REDACTED)
    return _SHAPES.sub(REDACTED, text)


def why_secret(text: str, variables: Mapping[str, str] | None = None) -> str:
    """Explain, without repeating the secret, why a text cannot name a folder or file.

    The explanation is "" if the text holds no secret.

    Args:
        text: proposed name.
        variables: environment; None: this process's own.
    """
    holders = [f"the secret of {name}" for form, name in _forms(variables).items() if form in text]
    holders += ["what has the form of a secret"] if _SHAPES.search(text) else []
    if not holders:
        return ""
    return (
        f"it holds {holders[0]}: the folder's name would show it, and a command that is printed without it would name another "
        "folder. Choose another name"
    )


def _forms(variables: Mapping[str, str] | None) -> dict[str, str]:
    """Map each spelling of a secret to the name of its variable. Spellings are plain, JSON, repr and URL-quoted."""
    given = os.environ if variables is None else variables
    secrets = [(value, name) for name, value in given.items() if _NAMES.fullmatch(name)]
    secrets += [(found[1], name) for name, value in given.items() if (found := _PASSWORD.search(value))]
    return {
        form: name
        for secret, name in secrets
        if len(secret) >= LEAST_LENGTH
        for form in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, safe=""))
    }


def tree_without_secrets(value: Any, variables: Mapping[str, str] | None = None) -> Any:
    """Redact all texts and mapping keys in a JSON-like tree. Tuples become lists."""
    if isinstance(value, str):
        return without_secrets(value, variables)
    if isinstance(value, Mapping):
        return {
            without_secrets(key, variables) if isinstance(key, str) else key: tree_without_secrets(item, variables)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [tree_without_secrets(item, variables) for item in value]
    return value


def unwritable(what: str, error: OSError) -> OutputError:
    """Return an error that explains why `what` cannot be written."""
    return OutputError(
        f"{what} cannot be written: {error.strerror}. What the command prints would be lost. Make room, or send it to another "
        "place."
    )


class _Blotted:
    """A wrapper around `stream` that redacts secrets in written text."""

    def __init__(self, stream: TextIO, what: str) -> None:
        self._stream = stream
        self._what = what

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._explained():
            shown = without_secrets(text)
            try:
                self._stream.write(shown)
            except UnicodeEncodeError as error:  # a terminal with another encoding, or a name that is not UTF-8
                self._stream.write(shown.encode(error.encoding, "backslashreplace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        with self._explained():
            self._stream.flush()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._what:
                return
            if error.errno == errno.EPIPE:
                raise
            raise unwritable(self._what, error) from None


def blotted(stream: TextIO, what: str = "") -> TextIO:
    """Wrap a stream so that secrets in text written to it are redacted.

    Args:
        stream: an open text stream.
        what: the stream's name in the OutputError that a failed write raises; a closed pipe raises BrokenPipeError. "": failed
            writes are ignored.
    """
    return cast(TextIO, _Blotted(stream, what))


@contextmanager
def blotted_streams() -> Iterator[None]:
    """Redact secrets in this process's prints to `sys.stdout` and `sys.stderr` within the block.

    Raises:
        OutputError: standard output cannot be written; errors on standard error are ignored.
        BrokenPipeError: the reader of standard output has gone.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = blotted(sys.stdout, "standard output"), blotted(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
