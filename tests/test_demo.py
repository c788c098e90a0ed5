"""The command line: the demo's measured table, its errors, and reports of real logs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from accum_plugin.cli import app

RANKS = 3


def _cli(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "accum_plugin.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "demo.json"
    done = _cli("demo", "--ranks", str(RANKS), "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text()), done.stdout


def test_demo_measures_the_table(demo):
    result, _ = demo
    assert result["ranks"] == RANKS
    assert [(row["loss"], row["reduction"]) for row in result["rows"]] == [
        ("global", "sum"),
        ("global", "mean"),
        ("local", "sum"),
        ("local", "mean"),
    ]
    without = [row["factor_without"] for row in result["rows"]]
    assert without == pytest.approx([1, 1 / RANKS, RANKS, 1], rel=1e-12)
    assert [row["factor_with"] for row in result["rows"]] == pytest.approx([1] * 4, rel=1e-12)


def test_demo_names_what_it_found(demo):
    result, _ = demo
    codes = [[finding["code"] for finding in row["findings"]] for row in result["rows"]]
    assert codes == [[], ["ACC101"], ["ACC102"], []]


def test_demo_corrects_the_incomplete_window_and_ragged_tokens(demo):
    result, _ = demo
    window, tokens = result["incomplete_window"], result["ragged_tokens"]
    assert window["factor_without"] == pytest.approx(0.5, rel=1e-12)
    assert window["with"]["deviation"] < 1e-12
    assert tokens["without"]["deviation"] > 0.01
    assert tokens["with"]["deviation"] < 1e-12


def test_demo_prints_what_it_measured(demo):
    result, output = demo
    for row in result["rows"]:
        assert f"{row['factor_without']:.6f}" in output
    for code in ("ACC101", "ACC102", "ACC105", "ACC106", "ACC107"):
        assert code in output


@pytest.mark.parametrize("ranks", ["0", "-1", "33"])
def test_demo_refuses_a_number_of_ranks_it_cannot_run(ranks):
    result = CliRunner().invoke(app, ["demo", "--ranks", ranks])
    assert result.exit_code == 1
    assert f"--ranks {ranks} is out of range; give a number of processes from 1 to 32" in result.output


def test_demo_without_scikit_learn_names_the_extra(tmp_path):
    hide = "import sys; sys.modules['sklearn'] = None\nfrom accum_plugin.cli import app\napp()"
    script = tmp_path / "hidden.py"
    script.write_text(hide)
    done = subprocess.run([sys.executable, str(script), "demo"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'accum-plugin[demo]'" in done.stderr


def test_rules_and_explain():
    assert "ACC103" in CliRunner().invoke(app, ["rules"]).output
    page = CliRunner().invoke(app, ["explain", "acc103"]).output
    assert "accumulation-divided-twice" in page
    unknown = CliRunner().invoke(app, ["explain", "ACC999"])
    assert unknown.exit_code == 1
    assert "'ACC999' is not a rule's code; `accum-plugin rules` lists them" in unknown.output


def test_configure_writes_the_flag(tmp_path):
    import yaml

    config = tmp_path / "config.yaml"
    config.write_text("# mine\ncompute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\n")
    command = ["configure", "--mode", "warn", "--ignore", "ACC301", "--config-file", str(config)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "# mine" in config.read_text()
    assert yaml.safe_load(config.read_text())["accum_plugin"] == {"mode": "warn", "ignore": ["ACC301"]}


def test_configure_refuses_a_mode_that_is_none(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\n")
    result = CliRunner().invoke(app, ["configure", "--mode", "fixx", "--config-file", str(config)])
    assert result.exit_code == 1
    assert "'fixx'" in result.output
    assert "accum_plugin" not in config.read_text()


def _train(logger, root):
    from lightning.pytorch import LightningModule, Trainer

    from accum_plugin.lightning import AccumulationCallback

    class Twice(LightningModule):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch, _):
            return (self.w * batch).mean() / 2

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=2,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        callbacks=[AccumulationCallback(log_every_n_steps=1)],
    )
    trainer.fit(Twice(), torch.utils.data.DataLoader(torch.arange(1.0, 17.0), batch_size=2))


@pytest.mark.filterwarnings("ignore")  # the run's own findings are warnings
@pytest.mark.parametrize("kind", ["CSVLogger", "TensorBoardLogger"])
def test_report_reads_a_real_run(tmp_path, kind):
    from lightning.pytorch import loggers

    _train(getattr(loggers, kind)(tmp_path), tmp_path)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "accum/effective_batch" in result.output
    assert (tmp_path / "accum_report.png").read_bytes().startswith(b"\x89PNG")
    if kind == "CSVLogger":
        assert "ACC103" in result.output


def test_report_is_polite_where_there_is_nothing(tmp_path):
    missing = CliRunner().invoke(app, ["report", str(tmp_path / "none")])
    assert missing.exit_code == 1
    assert "is not a directory" in missing.output.replace("\n", " ")
    empty = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert empty.exit_code == 1
    assert "no accum/* metrics and no findings.jsonl" in empty.output.replace("\n", " ")
