"""Context parallelism for accelerate and transformers' Trainer: `ParallelismConfig(cp_backend="ringflash", cp_size=N)`.

    register()  ->  Accelerator(parallelism_config=...) or TrainingArguments(parallelism_config=...)

    registration    changes of accelerate and Trainer for this backend
    forward         a model's forward on whole batches: it cuts them, and returns the loss of the whole sequence
    rows            the documents and padding of a batch

Needs the extra: pip install ringflash[accelerate].
"""

from ringflash.accelerate.registration import register

__all__ = ["register"]
