"""Peak rates of GPUs, from data sheets, and their lookup by the name that a driver gives a GPU.

MFU divides by them, and a device file in `configs/devices` refers to a row here by its name.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeakRate:
    """A device's dense peak in TFLOP/s, and the number's source."""

    tflops: float
    source: str


# Dense bf16 = dense fp16 on tensor cores with fp32 accumulation. Data sheets often print the number with 2:4 sparsity; the table
# has half of that. The first entry whose words are all in the device name applies, so longer names come first.
_PEAKS: tuple[tuple[str, PeakRate], ...] = (
    ("GB300", PeakRate(2500.0, "NVIDIA GB300 NVL72 page: 5 PFLOPS sparse per GPU")),
    ("B300", PeakRate(2250.0, "NVIDIA HGX B300 page: 36 PFLOPS sparse per 8 GPUs")),
    ("GB200", PeakRate(2500.0, "NVIDIA GB200 NVL72 data sheet: 5 PFLOPS sparse per GPU")),
    ("B200", PeakRate(2250.0, "NVIDIA HGX B200 data sheet: 36 PFLOPS sparse per 8 GPUs")),
    ("GH200", PeakRate(989.4, "NVIDIA GH200 data sheet: 1,979 sparse")),
    ("H200 NVL", PeakRate(835.5, "NVIDIA H200 data sheet: 1,671 sparse")),
    ("H200", PeakRate(989.4, "NVIDIA H200 data sheet: 1,979 sparse")),
    ("H100 NVL", PeakRate(835.5, "NVIDIA H100 data sheet: 1,671 sparse")),
    ("H100 PCIe", PeakRate(756.5, "NVIDIA H100 data sheet: 1,513 sparse")),
    ("H100", PeakRate(989.4, "NVIDIA H100 architecture white paper, SXM5")),
    ("H800 PCIe", PeakRate(756.5, "NVIDIA H800 data sheet: 1,513 sparse")),
    ("H800", PeakRate(989.4, "NVIDIA H800 data sheet: 1,979 sparse")),
    ("A100", PeakRate(312.0, "NVIDIA A100 data sheet")),
    ("A800", PeakRate(312.0, "NVIDIA A800 data sheet")),
    ("A30", PeakRate(165.0, "NVIDIA A30 data sheet")),
    ("A40", PeakRate(149.7, "NVIDIA A40 data sheet")),
    ("L40S", PeakRate(362.05, "NVIDIA L40S data sheet")),
    ("L40", PeakRate(181.05, "NVIDIA L40 data sheet")),
    ("L4", PeakRate(121.0, "NVIDIA L4 data sheet: 242 sparse")),
    ("RTX 4090", PeakRate(165.2, "NVIDIA Ada architecture white paper, fp32 accumulation")),
    ("RTX 3090", PeakRate(71.0, "NVIDIA GA102 architecture white paper, fp32 accumulation")),
)


_WITHOUT_FP8 = ("A100", "A800", "A30", "A40", "RTX 3090")
"""Devices in the table that are older than Ada and Hopper. By the same sources, all others run FP8 at twice the bf16 rate."""


def known_peak(device_name: str, dtype: str, *, in_fp8: bool = False) -> PeakRate | None:
    """Look up a device's peak and the number's source. None if it is unknown.

    Args:
        device_name: name from `torch.cuda.get_device_name` ("NVIDIA H100 80GB HBM3"). A MIG slice has no entry.
        dtype: GEMM dtype, as in `precision.dtype`. fp32 and float64 have no entry.
        in_fp8: whether to look up the FP8 peak, for a run with FP8 GEMMs. Devices without FP8 have no entry.
    """
    words = device_name.replace("-", " ").split()
    if dtype not in ("bf16", "fp16") or "MIG" in words:
        return None
    # Whole words: an A10G is no A10. The form factor may stand apart from the model ("NVIDIA H100 80GB PCIe").
    found = next(((name, peak) for name, peak in _PEAKS if all(word in words for word in name.split())), None)
    if found is None or (in_fp8 and found[0] in _WITHOUT_FP8):
        return None
    peak = found[1]
    return PeakRate(2 * peak.tflops, f"FP8, twice the bf16 of {peak.source}") if in_fp8 else peak
