"""PEFT under the Hugging Face plug, in one process: equal to adapters under dense attention in fp64, or refused.

CPU; needs the huggingface extra and peft.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ringflash import huggingface
from tests.helpers.models import build, tokens
from tests.unit.test_huggingface import assert_alike

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

ADAPTERS = {
    "on q and v": {"target_modules": ["q_proj", "v_proj"]},
    "with magnitudes (DoRA), on all layers": {"target_modules": "all-linear", "use_dora": True},
    "on embeddings": {"target_modules": ["k_proj", "embed_tokens"]},
    "beside a head trained as a whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def adapt(model: torch.nn.Module, **options: object) -> torch.nn.Module:
    """LoRA in a model, alike in every call, with values that are not its first ones, of which half are zeros."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **options), autocast_adapter_dtype=False).double()
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
    return adapted


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_loss_and_gradients_equal_dense(options: dict, when: str) -> None:
    """Adapters are made before `set_group` and `CausalLMWithLoss`, or into the model that these have already."""
    model, dense, ids = build("qwen3"), adapt(build("qwen3", "sdpa"), task_type="CAUSAL_LM", **options), tokens(2)
    if when == "before":
        ring = adapt(model, task_type="CAUSAL_LM", **options)
        huggingface.set_group(ring, None)
        with_loss = huggingface.CausalLMWithLoss(ring, None)
    else:
        huggingface.set_group(model, None)
        with_loss = huggingface.CausalLMWithLoss(model, None)
        ring = adapt(model, task_type="CAUSAL_LM", **options)
    loss = with_loss(**huggingface.prepare_batch(ids, group=None))
    logits = dense(input_ids=ids, use_cache=False).logits[:, :-1]
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert_alike(ring, loss, dense, want)


def test_refuses_adapters_on_the_head_at_any_time() -> None:
    model = build("qwen3")
    with_loss = huggingface.CausalLMWithLoss(model, None)
    adapted = adapt(model, target_modules=["q_proj", "lm_head"])
    with pytest.raises(NotImplementedError, match=r"got peft\S+Linear.* leave lm_head out of target_modules"):
        with_loss(**huggingface.prepare_batch(tokens(), group=None))
    with pytest.raises(NotImplementedError, match="leave lm_head out of target_modules"):
        huggingface.CausalLMWithLoss(adapted, None)


MORE_THAN_LAYERS = {
    "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "PREFIX_TUNING": {"num_virtual_tokens": 4},
    "ADALORA": {"target_modules": ["q_proj"], "total_step": 9},
    "LORA": {"target_modules": ["q_proj"], "alora_invocation_tokens": [1, 2]},
}


@pytest.mark.parametrize("kind", MORE_THAN_LAYERS)
def test_refuses_adapters_that_change_more_than_layers(kind: str) -> None:
    config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[kind](task_type="CAUSAL_LM", **MORE_THAN_LAYERS[kind])
    model = build("qwen3")
    with_loss = huggingface.CausalLMWithLoss(model, None)
    adapted = peft.get_peft_model(model, config)
    calls: list[Callable[[], object]] = [
        lambda: huggingface.set_group(adapted, None),
        lambda: huggingface.CausalLMWithLoss(adapted, None),
    ]
    batch = huggingface.prepare_batch(tokens(), group=None)
    if kind in ("ADALORA", "LORA"):
        outer = peft.get_peft_model(huggingface.CausalLMWithLoss(build("qwen3"), None), replace(config, task_type=None))
        calls.append(lambda: outer(**batch))
    if model.__dict__.get("peft_config"):  # adapters in its layers
        calls.append(lambda: with_loss(**batch))
    for call in calls:
        with pytest.raises(NotImplementedError, match=f"only changes layers, such as LORA, got {kind}"):
            call()
