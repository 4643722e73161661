"""Classes of CUDA kernels by name and launcher, and the breakdown of a trace that is written here by hand."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_contenders.kernel_classes import CLASSES, breakdown, classify

pytestmark = pytest.mark.slow

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3> >"
NAMES = {
    "GEMM": [
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT",
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(...)",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nt",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, true, false>(...)",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false, false, ...>",
        "triton_tem_fused_mm_3",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t, ...> >",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>(pytorch_flash::Flash_bwd_params)",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, ...>(pytorch_flash::Flash_bwd_params)",
        "cudnn_generated_fort_native_sdpa_sm90_knob_7_64x128x128_4x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_128x64x128_4x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 11, false, true>(...)",
    ],
    "norm": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(...)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16, float, 32u, 1u, ...>(...)",
        "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<c10::BFloat16, float>(...)",
        "triton_per_fused_add_native_layer_norm_4",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2",
    ],
    "elementwise": [
        ELEMENTWISE,
        "void at::native::unrolled_elementwise_kernel<at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)::{lambda()#1}>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, ...> > >(...)",
        "triton_poi_fused_gelu_7",
        "triton_poi_fused__to_copy_mul_silu_1",
        "triton_red_fused_sum_9",
    ],
    "cross-entropy": [
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, LogSoftMaxForwardEpilogue>(...)",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(...)",
        "triton_red_fused__log_softmax__log_softmax_backward_data_nll_loss_backward_0",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, ...> >(...)",
    ],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    ],
    "copy": [
        "Memcpy HtoD (Pinned -> Device)",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<at::native::OpaqueType<2u>, ...>(...)",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::direct_copy_kernel_cuda(...)> >",
    ],
    "other": [
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>"
    ],
}


def test_every_class_has_its_names() -> None:
    assert set(NAMES) == set(CLASSES)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_a_kernel_by_its_name(kind: str, name: str) -> None:
    assert classify(name) == kind


@pytest.mark.parametrize(
    ("name", "launchers", "kind"),
    [
        (ELEMENTWISE, ["_VocabParallelCrossEntropyBackward"], "cross-entropy"),
        (ELEMENTWISE, ["autograd::engine::evaluate_function: _RMSNormBackward"], "norm"),
        (ELEMENTWISE, ["aten::_scaled_dot_product_flash_attention_backward"], "attention"),
        (ELEMENTWISE, ["optimizer"], "optimizer"),
        ("void dot_kernel<float, 128, 0, cublasDotParams<...> >(...)", ["optimizer"], "optimizer"),
        ("ncclDevKernel_AllGather_RING_LL(...)", ["optimizer"], "communication"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT", ["_VocabParallelCrossEntropy"], "GEMM"),
        (ELEMENTWISE, ["aten::add", "forward_backward"], "elementwise"),
    ],
)
def test_a_kernel_by_what_launched_it(name: str, launchers: list[str], kind: str) -> None:
    assert classify(name, launchers) == kind


def kernel(name: str, start: float, duration: float, correlation: int, category: str = "kernel") -> dict[str, Any]:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "tid": 7, "ts": start, "dur": duration, "args": args}


def launch(time: float, correlation: int, thread: int = 1) -> dict[str, Any]:
    return kernel("cudaLaunchKernel", time, 1.0, correlation, "cuda_runtime") | {"tid": thread}


def span(name: str, start: float, duration: float, category: str = "cpu_op", thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": start, "dur": duration}


def test_breakdown(tmp_path: Path) -> None:
    """Two steps; 1 ms of GEMM and 0.5 ms of others each, of which 0.25 ms run beside the GEMM; a step takes 2 ms."""
    events = [
        {"ph": "M", "name": "process_name"},
        span("optimizer", 3000.0, 100.0, "user_annotation"),
        span("_CrossEntropyBackward", 100.0, 100.0, thread=2),
        span("_CrossEntropyBackward", 110.0, 20.0, thread=2),
        kernel("nvjet_tst_of_the_step_before", 0.0, 5000.0, 3),
        *(launch(time, number) for time, number in ((10.0, 5), (3050.0, 8))),
        launch(150.0, 6, thread=2),
        launch(150.0, 7, thread=3),
        kernel("nvjet_tst_128x128", 1000.0, 2000.0, 5),
        kernel(ELEMENTWISE, 2500.0, 500.0, 6),
        kernel(ELEMENTWISE, 3000.0, 200.0, 7),
        kernel("Memset (Device)", 3200.0, 100.0, 8, "gpu_memset"),
        kernel("indexSelectSmallIndex", 3300.0, 200.0, 9),
    ]
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = breakdown(path, num_steps=2, step_seconds=2e-3)
    assert found is not None
    expected = {"GEMM": 1.0, "cross-entropy": 0.25, "elementwise": 0.1, "optimizer": 0.05, "other": 0.1, "idle": 0.75}
    assert found["milliseconds"] == pytest.approx(dict.fromkeys(CLASSES, 0.0) | expected)
    assert found["kernels"]["GEMM"] == 0.5 and found["unknown"] == pytest.approx({"indexSelectSmallIndex": 0.1})


def test_a_trace_of_a_cpu_has_no_kernels(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [span("aten::mm", 0.0, 5.0)]}))
    assert breakdown(path, 2, 1e-3) is None
