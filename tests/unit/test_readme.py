"""The README's torchrun example, run as printed. CPU, 2 processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_example_runs_as_printed(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(# ring\.py.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "ring.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("out (1, 2048, 8, 64), |dk|") == 2, result.stdout
