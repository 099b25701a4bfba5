"""verl's own padding, slicing, patching and gathering with recipes/trainers/verl_ring.py, against one process in fp64.

Of its engine, these are the functions that see the ring; the engine itself needs GPUs, and its trainer Ray. Flash
attention is chosen in the configuration, since the package flash-attn is not installed.
"""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.distributed as dist
import transformers
import verl.utils.ulysses as ulysses
from checks import assert_gradients_equal, assert_refused
from transformers import GptOssConfig, LlamaConfig, PreTrainedModel, Qwen3Config
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.ulysses import gather_outputs_and_unpad, ulysses_pad_and_slice_inputs

LENGTHS = (37, 50, 21)
SIZES = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "vocab_size": 97, "head_dim": 8,
}  # fmt: skip
WINDOWS = {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 19}  # all of them: no choice to flip
CONFIGS = {
    "Llama": LlamaConfig(**SIZES),
    "Qwen3": Qwen3Config(**SIZES, **WINDOWS),
    "GptOss": GptOssConfig(**SIZES, **EXPERTS),  # sinks
}


def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probability of each label, as verl computes it from a rank's logits."""
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def use(model: PreTrainedModel, implementation: str) -> None:
    """Choose the attention without transformers' look for its package."""
    model.config._attn_implementation = model.model.config._attn_implementation = implementation


def check(name: str) -> None:
    """Compare loss and gradients of packed documents with those of one process."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(deepcopy(CONFIGS[name])).train()
    if name == "GptOss":
        model.set_experts_implementation("eager")  # others refuse fp64
    documents = [torch.randint(0, 97, (1, n)) for n in LENGTHS]
    packed, weights = torch.cat(documents, 1), torch.rand(sum(LENGTHS))
    rolled = torch.roll(packed, -1, 1)

    use(model, "eager")
    whole = torch.cat([model(x).logits for x in documents], 1)
    loss = -(log_probs(whole, rolled)[0] * weights).sum() / weights.sum()
    loss.backward()
    wanted = {key: x.grad.clone() for key, x in model.named_parameters()}
    model.zero_grad()

    use(model, "flash_attention_2")
    size = dist.get_world_size()
    apply_monkey_patch(model, ulysses_sp_size=size)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    mine, my_positions, padding = ulysses_pad_and_slice_inputs(packed, positions, sp_size=size)
    labels, _, _ = ulysses_pad_and_slice_inputs(rolled, None, sp_size=size)
    logits = model(input_ids=mine, position_ids=my_positions, attention_mask=None, use_cache=False).logits
    scores = gather_outputs_and_unpad(log_probs(logits, labels)[0], gather_dim=0, unpad_dim=0, padding_size=padding)
    ring_loss = -(scores * weights).sum() / weights.sum()
    torch.testing.assert_close(ring_loss, loss, rtol=1e-6, atol=0)
    ring_loss.backward()
    for x in model.parameters():
        dist.all_reduce(x.grad)  # FSDP averages; verl's gather has multiplied by the number of ranks
    assert_gradients_equal((key, x.grad / size, wanted[key]) for key, x in model.named_parameters())


def check_refusals() -> None:
    """Assert that each wrong use is refused on every rank."""
    size, ids = dist.get_world_size(), torch.zeros(1, 40, dtype=torch.int64)
    model = transformers.LlamaForCausalLM(deepcopy(CONFIGS["Llama"]))
    assert_refused(lambda: gather_outputs_and_unpad(ids, 1), "got one whose model was not patched")
    use(model, "sdpa")
    assert_refused(lambda: apply_monkey_patch(model, ulysses_sp_size=size), "got attn_implementation='sdpa'; set")
    use(model, "flash_attention_2")
    model.config.vision_config = {}
    assert_refused(lambda: apply_monkey_patch(model, ulysses_sp_size=size), "got images or other modalities; set")
    del model.config.vision_config
    model.conv = torch.nn.Conv1d(1, 1, 1)
    assert_refused(lambda: apply_monkey_patch(model, ulysses_sp_size=size), "got recurrent layers; set")
    del model.conv
    apply_monkey_patch(model, ulysses_sp_size=size)
    assert_refused(lambda: ulysses_pad_and_slice_inputs(ids, ids[:, None], size), "must be (1, tokens) on a ring")
    assert_refused(lambda: ulysses_pad_and_slice_inputs(ids, ids, size, True), "slices positions itself (VeOmni)")
    late = torch.arange(1, 41)[None]
    assert_refused(lambda: ulysses_pad_and_slice_inputs(ids, late, size), "must count from 0", ValueError)
    mine, positions, _ = ulysses_pad_and_slice_inputs(ids, torch.arange(40)[None], size)
    forward = {"input_ids": mine, "position_ids": positions, "use_cache": False}
    for wrong, message in (
        ({"cu_seq_lens_q": torch.tensor([0, 40])}, "got ['cu_seq_lens_q']"),
        ({"attention_mask": torch.zeros_like(mine)}, "got a mask"),
        ({"input_ids": mine.expand(2, -1), "position_ids": positions.expand(2, -1)}, "got a batch; set"),
    ):
        assert_refused(lambda wrong=wrong: model(**forward | wrong), message)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    assert_refused(lambda: model.train()(**forward), "got dropout; set attention_dropout=0")


dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)
ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
check_refusals()
for kind in CONFIGS:
    check(kind)
if dist.get_rank() == 0:
    print("equal to one process:", *CONFIGS)
dist.destroy_process_group()
