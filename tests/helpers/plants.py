"""Trainings of a tiny model, right and with one mistake each, as a user would hand them to `ringflash verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ringflash import RingAttention, document_table, huggingface
from ringflash import loss as token_loss
from ringflash.attention.ring_of_hops import GradientExchange
from ringflash.comm.seeding import seeded
from ringflash.huggingface import attention_function
from ringflash.huggingface.options import ModelRing
from ringflash.sequence import layout
from ringflash.sequence.padding import IGNORE_INDEX
from ringflash.verify import Training
from tests.helpers.models import build

Group = dist.ProcessGroup | None


def right(group: Group, kind: str = "llama") -> Training:
    """Plant no mistake."""
    model = build(kind)
    huggingface.set_group(model, group)
    return Training(huggingface.CausalLMWithLoss(model, group))


def right_in_fp8(group: Group, impl: str = "reference_fp8") -> Training:
    """Attention in FP8, of which nothing is wrong."""
    model = build(head_dim=64)
    huggingface.set_group(model, group, impl=impl)
    return Training(huggingface.CausalLMWithLoss(model, group))


def hidden_local_positions_in_fp8(group: Group) -> Training:
    """Plant the mistake of `hidden_local_positions` in a training in FP8."""
    return hidden_local_positions(group, right_in_fp8(group))


def hidden_local_positions(group: Group, training: Training | None = None) -> Training:
    """The model rotates by the row of the shard, whatever the batch says."""
    training = training or right(group)
    training.module.get_submodule("model.model.rotary_emb").register_forward_pre_hook(_count_rows, with_kwargs=True)
    return training


def _count_rows(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"position_ids": torch.arange(args[0].shape[1])[None]}


def local_positions_in_batch(group: Group) -> Training:
    """The batch counts positions from the shard's start."""
    training = right(group)

    def prepare(*args: Any, **kwargs: Any) -> dict[str, Any]:
        batch = huggingface.prepare_batch(*args, **kwargs)
        return batch | {"position_ids": torch.arange(batch["input_ids"].shape[1])[None]}

    training.prepare = prepare
    return training


def unshifted(labels: Tensor) -> Tensor:
    """Each token's own label."""
    return torch.cat([torch.full_like(labels[:, :1], IGNORE_INDEX), labels[:, :-1]], 1)


def shift(labels: Tensor) -> Tensor:
    """The next row's label."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE_INDEX)], 1)


def labels_shifted_in_batch(group: Group) -> Training:
    """The batch shards the labels and shifts the shard."""
    training = right(group)

    def prepare(input_ids: Tensor, *, labels: Tensor, **kwargs: Any) -> dict[str, Any]:
        batch = huggingface.prepare_batch(input_ids, labels=labels, **kwargs)
        return batch | {"shift_labels": shift(layout.shard_sequence(unshifted(labels), group))}

    training.prepare = prepare
    return training


class ShiftsInside(nn.Module):
    """Shifts the labels in the forward, where the sequence is already cut."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, labels: Tensor, **batch: Any) -> Tensor:
        return self.inner(**batch, shift_labels=shift(labels))


def labels_shifted_in_module(group: Group) -> Training:
    """The module shifts the shard's labels."""

    def prepare(input_ids: Tensor, *, labels: Tensor, **kwargs: Any) -> dict[str, Any]:
        batch = huggingface.prepare_batch(input_ids, labels=labels, **kwargs)
        del batch["shift_labels"]
        return batch | {"labels": layout.shard_sequence(unshifted(labels), group)}

    return Training(ShiftsInside(right(group).module), prepare)


class OwnMean(nn.Module):
    """The loss is the mean over the rank's own tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, shift_labels: Tensor, num_items_in_batch: Tensor, **batch: Any) -> Tensor:
        hidden, weight, _ = self.inner.decode(**batch)
        return token_loss.cross_entropy(hidden, weight, shift_labels, group=None)


def mean_of_own_tokens(group: Group) -> Training:
    """Each rank divides by the number of its own labels."""
    return Training(OwnMean(right(group).module))


class Scaled(nn.Module):
    """The loss times a factor."""

    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, **batch: Any) -> Tensor:
        return self.inner(**batch) * self.factor


def without_cp_size(group: Group) -> Training:
    """The loss lacks the factor cp_size."""
    return Training(Scaled(right(group).module, 1 if group is None else 1 / group.size()))


def ddp(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """The module in DDP."""
    return nn.parallel.DistributedDataParallel(module, process_group=group)


def gradients_not_averaged(group: Group) -> Training:
    """DDP over a group of this rank only."""
    training = right(group)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    training.wrap = lambda module, _: ddp(module, alone)
    return training


def right_with_ddp(group: Group) -> Training:
    """DDP over the ring, on top of a right model."""
    training = right(group)
    training.wrap = ddp
    return training


def right_with_fsdp(group: Group) -> Training:
    """FSDP2 over the ring, layer by layer."""
    training = right(group)

    def shard(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in module.get_submodule("model.model.layers").children():
            fully_shard(layer, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    training.wrap = shard
    return training


def documents_dropped_in_ring(group: Group) -> Training:
    """The bounds get lost where the sequence is cut."""
    training = right(group)

    def prepare(input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        batch = huggingface.prepare_batch(input_ids, **kwargs)
        return batch if group is None else batch | {"cu_seqlens": None}

    training.prepare = prepare
    return training


def documents_dropped_everywhere(group: Group) -> Training:
    """The bounds never reach the model: cp=1 and cp=N agree on the wrong thing."""
    training = right(group)
    training.prepare = lambda input_ids, **kw: huggingface.prepare_batch(input_ids, **kw) | {"cu_seqlens": None}
    return training


def _with_bounds(change: Callable[[Tensor], Tensor]) -> Callable[[Group], Training]:
    """The model gets other bounds, at cp=1 as at cp=N."""

    def build(group: Group) -> Training:
        training = right(group)
        training.prepare = lambda input_ids, *, cu_seqlens, **kw: (
            huggingface.prepare_batch(input_ids, cu_seqlens=cu_seqlens, **kw) | {"cu_seqlens": change(cu_seqlens)}
        )
        return training

    return build


def _moved(bounds: Tensor) -> Tensor:
    return torch.cat([bounds[:1], bounds[1:-1] - 1, bounds[-1:]])


bounds_a_token_early = _with_bounds(_moved)
bounds_but_the_first_dropped = _with_bounds(lambda bounds: bounds[[0, 1, -1]])


def parents_dropped(group: Group) -> Training:
    """The batch is made of the bounds only."""
    training = right(group)
    prepare = training.prepare
    training.prepare = lambda input_ids, *, cu_seqlens, **kw: prepare(input_ids, cu_seqlens=cu_seqlens[0], **kw)
    return training


def siblings_in_a_chain(group: Group) -> Training:
    """The batch is made of a table in which each document continues the previous one."""
    training = right(group)
    prepare = training.prepare

    def other(input_ids: Tensor, *, cu_seqlens: Tensor, **kw: Any) -> dict[str, Any]:
        chain = torch.arange(-1, cu_seqlens.shape[1] - 2, dtype=torch.int32)
        return prepare(input_ids, cu_seqlens=document_table(cu_seqlens[0], chain), **kw)

    training.prepare = other
    return training


def other_weights_on_rank_1(group: Group) -> Training:
    """Rank 1 has other weights than the others, marked as if they should: the first forward refuses all other ones."""
    training = right(group)
    weight: Any = training.module.get_submodule("model.lm_head").weight
    weight.allreduce = False
    if group is not None and group.rank() == 1:
        weight.data *= 1.1
    return training


def other_step_on_rank_1(group: Group) -> Training:
    """The ranks come apart in the optimizer."""
    training = right(group)
    if group is not None and group.rank() == 1:
        training.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.02)
    return training


def other_last_norm(group: Group) -> Training:
    """The norm between the layers and the head is wrong."""
    training = right(group)
    if group is not None:
        training.module.get_submodule("model.model.norm").variance_epsilon = 1e-4
    return training


def dropout_over_a_mistake(group: Group) -> Training:
    """Keys' gradients are a tenth too large in one layer; evaluation, as from_pretrained leaves it, is right."""
    training = right(group)
    if group is not None:
        keys = training.module.get_submodule("model.model.layers.1.self_attn.k_proj")
        keys.register_full_backward_pre_hook(lambda module, grads: (1.1 * grads[0],))
    layer = training.module.get_submodule("model.model.layers.0")
    layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.5))
    training.module.eval()
    return training


def missed_layer(group: Group) -> Training:
    """Layer 1 was left with attention over the rank's own tokens."""
    training = right(group)
    layer: Any = training.module.get_submodule("model.model.layers.1.self_attn")
    layer._ringflash_inputs = copy(layer._ringflash_inputs)
    layer._ringflash_inputs.options = ModelRing(None)
    return training


def eval_loss_summed(group: Group) -> Training:
    """The evaluation adds the ranks' losses up."""
    training = right(group)

    def evaluate(module: nn.Module, batch: dict[str, Any]) -> Tensor:
        loss = module(**batch)
        if group is not None:
            dist.all_reduce(loss, group=group)
        return loss

    training.evaluate = evaluate
    return training


def other_weights(group: Group) -> Training:
    """The ranks of a ring draw other weights than one device."""
    training = right(group)
    if group is not None:
        nn.init.ones_(training.module.get_submodule("model.lm_head").weight)
    return training


def counts_averaged(group: Group) -> Training:
    """A layer counts tokens in a buffer, by the mean over the ranks in place of their sum."""
    training = right(group)
    layer: Any = training.module.get_submodule("model.model.layers.1.mlp")
    layer.register_buffer("counts", torch.zeros(2))

    def count(layer: Any, args: tuple[Tensor, ...]) -> None:
        counts = torch.stack([(args[0] > 0).sum(), (args[0] <= 0).sum()]).float()
        if group is not None:
            dist.all_reduce(counts, group=group)
            counts /= group.size()
        layer.counts += counts

    layer.register_forward_pre_hook(count)
    return training


class Bare(nn.Module):
    """One attention without a list of layers, transformers or a known head."""

    def __init__(self, group: Group, **mask: Any) -> None:
        super().__init__()
        self.group = group
        self.embedding = nn.Embedding(61, 32)
        self.qkv = nn.Linear(32, 96)
        self.attention = RingAttention(group, **mask)
        self.head = nn.Linear(32, 61, bias=False)

    def forward(self, input_ids: Tensor, shift_labels: Tensor, **rest: Any) -> Tensor:
        q, k, v = self.qkv(self.embedding(input_ids)).unflatten(-1, (6, 16)).split(2, 2)
        out = self.attention(q, k, v, rest["cu_seqlens"]).flatten(2)
        return token_loss.cross_entropy(out, self.head.weight, shift_labels, group=self.group)


def bare(group: Group, **mask: Any) -> Training:
    """A model of plain torch."""
    with seeded(0):
        return Training(Bare(group, **mask))


def batch_norm(group: Group) -> Training:
    """Tokens are normalised by all that the rank has."""
    training = bare(group)
    training.module.norm = nn.BatchNorm1d(32)
    return training


def bidirectional(group: Group) -> Training:
    """Its attention goes both ways."""
    return bare(group, causal=False)


def bidirectional_window(group: Group) -> Training:
    """And as far to both sides."""
    return bare(group, causal=False, window_size=(4, 4))


def bidirectional_on_own_shard(group: Group) -> Training:
    """Its attention was built without the group."""
    training = bidirectional(group)
    training.module.attention = RingAttention(None, causal=False)
    return training


def bidirectional_without_documents(group: Group) -> Training:
    """The bounds never reach the model."""
    training = bidirectional(group)
    training.prepare = lambda input_ids, **kw: huggingface.prepare_batch(input_ids, **kw) | {"cu_seqlens": None}
    return training


def bare_on_own_shard(group: Group) -> Training:
    """Its attention was built without the group."""
    training = bare(group)
    training.module.attention = RingAttention(None)
    return training


class HandWritten(nn.Module):
    """A layer that computes attention itself, to the rank's own tokens, before a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in self.qkv(hidden).unflatten(-1, (3, 4, 8)).unbind(2))
        scores = (q @ k.transpose(2, 3)).masked_fill(~torch.ones(q.shape[2], q.shape[2]).tril().bool(), float("-inf"))
        return hidden + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layered(nn.Module):
    """Such layers in a list."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group, self.embedding = group, nn.Embedding(61, 32)
        self.layers = nn.ModuleList([HandWritten(), HandWritten()])
        self.head = nn.Linear(32, 61, bias=False)

    def forward(self, input_ids: Tensor, shift_labels: Tensor, **rest: Any) -> Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return token_loss.cross_entropy(hidden, self.head.weight, shift_labels, group=self.group)


class Flat(HandWritten):
    """The same attention in the model itself."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group, self.embedding = group, nn.Embedding(61, 32)
        self.head = nn.Linear(32, 61, bias=False)

    def forward(self, input_ids: Tensor, shift_labels: Tensor, **rest: Any) -> Tensor:  # type: ignore[override]
        hidden = super().forward(self.embedding(input_ids))
        return token_loss.cross_entropy(hidden, self.head.weight, shift_labels, group=self.group)


def hand_written(group: Group) -> Training:
    """An attention outside any module of attention, which knows of no ring."""
    with seeded(0):
        return Training(Layered(group))


def hand_written_in_the_model(group: Group) -> Training:
    """The same without layers."""
    with seeded(0):
        return Training(Flat(group))


class Listed(Bare):
    """Its only list is one of embeddings, and the attention is outside it; documents are dropped, at cp=1 too."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.embeddings = nn.ModuleList([self.embedding])

    def forward(self, input_ids: Tensor, shift_labels: Tensor, **rest: Any) -> Tensor:
        return super().forward(input_ids, shift_labels, cu_seqlens=None)


def documents_dropped_beside_a_list(group: Group) -> Training:
    """The list of modules ends before the attention begins."""
    with seeded(0):
        return Training(Listed(group))


@contextmanager
def patched_attention(**changes: Any) -> Iterator[None]:
    """Attention over a ring is called with other arguments."""

    def attend(*args: Any, **options: Any) -> Any:
        return original(*args, **(options if options["options"].group is None else options | changes))

    original = attention_function.attend
    with mock.patch.object(attention_function, "attend", attend):
        yield


@contextmanager
def rounded_gradients() -> Iterator[None]:
    """dK and dV come home in bf16."""

    def finish(self: GradientExchange) -> Any:
        return tuple(x.bfloat16().to(x.dtype) for x in original(self))

    original = GradientExchange.finish_gradients
    with mock.patch.object(GradientExchange, "finish_gradients", finish):
        yield


@contextmanager
def other_windows(change: Callable[[tuple[int, int], int], tuple[int, int]]) -> Iterator[None]:
    """Attention is called with the window that `change` makes of its own and the layer's number, at cp=1 as at cp=N."""
    layers: list[int] = []

    def find_error(module: nn.Module, *args: Any) -> Exception | None:
        layers.append(module.layer_idx)  # type: ignore[arg-type]
        return check(module, *args)

    def attend(*args: Any, window_size: tuple[int, int], **rest: Any) -> Any:
        return original(*args, window_size=change(window_size, layers[-1]), **rest)

    original, check = attention_function.attend, attention_function.find_static_error
    with (
        mock.patch.object(attention_function, "attend", attend),
        mock.patch.object(attention_function, "find_static_error", find_error),
    ):
        yield


def other_chunks(bounds: Callable[..., Tensor]) -> Any:
    """Bounds of chunks and documents are what `bounds` makes of the documents, the size, the length and q."""
    return mock.patch.object(attention_function, "_chunk_bounds", bounds)


def _of_the_shard(cu_seqlens: Tensor | None, size: int, seqlen: int, q: Tensor) -> Tensor:
    """Every chunk of the zigzag layout begins anew; one device has it right."""
    part = q.shape[1] // 2 if q.shape[1] < seqlen else seqlen
    return _starts([(start, start + part) for start in range(0, seqlen, part)], size)


def _of_the_sequence(cu_seqlens: Tensor | None, size: int, seqlen: int, q: Tensor) -> Tensor:
    """Documents begin in the middle of chunks, as before transformers 5.23."""
    documents = [] if cu_seqlens is None else cu_seqlens.tolist()
    return torch.tensor(sorted({*documents, *range(0, seqlen, size), seqlen}), dtype=torch.int32)


def _starts(spans: list[tuple[int, int]], size: int) -> Tensor:
    starts = [x for start, stop in spans for x in range(start, stop, size)]
    return torch.tensor([*starts, spans[-1][1]], dtype=torch.int32)


PATCHES: dict[str, Callable[[], Any]] = {
    "local_shard_only": lambda: patched_attention(options=ModelRing(None)),
    "window_dropped": lambda: patched_attention(window_size=(-1, -1)),
    "rounded_gradients": rounded_gradients,
    "scale": lambda: patched_attention(softmax_scale=8**-0.5 * (1 + 1e-3)),
    "nearly_the_scale": lambda: patched_attention(softmax_scale=8**-0.5 * (1 + 5e-6)),
    "window_dropped_everywhere": lambda: other_windows(lambda window, layer: (-1, -1)),
    "window_one_more": lambda: other_windows(lambda window, layer: (window[0] + (window[0] >= 0), -1)),
    "window_one_less": lambda: other_windows(lambda window, layer: (window[0] - (window[0] >= 0), -1)),
    "window_on_the_wrong_layer": lambda: other_windows(lambda window, layer: (4 if layer == 0 else -1, -1)),
    "chunks_dropped": lambda: mock.patch.object(attention_function, "chunk_size", lambda module: None),
    "chunks_of_the_shard": lambda: other_chunks(_of_the_shard),
    "chunks_of_the_sequence": lambda: other_chunks(_of_the_sequence),
}
