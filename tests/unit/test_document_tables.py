"""Every public function that takes cu_seqlens knows a table of documents that continue others, or refuses it by name.

CPU, one process. A function that is new, or takes cu_seqlens newly, needs an entry here.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch

import ringflash
from ringflash import huggingface, loss
from ringflash.attention.inputs import CallInputs
from ringflash.attention.options import CallOptions
from ringflash.attention.plan import plan_call
from ringflash.compat import ring_flash_attn
from ringflash.huggingface.attention_function import attend_in_chunks
from ringflash.huggingface.batch import within_documents
from ringflash.huggingface.flops import ChunkedAttention, MatmulSizes, training_flops
from ringflash.huggingface.validation import find_static_error
from ringflash.lightning.module import bucket_bounds, position_buckets
from ringflash.sequence.layout import read_documents
from ringflash.testing import dense
from tests.helpers import hybrids, models
from tests.two_sided.forests import Forest, images, rollouts
from tests.unit.test_house import modules

LENGTH = models.LENGTH
CHAIN = images([(5, 4), (3, 2), (6, 4)])  # text and spans
TREE = rollouts(7, [8, 3, 6])
PLAIN = Forest((7, 1, 16), (-1,) * 3, (False,) * 3)
GLOBAL = Forest(PLAIN.lengths, PLAIN.parents, PLAIN.bidirectional, left=4, global_tokens=(2,) * 3)
FORESTS = {"chain": CHAIN, "tree": TREE, "plain": PLAIN, "global tokens": GLOBAL}
BRANCHES = "documents that branch"


def refused(forest: Forest, text: str = "plain documents", kind: type = NotImplementedError) -> AbstractContextManager:
    """Expect a refusal unless the documents are plain, in which case a table is as good as bounds."""
    return nullcontext() if forest is PLAIN else pytest.raises(kind, match=text)


def check_attention(forest: Forest) -> None:
    q, k, v, dout = (torch.randn(1, LENGTH, 2, 16, dtype=torch.float64) for _ in range(4))
    window = {"window_size": (forest.left, -1)}
    want = dense.attention(q, k, v, dout, causal=True, cu_seqlens=forest.rows, **window)
    positions = torch.arange(LENGTH)
    seen = dense.visible(positions, positions, causal=True, cu_seqlens=forest.rows, **window)
    assert torch.equal(seen, forest.visible())
    by_module = ringflash.RingAttention(None, **window)(q, k, v, forest.table)
    for out in (ringflash.ring_attention(q, k, v, group=None, cu_seqlens=forest.table, **window), by_module):
        assert (out - want["out"]).abs().max() < 1e-12
    found = ringflash.explain(q, k, v, group=None, cu_seqlens=forest.table, **window)
    options = CallOptions(None, softmax_scale=1.0, window_left=forest.left)
    plan = plan_call(CallInputs(q, k, v, forest.table, options))
    assert found.num_visible == plan.mask.num_visible == forest.visible().sum()


def check_layouts(forest: Forest) -> None:
    held = [ringflash.local_positions(LENGTH, 2, rank, "balanced", forest.table) for rank in range(2)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(LENGTH))
    x = torch.randn(1, LENGTH)
    assert torch.equal(ringflash.shard_sequence(x, None, 1, "balanced", forest.table), x)
    assert torch.equal(ringflash.unshard_sequence(x, None, 1, "balanced", forest.table), x)
    broken = forest.table
    broken[1, 0] = 2
    with pytest.raises(ValueError, match="depth first"):
        ringflash.local_positions(LENGTH, 2, 0, "balanced", broken)


def check_padding(forest: Forest) -> None:
    found = ringflash.pad_sequence(models.tokens(), cu_seqlens=forest.table, cp_size=7)
    lengths, parents, both = forest.lengths, forest.parents, forest.bidirectional
    counts = forest.global_tokens and (*forest.global_tokens, 0)
    padded = Forest((*lengths, 4), (*parents, -1), (*both, False), global_tokens=counts)
    assert torch.equal(found.cu_seqlens, padded.table)


def check_labels(forest: Forest) -> None:
    """A token has the label that follows it in the path, unless it sees that."""
    tokens, document = (
        models.tokens(),
        torch.repeat_interleave(torch.arange(len(forest.lengths)), torch.tensor(forest.lengths)),
    )
    with nullcontext() if forest is not TREE else pytest.raises(ValueError, match=BRANCHES):
        labels = loss.shift_labels(tokens, forest.table)[0]
        seen = forest.visible()
        for t in range(LENGTH - 1):
            continues = document[t] == document[t + 1] or forest.parents[document[t + 1]] == document[t]
            assert labels[t] == (tokens[0, t + 1] if continues and not seen[t, t + 1] else -100)
        assert labels[-1] == -100


def check_positions(forest: Forest) -> None:
    assert torch.equal(within_documents(torch.arange(LENGTH), forest.table), forest.positions())
    buckets = position_buckets(torch.arange(LENGTH)[None], forest.table, LENGTH)[0]
    assert torch.equal(
        buckets, torch.bucketize(forest.positions(), torch.tensor(bucket_bounds(LENGTH)[1:]), right=True)
    )


def labels_of(forest: Forest) -> torch.Tensor:
    return loss.shift_labels(models.tokens(), None if forest is TREE else forest.table)


def batch_of(forest: Forest) -> dict[str, torch.Tensor]:
    return huggingface.prepare_batch(
        models.tokens(), group=None, labels=labels_of(forest), cu_seqlens=forest.table, position_ids="document"
    )


def check_batch(forest: Forest) -> None:
    tokens = models.tokens()
    batch = batch_of(forest)
    assert torch.equal(batch["position_ids"][0], forest.positions())
    with nullcontext() if forest is not TREE else pytest.raises(ValueError, match=BRANCHES):
        huggingface.prepare_batch(tokens, group=None, labels=labels_of(forest), cu_seqlens=forest.table)
    with nullcontext() if forest is not TREE else pytest.raises(ValueError, match=BRANCHES):
        huggingface.prepare_batch(tokens, group=None, cu_seqlens=forest.table, position_ids="document")


def check_padded_batch(forest: Forest) -> None:
    """Padding at the end of a document, also with all of the next one, is not seen by another one, or refused."""
    bounds = [*forest.cu_seqlens, LENGTH]
    for first, stop in [(b - 1, c) for a, b, c in zip(bounds, bounds[1:], bounds[2:], strict=False) for c in (b, c)]:
        mask = torch.ones(1, LENGTH, dtype=torch.int64)
        mask[0, first:stop] = 0
        seen = forest.visible()[mask[0] == 1, first:stop]
        both = torch.repeat_interleave(torch.tensor(forest.bidirectional), torch.tensor(forest.lengths))[first:stop]
        wrong = seen.any() or both.any()
        with pytest.raises(ValueError, match="attention_mask must be") if wrong else nullcontext():
            huggingface.prepare_batch(
                models.tokens(), group=None, labels=labels_of(forest).masked_fill(mask == 0, -100), attention_mask=mask,
                cu_seqlens=forest.table, position_ids="document",
            )  # fmt: skip


def check_model(forest: Forest) -> None:
    kind = "mistral_window" if forest is GLOBAL else "llama"  # with the window of the forest
    ring, plain, tokens = models.build(kind), models.build(kind, "sdpa"), models.tokens()
    huggingface.set_group(ring, None)
    batch = batch_of(forest)
    want = plain(
        tokens, position_ids=forest.positions()[None], attention_mask=forest.visible()[None, None], use_cache=False
    ).logits
    assert (ring(**batch).logits - want).abs().max() < 1e-10
    fused = huggingface.CausalLMWithLoss(ring, None)
    assert torch.isfinite(fused(**batch))
    if forest is TREE:  # positions that are not those of the path
        with pytest.raises(ValueError, match="position_ids must be"):
            ring(**{**batch, "position_ids": torch.arange(LENGTH)[None]})


def check_log_probs(forest: Forest) -> None:
    ring = models.build()
    huggingface.set_group(ring, None)
    model = huggingface.CausalLMWithLoss(ring, None)
    with nullcontext() if forest is not TREE else pytest.raises(ValueError, match=BRANCHES):
        found = ringflash.log_probs(model, models.tokens(), group=None, cu_seqlens=forest.table)
        assert torch.equal(found == 0, labels_of(forest) == -100)


def check_flops(forest: Forest) -> None:
    found = training_flops(MatmulSizes(0, 1), [None, 3], read_documents(forest.table))
    far, near = (replace(forest, left=left).visible().sum() for left in (-1, 3))
    assert found == 12 * (far + near)
    with refused(forest):
        training_flops(MatmulSizes(0, 1), [ChunkedAttention(4)], read_documents(forest.table))


def refused_by_model(forest: Forest, ring: torch.nn.Module, user: str) -> None:
    huggingface.set_group(ring, None)
    batch = batch_of(forest)
    with refused(forest, user):
        ring(**batch)


def check_chunks(forest: Forest) -> None:
    refused_by_model(forest, models.build("chunks"), "layers that attend in chunks")


def check_recurrences(forest: Forest) -> None:
    refused_by_model(forest, hybrids.build("qwen3_next"), "layers with recurrences or convolutions")


def check_names_of_others(forest: Forest) -> None:
    with refused(forest, "llama3_flash_attn_prepare_cu_seqlens"):
        ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(forest.table, True, 0, 2)


def check_spans(forest: Forest) -> None:
    with refused(forest, "span_documents"):
        ringflash.span_documents(torch.full((LENGTH,), -1), forest.table)


CHECKS: dict[str, Callable[[Forest], None]] = {
    name.removeprefix("check_"): check for name, check in sorted(globals().items()) if name.startswith("check_")
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
@pytest.mark.parametrize("forest", FORESTS.values(), ids=FORESTS.keys())
def test_a_table(forest: Forest, check: Callable[[Forest], None]) -> None:
    check(forest)


def test_no_other_shape() -> None:
    for shape in ((), (2, 4), (3, 4), (1, 4, 4)):
        with pytest.raises(ValueError, match="must be 1-D int32, or a table"):
            loss.shift_labels(models.tokens(), torch.zeros(shape, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"parents must have one entry for each document of cu_seqlens \(2,\)"):
        ringflash.document_table(torch.tensor([0, 3, 5]), torch.tensor([-1]))
    of_all, of_each = (
        ringflash.document_table(torch.tensor([0, 3, 5]), None, None, x) for x in (2, torch.tensor([2, 2]))
    )
    assert torch.equal(of_all, of_each)


def test_no_masks_or_fractions_in_place_of_numbers() -> None:
    """The False of a mask of a prefix would make one span of the text after it."""
    cu_seqlens = torch.tensor([0, 3, 5])
    for values in (torch.tensor([True, True, False]), torch.tensor([0.0, 0.0, -1.0])):
        with pytest.raises(ValueError, match="block_sequence_ids must be integers, got torch.*give -1 to text"):
            ringflash.span_documents(values)
        with pytest.raises(ValueError, match="parents must be integers, got torch"):
            ringflash.document_table(cu_seqlens, values[1:])
    with pytest.raises(ValueError, match="bidirectional must be bool, got torch.float32"):
        ringflash.document_table(cu_seqlens, bidirectional=torch.tensor([0.0, 0.4]))
    with pytest.raises(ValueError, match="bidirectional must be bool, got torch.int64"):
        ringflash.document_table(cu_seqlens, bidirectional=torch.tensor([-1, 0]))  # numbers of spans
    for count in (True, torch.tensor([True, False])):
        with pytest.raises(ValueError, match="global_tokens must be integers, got torch.bool"):
            ringflash.document_table(cu_seqlens, global_tokens=count)
    with pytest.raises(ValueError, match="global_tokens must fit torch.int32, got up to 4294967296"):
        ringflash.document_table(cu_seqlens.int(), global_tokens=2**32)


USED_ABOVE = {
    ringflash.ring_attention, ringflash.RingAttention.forward, ringflash.explain, plan_call, ringflash.local_positions,
    ringflash.shard_sequence, ringflash.unshard_sequence, ringflash.pad_sequence, ringflash.document_table,
    ringflash.span_documents, ringflash.log_probs, loss.shift_labels, within_documents, position_buckets,
    huggingface.prepare_batch, huggingface.CausalLMWithLoss.forward, huggingface.CausalLMWithLoss.decode,
    attend_in_chunks, find_static_error, read_documents, dense.attention, dense.visible,
    ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens,
}  # fmt: skip
PASS_ON = {  # to a function above
    "attention.api.attend", "attention.inputs.documents_of",
    "compat.ring_flash_attn.zigzag_ring_flash_attn_varlen_func", "compat.packed_bounds.scaled_bounds",
    "huggingface.forward_inputs.ForwardInputs.find_error", "huggingface.options.ModelRing.positions",
    "huggingface.batch.check_padding", "verify.target.default_prepare",  # tests/distributed/test_verify.py
    "compat.ring_flash_attn.update_ring_flash_attn_params", "wrap.interception.WrappedState.record",
    "huggingface.spans.LayerSpans.find_error", "huggingface.spans.spans_fit",  # tests/distributed/test_spans.py
    "huggingface.spans.without_directions", "sequence.layout.cut_sequence",  # of shard_sequence
    "sequence.mask.check_cu_seqlens", "sequence.mask.check_parents",  # get their integers
    "testing.ring.measure_ring",
}  # fmt: skip


def _functions() -> Iterator[str]:
    """Public functions and methods of the package with an argument cu_seqlens."""
    for name, tree in modules().items():
        for path, function in _definitions(tree, name.removeprefix("ringflash.")):
            arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
            if name.startswith("ringflash.") and "cu_seqlens" in {x.arg for x in arguments}:
                yield path


def _definitions(node: ast.AST, path: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
            if isinstance(child, ast.FunctionDef):
                yield f"{path}.{child.name}", child
            else:
                yield from _definitions(child, f"{path}.{child.name}")


def test_no_function_is_forgotten() -> None:
    known = {f"{x.__module__}.{x.__qualname__}".removeprefix("ringflash.") for x in map(inspect.unwrap, USED_ABOVE)}
    assert set(_functions()) - known == PASS_ON
