"""`axolotl train` on CPU processes: what it asks of GPUs before it trains is answered here."""

from __future__ import annotations

import sys
from typing import Any


def main() -> None:
    """Train by the configuration that the command line names."""
    import torch

    torch.cuda.can_device_access_peer = lambda *_: True
    from axolotl.cli.train import do_cli
    from axolotl.loaders.model import ModelLoader

    choose = ModelLoader._set_device_map_config

    def on_cpu(self: Any) -> None:
        """Load the model on the CPU; with several processes, axolotl chooses the GPU of each."""
        choose(self)
        self.model_kwargs["device_map"] = "cpu"

    ModelLoader._set_device_map_config = on_cpu
    do_cli(sys.argv[1])


if __name__ == "__main__":  # not in the processes that axolotl spawns, which import nothing here
    main()
