"""transformers models over a ring: `attn_implementation="ringflash"`, batches, and a loss without logits.

    register()  ->  from_pretrained(..., attn_implementation="ringflash")  ->  set_group(model, group)
    batch = prepare_batch(input_ids, group=group)  ->  loss = CausalLMWithLoss(model, group)(**batch)

`plug` runs a model's attention over the ring after `refusals` looked at its arguments and `together` at what all
ranks were given; `layers` finds the attention, `sinks` and `chunks` are what some attentions have beside a mask;
`whole` and `given` tell models of the sequence what they would take from the shard. `batch` and `model` are what a
training step calls. Needs the extra: pip install ringflash[huggingface].
"""

from ringflash.huggingface.attention_function import register, set_group
from ringflash.huggingface.batch import prepare_batch
from ringflash.huggingface.model import CausalLMWithLoss

__all__ = ["CausalLMWithLoss", "prepare_batch", "register", "set_group"]
