"""accelerate's own test scripts, unmodified, with the plugin switched on by its environment variable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate import test_utils

SCRIPTS = Path(test_utils.__file__).parent / "scripts"


def run(script: Path, ranks: int, mode: str) -> subprocess.CompletedProcess[str]:
    """Run a script on one process, or with torchrun."""
    environment = {**os.environ, "ACCELERATE_ACCUM_PLUGIN": mode, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script", ["test_sync.py", pytest.param("test_script.py", marks=pytest.mark.nightly)])
@pytest.mark.timeout(300)
def test_reporting_changes_nothing(script: str, ranks: int) -> None:
    done = run(SCRIPTS / script, ranks, "warn")
    assert done.returncode == 0, done.stderr[-3000:]


COUNT_FAILURES = """
from accelerate.test_utils.scripts import test_sync

compare, failed = test_sync.check_model_parameters, []


def counted(model_a, model_b, did_step, iteration, **kwargs):
    try:
        compare(model_a, model_b, did_step, iteration, **kwargs)
    except AssertionError:
        failed.append((did_step, iteration))
        for one, other in zip(model_a.parameters(), model_b.parameters()):
            other.grad.copy_(one.grad)  # go on as if this window had not been corrected


test_sync.check_model_parameters = counted
test_sync.main()
print("failed", sorted(set(failed)))
"""


@pytest.mark.timeout(300)
def test_fixing_fails_only_where_the_last_window_is_asserted_uncorrected(tmp_path: Path) -> None:
    """``test_sync`` drives 3 batches with ``K = 2`` and asserts that the last window is half as large as it should."""
    script = tmp_path / "count_failures.py"
    script.write_text(COUNT_FAILURES)
    done = run(script, 2, "fix")
    assert done.returncode == 0, done.stderr[-3000:]
    said = {line for line in done.stdout.splitlines() if line.startswith("failed")}
    assert said == {"failed [(True, 2)]"}
