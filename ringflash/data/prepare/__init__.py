"""Tokenization of text into token files: sources -> tokenizers -> pipeline, which writes the `format` of the package.

`python -m ringflash.data prepare` runs it.
"""

from ringflash.data.prepare.pipeline import prepare

__all__ = ["prepare"]
