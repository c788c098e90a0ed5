"""Whatever breaks inside the plugin, training goes on as if it were not there, and no rank waits for another."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from lightning_loops import Run, alone, examples, identical, network

from accum_plugin import correction, lightning, loggers, record, session, verdict, window
from accum_plugin.boundary import Boundary
from accum_plugin.ledger import Ledger
from accum_plugin.neighbors import Neighbors
from accum_plugin.sentinel import Sentinel
from accum_plugin.summary import Summary
from accum_plugin.taps import backward_tap, norm_tap

BATCHES = list(zip(*(part.split(5) for part in examples(60))))


def cross_entropy(loop, batch, index):
    return F.cross_entropy(loop.model(batch[0]), batch[1])


class Broken(Exception):
    """Stands for any bug of ours."""


def broken(*_args, **_kwargs):
    raise Broken("injected")


PLACES = {
    "start": (lightning, "LightningHost"),
    "prepare": (session.Session, "start"),
    "count the batch": (lightning, "count_examples"),
    "new microbatch": (session.Session, "begin_microbatch"),
    "read the loss": (session, "read_loss"),
    "roles of scalars": (session, "view_term"),
    "scale microbatch": (correction.Correction, "before_backward"),
    "table": (Summary, "show_once"),
    "book": (window.OptimizerWindow, "enter"),
    "ledger": (Ledger, "fields"),
    "sample": (Sentinel, "sample"),
    "measure": (verdict, "measure"),
    "judge": (verdict, "judge"),
    "factor": (Boundary, "_factor"),
    "settle": (correction.Correction, "settle"),
    "norm": (window.OptimizerWindow, "measure_norm"),
    "record": (record.WindowRecord, "metrics"),
    "loggers": (loggers.LightningLog, "metrics"),
    "clear": (Boundary, "clearing"),
    "stepped": (Boundary, "stepped"),
    "rotate": (Sentinel, "rotate"),
    "neighbors": (Neighbors, "stepped"),
    "end": (Neighbors, "finish"),
}


def count_down(original, calls):
    """Work ``calls`` times, then raise for good."""
    left = [calls]

    def sometimes(*args, **kwargs):
        if left[0] <= 0:
            raise Broken("injected")
        left[0] -= 1
        return original(*args, **kwargs)

    return sometimes


@contextlib.contextmanager
def breaking(place: str | None, calls: int = 0):
    owner, name = PLACES[place] if place else (None, None)
    with pytest.MonkeyPatch.context() as patch:
        if place:
            patch.setattr(owner, name, count_down(getattr(owner, name), calls))
        yield


def job(folder) -> dict:
    return {
        "step": cross_entropy,
        "model": network,
        "K": 3,
        "gradient_clip_val": 0.5,
        "fresh": lambda: {"logger": CSVLogger(folder), "log_every_n_steps": 1},
    }


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_an_internal_error_on_one_process(place, calls, tmp_path):
    bare = alone(batches=BATCHES, mode=None, **job(tmp_path))
    with breaking(place, calls):
        run = alone(batches=BATCHES, mode="fix", **job(tmp_path))
    assert identical(run, bare)
    happens_once = place in ("start", "prepare", "roles of scalars", "end") and calls
    assert [f.code for f in run.findings] == ([] if happens_once else ["ACC902"])
    assert all("injected" in f.message for f in run.findings)
    assert not backward_tap.listeners and not norm_tap.listeners


def _broken_on(rank: int, n: int, folder: str, batches, only: int, places) -> dict[str, tuple[Run, Run]]:
    bare = alone(batches=batches[rank], mode=None, **job(folder))
    result = {}
    for place, calls in places:
        with breaking(place if rank == only else None, calls):
            result[f"{place} {calls}"] = alone(batches=batches[rank], mode="fix", **job(folder)), bare
    return result


@pytest.mark.parametrize("only", [0, 1])
def test_an_internal_error_on_one_of_two_ranks(ranks, tmp_path, only):
    batches = [BATCHES[rank::2] for rank in range(2)]
    places = [(place, 0) for place in PLACES] + [("read the loss", 1), ("sample", 1), ("clear", 1)]
    results = ranks(2, _broken_on, str(tmp_path), batches, only, places, timeout=300)
    for name in results[0]:
        for result in results:
            run, bare = result[name]
            assert identical(run, bare), name
            assert run.alarms() == [] and len(run.findings) <= 1, name
        said = [[f.code for f in result[name][0].findings] for result in results]
        assert said[only] == ["ACC902"], name
        if not name.startswith("end"):  # nobody is left to tell
            assert said[1 - only] == said[only], name


def test_units_that_raise(tmp_path):
    run = alone(batches=BATCHES, mode="fix", keywords={"units": broken}, **job(tmp_path))
    assert identical(run, alone(batches=BATCHES, mode=None, **job(tmp_path)))
    assert [f.code for f in run.findings] == ["ACC902"]


def nan_now_and_then(loop, batch, index):
    loss = cross_entropy(loop, batch, index)
    return loss * float("nan") if index == 4 else loss


def infinite(loop, batch, index):
    return cross_entropy(loop, batch, index) * float("inf")


def nothing(loop, batch, index):
    return None


def all_ignored(loop, batch, index):
    """The mean over no target at all is NaN; its gradient is zero."""
    return F.cross_entropy(loop.model(batch[0]), torch.full_like(batch[1], -100))


@pytest.mark.parametrize("step", [nan_now_and_then, infinite, nothing, all_ignored])
@pytest.mark.parametrize("K", [1, 3])
def test_strange_losses_on_one_process(step, K):
    bare, run = (alone(step=step, batches=BATCHES, K=K, model=network, mode=mode) for mode in (None, "fix"))
    assert identical(run, bare) and run.alarms() == []
    assert "ACC902" not in [f.code for f in run.findings]


def _strange(rank: int, n: int, batches) -> dict[str, tuple[Run, Run]]:
    def on_last(loop, batch, index):
        return nan_now_and_then(loop, batch, index) if rank == n - 1 else cross_entropy(loop, batch, index)

    def none_valid(loop, batch, index):
        labels = torch.full_like(batch[1], -100) if rank == n - 1 else batch[1]
        return F.cross_entropy(loop.model(batch[0]), labels, reduction="sum") / (labels != -100).sum().clamp(min=1)

    def now_and_then(loop, batch, index):
        labels = torch.full_like(batch[1], -100) if (rank + index) % 3 == 0 else batch[1]
        return F.cross_entropy(loop.model(batch[0]), labels)

    steps = {"nan": on_last, "none valid": none_valid, "now and then": now_and_then, "nobody": all_ignored}
    return {
        name: tuple(alone(step=step, batches=batches[rank], K=3, model=network, mode=mode) for mode in ("fix", None))
        for name, step in steps.items()
    }


@pytest.mark.parametrize("n", [2, 3])
def test_strange_losses_on_some_ranks(ranks, n):
    features, labels = examples(n * 30)
    batches = [list(zip(features[rank::n].split(5), labels[rank::n].split(5))) for rank in range(n)]
    results = ranks(n, _strange, batches)
    for name in results[0]:
        for result in results:
            assert "ACC902" not in [f.code for f in result[name][0].findings], name
            assert identical(result[name][0], results[0][name][0]), name  # the ranks stay together
    for name in ("nan", "nobody"):
        assert all(identical(*result[name]) for result in results) and results[0][name][0].alarms() == []
    model, kept = network(), [part for rank in range(n - 1) for part in batches[rank][:3]]
    F.cross_entropy(model(torch.cat([x for x, _ in kept])), torch.cat([y for _, y in kept])).backward()
    meant = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
    assert (results[0]["none valid"][0].grads[0] - meant).abs().max() < 1e-12
