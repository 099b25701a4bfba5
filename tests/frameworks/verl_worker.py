"""verl's FSDP engine with recipes/trainers/verl_ring.py, against one process in fp64.

Its methods for a micro-batch and its patch of the model run, with what they call; its constructor needs GPUs, and verl
needs Ray to train. Flash attention is chosen in the configuration, since the package flash-attn is not installed.
"""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import torch
import torch.distributed as dist
import transformers
import verl.utils.ulysses as ulysses
from checks import assert_gradients_equal, assert_refused
from tensordict import NonTensorData, TensorDict
from transformers import GptOssConfig, LlamaConfig, PreTrainedModel, Qwen3Config
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.torch_functional import entropy_from_logits
from verl.utils.ulysses import gather_outputs_and_unpad, ulysses_pad_and_slice_inputs
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

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


def engine_of(model: PreTrainedModel) -> FSDPEngineWithLMHead:
    """Return an engine as it prepares and reads micro-batches; its constructor needs GPUs."""
    engine = object.__new__(FSDPEngineWithLMHead)
    engine.module, engine.pad_to_length, engine.use_ulysses_sp = model, False, True
    engine.ulysses_sequence_parallel_size = dist.get_world_size()
    engine.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    engine.compute_entropy_from_logits = entropy_from_logits
    return engine


def use(model: PreTrainedModel, implementation: str) -> None:
    """Choose the attention without transformers' look for its package."""
    model.config._attn_implementation = model.model.config._attn_implementation = implementation


def objective(scores: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    """A loss of log-probabilities and entropies of all tokens."""
    weights = torch.linspace(1, 2, len(scores))
    return ((0.1 * entropies - scores) * weights).mean()


def check(name: str) -> None:
    """Compare loss and gradients of packed documents with those of one process."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(deepcopy(CONFIGS[name])).train()
    if name == "GptOss":
        model.set_experts_implementation("eager")  # others refuse fp64
    documents = [torch.randint(0, 97, (n,)) for n in LENGTHS]
    temperatures = torch.tensor([1.0, 0.7, 1.3], dtype=torch.float32)

    use(model, "eager")
    scaled = [model(x[None]).logits[0] / t.double() for x, t in zip(documents, temperatures, strict=True)]
    logits = torch.cat(scaled).log_softmax(-1)
    labels = torch.cat(documents).roll(-1)
    loss = objective(logits.gather(-1, labels[:, None])[:, 0], -(logits.exp() * logits).sum(-1))
    loss.backward()
    wanted = {key: x.grad.clone() for key, x in model.named_parameters()}
    model.zero_grad()

    use(model, "flash_attention_2")
    size = dist.get_world_size()
    apply_monkey_patch(model, ulysses_sp_size=size)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = engine_of(model)
    packed, positions = (
        torch.nested.nested_tensor(x, layout=torch.jagged) for x in (documents, [torch.arange(n) for n in LENGTHS])
    )
    batch = TensorDict({"input_ids": packed, "position_ids": positions, "temperature": temperatures}, batch_size=3)
    batch["calculate_entropy"] = NonTensorData(True)
    inputs, rest = engine.prepare_model_inputs(batch)
    output = engine.prepare_model_outputs(model(**inputs, use_cache=False), rest, batch, None)
    ring_loss = objective(output["log_probs"].values(), output["entropy"].values())
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
    scaled = deepcopy(CONFIGS["Llama"])
    scaled.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    longer = transformers.LlamaForCausalLM(scaled)
    use(longer, "flash_attention_2")
    message = "got rotary angles that depend on the length; set"
    assert_refused(lambda: apply_monkey_patch(longer, ulysses_sp_size=size), message)
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
