"""benchmarks/device_time.py on made-up traces: kinds of kernels, time shared out, parts that add up. No GPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.device_time import PRECEDENCE, Span, kind_of, longest_kernels, parts_of_step, shared_out, step_spans


def event(name: str, begin: float, end: float, category: str = "kernel") -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("forward_kernel", "attention"),
        ("backward_keys", "attention"),
        ("forward_fp8", "attention"),
        ("quantise_records", "attention"),
        ("_key_operands", "attention"),
        ("_preprocess", "attention"),
        ("_collect", "attention"),
        ("_publish", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>", "attention"),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "linear"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "linear"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16>", "linear"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "linear"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        ("void c10d::symmetric_memory::barrier_kernel(unsigned int**)", "communication"),
        ("Memcpy DtoH (Device -> Pinned)", "host copies"),
        ("Memcpy HtoD (Pinned -> Device)", "host copies"),
        ("Memcpy DtoD (Device -> Device)", "other"),
        ("_rms_norm_backward_kernel", "other"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_optimizer_is_what_follows_the_mark() -> None:
    """But for communication; a kernel that began before belongs to the backward."""
    found = step_spans(
        [
            event("ringflash::backward_section0", 0, 9, "user_annotation"),
            event("void at::native::multi_tensor_apply_kernel<Adam>", 8, 9),
            event("void spin_kernel(long)", 5, 6),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 7, 8),
            event("nvjet_tst", 1, 5.5),
        ]
    )
    assert found == [
        Span("linear", 1, 5.5), Span("optimizer", 5, 6), Span("communication", 7, 8), Span("optimizer", 8, 9)
    ]  # fmt: skip


spans = st.lists(
    st.builds(
        lambda kind, begin, length: Span(kind, begin, begin + length), st.sampled_from(PRECEDENCE), st.integers(0, 60),
        st.integers(0, 20),
    ),
    max_size=12,
)  # fmt: skip


@given(spans)
def test_each_moment_goes_to_the_first_kind_that_runs(found: list[Span]) -> None:
    """Against a count of unit intervals, each on its own; together it is the time in which anything runs."""
    want = dict.fromkeys(PRECEDENCE, 0)
    for moment in range(80):
        running = {span.kind for span in found if span.begin <= moment < span.end}
        for kind in PRECEDENCE:
            if kind in running:
                want[kind] += 1
                break
    assert shared_out(found) == want
    assert sum(parts_of_step(found, 1.0).values()) == pytest.approx(1.0)


def test_longest_kernels_are_named_with_their_calls() -> None:
    events = [event("nvjet_a", 0, 2e6), event("nvjet_a", 3e6, 4e6), event("_collect", 0, 1e6), event("x", 0, 1)]
    assert longest_kernels(events, 2) == [
        {"kernel": "nvjet_a", "kind": "linear", "seconds": 3.0, "calls": 2},
        {"kernel": "_collect", "kind": "attention", "seconds": 1.0, "calls": 1},
    ]
