"""Token files: text is tokenized once and packed into sequences; each rank reads only its own chunks.

    format (on disk)  ->  files  ->  sequences (packing), order (shuffling)

`python -m recipes.data prepare` writes these files, and `ringflash.lightning.TokenData` trains on them. Needs an extra:
pip install 'ringflash[data]'.
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
from ringflash.data.sequences import TokenSequences

__all__ = ["SampleOrder", "TokenFileError", "TokenFiles", "TokenSequences"]
