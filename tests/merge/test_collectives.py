"""Which kernels and host ops are communication, by the argument first and by name second."""

import pytest

from chakra_capture.merge.collectives import host_collective, kernel_collective


@pytest.mark.parametrize(
    ("name", "stated", "expected"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", None, "all_reduce"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)", None, "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", None, "reduce_scatter"),
        ("ncclDevKernel_Broadcast_RING_LL(x)", None, "broadcast"),
        ("ncclSymkDevKernel_AllReduce(x)", None, "all_reduce"),
        ("ncclDevKernel_SendRecv(x)", None, "send_recv"),
        ("ncclDevKernel_SendRecv(x)", "_all_to_all_base", "all_to_all"),
        ("ncclDevKernel_Generic(x)", "allreduce", "all_reduce"),
        ("ncclDevKernel_Generic(x)", None, "other"),
        ("void vllm::cross_device_reduce_1stage<float, 2>(vllm::RankData*)", None, "all_reduce"),
        ("void two_shot_all_reduce_kernel<c10::BFloat16>(x)", None, "all_reduce"),
        ("void multimem_one_shot_all_reduce_kernel<float, 16>(x)", None, "all_reduce"),
        ("void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<float>(x)", None, "all_reduce"),
        ("multimem_all_gather_kernel(x)", None, "all_gather"),
        ("void deep_ep::internode_ll::dispatch<true, 7168>(x)", None, "all_to_all"),
        ("void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(x)", None, "all_to_all"),
        ("void deep_ep::intranode::notify_dispatch<8>(x)", None, "other"),
        ("nvshmem_float_alltoall_on_stream_kernel(x)", None, "all_to_all"),
        ("nvshmemi_barrier_on_stream_kernel(x)", None, "barrier"),
        ("oneccl_allgatherv_small(x)", None, "all_gather"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<x>(y)", None, "all_reduce"),
        ("mscclKernel_Sum_float_Simple_false(x)", None, "other"),
        # "nccl" inside a name proves nothing, nor does a collective's name.
        ("void at::native::all_reduce_like_kernel<float>(x)", None, None),
        ("triton_poi_fused_all_gather_into_tensor_0", None, None),
        ("cutlass_gemm_with_nccl_layout", None, None),
        ("void at::native::reduce_kernel<512, 1>(x)", None, None),
        ("ampere_sgemm_32x32", None, None),
    ],
)
def test_kernel(name: str, stated: str | None, expected: str | None) -> None:
    assert kernel_collective(name, stated) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gloo:all_reduce", "all_reduce"),
        ("c10d::allreduce_", "all_reduce"),
        ("c10d::_allgather_base_", "all_gather"),
        ("nccl:broadcast", "broadcast"),
        ("nccl:send 0->1", "send"),
        ("c10d::recv_any_source_", "recv"),
        ("c10d::reduce_scatter_tensor_coalesced_", "reduce_scatter"),
        ("nccl:coalesced", None),
        ("c10d::wait", None),
        ("c10d::monitored_barrier_", "barrier"),
        ("gloo:recvAnySource", "recv"),
        ("xccl:all_reduce", "all_reduce"),
        ("oneccl_bindings_for_pytorch::alltoall_base", "all_to_all"),
        ("aten::all_reduce", None),
        ("reduce", None),
    ],
)
def test_host_op(name: str, expected: str | None) -> None:
    assert host_collective(name) == expected
