"""Token files: text is tokenized once and packed into sequences; each rank reads only its own chunks.

    python -m ringflash.data prepare books/ --tokenizer checkpoints/llama --out tokens/books

    prepare/  ->  format (on disk)  ->  files  ->  sequences (packing), order (shuffling)

`ringflash.lightning.TokenData` trains on these files. Needs an extra: pip install 'ringflash[data]'.
"""

try:
    import numpy as _  # noqa: F401
except ModuleNotFoundError as missing:
    raise ImportError(
        f"numpy must be installed for ringflash.data, got {missing}; pip install 'ringflash[data]'."
    ) from missing

from ringflash.data.files import TokenFiles
from ringflash.data.format import TokenFileError
from ringflash.data.order import SampleOrder
from ringflash.data.prepare import prepare
from ringflash.data.sequences import TokenSequences

__all__ = ["SampleOrder", "TokenFileError", "TokenFiles", "TokenSequences", "prepare"]
