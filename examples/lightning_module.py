# lightning_module.py, run by: torchrun --nproc-per-node 2 lightning_module.py
import os

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ringflash
from ringflash.lightning import ContextParallelStrategy, SequenceSharding


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, 64)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # over the whole sequence, by the mixin
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(SequenceSharding, lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, 64), nn.Embedding(1024, 64)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(64, 256)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        tokens, labels = batch  # the shard of this rank
        x = self.tokens(tokens) + self.places(self.positions(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.token_loss(self.head(x), labels)  # the mean over the whole sequence

    def on_train_batch_end(self, outputs: dict[str, torch.Tensor], *_: object) -> None:
        self.print(f"loss {outputs['loss'].item():.3f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0)  # the same weights and sequences on every rank
tokens = torch.randint(0, 256, (4, 1024))
data = TensorDataset(tokens, ringflash.loss.shift_labels(tokens))  # before the mixin cuts them
lightning.Trainer(
    devices=int(os.environ.get("WORLD_SIZE", 1)),
    strategy=ContextParallelStrategy(),  # all ranks share one sequence, and the parameters (FSDP2)
    precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
).fit(GPT(), DataLoader(data))
