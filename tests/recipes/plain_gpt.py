"""A LightningModule as it is before ringflash: the diff of docs/lightning.md is applied to this file."""

import lightning
import torch
from torch.nn import functional as F

from tests.helpers.own_models import Model


class GPT(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model(is_causal=True)

    def step(self, batch):
        tokens, labels = batch
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        logits = self.model(tokens, positions)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("eval_loss", self.step(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
