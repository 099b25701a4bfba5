"""Trainings of a tiny model, right and with one mistake each, as a user would hand them to `ringflash verify`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ringflash import RingAttention, document_table, huggingface
from ringflash import loss as token_loss
from ringflash.attention.gradient_return import GradientReturn
from ringflash.comm.seeding import seeded
from ringflash.huggingface import attention_function
from ringflash.huggingface.options import ModelRing
from ringflash.sequence import layout
from ringflash.sequence.padding import IGNORE_INDEX
from ringflash.verify import Training
from tests.helpers.models import build

Group = dist.ProcessGroup | None
Plant = Callable[[Group], Training]
Batch = dict[str, Any]


def right(group: Group, kind: str = "llama") -> Training:
    model = build(kind)
    huggingface.set_group(model, group)
    return Training(huggingface.CausalLMWithLoss(model, group))


def right_in_fp8(group: Group, impl: str = "reference_fp8") -> Training:
    """Attention in FP8, of which nothing is wrong."""
    model = build(head_dim=64)
    huggingface.set_group(model, group, impl=impl)
    return Training(huggingface.CausalLMWithLoss(model, group))


def changed(change: Callable[[Training, Group], object], build: Callable[..., Training] = right) -> Plant:
    """A training after a change."""

    def plant(group: Group) -> Training:
        training = build(group)
        change(training, group)
        return training

    return plant


def on_the_ring(change: Callable[[Training], object], rank: int | None = None) -> Plant:
    """A training that is right on one device, and wrong on a ring, or on one rank of it."""
    return changed(lambda training, group: group is None or rank not in (None, group.rank()) or change(training))


def with_batch(change: Callable[[Batch, Group], Batch], build: Callable[..., Training] = right) -> Plant:
    """A training whose batch has other entries."""

    def replace_prepare(training: Training, group: Group) -> None:
        def prepare(*args: Any, **options: Any) -> Batch:
            batch = huggingface.prepare_batch(*args, **options)
            return batch | change(batch, group)

        training.prepare = prepare

    return changed(replace_prepare, build)


def with_documents(change: Callable[[Tensor], Tensor], build: Callable[..., Training] = right) -> Plant:
    """A training whose whole batch is made of other documents, at cp=1 as at cp=N."""

    def replace_prepare(training: Training, group: Group) -> None:
        prepare = training.prepare
        training.prepare = lambda ids, *, cu_seqlens, **rest: prepare(ids, cu_seqlens=change(cu_seqlens), **rest)

    return changed(replace_prepare, build)


class Around(nn.Module):
    """A module that is called otherwise: `call(inner, **batch)`."""

    def __init__(self, inner: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, **batch: Any) -> Tensor:
        return self.call(self.inner, **batch)


# Positions and labels.


def _rotate_by_row(training: Training, group: Group) -> None:
    """The model rotates by the row of the shard, whatever the batch says."""

    def count_rows(module: nn.Module, args: tuple[Tensor, ...], kwargs: Batch) -> Any:
        return args, kwargs | {"position_ids": torch.arange(args[0].shape[1])[None]}

    training.module.get_submodule("model.model.rotary_emb").register_forward_pre_hook(count_rows, with_kwargs=True)


hidden_local_positions = changed(_rotate_by_row)
hidden_local_positions_in_fp8 = changed(_rotate_by_row, right_in_fp8)
local_positions_in_batch = with_batch(lambda x, _: {"position_ids": torch.arange(x["input_ids"].shape[1])[None]})


def unshifted(labels: Tensor) -> Tensor:
    """Each token's own label."""
    return torch.cat([torch.full_like(labels[:, :1], IGNORE_INDEX), labels[:, :-1]], 1)


def shift(labels: Tensor) -> Tensor:
    """The next row's label."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE_INDEX)], 1)


def labels_shifted_in_batch(group: Group) -> Training:
    """The batch shards the labels and shifts the shard."""
    training = right(group)

    def prepare(input_ids: Tensor, *, labels: Tensor, **kwargs: Any) -> Batch:
        batch = huggingface.prepare_batch(input_ids, labels=labels, **kwargs)
        return batch | {"shift_labels": shift(layout.shard_sequence(unshifted(labels), group))}

    training.prepare = prepare
    return training


def labels_shifted_in_module(group: Group) -> Training:
    """The module shifts the labels in its forward, where the sequence is already cut."""

    def prepare(input_ids: Tensor, *, labels: Tensor, **kwargs: Any) -> Batch:
        batch = huggingface.prepare_batch(input_ids, labels=labels, **kwargs)
        del batch["shift_labels"]
        return batch | {"labels": layout.shard_sequence(unshifted(labels), group)}

    def shifting(inner: nn.Module, labels: Tensor, **batch: Any) -> Tensor:
        return inner(**batch, shift_labels=shift(labels))

    return Training(Around(right(group).module, shifting), prepare)


# The loss and its gradients.


def mean_of_own_tokens(group: Group) -> Training:
    """Each rank divides by the number of its own labels."""

    def own_mean(inner: Any, shift_labels: Tensor, num_items_in_batch: Tensor, **batch: Any) -> Tensor:
        hidden, weight, _ = inner.decode(**batch)
        return token_loss.cross_entropy(hidden, weight, shift_labels, group=None)

    return Training(Around(right(group).module, own_mean))


def without_cp_size(group: Group) -> Training:
    """The loss lacks the factor cp_size."""
    size = 1 if group is None else group.size()
    return Training(Around(right(group).module, lambda inner, **batch: inner(**batch) / size))


def eval_loss_summed(group: Group) -> Training:
    """The evaluation adds the ranks' losses up."""
    training = right(group)

    def evaluate(module: nn.Module, batch: Batch) -> Tensor:
        loss = module(**batch)
        if group is not None:
            dist.all_reduce(loss, group=group)
        return loss

    training.evaluate = evaluate
    return training


def ddp(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, process_group=group)


def fsdp(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """The module in FSDP2, layer by layer."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in module.get_submodule("model.model.layers").children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def gradients_not_averaged(group: Group) -> Training:
    """DDP over a group of this rank only."""
    training = right(group)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    training.wrap = lambda module, _: ddp(module, alone)
    return training


right_with_ddp = changed(lambda training, _: setattr(training, "wrap", ddp))
right_with_fsdp = changed(lambda training, _: setattr(training, "wrap", fsdp))


# Documents: lost where the sequence is cut, or nowhere known, so that cp=1 and cp=N agree on the wrong thing.

documents_dropped_in_ring = with_batch(lambda _, group: {} if group is None else {"cu_seqlens": None})
documents_dropped_everywhere = with_batch(lambda *_: {"cu_seqlens": None})
bounds_a_token_early = with_batch(
    lambda batch, _: {"cu_seqlens": batch["cu_seqlens"] - torch.tensor([0, 1, 1, 0], dtype=torch.int32)}
)
bounds_but_the_first_dropped = with_batch(lambda batch, _: {"cu_seqlens": batch["cu_seqlens"][[0, 1, -1]]})
parents_dropped = with_documents(lambda table: table[0])
global_tokens_dropped = with_documents(lambda table: table[0], partial(right, kind="mistral_window"))
siblings_in_a_chain = with_documents(  # each document continues the previous one
    lambda table: document_table(table[0], torch.arange(-1, table.shape[1] - 2, dtype=torch.int32))
)


# Other parameters, on the ring or on one rank.


def _part(training: Training, name: str) -> Any:
    return training.module.get_submodule(f"model.{name}")


other_weights = on_the_ring(lambda training: nn.init.ones_(_part(training, "lm_head").weight))
other_step_on_rank_1 = on_the_ring(lambda x: setattr(x, "optimizer", partial(torch.optim.SGD, lr=0.02)), rank=1)
other_last_norm = on_the_ring(lambda training: setattr(_part(training, "model.norm"), "variance_epsilon", 1e-4))


def other_weights_on_rank_1(group: Group) -> Training:
    """Rank 1 has other weights, marked as if they should differ: the first forward refuses all other ones."""
    training = right(group)
    weight = _part(training, "lm_head").weight
    weight.allreduce = False
    if group is not None and group.rank() == 1:
        weight.data *= 1.1
    return training


def dropout_over_a_mistake(group: Group) -> Training:
    """Keys' gradients are a tenth too large in one layer; evaluation, as from_pretrained leaves it, is right."""
    training = right(group)
    if group is not None:
        keys = _part(training, "model.layers.1.self_attn.k_proj")
        keys.register_full_backward_pre_hook(lambda module, grads: (1.1 * grads[0],))
    layer = _part(training, "model.layers.0")
    layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.5))
    training.module.eval()
    return training


def missed_layer(group: Group) -> Training:
    """Layer 1 was left with attention over the rank's own tokens."""
    training = right(group)
    layer = _part(training, "model.layers.1.self_attn")
    layer._ringflash_inputs = copy(layer._ringflash_inputs)
    layer._ringflash_inputs.options = ModelRing(None)
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


# Models of plain torch.


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


class Listed(Bare):
    """Its only list is one of embeddings, and the attention is outside it; documents are dropped, at cp=1 too."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.embeddings = nn.ModuleList([self.embedding])

    def forward(self, input_ids: Tensor, shift_labels: Tensor, **rest: Any) -> Tensor:
        return super().forward(input_ids, shift_labels, cu_seqlens=None)


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


def drawn(kind: Callable[..., nn.Module], **mask: Any) -> Plant:
    """A training of such a model."""

    def plant(group: Group) -> Training:
        with seeded(0):
            return Training(kind(group, **mask))

    return plant


def _attend_without_group(training: Training, group: Group, **mask: Any) -> None:
    training.module.attention = RingAttention(None, **mask)


bare = drawn(Bare)
bare_on_own_shard = changed(_attend_without_group, bare)
batch_norm = changed(lambda training, _: setattr(training.module, "norm", nn.BatchNorm1d(32)), bare)
bidirectional = drawn(Bare, causal=False)
bidirectional_window = drawn(Bare, causal=False, window_size=(4, 4))
bidirectional_on_own_shard = changed(partial(_attend_without_group, causal=False), bidirectional)
bidirectional_without_documents = with_batch(lambda *_: {"cu_seqlens": None}, bidirectional)
hand_written = drawn(Layered)
hand_written_in_the_model = drawn(Flat)
documents_dropped_beside_a_list = drawn(Listed)


# Attention of the models of transformers.


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

    def collect(self: GradientReturn, index: int, dk: Sequence[Tensor], dv: Sequence[Tensor], impl: str) -> None:
        original(self, index, dk, dv, impl)
        for x in (*dk, *dv):
            x.copy_(x.bfloat16())

    original = GradientReturn.collect
    with mock.patch.object(GradientReturn, "collect", collect):
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
