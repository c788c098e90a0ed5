"""The accelerate flag in real subprocesses: `accelerate launch`, `torchrun`, and scripts that know nothing of it."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from accum_plugin.autoload import ENVIRONMENT_VARIABLE, reads_accelerate_config
from accum_plugin.configure import configure
from accum_plugin.flag import check, from_text, to_text
from accum_plugin.launching import accept_key, is_launch

# A test may wait for the commands of those before it.
pytestmark = pytest.mark.timeout(300)
BIN = Path(sys.executable).parent
ACCUMULATE = 3
CONFIG = "# hand-written\ncompute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nuse_cpu: true\nnum_processes: 1\n"

# Case A1: divided by K, and again by accelerator.backward. SGD at lr 1 leaves minus the gradient in the weight.
# accelerate before torch, so that torch's entry points run while accelerate.accelerator is half imported.
SCRIPT = f"""
from accelerate import Accelerator
import torch

accelerator = Accelerator(gradient_accumulation_steps={ACCUMULATE})
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
first = 1 + 2 * {ACCUMULATE} * accelerator.process_index
for k in range({ACCUMULATE}):
    x = torch.tensor([[first + 2.0 * k], [first + 2.0 * k + 1]])
    with accelerator.accumulate(model):
        accelerator.backward(model(x).mean() / {ACCUMULATE})
        optimizer.step()
        optimizer.zero_grad()
if accelerator.is_main_process:
    print("GRADIENT", -accelerator.unwrap_model(model).weight.item())
"""

# Two of accelerate's commands in one process, to import torch only once. The key's value is wrong: they do not mind.
CONFIG_COMMANDS = """
import sys

path = sys.argv[1]
sys.argv = ["accelerate", "config", "update", "--config_file", path]
from accelerate.commands.accelerate_cli import main

main()
sys.argv = ["accelerate", "env", "--config_file", path]
main()
print(open(path).read())
"""

UNSET = """
import sys
before = sys.meta_path[0]
import torch
assert sys.meta_path[0] is before
print([name for name in sys.modules if name.startswith(("accum_plugin", "accelerate", "yaml", "rich"))])
"""
WRAPPED = "import accelerate; print(hasattr(accelerate.Accelerator.__init__, '__wrapped__'))"
HOOKS = """
import torch
from accelerate import Accelerator
from accum_plugin.accelerate import AccumulationHook
from accum_plugin.autoload import autoload
import inspect

autoload()  # a second time
print(list(inspect.signature(Accelerator.__init__).parameters)[:2])
one = Accelerator(cpu=True)
hook = AccumulationHook.of(one)
two = Accelerator()
print(hook is not None, AccumulationHook.of(one) is hook, AccumulationHook.of(two) not in (hook, None))
"""


def run_command(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of this virtual environment, with nothing of a flag in its environment but ``variables``."""
    environment = {key: value for key, value in os.environ.items() if key != ENVIRONMENT_VARIABLE}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    program = sys.executable if command[0] == "python" else str(BIN / command[0])
    return subprocess.run([program, *command[1:]], env=environment, capture_output=True, text=True, timeout=200)


def gradient_of(done: subprocess.CompletedProcess[str]) -> float:
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("GRADIENT"))
    return float(line.split()[1])


def mean_to(n: int) -> float:
    """The mean of 1 to ``n``: the gradient meant by SCRIPT, where ``n`` examples are seen."""
    return (n + 1) / 2


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Start the module's slow commands at once, two at a time; ``started(name)`` waits for one of them."""
    folder = tmp_path_factory.mktemp("flag")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    home = folder / "home" / "accelerate"
    home.mkdir(parents=True)
    files = {
        "default": (home / "default_config.yaml", "accum_plugin: fix\n"),
        "warn": (folder / "warn.yaml", "accum_plugin: {mode: warn, ignore: [ACC301]}\n"),
        "wrong": (folder / "wrong.yaml", "accum_plugin: fxi\n"),
        "update": (folder / "update.yaml", "accum_plugin: {mode: fxi, ignore: [ACC301]}\n"),
    }
    for path, line in files.values():
        path.write_text(CONFIG + line)
    ranks = ("torchrun", "--standalone", "--nproc_per_node", "2", str(script))

    def named(name: str) -> tuple[str, str]:
        return "--config_file", str(files[name][0])

    commands: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
        "default": (("accelerate", "launch", str(script)), {}),
        "warn": (("accelerate-launch", *named("warn"), str(script)), {}),
        "wrong": (("accelerate", "launch", *named("wrong"), str(script)), {}),
        "ranks": (ranks, {"ACCELERATE_USE_CPU": "true", ENVIRONMENT_VARIABLE: '{"mode": "fix"}'}),
        "wrong ranks": (ranks, {"ACCELERATE_USE_CPU": "true", ENVIRONMENT_VARIABLE: "fxi"}),
        "unset": (("python", "-c", UNSET), {}),
        "warnings": (("python", "-W", f"error:{ENVIRONMENT_VARIABLE}", "-c", WRAPPED), {ENVIRONMENT_VARIABLE: "fxi"}),
        "hooks": (("python", "-c", HOOKS), {ENVIRONMENT_VARIABLE: "warn"}),
        "update": (("python", "-c", CONFIG_COMMANDS, str(files["update"][0])), {}),
    }
    pool = ThreadPoolExecutor(2)
    futures: dict[str, Future[Any]] = {
        name: pool.submit(run_command, *command, HF_HOME=str(home.parent), **variables)
        for name, (command, variables) in commands.items()
    }
    yield lambda name: futures[name].result()
    pool.shutdown(cancel_futures=True)


def test_launch_fixes_an_unmodified_script_from_the_default_config(started: Callable[[str], Any]) -> None:
    done = started("default")
    assert gradient_of(done) == pytest.approx(mean_to(6), rel=1e-6)
    assert "ACC103" in done.stderr


def test_launch_honors_a_mapping_in_a_named_config(started: Callable[[str], Any]) -> None:
    done = started("warn")
    assert gradient_of(done) == pytest.approx(mean_to(6) / ACCUMULATE, rel=1e-6)
    assert "ACC103" in done.stderr


def test_a_wrong_value_stops_the_launch(started: Callable[[str], Any]) -> None:
    done = started("wrong")
    assert done.returncode == 1
    assert "GRADIENT" not in done.stdout
    for part in ("config file", "accum_plugin: 'fxi'", "'fix'", "'warn'", "'raise'"):
        assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_torchrun_fixes_two_ranks(started: Callable[[str], Any]) -> None:
    done = started("ranks")
    assert gradient_of(done) == pytest.approx(mean_to(12), rel=1e-6)
    assert "ACC103" in done.stderr


def test_a_wrong_value_leaves_torchrun_alone(started: Callable[[str], Any]) -> None:
    done = started("wrong ranks")
    assert gradient_of(done) == pytest.approx(mean_to(12) / ACCUMULATE, rel=1e-6)
    assert done.stderr.count(f"{ENVIRONMENT_VARIABLE}='fxi' is not understood") == 1
    assert "The plugin is off" in done.stderr


def test_config_update_keeps_the_key_and_env_shows_it(started: Callable[[str], Any]) -> None:
    done = started("update")
    assert done.returncode == 0, done.stderr
    assert "- accum_plugin: {'ignore': ['ACC301'], 'mode': 'fxi'}" in done.stdout
    written = done.stdout[done.stdout.index("accum_plugin:\n") :]
    assert yaml.safe_load(written)["accum_plugin"] == {"mode": "fxi", "ignore": ["ACC301"]}


def test_unset_imports_nothing(started: Callable[[str], Any]) -> None:
    done = started("unset")
    assert done.stdout.strip() == "['accum_plugin', 'accum_plugin.autoload']", done.stderr


def test_a_wrong_value_breaks_no_import_where_warnings_are_errors(started: Callable[[str], Any]) -> None:
    done = started("warnings")
    assert done.stdout.strip() == "False", done.stderr
    assert "accum_plugin: ACCELERATE_ACCUM_PLUGIN='fxi' is not understood" in done.stderr


def test_every_accelerator_gets_one_hook_also_where_torch_comes_first(started: Callable[[str], Any]) -> None:
    done = started("hooks")
    assert done.stdout.splitlines() == ["['self', 'device_placement']", "True True True"], done.stderr


@pytest.mark.parametrize(
    ("text", "mode"),
    [("fix", "fix"), (" Warn\n", "warn"), ("1", "fix"), ("True", "fix"), ('{"mode": "raise"}', "raise"), ("{}", "fix")],
)
def test_text_that_is_understood(text: str, mode: str) -> None:
    settings = from_text(text)
    assert settings is not None and settings.mode == mode


@pytest.mark.parametrize("text", ["off", "False", "0", "no", ""])
def test_text_that_switches_off(text: str) -> None:
    assert from_text(text) is None


@pytest.mark.parametrize(
    "text", ["fxi", "{mode: fix}", '{"mode": ["fix"]}', '{"units": 3}', '{"ignore": 5}', '{"ignore": ["ACC999"]}', "[]"]
)
def test_text_that_is_refused_is_quoted(text: str) -> None:
    with pytest.raises(ValueError) as refused:
        from_text(text)
    assert f"{ENVIRONMENT_VARIABLE}={text!r}" in str(refused.value)


@pytest.mark.parametrize("value", ["warn", True, {"mode": "fix", "verify": True, "ignore": ["ACC301"]}, {}])
def test_a_value_survives_the_environment(value: Any) -> None:
    assert from_text(to_text(value)) == check(value)


@pytest.mark.parametrize(
    ("argv", "reads", "launches"),
    [
        (["/venv/bin/accelerate", "launch", "train.py"], True, True),
        (["accelerate-launch", "train.py"], True, True),
        (["accelerate.exe", "launch"], True, True),
        (["/lib/accelerate/commands/launch.py", "train.py"], True, True),
        (["/lib/accelerate/commands/accelerate_cli.py", "launch"], True, True),
        (["/venv/bin/trl", "sft"], True, True),
        (["/venv/bin/trl", "env"], True, False),
        (["accelerate", "env"], True, False),
        (["accelerate", "config", "update"], True, False),
        (["accelerate"], True, False),
        (["transformers", "env"], True, False),
        (["accelerate.py", "launch"], False, False),
        (["launch.py", "launch"], False, False),
        (["train.py", "accelerate"], False, False),
        ([""], False, False),
    ],
)
def test_which_programs_read_the_config_file(argv: list[str], reads: bool, launches: bool) -> None:
    assert reads_accelerate_config(argv, ["python", *argv]) is reads
    if reads:
        assert is_launch(argv) is launches


def test_a_module_run_by_name_is_recognized_before_it_has_a_path() -> None:
    assert reads_accelerate_config(["-m", "train.py"], ["python", "-m", "accelerate.commands.launch", "train.py"])
    assert not reads_accelerate_config(["-m"], ["python", "-m", "torch.distributed.run", "accelerate"])


@pytest.fixture
def config_args(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A second copy of accelerate's own config module, so that the first stays as accelerate made it."""
    original = importlib.util.find_spec("accelerate.commands.config.config_args")
    assert original is not None and original.origin is not None
    name = "accelerate.commands.config.config_args_copy"
    spec = importlib.util.spec_from_file_location(name, original.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["accelerate-launch", "train.py"])
    # Set and taken away again: what the code under test leaves in the environment is undone.
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "off")
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    accept_key(module)
    return module


def test_a_launch_takes_the_key_out_of_a_json_config(config_args: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"distributed_type": "NO", "accum_plugin": {"mode": "warn"}}))
    config = config_args.load_config_from_file(str(path))
    assert type(config).__name__ == "ClusterConfig"
    assert json.loads(os.environ[ENVIRONMENT_VARIABLE]) == {"mode": "warn"}
    assert "accum_plugin" not in config.to_dict()


def test_the_environment_outranks_the_config(
    config_args: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "raise")
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG + "accum_plugin: fix\n")
    config_args.load_config_from_file(str(path))
    assert os.environ[ENVIRONMENT_VARIABLE] == "raise"


def test_other_unknown_keys_are_refused_as_before(config_args: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG + "accum_plugins: fix\n")
    with pytest.raises(ValueError, match="accum_plugins"):
        config_args.load_config_from_file(str(path))


def test_a_wrong_environment_variable_stops_a_launch(config_args: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fxi")
    with pytest.raises(SystemExit, match="ACCELERATE_ACCUM_PLUGIN='fxi' is not understood.*'fix', 'warn', 'raise'"):
        accept_key(config_args)


def test_a_sagemaker_job_gets_the_variable(config_args: ModuleType, tmp_path: Path) -> None:
    from accelerate.utils.launch import prepare_sagemager_args_inputs

    path = tmp_path / "config.yaml"
    path.write_text(
        "{compute_environment: AMAZON_SAGEMAKER, distributed_type: DATA_PARALLEL, mixed_precision: 'no', "
        "use_cpu: true, debug: false, ec2_instance_type: ml.m5.large, iam_role_name: role, profile: me, "
        "accum_plugin: warn, additional_args: {environment: {MINE: kept}}}"
    )
    config = config_args.load_config_from_file(str(path))
    names = ("dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation")
    args = SimpleNamespace(
        training_script="train.py", training_script_args=[], mixed_precision="no", dynamo_backend="no"
    )
    vars(args).update(dict.fromkeys(names, "default"))
    environment = prepare_sagemager_args_inputs(config, args)[0]["environment"]
    assert environment[ENVIRONMENT_VARIABLE] == "warn"
    assert environment["MINE"] == "kept" and environment["ACCELERATE_USE_SAGEMAKER"] == "true"


MAPPING = {"mode": "fix", "verify": True, "ignore": ["ACC301"]}


@pytest.mark.parametrize("value", ["warn", MAPPING])
@pytest.mark.parametrize(
    "text",
    [
        CONFIG,
        CONFIG.rstrip(),
        CONFIG.replace("\n", "\r\n"),
        CONFIG + "accum_plugin:\n  mode: raise  # inner\n  ignore:\n  - ACC301\n\n# next\nmachine_rank: 0\n",
        CONFIG + "accum_plugin:\n",
        "{distributed_type: 'NO', accum_plugin: raise, use_cpu: true}",
        "{distributed_type: 'NO'}",
        '{\n"distributed_type": "NO",\n"use_cpu": true}',
    ],
)
def test_configure_changes_one_key(value: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode())
    assert configure(value, path) == path
    before, after = yaml.safe_load(text), yaml.safe_load(path.read_bytes())
    assert after.pop("accum_plugin") == value
    before.pop("accum_plugin", None)
    assert list(after) == list(before) and after == before


def test_configure_keeps_comments_and_the_place(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG + "accum_plugin: warn  # why\n# end\nmachine_rank: 0\n")
    configure(MAPPING, path)
    line = "accum_plugin: {mode: fix, verify: true, ignore: [ACC301]}  # why\n"
    assert path.read_text() == CONFIG + line + "# end\nmachine_rank: 0\n"
    configure("off", path)
    assert path.read_text() == CONFIG + "# end\nmachine_rank: 0\n"


def test_configure_writes_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"use_cpu": true, "distributed_type": "NO"}')
    configure("fix", path)
    assert json.loads(path.read_text()) == {"use_cpu": True, "distributed_type": "NO", "accum_plugin": "fix"}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("notes.txt", b"just a line\n", "holds no mapping"),
        ("list.yaml", b"- a\n- b\n", "holds no mapping"),
        ("empty.yaml", b"", "holds no mapping"),
        ("other.yaml", b"model: gpt\n", "has none of the keys"),
        ("broken.yaml", b"a: [\n", "is not YAML"),
        ("broken.json", b"distributed_type: NO\n", "is not JSON"),
        ("weights.bin", b"\xff\xfe\x00\x80", "is not a text file"),
        ("ended.yaml", b"distributed_type: x\n...\n", "by hand"),
    ],
)
def test_configure_refuses_what_is_no_config(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as refused:
        configure("fix", path)
    assert str(path) in str(refused.value)
    assert "accelerate config" in str(refused.value) or "by hand" in str(refused.value)
    assert path.read_bytes() == content


def test_configure_refuses_a_missing_file_and_a_wrong_value(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run `accelerate config`"):
        configure("fix", tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="accum_plugin: 'fxi' is not understood.*'fix', 'warn', 'raise'"):
        configure("fxi", tmp_path / "none.yaml")


def test_configure_takes_the_file_that_launch_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.commands.config import config_args

    path = tmp_path / "default_config.yaml"
    path.write_text(CONFIG)
    monkeypatch.setattr(config_args, "default_config_file", str(path))
    assert configure("fix") == path
    assert path.read_text() == CONFIG + "accum_plugin: fix\n"


def test_an_entry_point_that_fails_says_so_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from accum_plugin import autoload

    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fix")
    monkeypatch.setattr(autoload, "_come_back", lambda **_: inspect.signature(None))
    autoload.autoload()
    assert "the ACCELERATE_ACCUM_PLUGIN flag is off" in capsys.readouterr().err
