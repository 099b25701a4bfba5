"""Training through the ring with Lightning: a strategy, a language model, and data that resumes exactly.

    trainer = Trainer(strategy=ContextParallelStrategy(context_parallel_size=4), ...)
    trainer.fit(CausalLM(...), datamodule=TokenData(...))

recipes/lightning has complete training runs built from these classes, with callbacks that print and evaluate.
"""

try:
    import lightning as _  # noqa: F401
except ModuleNotFoundError as missing:
    raise ImportError(
        f"lightning must be installed for ringflash.lightning, got {missing}; pip install 'ringflash[lightning]'."
    ) from missing

from ringflash.lightning.checkpoints import ModelCheckpoint
from ringflash.lightning.data import TokenData
from ringflash.lightning.module import CausalLM
from ringflash.lightning.sharding import SequenceSharding
from ringflash.lightning.stop import StopOnSignal
from ringflash.lightning.strategy import ContextParallelStrategy

__all__ = [
    "CausalLM",
    "ContextParallelStrategy",
    "ModelCheckpoint",
    "SequenceSharding",
    "StopOnSignal",
    "TokenData",
]
