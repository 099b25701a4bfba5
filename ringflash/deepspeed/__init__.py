"""Training through the ring with DeepSpeed's ZeRO, stages 0 to 3.

    mesh = context_mesh(context_parallel_size=4)
    engine, *_ = initialize(model=model, config="zero3.json", optimizer=optimizer)

ZeRO averages gradients over one flat group of all ranks. With the scale of `ringflash.loss` this average is the
gradient of the loss, at every stage. `recipes.deepspeed.strategy` is the strategy for Lightning.
"""

try:
    import deepspeed as _  # noqa: F401
except ModuleNotFoundError as missing:
    raise ImportError(
        f"deepspeed must be installed for ringflash.deepspeed, got {missing}; pip install 'ringflash[deepspeed]'."
    ) from missing

from ringflash.deepspeed.engine import context_mesh, initialize

__all__ = ["context_mesh", "initialize"]
