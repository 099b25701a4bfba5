"""Automodel's sharder, loss, hooks and mesh with recipes/trainers/automodel_ring.py, against one process in fp64.

Its recipe class builds models on GPUs only, so it is not run: the model is sharded by FSDP2 as there, and put on the
ring by the function that the recipe calls.
"""

from __future__ import annotations

import automodel_ring
import torch
import torch.distributed as dist
from checks import assert_gradients_equal, assert_refused
from nemo_automodel.components.distributed.context_parallel import ContextParallelSharder
from nemo_automodel.components.distributed.context_parallel.utils import attach_context_parallel_hooks
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "vocab_size": 97,
}  # fmt: skip
LENGTHS = [37, 50, 22]
LOSS = MaskedCrossEntropy(fp32_upcast=False)

dist.init_process_group("gloo")
SIZE = dist.get_world_size()
MESH = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("dp", "cp"))


def build(state: dict | None = None) -> LlamaForCausalLM:
    """A small model, with the weights of another."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="eager"))
    if state is not None:
        model.load_state_dict(state)
    return model


def check(kind: str) -> None:
    """Compare loss, gradients and gathered logits for packed documents, or for two rows of which one is padded."""
    plain = build()
    ring = build(plain.state_dict())
    rows = 1 if kind == "packed" else 2
    ids, labels = torch.randint(0, 97, (rows, 109)), torch.randint(0, 97, (rows, 109))
    labels[:, ::5] = -100
    batch = {"input_ids": ids, "labels": labels, "padding_mask": ids == 0}
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        logits = torch.cat([plain(x).logits for x in ids.split(LENGTHS, 1)], 1)
    else:
        mask = torch.ones_like(ids)
        mask[1, 90:] = 0
        labels[1, 89:] = -100
        batch |= {"attention_mask": mask, "position_ids": torch.arange(109)[None].expand(2, -1)}
        logits = plain(ids, attention_mask=mask).logits
    count = int((labels != -100).sum())
    wanted = LOSS(logits, labels, num_label_tokens=count)
    wanted.backward()

    attach_context_parallel_hooks(ring)
    for layer in ring.model.layers:
        fully_shard(layer, mesh=MESH["cp"])
    fully_shard(ring, mesh=MESH["cp"])
    automodel_ring.put_on_ring(ring, MESH["cp"])
    sharder = ContextParallelSharder(ring, MESH, dict(batch))
    context, local = sharder.shard(batch)
    mine = local.pop("labels")
    with context():
        out = ring(**local).logits
        loss = LOSS(out, mine, num_label_tokens=count)
        (loss * SIZE).backward()  # as the recipe: times dp * cp, for FSDP's mean
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, wanted.detach(), rtol=1e-6, atol=0)
    pairs = zip(ring.named_parameters(), plain.parameters(), strict=True)
    assert_gradients_equal((name, x.grad.full_tensor(), y.grad) for (name, x), y in pairs)
    whole = sharder.gather_token_tensor(out.detach(), trim=True)
    seen = torch.ones_like(labels) if kind == "packed" else batch["attention_mask"]
    torch.testing.assert_close(whole[seen != 0], logits[seen != 0], rtol=1e-5, atol=1e-6)


def check_refusals() -> None:
    """Assert that each wrong use is refused on every rank."""
    ring, ids = automodel_ring.put_on_ring(build(), MESH["cp"]), torch.ones(2, 40, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids * 0}

    def shard(**changes: torch.Tensor) -> None:
        ContextParallelSharder(ring, MESH, batch | changes).shard(batch | changes)

    packed = torch.cat([torch.arange(10), torch.arange(30)]).expand(2, -1)
    assert_refused(lambda: shard(position_ids=packed), "packed documents must be one row on a ring, got 2; set")
    assert_refused(lambda: shard(seq_lens=ids), "may have position_ids and attention_mask, got ['input_ids', 'labels'")
    assert_refused(lambda: shard(position_ids=torch.arange(1, 41)[None]), "must count from 0", ValueError)
    left = torch.ones_like(ids)
    left[0, :3] = 0
    assert_refused(lambda: shard(attention_mask=left), "got padding before a token", ValueError)
    whole = build()
    whole.backend = object()
    assert_refused(lambda: automodel_ring.put_on_ring(whole, MESH["cp"]), "must be transformers' own on a ring, got")


torch.set_default_dtype(torch.float64)
for kind in ("packed", "rows"):
    check(kind)
check_refusals()
if dist.get_rank() == 0:
    print("equal to one process: packed rows")
dist.destroy_process_group()
