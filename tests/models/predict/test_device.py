"""Devices: their files, and the rates that are read off them."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.errors import ConfigError
from triaxis.engine.program import ROOT
from triaxis.models.predict.device import DEVICES, device_names, load_device

H100 = load_device("H100-SXM-80GB")


@pytest.mark.parametrize("name", device_names())
def test_every_device_reads_and_no_rate_is_above_its_peak(name: str) -> None:
    device = load_device(name)
    assert device.name == name and len(device.digest) == 12
    for row in device.gemm:
        assert 0 < row.tflops < device.peak_tflops[row.dtype] and row.source
    for attention in device.attention:
        assert 0 < attention.tflops < device.peak_tflops["bf16"] and attention.source


def test_a_file_has_the_peaks_of_its_gpu_or_its_own(tmp_path: Path) -> None:
    assert load_device("B200-SXM-180GB").peak_tflops == {"bf16": 2250, "fp16": 2250, "fp8": 4500}
    assert "fp8" not in load_device("A100-SXM-80GB").peak_tflops
    shipped = (ROOT / DEVICES / "A100-SXM-80GB.yaml").read_text()
    mine, unknown = tmp_path / "mine.yaml", tmp_path / "unknown.yaml"
    mine.write_text(shipped.replace("gpu: A100", "peak_tflops: {bf16: 300.0, fp16: 300.0}"))
    assert load_device(mine).peak_tflops == {"bf16": 300, "fp16": 300}
    unknown.write_text(shipped.replace("gpu: A100", "gpu: A1000"))
    with pytest.raises(ConfigError, match=r"gpu = A1000 has no known peak rates. Give `peak_tflops`"):
        load_device(unknown)


def test_measured_products_come_out_as_measured() -> None:
    """A row's rate is met where few others have its FLOPs, less what constant load takes."""
    largest = max(H100.gemm, key=lambda row: (row.dtype == "bf16", row.m * row.n * row.k))
    rate = H100.gemm_tflops(largest.m, largest.n, largest.k)
    assert rate == pytest.approx(largest.tflops * H100.sustained_share, rel=1e-6)
    close = [row for row in H100.gemm if row.dtype == "bf16" and row.m * row.n * row.k >= 2**33]
    for row in close:
        assert H100.gemm_tflops(row.m, row.n, row.k) == pytest.approx(row.tflops * H100.sustained_share, rel=0.12)


def test_small_and_narrow_products_are_slower() -> None:
    assert H100.gemm_tflops(512, 512, 512) < H100.gemm_tflops(2048, 2048, 2048) < H100.gemm_tflops(8192, 8192, 8192)
    assert H100.gemm_tflops(8192, 8192, 128) < 0.7 * H100.gemm_tflops(8192, 8192, 4096)


def test_one_tile_more_than_a_wave_costs_a_wave() -> None:
    """132 processors: 11 x 12 tiles of 128 x 256 fill one wave, another row of tiles does not fit."""
    one, two = (H100.gemm_seconds(128 * rows, 256 * 12, 8192) for rows in (11, 12))
    assert two > 1.25 * one


@given(
    m=st.integers(64, 2**16), n=st.integers(64, 2**15), k=st.integers(64, 2**15), dtype=st.sampled_from(["bf16", "fp8"])
)
def test_no_product_beats_peak_or_memory(m: int, n: int, k: int, dtype: str) -> None:
    seconds = H100.gemm_seconds(m, n, k, dtype)
    assert seconds >= 2 * m * n * k / (H100.peak_tflops[dtype] * 1e12)
    assert seconds >= 2 * m * n / H100.stream_bytes_per_s


def test_attention_is_faster_for_longer_rows_and_by_newer_kernels() -> None:
    """Rows are bursts, as those of products are: constant load takes the same share of both."""
    rate, share = H100.attention_tflops, H100.sustained_share
    assert rate("cudnn", "forward", 128, 2048) == 484 * share
    assert 484 * share < rate("cudnn", "forward", 128, 3000) < 518 * share
    assert rate("fa2", "forward", 128, 8192) < rate("cudnn", "forward", 128, 8192) < rate("fa3", "forward", 128, 8192)
    assert 2 * rate("fa1_triton", "backward", 128, 2048) < rate("fa2", "backward", 128, 2048)


def test_a_kernel_without_rows_is_as_fast_as_the_newest_older_one() -> None:
    a100 = load_device("A100-SXM-80GB")
    assert a100.attention_tflops("cudnn", "forward", 128, 16384) == 227, "flash attention 2"
    assert a100.attention_tflops("fa1_triton", "forward", 128, 16384) == 91
    assert a100.attention_tflops("somebody's", "forward", 128, 16384) == 91, "the slowest"


def test_filling_a_tile_takes_as_long_in_fp8() -> None:
    """So a narrow product gains less from fp8 than a deep one."""
    narrow, deep = (H100.gemm_tflops(8192, 8192, k, "fp8") / H100.gemm_tflops(8192, 8192, k) for k in (512, 16384))
    assert narrow < 0.93 * deep


def test_a_collective_slows_what_hides_it() -> None:
    assert H100.beyond(1.0, 0.0) == 1.0
    assert H100.beyond(1.0, 10.0) == pytest.approx(24 / 132)
    assert H100.beyond(3.0, 1.0) == pytest.approx(2 + 24 / 132)


def test_unknown_devices_and_dtypes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="H100-SXM-80GB"):
        load_device("H1000")
    with pytest.raises(ConfigError, match="A100-SXM-80GB has no rate for fp8"):
        load_device("A100-SXM-80GB").gemm_seconds(128, 128, 128, "fp8")
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\n")
    with pytest.raises(ConfigError, match="memory_gb"):
        load_device(path)


def test_state_from_host_memory_takes_what_the_update_does_not_hide() -> None:
    rate = H100.host_gb_per_s * 1e9
    seconds = H100.streamed_seconds(1.0, 2 * rate, 0.1 * rate)
    assert seconds == pytest.approx(2.0 + 0.1 + 0.1), "the bus is slower: all copies in, and the last piece out"
    assert H100.streamed_seconds(3.0, 2 * rate, 0.1 * rate) == pytest.approx(3.0 + 0.1 + 0.1)
    alone = replace(H100, copies_beside=False).streamed_seconds(1.0, 2 * rate, 0.1 * rate)
    assert alone == pytest.approx(1.0 + 2.0 + 2.0), "a CPU copies in turn"


def test_a_device_without_measured_rates_reaches_another_s_shares_of_peak() -> None:
    b200 = load_device("B200-SXM-180GB")
    assert b200.rates_as == H100.name and len(b200.gemm) == len(H100.gemm)
    for mine, measured in zip(b200.gemm, H100.gemm, strict=True):
        shares = [
            row.tflops / peak[row.dtype] for row, peak in ((mine, b200.peak_tflops), (measured, H100.peak_tflops))
        ]
        assert shares[0] == pytest.approx(shares[1])
    faster = b200.peak_tflops["bf16"] / H100.peak_tflops["bf16"]
    assert b200.attention_tflops("cudnn", "forward", 128, 2048) == pytest.approx(faster * 484 * b200.sustained_share)
