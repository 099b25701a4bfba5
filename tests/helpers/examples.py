"""Examples of the documents, and running a script under torchrun on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def example(document: str, start: str) -> str:
    """The one Python block of a document, relative to the repository, that begins with `start`."""
    text = (ROOT / document).read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if block.startswith(start))
    return code


def torchrun(code: str, folder: Path, num_processes: int = 2) -> str:
    """What a script prints; its errors are raised.

    Args:
        folder: where the script is written.
    """
    script = folder / "script.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    result = subprocess.run([*launcher, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout
