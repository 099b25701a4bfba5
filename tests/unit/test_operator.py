"""The registered operator: opcheck, one graph under compile, checkpointing, explain, refusals. CPU, one process."""

import operator
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import ringflash
from ringflash.attention import operators, plan
from ringflash.attention.api import attend
from ringflash.attention.inputs import CallInputs
from ringflash.attention.options import CallOptions
from ringflash.comm import call_numbers
from ringflash.memory.layers import attention_kept
from ringflash.sequence.layout import read_documents
from ringflash.testing import dense
from ringflash.testing.tolerance import assert_close
from ringflash_kernels import reference

TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

OPTIONS = (-1, -1, "zigzag", "reference", "auto", False)  # window, layout, ... , deterministic

TABLE = (0, 5, 9, 16), (-1, 0, 0, -1), (0, 1, 0, 0), (6, 6, 6, 0)


def draw(requires_grad: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of 16 tokens, 4 and 2 heads, fp64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 16, n, 8) for n in (4, 2, 2)]
    q, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return tuple(x.requires_grad_(requires_grad) for x in (q, k, v))  # type: ignore[return-value]


@pytest.mark.parametrize("size", ["", "1", "2"])
def test_process_that_has_not_joined_is_warned(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dist.group.WORLD` is None then, and every rank would silently attend to its own shard."""
    monkeypatch.setenv("WORLD_SIZE", size)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ringflash.ring_attention(*draw(), group=torch.distributed.group.WORLD)
    told = [warning for warning in found if "group is None, and this process, one of 2," in str(warning.message)]
    assert bool(told) == (size == "2")


@pytest.mark.parametrize("return_lse", [True, False])
@pytest.mark.parametrize(
    "cu_seqlens",
    [None, torch.tensor([0, 5, 16], dtype=torch.int32), torch.tensor(TABLE, dtype=torch.int32)],
    ids=["one", "packed", "table"],
)
def test_opcheck(return_lse: bool, cu_seqlens: torch.Tensor | None) -> None:
    options = ("", True, 0.25, *OPTIONS, 7, return_lse, 8)
    results = torch.library.opcheck(operators.ring_attention, (*draw(), cu_seqlens, *options), test_utils=TESTS)
    assert set(results.values()) == {"SUCCESS"}


def test_no_operator_is_put_into_graphs_of_inductor() -> None:
    """They would hold our buffers in their pools, and replay the number of one call (`mode="reduce-overhead"`)."""
    ours = [getattr(torch.ops.ringflash, name).default for name in ("ring_attention", "ring_attention_backward")]
    found = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ringflash::")]
    assert sorted(found) == sorted(op.name() for op in ours)
    assert all(torch.Tag.cudagraph_unsafe in op.tags for op in ours)


def test_tables_are_made_on_the_host_by_any_default() -> None:
    """A mode of the default device is off in an operator. Tables made on a GPU could be read before they are there."""
    qkv, bounds = draw(), torch.tensor([0, 7, 16], dtype=torch.int32)
    ones, found = torch.ones(1, 16, 4, 8, dtype=torch.float64), []
    for default in (torch.device("meta"), torch.device("cpu")):
        with default:
            out, lse, *_, record = operators.ring_attention(*qkv, bounds, "", True, 0.25, *OPTIONS, 7, True, 8)
            found.append([out, lse, record, *torch.autograd.grad(out, qkv, ones)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_have_the_strides_of_the_fake(dtype: torch.dtype) -> None:
    """inductor asserts what the operator's fake says, of heads-first q, k and v as well."""
    q, k, v = (x.detach().to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in draw())
    out, lse, *kept = operators.ring_attention(q, k, v, None, "", True, 0.25, *OPTIONS, 7, True, 8)
    grads = operators.ring_attention_backward(out, None, q, k, v, out, lse, *kept, "", True, 0.25, *OPTIONS)
    assert not q.is_contiguous() and all(grad.is_contiguous() for grad in grads)


def test_gradcheck() -> None:
    """Numerical derivatives, through out and lse."""

    def call(*inputs: torch.Tensor) -> Any:
        return ringflash.ring_attention(*inputs, group=None, window_size=(5, 0), return_lse=True)

    inputs = tuple(x[:, :6, :, :2].detach().requires_grad_() for x in draw())
    assert torch.autograd.gradcheck(call, inputs)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(32, 96, dtype=torch.float64)
        self.attention = ringflash.RingAttention(None, window_size=(7, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).unbind(2)
        return self.attention(q, k, v).flatten(2)


def results(layer: Layer, call: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and the gradient of the projection."""
    out = call(x)
    (dw,) = torch.autograd.grad(out.square().sum(), layer.project.weight)
    return {"out": out.detach(), "dw": dw}


def test_kernels_are_given_what_tma_can_address() -> None:
    """A contiguous view may begin anywhere: one of a flat buffer, or the gradient of a concatenation."""
    q, k, v = (torch.zeros(1 + x.numel(), dtype=torch.bfloat16)[1:].view(x.shape) for x in draw(False))
    for x in (q, k, v):
        x.requires_grad_()
    with (
        mock.patch.object(reference, "forward", wraps=reference.forward) as forward,
        mock.patch.object(reference, "begin_backward", wraps=reference.begin_backward) as backward,
    ):
        out = ringflash.ring_attention(q, k, v, group=None)
        torch.cat((out.new_zeros(1), out.flatten())).sum().backward()
    given = (*forward.call_args.args[:3], *backward.call_args.args[:2])
    assert q.data_ptr() % 16 and all(x.data_ptr() % 16 == 0 for x in given)


def forward_calls(**contexts: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """Count the runs of the kernel's forward in a checkpointed step; return the step's results, too.

    Its recomputation calls an operator that its forward does not, as ZeRO-3 does for parameters that it prefetched.
    """
    layer, x = Layer(), torch.ones(1, 16, 32, dtype=torch.float64).cumsum(1) / 16
    runs = []

    def gathered(x: torch.Tensor) -> torch.Tensor:
        runs.append(torch.zeros(1).cosh() if runs else None)
        return layer(x)

    def call(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(gathered, x, use_reentrant=False, **contexts)

    with mock.patch.object(reference, "forward", wraps=reference.forward) as kernel:
        got = results(layer, call, x)
    return kernel.call_count, got


def test_checkpointing_keeps_attention() -> None:
    kept, got = forward_calls(context_fn=attention_kept)
    recomputed, want = forward_calls()
    assert (kept, recomputed) == (1, 2)
    assert_close(got, want)


@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_profiler_sees_the_operators(with_gradients: bool) -> None:
    """Eager calls pass them by unseen."""
    q, k, v = draw()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with torch.set_grad_enabled(with_gradients):
            out = ringflash.ring_attention(q, k, v, group=None)
        if with_gradients:
            out.sum().backward()
    wanted = {"ringflash::ring_attention", *["ringflash::ring_attention_backward"] * with_gradients}
    assert wanted <= {event.name for event in profiler.events()}


@pytest.mark.parametrize("enabled", [False, True])
def test_torchs_deterministic_mode_is_followed(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    """In the backward also if it was switched on after the forward."""
    inputs = draw()
    before = ringflash.ring_attention(*inputs, group=None)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: enabled)
    with mock.patch.object(operators, "call_operator", wraps=operators.call_operator) as attend:
        ringflash.ring_attention(*draw(), group=None)
    assert CallOptions(None, *attend.call_args.args[5:13]).deterministic == enabled
    with mock.patch.object(reference, "begin_backward", wraps=reference.begin_backward) as backward:
        torch.autograd.grad(before.sum(), inputs)
    assert backward.call_args.kwargs["deterministic"] == enabled


def test_integers_of_numpy_are_integers() -> None:
    size = pytest.importorskip("numpy").int64(3)
    got, want = (gradients(draw(), window_size=(x, 0)) for x in (size, 3))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert ringflash.explain(*draw(), group=None, window_size=(size, 0)).num_visible == 16 * 4 - 6


def test_gradients_in_batches() -> None:
    """torch.autograd.functional.jacobian asks for them so."""
    inputs = draw()
    out = ringflash.ring_attention(*inputs, group=None)
    douts = torch.stack([torch.ones_like(out), torch.arange(float(out.numel())).view_as(out).to(out)])
    got = torch.autograd.grad(out, inputs, douts, retain_graph=True, is_grads_batched=True)
    for index, dout in enumerate(douts):
        want = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        assert all(torch.equal(a[index], b) for a, b in zip(got, want, strict=True))


def test_compiled_step_does_not_enter_the_operator() -> None:
    """A backward in it runs in Python, of a forward that did."""
    graphs: list[set[str]] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append({str(node.target) for node in module.graph.nodes if node.op == "call_function"})
        return module.forward

    inputs = draw()
    forward = torch.compiler.disable(lambda: ringflash.ring_attention(*inputs, group=None))
    torch.compile(lambda: forward().sum().backward(), backend=backend)()
    assert all(names <= {"ringflash.ring_attention_backward.default", str(operator.getitem)} for names in graphs)


def gradients(inputs: tuple[torch.Tensor, ...], **options: Any) -> tuple[torch.Tensor, ...]:
    out = ringflash.ring_attention(*inputs, group=None, **options)
    assert isinstance(out, torch.Tensor)
    return torch.autograd.grad(out.square().sum(), inputs)


def test_gradients_of_gradients_are_refused() -> None:
    """The backward's work in place would be recorded, and differentiated wrongly."""
    q, k, v = draw()
    out = ringflash.ring_attention(q, k, v, group=None)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(dq.sum(), q)


def test_autocast_does_not_reach_implementations() -> None:
    """It would round what is summed in fp32: eager products of upcast tensors are autocast like any others."""
    inputs = [x.to(torch.bfloat16) for x in draw(requires_grad=False)]

    def run(autocast: bool) -> list[torch.Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out, lse = ringflash.ring_attention(q, k, v, group=None, return_lse=True)
            return [out, lse, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_lse_is_returned_only_on_request() -> None:
    for dtype in (torch.float64, torch.float32):
        inputs = [x.to(dtype) for x in draw()]
        out, lse = ringflash.ring_attention(*inputs, group=None, return_lse=True)
        assert torch.equal(out, ringflash.ring_attention(*inputs, group=None))
        assert lse.shape == (1, 4, 16) and lse.dtype == dtype


def test_no_gradient_is_made_for_an_unused_output() -> None:
    q, k, v = draw()
    with mock.patch.object(operators, "_backward", side_effect=operators._backward) as backward:
        torch.autograd.grad(ringflash.ring_attention(q, k, v, group=None).sum(), (q, k, v))
    assert backward.call_args.args[2:] == (None, None, None)


@pytest.mark.parametrize("cu_seqlens", [None, (0, 16), (0, 1, 9, 16), TABLE])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_one_process_equals_dense(cu_seqlens: tuple[int, ...] | None, layout: str) -> None:
    q, k, v = draw()
    dout = torch.ones_like(q).cumsum(1) / 16
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
    out = ringflash.ring_attention(q, k, v, group=None, cu_seqlens=bounds, layout=layout)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    want = dense.attention(q.detach(), k, v, dout, causal=True, cu_seqlens=cu_seqlens)
    assert_close({"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}, want)


def test_explain_names_kernel_and_work() -> None:
    explained = ringflash.explain(*draw(), group=None)
    assert (explained.impl, explained.algorithm, explained.transport, explained.cp_size) == (
        "reference", "local", None, 1,
    )  # fmt: skip
    assert explained.num_visible == 16 * 17 // 2
    with pytest.raises(ValueError, match="cu_seqlens must be a tensor, got a list of 1"):
        ringflash.explain(*draw(), group=None, cu_seqlens=[torch.tensor([0, 16], dtype=torch.int32)])
    assert "flash2 cannot take dtype torch.float64" in explained.impl_reason
    assert "136 visible pairs on this rank" in str(explained)
    for options in ({"impl": "fp8"}, {"impl": "reference_fp8_all", "deterministic": True}):
        with pytest.raises((ValueError, NotImplementedError)) as refusal:
            ringflash.ring_attention(*draw(), group=None, **options)
        with pytest.raises(type(refusal.value), match=re.escape(str(refusal.value))):
            ringflash.explain(*draw(), group=None, **options)


def test_explain_is_about_the_tensors_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call copies tensors with strides that no kernel of ours can address, and then has the choice."""
    given = []
    monkeypatch.setattr(plan, "choose_impl", lambda *x: given.append([y.stride(-1) for y in x]) or ("reference", ""))
    inputs = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in draw(False)]
    ringflash.ring_attention(*inputs, group=None)
    ringflash.explain(*inputs, group=None)
    assert given == [[1, 1, 1]] * 2


def test_a_group_of_an_earlier_world_is_refused() -> None:
    """Another group may have its name."""
    groups: list[Any] = []
    for refusal in (
        nullcontext(),
        pytest.raises(RuntimeError, match="has been destroyed; give the layer or model a group that still exists"),
    ):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        groups.append(torch.distributed.new_group([0]))
        try:
            with refusal:
                attend(*draw(), CallOptions(groups[0]))
        finally:
            torch.distributed.destroy_process_group()
    assert groups[0].group_name == groups[1].group_name


def test_a_problem_of_an_earlier_world_is_forgotten() -> None:
    """The next world's checkpoints do not fail for it."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    group = torch.distributed.new_group([0])
    call_numbers._calls(group).problem = "calls were mixed"
    found = call_numbers.find_problem()
    torch.distributed.destroy_process_group()
    assert str(found) == "calls were mixed" and call_numbers.find_problem() is None


def test_ranks_compare_the_kind_of_their_device() -> None:
    """In a group for CPUs and GPUs, a rank with tensors on a CPU would wait for messages over gloo."""
    arguments = CallOptions(softmax_scale=1.0)
    found = []
    for device in ("cpu", "meta"):
        q = torch.empty(1, 8, 2, 16, device=device)
        made = plan.plan_call(CallInputs(q, q, q, None, arguments))
        found.append(plan.signature(q, q, made, width=1))
        assert plan.signature(q, q, made, width=1) is found[-1] and plan.signature(q, q, made, width=2)["width"] == 2
    assert {name for name, value in found[0].items() if value != found[1][name]} == {"device"}


def test_module_shows_its_options() -> None:
    assert "cp_size=1, causal=True, window_size=(7, -1), layout='zigzag'" in repr(Layer().attention)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_values_narrower_than_keys(compiled: bool) -> None:
    """out, lse and gradients of values of 5 features for keys of 8."""
    q, k, v = draw()
    narrow = v.detach()[..., :5].requires_grad_()
    attend = ringflash.ring_attention
    if compiled:
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    want, want_lse = ringflash.ring_attention(q, k, v, group=None, return_lse=True)
    (want[..., :5].sum() + want_lse.sum()).backward()
    wanted = [x.grad for x in (q, k)] + [v.grad[..., :5]]  # type: ignore[index]
    q.grad = k.grad = None
    out, lse = attend(q, k, narrow, group=None, return_lse=True)
    (out.sum() + lse.sum()).backward()
    assert out.shape == (*q.shape[:-1], 5) and torch.equal(out, want[..., :5]) and torch.equal(lse, want_lse)
    for got, expected in zip((q.grad, k.grad, narrow.grad), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def within_dual_level(f: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x))).tangent


TANGENTS = "carry no tangents, got forward-mode differentiation; use"
OUTSIDE = r"outside of torch\.func's transforms, got a call inside .*; use"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "derive, message",
    [
        (lambda f, x: torch.func.jvp(f, (x,), (x,))[1], TANGENTS),
        (lambda f, x: torch.func.grad(lambda y: f(y).sum())(x), OUTSIDE),
        (within_dual_level, TANGENTS),
    ],
    ids=["jvp", "grad", "dual_level"],
)
def test_transforms_are_refused(derive: Any, message: str, compiled: bool) -> None:
    """A custom operator drops tangents: the derivative was 0. torch wraps the error of compiled code."""

    def attention(x: torch.Tensor) -> torch.Tensor:
        return ringflash.ring_attention(x, x, x, group=None)

    run, error = partial(derive, attention), NotImplementedError
    if compiled:
        run, error, message = torch.compile(run, backend="aot_eager"), RuntimeError, f"{TANGENTS}|{OUTSIDE}"
    with pytest.raises(error, match=message):
        run(torch.ones(1, 8, 2, 16))


def test_only_shapes() -> None:
    """torch's own attention has them on the meta device."""
    q, k, v = (x.detach().to("meta").requires_grad_() for x in draw())
    out = ringflash.ring_attention(q, k, v, group=None)
    out.sum().backward()
    assert out.is_meta and out.shape == q.shape and k.grad is not None and k.grad.shape == k.shape


def test_bounds_made_in_inference_mode_are_read() -> None:
    """Lightning evaluates in it; such a tensor has no version by which a change of it could be seen."""
    with torch.inference_mode():
        bounds = torch.tensor([0, 5, 16], dtype=torch.int32)
    elsewhere = mock.Mock(wraps=bounds, device=torch.device("cuda", 0), is_inference=bounds.is_inference)
    type(elsewhere)._version = property(lambda self: bounds._version)
    assert read_documents(elsewhere).bounds == (0, 5, 16)


@pytest.mark.parametrize("way", ["eager", "profiled", "compiled", "checkpointed"])
def test_the_backward_has_the_bounds_of_its_forward(way: str) -> None:
    """A loader refills its buffer between them, through numpy, which torch's version counter does not see."""
    memory = pytest.importorskip("numpy").array([0, 5, 16], dtype="int32")
    inputs, bounds = draw(), torch.from_numpy(memory)

    def attend(*inputs: torch.Tensor) -> Any:
        return ringflash.ring_attention(*inputs, group=None, cu_seqlens=bounds)

    def kept(*inputs: torch.Tensor) -> Any:
        return checkpoint(attend, *inputs, use_reentrant=False, context_fn=attention_kept)

    ways = {"compiled": torch.compile(attend, backend="aot_eager"), "checkpointed": kept}
    cpu = [torch.profiler.ProfilerActivity.CPU]
    observed = torch.profiler.profile(activities=cpu) if way == "profiled" else nullcontext()
    want = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    with observed:
        loss = ways.get(way, attend)(*inputs).square().sum()
        memory[:] = [0, 11, 16]
        got = torch.autograd.grad(loss, inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_mixed_requires_grad_is_fine_without_autograd() -> None:
    q, k, v = draw()
    with torch.no_grad():
        assert ringflash.ring_attention(q, k.detach(), v, group=None).shape == q.shape


def attention(*qkv: torch.Tensor, **options: Any) -> object:
    return ringflash.ring_attention(*(qkv or draw()), **{"group": None} | options)


BOOL, GROUP = "Expected a value of type 'bool'", "group must be a ProcessGroup, a 1-D DeviceMesh or None, got str"
WINDOWS = {"(1,)": (1,), "(4096,)": 4096, "(4.0, 0)": (4.0, 0)}  # as shown: as given
REFUSED: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    # The operator would refuse these two, but eager calls pass by it: "no" was a causal mask.
    "causal": (RuntimeError, BOOL, partial(attention, causal="no")),
    "deterministic": (RuntimeError, BOOL, partial(attention, deterministic="no")),
    "group": (ValueError, f"{GROUP}; a rank", partial(attention, group="world")),
    "group of a module": (ValueError, GROUP, lambda: setattr(ringflash.RingAttention(None), "group", "cp")),
    "no dimensions": (ValueError, "q must be", partial(attention, *[torch.ones(())] * 3)),
    "no head_dim": (ValueError, "q must not be empty", partial(attention, *[torch.ones(1, 16, 2, 0)] * 3)),
    "policy": (
        ValueError, "policy must be 'changed', 'always' or 'never', got 'sometimes'; the default",
        partial(ringflash.set_agreement_check, "sometimes"),  # type: ignore[arg-type]
    ),
} | {
    f"window {shown} of a {kind}": (
        ValueError, rf"window_size must be \(left, right\).*got {re.escape(shown)}; a window",
        partial(call, window_size=window),
    )
    for shown, window in WINDOWS.items()
    for kind, call in (("call", attention), ("module", partial(ringflash.RingAttention, None)))
}  # fmt: skip


@pytest.mark.parametrize("error, message, call", REFUSED.values(), ids=REFUSED)
def test_refusals(error: type[Exception], message: str, call: Callable[[], object]) -> None:
    """All ranks' refusals are in tests/helpers/refusals.py."""
    with pytest.raises(error, match=message):
        call()
