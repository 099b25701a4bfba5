"""Examples of the documents."""

import re

from tests.recipes.launching import ROOT


def example(document: str, start: str) -> str:
    """The one Python block of a document, relative to the repository, that begins with `start`."""
    text = (ROOT / document).read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if block.startswith(start))
    return code
