"""transformers models on a ring: `attn_implementation="ringflash"`, sharded batches, and a loss without full logits.

    register()  ->  from_pretrained(..., attn_implementation="ringflash")  ->  set_group(model, group)
    batch = prepare_batch(input_ids, group=group)  ->  loss = CausalLMWithLoss(model, group)(**batch)

the calls of a user
    attention_function    register, set_group, and the attention call; chunks and sinks
    batch, model          prepare_batch and CausalLMWithLoss; router_loss balances experts over the whole sequence
    log_probs             per-token log-probabilities of a whole sequence, for reinforcement learning
    generation            generate, off the ring
a forward on a ring
    forward_inputs        notes of a model's forwards, made by hooks; options has the group and options of set_group
    consistency           checks that need values or the other ranks, once a forward, in layer 0
    rank_errors           errors of one rank that every rank raises
    global_length         rotary embeddings and positions of the sequence instead of the shard
    spans                 images and prefixes whose tokens see one another
    recurrent_layers      layers whose tokens interact outside attention, in the order of the sequence
what is refused
    model_checks          models that would be wrong on a shard; validation: adapters and arguments of calls
    head_checks           a forward, hook or loss function of the user that a ring would not call
    head_probe            logits and loss that are not those of hidden states times the output embedding
    shard_loss            transformers' own loss with labels of a shard
    reached_layers        layers that have not called ring attention
weights                   initial values, and from_pretrained for sharded models; checkpoint_map is its plan
flops                     floating-point operations of a step, for MFU

Needs the extra: pip install ringflash[huggingface].
"""

from ringflash.huggingface.attention_function import register, set_group
from ringflash.huggingface.batch import prepare_batch
from ringflash.huggingface.model import CausalLMWithLoss

__all__ = ["CausalLMWithLoss", "prepare_batch", "register", "set_group"]
