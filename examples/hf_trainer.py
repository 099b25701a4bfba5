# hf_trainer.py, run by: accelerate launch --multi_gpu --num_processes 2 hf_trainer.py
import torch
from accelerate import ParallelismConfig
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, LlamaConfig, Trainer, TrainingArguments

import ringflash.accelerate

ringflash.accelerate.register()
arguments = TrainingArguments(
    "runs/trainer",
    parallelism_config=ParallelismConfig(cp_backend="ringflash", cp_size=2),
    max_steps=6,
    per_device_train_batch_size=2,  # sequences of a ring, not of a GPU
    gradient_accumulation_steps=2,
    bf16=torch.cuda.is_available(),
    use_cpu=not torch.cuda.is_available(),
    eval_strategy="epoch",
    logging_steps=1,
    save_steps=4,
    report_to="none",
    disable_tqdm=True,
)
torch.manual_seed(0)  # the same weights on every rank
config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
model = AutoModelForCausalLM.from_config(config)
data = []
for i in range(16):  # a prompt, and an answer to learn
    tokens = [(n + 3 * i) % 64 for n in range(240 + 4 * (i % 5))]
    data.append({"input_ids": tokens, "labels": [-100] * 40 + tokens[40:]})
Trainer(
    model,
    arguments,
    DataCollatorWithFlattening(),  # packs by position_ids
    train_dataset=data,
    eval_dataset=data[:4],
).train()
