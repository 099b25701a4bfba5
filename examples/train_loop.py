# train_loop.py, run by: torchrun --nproc-per-node 2 train_loop.py
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ringflash


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(256, 64), torch.nn.Embedding(1024, 64)
        self.qkv, self.head = torch.nn.Linear(64, 192), torch.nn.Linear(64, 256)

    def forward(self, tokens, positions):
        x = self.tokens(tokens) + self.places(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + out.transpose(1, 2).flatten(-2)  # hidden states: the loss makes the logits


cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
torch.manual_seed(0)  # the same weights and the same sequences on every rank
group, seqlen = dist.group.WORLD, 1024
model = ringflash.wrap_attention(GPT(), group).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
positions = ringflash.local_positions(seqlen, group.size(), group.rank()).to(device)
for _ in range(3):
    tokens = torch.randint(0, 256, (1, seqlen)).to(device)
    labels = ringflash.loss.shift_labels(tokens)  # before the cut: a shard's last label is another rank's token
    tokens, labels = (ringflash.shard_sequence(x, group) for x in (tokens, labels))
    loss = ringflash.loss.cross_entropy(model(tokens, positions), model.head.weight, labels, group=group)
    loss.backward()
    ringflash.average_gradients(model.parameters(), group)  # as DDP and FSDP2 do
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(shown := loss.detach())
    if group.rank() == 0:
        print(f"loss {shown.item() / group.size():.3f}")
dist.destroy_process_group()
