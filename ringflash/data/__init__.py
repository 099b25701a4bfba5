"""Token files: text tokenised once, packed into sequences, and read by each rank in its own chunks.

    python -m ringflash.data prepare books/ --tokenizer checkpoints/llama --out tokens/books

`sources` and `tokenizers` feed `prepare`, which writes the `format` that `files` reads; `sequences` packs documents,
in the `order` that training sees. `ringflash.lightning.TokenData` trains on them. Needs the extra: pip install
ringflash[data].
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
