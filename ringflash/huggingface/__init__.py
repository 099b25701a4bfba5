"""transformers models on a ring: `attn_implementation="ringflash"`, sharded batches, and a loss without full logits.

    register()  ->  from_pretrained(..., attn_implementation="ringflash")  ->  set_group(model, group)
    batch = prepare_batch(input_ids, group=group)  ->  loss = CausalLMWithLoss(model, group)(**batch)

    attention_function    register, set_group, and the attention call; chunks and sinks
    validation            checks of models, adapters and arguments that need no tensor's values
    forward_inputs        notes of a model's forwards, made by hooks
    consistency           checks that need values or the other ranks, once a forward, in layer 0
    rank_errors           errors of one rank that every rank raises
    shard_loss            guards of transformers' own loss
    global_length         rotary embeddings and positions of the sequence instead of the shard
    generation            generate, off the ring
    batch, model          the calls of a training step
    head_checks           a forward, hook or loss function of the user that a ring would not call
    head_probe            which logits and loss a model computes of its hidden states
    router_loss           balancing loss of experts over the whole sequence
    log_probs             per-token log-probabilities of a whole sequence, for reinforcement learning
    weights               initial values, and from_pretrained for sharded models; checkpoint_map is its plan

Needs the extra: pip install ringflash[huggingface].
"""

from ringflash.huggingface.attention_function import register, set_group
from ringflash.huggingface.batch import prepare_batch
from ringflash.huggingface.model import CausalLMWithLoss

__all__ = ["CausalLMWithLoss", "prepare_batch", "register", "set_group"]
