"""Exchanges texts over an axis, as bytes without pickle."""

import torch

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.numerics.precision import AGREEMENT_DTYPE

TEXT_BYTES = 4096
"""Default limit per member for `gather_text`, and fixed length for `announce`, in bytes: a path, or some lines of an error."""


def gather_text(
    axis: Axis, text: str, device: torch.device, purpose: str, most_bytes: int | None = TEXT_BYTES
) -> list[str]:
    """Gather every member's text on every member, in rank order.

    If all texts are empty, the call costs one number per member.

    Args:
        most_bytes: limit in UTF-8 bytes, to which longer texts are cut; None: no limit.
    """
    content = text.encode()[:most_bytes]
    length = torch.tensor([len(content)], dtype=AGREEMENT_DTYPE, device=device)
    longest = int(axis.all_reduce(length, purpose, op="max").wait().item())
    if not longest:
        return [""] * axis.size
    gathered = axis.all_gather(_bytes_to(content.ljust(longest, b"\0"), device), purpose).wait()
    flat = gathered.cpu().numpy().tobytes()
    return [_text(flat[start : start + longest]) for start in range(0, len(flat), longest)]


def announce(axis: Axis, text: str, device: torch.device, purpose: str) -> str:
    """Return the first member's text on every member.

    A text that is longer than `TEXT_BYTES` in UTF-8 is cut.
    """
    content = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    return _text(axis.broadcast(_bytes_to(content, device), 0, purpose).wait().cpu().numpy().tobytes())


def _bytes_to(content: bytes, device: torch.device) -> torch.Tensor:
    """Copy bytes to a device, as uint8 [len(content)]."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def _text(content: bytes) -> str:
    """Decode UTF-8 bytes and drop the zeros that pad them."""
    return content.rstrip(b"\0").decode(errors="ignore")
