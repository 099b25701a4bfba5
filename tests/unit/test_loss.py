"""The chunked cross-entropy against torch's in fp64, its scale, its memory, its refusals. CPU, one process."""

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringflash.loss import count_tokens, cross_entropy, score_tokens, token_log_probs
from ringflash.testing.tolerance import assert_close

VOCAB = 37


def draw(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden (2, 11, 8), weight, labels with some -100."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 11, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (2, 11), generator=generator)
    labels[0, 3], labels[1, -4:] = -100, -100
    return hidden, weight, labels


def results(loss: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
    return {"loss": loss.detach()[None, None], "dhidden": dhidden, "dweight": dweight}


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = (hidden @ weight.T).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels.flatten())


@pytest.mark.parametrize(
    ("chunk_tokens", "logit_scale", "factor"),
    [*((size, 1.0, 1) for size in (None, 1, 4, 22, 1000)), (None, 1.0, 3), (None, 0.3, 1), (4, 0.3, 1)],
)
def test_equals_torch(chunk_tokens: int | None, logit_scale: float, factor: int) -> None:
    """Also of models that scale their logits, and if more is computed from the loss."""
    hidden, weight, labels = draw()
    options = {"chunk_tokens": chunk_tokens, "logit_scale": logit_scale}
    ours = factor * cross_entropy(hidden, weight, labels, group=None, **options)
    want = factor * plain(logit_scale * hidden, weight, labels)
    assert_close(results(ours, hidden, weight), results(want, hidden, weight))


def precisions(dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """The inputs in the low dtype twice, for us and for torch, and the same numbers in fp64."""
    low, baseline = draw(dtype), draw(dtype)
    return low, baseline, (*(x.detach().double().requires_grad_() for x in low[:2]), low[2])


def test_bf16_within_what_torch_loses() -> None:
    low, baseline, exact = precisions(torch.bfloat16)
    loss = results(cross_entropy(*low, group=None, chunk_tokens=5), *low[:2])
    values = with_gradients(token_log_probs(*low, chunk_tokens=5), "both", *low[:2])
    assert loss["loss"].dtype == values["log_probs"].dtype == torch.float32
    assert_close(loss, *(results(plain(*x), *x[:2]) for x in (exact, baseline)))
    assert_close(values, *(with_gradients(plain_log_probs(*x), "both", *x[:2]) for x in (exact, baseline)))


def test_fp16_gradients_are_scaled_before_rounding() -> None:
    """The probabilities divided by the count are below what fp16 holds; times 65536 they are not."""
    low, baseline, exact = precisions(torch.float16)
    factor = 65536 * 17 / 2**20  # labelled tokens here, and in the whole sequence
    assert int(count_tokens(low[2], None)) == 17
    ours = results(65536 * cross_entropy(*low, group=None, num_tokens=2**20), *low[:2])
    assert_close(
        ours, results(factor * plain(*exact), *exact[:2]), results(factor * plain(*baseline).float(), *baseline[:2])
    )


def test_weight_gradient_is_summed_in_fp32() -> None:
    """In bf16 a sum of equal terms stays at 256 of them."""
    hidden, weight, labels = (x[:1, :1].repeat(1, 1024, 1) if x.dim() == 3 else x for x in draw(torch.bfloat16))
    labels = labels[:1, :1].expand(1, 1024)
    losses = (cross_entropy(hidden, weight, labels, group=None, chunk_tokens=n) for n in (1, 1024))
    one, other = (torch.autograd.grad(loss, weight)[0] for loss in losses)
    assert (one - other).abs().max() <= torch.finfo(torch.bfloat16).eps * other.abs().max()


@pytest.mark.parametrize("num_tokens", [None, 0])
def test_no_labelled_token(num_tokens: int | None) -> None:
    """A step of padding only: a loss of 0, not of 0 / 0."""
    hidden, weight, labels = draw()
    loss = cross_entropy(hidden, weight, torch.full_like(labels, -100), group=None, num_tokens=num_tokens)
    assert all(not x.any() for x in results(loss, hidden, weight).values())


def test_large_vocabulary_takes_a_token_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringflash.loss.CHUNK_LOGITS", VOCAB - 1)
    hidden, weight, labels = draw()
    ours = results(cross_entropy(hidden, weight, labels, group=None), hidden, weight)
    assert_close(ours, results(plain(hidden, weight, labels), hidden, weight))
    assert torch.equal(score_tokens(hidden, weight, labels)[0], score_tokens(hidden, weight, labels, chunk_tokens=1)[0])


def plain_log_probs(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Log-probabilities and entropies by torch, from all logits."""
    log_p, labelled = (hidden @ weight.T).log_softmax(-1), labels != -100
    chosen = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return chosen.where(labelled, 0.0), -(log_p.exp() * log_p).sum(-1).where(labelled, 0.0)


def with_gradients(values: tuple[torch.Tensor, ...], used: str, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """log_probs and entropy, and the gradients of an objective of those that are used, token by token."""
    named = dict(zip(("log_probs", "entropy"), values, strict=True))
    factors = torch.randn(values[0].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    objective = sum((x * factors.to(x.dtype)).sum() for name, x in named.items() if used in (name, "both"))
    grads = torch.autograd.grad(objective, inputs)
    return {name: x.detach() for name, x in named.items()} | dict(zip(("dhidden", "dweight"), grads, strict=True))


@pytest.mark.parametrize("used", ["log_probs", "entropy", "both"])
@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_log_probs_and_entropy_equal_torch(used: str, chunk_tokens: int | None) -> None:
    hidden, weight, labels = draw()
    ours = token_log_probs(hidden, weight, labels, chunk_tokens=chunk_tokens, logit_scale=0.3)
    want = with_gradients(plain_log_probs(0.3 * hidden, weight, labels), used, hidden, weight)
    assert_close(with_gradients(ours, used, hidden, weight), want)
    objective = sum(x.sum() for x in token_log_probs(hidden.detach(), weight, labels))
    (got,) = torch.autograd.grad(objective, weight)
    (wanted,) = torch.autograd.grad(sum(x.sum() for x in plain_log_probs(hidden, weight, labels)), weight)
    assert_close({"dweight": got}, {"dweight": wanted})
    with pytest.raises(ValueError, match="labels must have the shape of hidden"):
        token_log_probs(hidden, weight, labels[:, :-1])


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_frozen_inputs(frozen: str) -> None:
    hidden, weight, labels = draw()
    inputs = {"hidden": hidden, "weight": weight}
    for name in ("hidden", "weight") if frozen == "both" else (frozen,):
        inputs[name] = inputs[name].detach()
    loss = cross_entropy(**inputs, labels=labels, group=None)
    assert loss.requires_grad == (frozen != "both")
    trained = {"hidden": weight, "weight": hidden}.get(frozen)
    if trained is not None:
        (got,) = torch.autograd.grad(loss, trained)
        (want,) = torch.autograd.grad(plain(hidden, weight, labels), trained)
        assert_close({"grad": got[None]}, {"grad": want[None]})


class Alive(TorchDispatchMode):
    """The most elements of any tensor an operation returns, and the most bytes alive of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.bytes = self.now = 0
        self.storages: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
            self.hold(result.untyped_storage())
        return result

    def hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.storages:
            return
        self.storages[key] = size
        self.now += size
        self.bytes = max(self.bytes, self.now)
        weakref.finalize(storage, self.drop, key)

    def drop(self, key: int) -> None:
        self.now -= self.storages.pop(key)


@pytest.mark.parametrize("chunks", [1, 2, 32])
def test_never_holds_more_logits_than_a_chunk(chunks: int) -> None:
    """Ten bytes of each in bf16: themselves, in fp32, and the logarithms of their probabilities. Of no chunk before."""
    chunk, vocab = 64, 4096
    num_tokens = chunk * chunks
    hidden = torch.randn(1, num_tokens, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, 8, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(1, num_tokens, dtype=torch.int64)
    with Alive() as alive:
        loss = cross_entropy(hidden, weight, labels, group=None, num_tokens=num_tokens, chunk_tokens=chunk)
    assert alive.elements == chunk * vocab
    gradients = weight.numel() * 4 + hidden.numel() * 2
    assert 10 * chunk * vocab < alive.bytes < 11 * chunk * vocab + gradients
    with alive:
        loss.backward()
    assert alive.elements == chunk * vocab


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": torch.ones(VOCAB, 4)}, r"weight must be \(vocab_size, 8\), got \(37, 4\); pass"),
        ({"labels": torch.ones(2, 4)}, r"labels must have the shape of hidden .*\(2, 11\), got \(2, 4\); shard"),
        # -1, which is no limit elsewhere, would leave out every token: a loss of 0, and no gradients
        *(({"chunk_tokens": x}, f"chunk_tokens must be 1 or more, got {x}; leave it out") for x in (0, -1)),
        *(
            ({"num_tokens": x}, f"num_tokens must be {message}")
            for x, message in (
                (-1, "0 or more, got -1; leave it out"),
                (torch.tensor(-1), "0 or more, got -1; leave it out"),
                (17.0, "an integer or a tensor of one, got 17.0; leave it out"),
                (float("nan"), "an .*, got nan"),
                (torch.tensor(17.0), r"an .*, got torch.float32 of shape \(\)"),
                (True, "an .*, got True"),
                (torch.tensor(True), "an .*, got torch.bool"),
                (torch.tensor([8, 9]), r"an .*, got torch.int64 of shape \(2,\)"),
                ("17", "an .*, got '17'"),
            )
        ),
    ],
    ids=str,
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    hidden, weight, labels = draw()
    with pytest.raises(ValueError, match=message):
        cross_entropy(**{"hidden": hidden, "weight": weight, "labels": labels, "group": None} | change)
    if "chunk_tokens" in change:
        with pytest.raises(ValueError, match=message):
            score_tokens(hidden, weight, labels, **change)


@pytest.mark.parametrize("call", [partial(cross_entropy, group=None), token_log_probs])
def test_a_logit_scale_to_learn_is_refused(call: Any) -> None:
    """It would get no gradient. Without gradients it is a number like any other."""
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="logit_scale must be a number, got a tensor that requires grad, .*; multiply"):
        call(*draw(), logit_scale=scale)
    with torch.no_grad():
        got, want = (call(*draw(), logit_scale=factor) for factor in (scale, 2.0))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("num_tokens", [34, np.int64(34), torch.tensor(34), torch.tensor([34], dtype=torch.int32)])
def test_every_form_of_a_count_is_the_same_number(num_tokens: Any) -> None:
    assert torch.equal(*(cross_entropy(*draw(), group=None, num_tokens=n) for n in (num_tokens, 34)))


@pytest.mark.parametrize("label", [-1, -7, VOCAB])
@pytest.mark.parametrize("call", [partial(cross_entropy, group=None), score_tokens])
def test_a_label_out_of_range_is_an_error(call: Any, label: int) -> None:
    """Not the loss of some other token."""
    hidden, weight, labels = draw()
    labels[1, 2] = label
    with pytest.raises((RuntimeError, IndexError), match="out of (bounds|range)|is out"):
        call(hidden, weight, labels)


def test_second_derivatives_are_refused() -> None:
    """The gradients are constants: what else depends on the inputs would be missing, as from a penalty on them."""
    hidden, weight, labels = draw()
    for loss in (cross_entropy(hidden, weight, labels, group=None), *token_log_probs(hidden, weight, labels)):
        with pytest.raises(NotImplementedError, match="create_graph must be False, got True; second"):
            torch.autograd.grad(loss.sum(), hidden, create_graph=True)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_a_sharded_weight_is_refused(mesh: DeviceMesh) -> None:
    hidden, weight, labels = draw()
    sharded = distribute_tensor(weight.detach(), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="weight must be whole, got a sharded DTensor; call"):
        cross_entropy(hidden, sharded, labels, group=None)


@pytest.mark.parametrize("chunk", [1, 7, None])
def test_scores_are_those_of_whole_logits(chunk: int | None) -> None:
    """Loss of each token, and whether its label is the most likely; nothing where there is no label."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 20, 8, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    logits = hidden @ weight.T
    labels = torch.where(torch.rand(2, 20) < 0.5, logits.argmax(-1), torch.randint(0, 11, (2, 20)))
    labels[:, ::3] = -100
    losses, correct = score_tokens(hidden, weight, labels, chunk_tokens=chunk)
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 20)
    assert torch.allclose(losses, want, rtol=1e-12, atol=0) and (losses[:, ::3] == 0).all()
    assert torch.equal(correct, logits.argmax(-1) == labels) and 0 < correct.sum() < correct.numel()
    assert not losses.requires_grad
