"""`axolotl train` on CPU processes: what it asks of GPUs before it trains is answered here."""

from __future__ import annotations

import sys
from typing import Any

import torch

torch.cuda.can_device_access_peer = lambda *_: True

from axolotl.cli.train import do_cli  # noqa: E402
from axolotl.loaders.model import ModelLoader  # noqa: E402

_own = ModelLoader._set_device_map_config


def on_cpu(self: Any) -> None:
    """Load the model on the CPU; with several processes, axolotl chooses the GPU of each."""
    _own(self)
    self.model_kwargs["device_map"] = "cpu"


ModelLoader._set_device_map_config = on_cpu
if __name__ == "__main__":  # not in the processes that it spawns
    do_cli(sys.argv[1])
