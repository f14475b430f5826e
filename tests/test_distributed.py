"""Several processes: the same losses as one, in a run that stops by itself."""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("distributed_train.py")


def test_two_processes_train_as_one():
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=700,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "two processes, 4 devices each: " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("equal ")
