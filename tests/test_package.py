"""The package as installed: metadata, entry points, what an import costs, and the stated versions."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import accum_plugin

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "lightning", "accelerate", "transformers", "torchmetrics", "rich", "typer", "yaml", "sklearn")


def _run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_no_framework():
    code = f"import sys, accum_plugin; accum_plugin.__all__; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert _run(code) == "[]"


def test_a_finding_needs_no_framework():
    names = "from accum_plugin import Finding, WindowRecord"
    code = f"import sys; {names}; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert _run(code) == "[]"


def test_the_flag_unset_costs_torch_no_framework():
    code = "import sys, torch; print([m for m in ('lightning', 'accelerate', 'rich', 'yaml') if m in sys.modules])"
    assert _run(code) == "[]"


def test_public_names_load_from_their_modules():
    from accum_plugin.equivalence import check_equivalence
    from accum_plugin.finding import Finding
    from accum_plugin.record import WindowRecord

    assert accum_plugin.Finding is Finding
    assert accum_plugin.WindowRecord is WindowRecord
    assert accum_plugin.check_equivalence is check_equivalence
    assert set(accum_plugin.__all__) <= set(dir(accum_plugin))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Findings'"):
        accum_plugin.Findings  # noqa: B018


def test_metadata_and_entry_points():
    distribution = importlib.metadata.distribution("accum-plugin")
    assert distribution.version == accum_plugin.__version__
    assert distribution.metadata["License-Expression"] == "Apache-2.0"
    found = {(point.group, point.name): point.value for point in distribution.entry_points}
    assert found["console_scripts", "accum-plugin"] == "accum_plugin.cli:main"
    assert found["torch.backends", "accum_plugin"] == "accum_plugin.autoload:autoload"


def test_the_package_is_typed_and_licensed():
    assert (ROOT / "accum_plugin" / "py.typed").exists()
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_changelog_names_this_version():
    assert f"## {accum_plugin.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_runtime_dependency_has_a_tested_version():
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {Requirement(line).name for line in lines if line and not line.startswith("#")}
    for text in importlib.metadata.requires("accum-plugin"):
        assert Requirement(text).name in pinned


def test_ci_runs_exactly_the_readmes_two_commands():
    blocks = (ROOT / "README.md").read_text().split("```console\n")[1:]
    commands = [block.split("\n```")[0].replace(" \\\n", " ").removeprefix("$ ") for block in blocks]
    commands = [
        " ".join(command.split()) for command in commands if " pip install " in command or "/pip install" in command
    ]
    script = (ROOT / ".ci" / "run").read_text().replace('"$venv/bin/', ".venv/bin/").replace('"$venv"', ".venv")
    steps = [
        line.replace('"', "") for line in script.splitlines() if line.startswith(("python3 -m venv", ".venv/bin/"))
    ]
    assert " && ".join(steps) == " && ".join(commands[:2])
