# deepspeed_zero.py, run by: torchrun --nproc-per-node 2 deepspeed_zero.py
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from ringflash import deepspeed, huggingface

config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}


def main() -> None:
    mesh = deepspeed.context_mesh(context_parallel_size=2)  # data_parallel_size is what that leaves
    group = mesh["context_parallel"].get_group()
    torch.manual_seed(0)  # the same weights and the same tokens on every rank
    huggingface.register()
    shape = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    )
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="ringflash", dtype=torch.bfloat16)
    huggingface.set_group(model, group)
    model = huggingface.CausalLMWithLoss(model, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)

    input_ids = torch.randint(0, 256, (1, 1024)).to(engine.device)
    for _ in range(3):
        loss = engine(**huggingface.prepare_batch(input_ids, group=group))
        engine.backward(loss)
        engine.step()
        dist.all_reduce(mean := loss.detach())
        print(f"rank {dist.get_rank()}: loss {mean.item() / dist.get_world_size():.3f}")


main()
dist.destroy_process_group()
