"""Metrics and findings in real trackers, offline."""

from __future__ import annotations

import json
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from accelerate_loops import Scalar, counting, fresh, quiet
from torch.utils.data import DataLoader

from accum_plugin.accelerate import AccumulationHook

STEPS, BATCH = 4, 5
KEYS = {"microbatches", "optimizer_steps", "effective_batch", "units", "gradient_scale", "weight_spread", "correction"}
KEYS = {f"accum/{name}" for name in (*KEYS, "lr", "grad_norm")}


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    settings = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(tmp_path / "trackio")}
    settings |= {"MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    fresh()
    with quiet():
        yield


def train(
    tracker: Any,
    *,
    every: Callable[[Accelerator, int], None] | None = None,
    windows: int = 3,
    project: str = "digits",
    **keywords: Any,
) -> AccumulationHook:
    """Divide twice by K for some windows while a tracker is there, or none."""
    folders = ProjectConfiguration(project_dir=".", logging_dir="logs")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS, log_with=tracker, project_config=folders)
    hook = AccumulationHook.attach(accelerator, log_every_n_steps=1)
    if tracker is not None:
        accelerator.init_trackers(project, **keywords)
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    loader = DataLoader(counting(windows * STEPS * BATCH), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for index, (x,) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean() / STEPS)
            optimizer.step()
            optimizer.zero_grad()
        if every is not None:
            every(accelerator, index)
    accelerator.end_training()
    hook.detach()
    return hook


def test_tensorboard() -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    hook = train("tensorboard")
    events = accumulator.EventAccumulator("logs/digits")
    events.Reload()
    assert set(events.Tags()["scalars"]) == KEYS
    for key in KEYS:
        written = [(event.step, event.value) for event in events.Scalars(key)]
        assert written == [(w.optimizer_step, pytest.approx(w.metrics()[key])) for w in hook.windows]
    (text,) = events.Tensors("accum/ACC103/text_summary")
    assert text.tensor_proto.string_val[0].decode() == hook.findings[0].message
    assert not Path("logs/findings.jsonl").exists()


def test_tracker_that_takes_no_text() -> None:
    """Findings then go into a file in the logging directory."""
    from accelerate.tracking import GeneralTracker, on_main_process

    class Rows(GeneralTracker):
        name, requires_logging_directory, main_process_only = "rows", False, True

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[tuple[int | None, dict[str, float]]] = []

        @property
        def tracker(self) -> list[Any]:
            return self.rows

        @on_main_process
        def store_init_configuration(self, values: dict[str, Any]) -> None:
            raise NotImplementedError("nothing is configured here")

        @on_main_process
        def log(self, values: dict[str, float], step: int | None = None) -> None:
            self.rows.append((step, values))

    tracker = Rows()
    hook = train(tracker)
    assert [step for step, _ in tracker.rows] == [0, 1, 2]
    assert all(set(values) == KEYS for _, values in tracker.rows)
    (line,) = Path("logs/findings.jsonl").read_text().splitlines()
    assert json.loads(line) == hook.findings[0].to_dict()


def test_without_trackers() -> None:
    train(None)
    assert '"ACC103"' in Path("logs/findings.jsonl").read_text()


def test_logging_interval() -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=".")
    hook = AccumulationHook.attach(accelerator, log_every_n_steps=2)
    accelerator.init_trackers("plain")
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(counting(25), batch_size=BATCH))
    for (x,) in loader:
        accelerator.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    hook.detach()
    events = accumulator.EventAccumulator("plain")
    events.Reload()
    assert [event.step for event in events.Scalars("accum/grad_norm")] == [0, 1, 3]


def wandb_records(path: Path) -> Iterator[Any]:
    """Read the records of an offline run: protobuf messages in LevelDB's log format, blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def finished_records(path: Path) -> list[Any]:
    """All records of a run, once the service process has written the last one."""
    for _ in range(100):
        records = list(wandb_records(path))
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError(f"the run never ended: {[record.WhichOneof('record_type') for record in records]}")


@pytest.mark.parametrize("explicit", [True, False])
def test_wandb_rows_are_the_loops_own(explicit: bool) -> None:
    """W&B drops rows of a lower step than the latest one: ours join the loop's, whatever it counts."""
    pytest.importorskip("wandb")

    def log_own(accelerator: Accelerator, index: int) -> None:
        if (index + 1) % STEPS == 0:
            accelerator.log({"loss": float(index)}, step=7 + index if explicit else None)

    hook = train("wandb", every=log_own, init_kwargs={"wandb": {"dir": str(Path.cwd())}})
    (path,) = Path("wandb").glob("offline-run-*/*.wandb")
    records = finished_records(path)
    rows = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in r.history.item} for r in records]
    rows = [row for row in rows if row]
    assert [row["_step"] for row in rows] == ([10, 14, 18] if explicit else [0, 1, 2])
    assert [row["loss"] for row in rows] == [3.0, 7.0, 11.0]
    assert [row["accum/optimizer_steps"] for row in rows] == [1.0, 2.0, 3.0]
    assert all(set(row) >= KEYS for row in rows)
    (alert,) = [record.alert for record in records if record.WhichOneof("record_type") == "alert"]
    assert (alert.title, alert.text) == ("ACC103 accumulation-divided-twice", hook.findings[0].message)


def test_mlflow_tags() -> None:
    mlflow = pytest.importorskip("mlflow")
    hook = train("mlflow")
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.data.tags["accum/ACC103"] == hook.findings[0].message
    history = mlflow.tracking.MlflowClient().get_metric_history(run.info.run_id, "accum/correction")
    assert [(point.step, point.value) for point in history] == [(0, 4.0), (1, 4.0), (2, 4.0)]


def test_trackio_alerts() -> None:
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    project = f"digits-{uuid.uuid4().hex}"  # the folder is fixed when trackio is imported
    hook = train("trackio", project=project)
    (alert,) = SQLiteStorage.get_alerts(project)
    assert (alert["title"], alert["text"]) == ("ACC103 accumulation-divided-twice", hook.findings[0].message)
    (run,) = SQLiteStorage.get_runs(project)
    assert [row["accum/optimizer_steps"] for row in SQLiteStorage.get_logs(project, run)] == [1.0, 2.0, 3.0]
