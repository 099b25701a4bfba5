"""What `ringflash.comm.communicator` does when the interpreter ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

END = """
import atexit
import torch.distributed as dist
atexit.register(lambda: print("left:", dist.is_initialized()))  # registered before ringflash's: runs after it
import ringflash
dist.init_process_group("{backend}", store=dist.HashStore(), rank=0, world_size=1)
{own_end}
"""


@pytest.mark.parametrize(
    ("backend", "own_end", "left"),
    [("gloo", "", False), ("gloo", "dist.destroy_process_group()", False), ("fake", "", True)],
    ids=["gloo", "gloo-ended-by-the-user", "another-backend"],
)
def test_gloo_ends_before_the_interpreter(backend: str, own_end: str, left: bool) -> None:
    script = "from torch.testing._internal.distributed import fake_pg" if backend == "fake" else ""
    script += END.format(backend=backend, own_end=own_end)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, f"left: {left}\n"), ended.stderr[-2000:]
