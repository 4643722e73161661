"""What would go on with wrong numbers on the stub ends the process, and is named."""

import re
import subprocess
import sys

import pytest

WITHOUT_MODES = "from torch.utils._python_dispatch import _disable_current_modes as without"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            [WITHOUT_MODES, "x = torch.ones(8, device='cuda')", "with without(): x + 1"],
            r"cuda stub: a kernel outside of an operator that gives its values: .*CUDAFunctor",
        ),
        (
            [WITHOUT_MODES, "x = torch.ones(8, 8, device='cuda')", "with without(): x @ x"],
            "cuda stub: a kernel outside of an operator that gives its values: cublas",
        ),
        (["torch.linalg.qr(torch.ones(8, 8, device='cuda'))"], "cuda stub: not implemented: cusolver"),
        (
            [
                "from tests.cuda_stub.operators import FORMS",
                "del FORMS['aten._fused_rms_norm_backward.default']",
                "x = torch.ones(8, 8, device='cuda', requires_grad=True)",
                "try: torch.nn.functional.rms_norm(x, (8,)).sum().backward()",
                "except Exception: print('swallowed')",
            ],
            "cuda stub: aten._fused_rms_norm_backward.default has no value",
        ),
    ],
    ids=["kernel", "product", "function", "operator"],
)
def test_is_named(lines: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(["import torch", *lines, "print('went on')"])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and not done.stdout, done.stdout
    assert re.search(said, done.stderr), done.stderr
