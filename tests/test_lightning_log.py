"""What a Lightning user finds in the experiment log, and what it costs: keys, findings, collectives, host reads."""

from __future__ import annotations

import csv
import json
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from lightning_loops import QUIET, Loop, alone, examples, fit, network, numbers
from torch.utils._python_dispatch import TorchDispatchMode

from accum_plugin import Finding
from accum_plugin.lightning import AccumulationCallback

BATCHES = list(zip(*(part.split(5) for part in examples(60))))
KEYS = {
    "accum/microbatches": 3.0,
    "accum/effective_batch": 15.0,
    "accum/units": 15.0,
    "accum/gradient_scale": 1 / 3,
    "accum/weight_spread": 1.0,
    "accum/correction": 3.0,
    "accum/lr": 0.125,
}


def divided(loop, batch, index):
    return F.cross_entropy(loop.model(batch[0]), batch[1]) / 3


def cross_entropy(loop, batch, index):
    return F.cross_entropy(loop.model(batch[0]), batch[1])


def job(step=divided, **options):
    return {"step": step, "batches": BATCHES, "K": 3, "model": network, **options}


def rows(folder) -> list[dict[str, str]]:
    """The rows of ``metrics.csv`` that the plugin wrote."""
    with (Path(folder) / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get("accum/optimizer_steps")]


def lines(folder) -> list[str]:
    return (Path(folder) / "findings.jsonl").read_text().splitlines()


def test_csv_logger_holds_every_key_and_the_findings_beside_it(tmp_path):
    logger = CSVLogger(tmp_path)
    run = alone(**job(logger=logger, log_every_n_steps=2))
    logged = rows(logger.log_dir)
    assert [float(row["accum/optimizer_steps"]) for row in logged] == [2, 4]
    for key, value in KEYS.items():
        assert float(logged[0][key]) == pytest.approx(value, rel=1e-9), key
    norms = [float(run.grads[step].norm()) for step in (1, 3)]
    assert [float(row["accum/grad_norm"]) for row in logged] == pytest.approx(norms, rel=1e-9)
    assert [Finding.from_dict(json.loads(line)) for line in lines(logger.log_dir)] == run.findings
    assert run.warned == [run.findings[0].message]


def test_the_callbacks_own_interval_and_further_parameter_groups(tmp_path):
    def groups(loop):
        first, *others = loop.parameters()
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": others, "lr": 0.25}])

    logger = CSVLogger(tmp_path)
    alone(**job(logger=logger, optimizers=groups, keywords={"log_every_n_steps": 1}, log_every_n_steps=1000))
    logged = rows(logger.log_dir)
    assert len(logged) == 4
    assert {(float(row["accum/lr"]), float(row["accum/lr/1"])) for row in logged} == {(0.5, 0.25)}


def test_tensorboard_takes_numbers_and_text(tmp_path):
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    run = alone(**job(logger=logger, log_every_n_steps=1))
    logger.experiment.close()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert {"accum/grad_norm", "accum/optimizer_steps", *KEYS} <= set(events.Tags()["scalars"])
    assert len(events.Scalars("accum/correction")) == 4
    (text,) = events.Tensors("accum/ACC103/text_summary")
    assert text.tensor_proto.string_val[0].decode() == run.findings[0].message


def _logs_of_ranks(rank, n, folder):
    logger = CSVLogger(folder, version=0)
    batches = BATCHES[rank::n]
    return alone(**{**job(logger=logger, log_every_n_steps=1), "batches": batches}), logger.log_dir


def test_only_rank_zero_writes_and_warns_with_numbers_of_all_ranks(ranks, tmp_path):
    (first, folder), (second, _) = ranks(2, _logs_of_ranks, str(tmp_path))
    assert len(first.warned) == 1 and not second.warned
    assert [float(row["accum/effective_batch"]) for row in rows(folder)] == [30, 30]
    assert len(lines(folder)) == 1
    assert [f.code for f in second.findings] == [f.code for f in first.findings] == ["ACC103"]


def test_the_table_at_the_start(capsys):
    loop = Loop(network(), divided)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(max_epochs=1, accumulate_grad_batches=3, callbacks=[AccumulationCallback()], **QUIET)
        trainer.fit(loop, torch.utils.data.DataLoader(BATCHES, batch_size=None))
    shown = capsys.readouterr().err
    assert "5 x 3 x 1 = 15" in shown and "cross_entropy(mean) / 3" in shown
    assert "Trainer(accumulate_grad_batches=3)" in shown and shown.count("effective batch") == 1


# -- counted budgets --------------------------------------------------------------------------------------------------


class HostReads(TorchDispatchMode):
    def __init__(self, now) -> None:
        super().__init__()
        self._now = now

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._now["reads"] += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


class Counter(L.Callback):
    """What each window cost, from the first microbatch's start to the end of the last."""

    def __init__(self) -> None:
        self.now = {"collectives": 0, "bytes": 0, "passes": 0, "norms": 0, "reads": 0}
        self.costs: list[dict[str, int]] = []
        self._patch = pytest.MonkeyPatch()

    def on_train_start(self, trainer, pl_module):
        self._count(dist, "all_reduce", "collectives")
        self._count(torch, "_foreach_mul_", "passes")
        self._count(torch, "_foreach_norm", "norms")
        self._mode = HostReads(self.now)
        self._mode.__enter__()

    def _count(self, owner, name, key):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            self.now[key] += 1
            if key == "collectives":
                self.now["bytes"] = max(self.now["bytes"], args[0].numel() * args[0].element_size())
            return original(*args, **kwargs)

        self._patch.setattr(owner, name, counted)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % 3 == 0:
            self.costs.append(dict(self.now))
            self.now.update(dict.fromkeys(self.now, 0))

    def on_train_end(self, trainer, pl_module):
        self._mode.__exit__(None, None, None)
        self._patch.undo()


def _costs(rank, n, step, mode, **options):
    counter = Counter()
    batches = list(zip(*(part.split(5) for part in examples(5 * 3 * 8))))
    fit(step, batches, K=3, model=network(), mode=mode, callbacks=[counter], log_every_n_steps=1000, **options)
    return counter.costs


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.5}])
def test_correct_code_on_one_process_costs_one_norm(clip):
    costs, bare = _costs(0, 1, cross_entropy, "fix", **clip), _costs(0, 1, cross_entropy, None, **clip)
    for cost, usual in list(zip(costs, bare))[1:]:
        assert cost["collectives"] == 0 and cost["passes"] == usual["passes"]
        assert cost["norms"] == 1  # shared with the Trainer's clipping where there is any
    assert [cost["reads"] for cost in costs[4:]] == [usual["reads"] for usual in bare[4:]]


def test_wrong_code_on_one_process_costs_one_pass():
    costs, bare = _costs(0, 1, divided, "fix"), _costs(0, 1, divided, None)
    assert {cost["passes"] - usual["passes"] for cost, usual in zip(costs, bare)} == {1}
    assert [cost["reads"] for cost in costs[4:]] == [usual["reads"] for usual in bare[4:]]


@pytest.mark.parametrize("step", [cross_entropy, divided])
def test_two_ranks_exchange_once_per_step(ranks, step):
    for costs in ranks(2, _costs, step, "fix"):
        assert [cost["collectives"] for cost in costs[1:]] == [1] * (len(costs) - 1)
        assert all(0 < cost["bytes"] <= 256 for cost in costs)


def test_ragged_ranks_exchange_once_per_step(ranks):
    """Unequal weights are measured with a second exchange only in the first windows, and where they are logged."""
    for costs in ranks(2, _ragged_costs):
        assert [cost["collectives"] for cost in costs[3:]] == [1] * (len(costs) - 3)


def _ragged_costs(rank, n):
    counter = Counter()
    batches = [part for _ in range(8) for part in numbers(1, 12).split([3, 4 + rank, 5 - rank])]
    fit(lambda s, b, i: s.model(b).mean(), batches, K=3, callbacks=[counter], log_every_n_steps=1000)
    return counter.costs
