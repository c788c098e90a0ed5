"""What the callback costs: a Trainer with it, against the bare Trainer and against the usual monitors.

Run ``python benchmarks/overhead.py [--rounds N] [--ranks 1 2]``. Every round trains all three, one after the other in
changing order, and compares within the round; the table shows medians over the rounds, with the quartiles of the
wall-clock ratio. A window has 4 microbatches, so a microbatch that does not step and one that does are timed apart.
The host's microseconds are processor time, which other programs on the machine disturb less than the wall clock.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.table import Table
from torch import nn

from accum_plugin.lightning import AccumulationCallback

ACCUMULATION = 4
VARIANTS = ("bare", "callback", "monitors")


class Milliseconds(LightningModule):
    """A network whose forward and backward take about a millisecond on one core."""

    windows, warmup = 100, 20

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(192, 192), nn.ReLU()) for _ in range(4)))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.layers(batch), batch.argmax(dim=1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def batches(self, count):
        return torch.randn(count * 32, 192), 32


class Transformer(LightningModule):
    """An encoder of about 10 million parameters that predicts bytes."""

    windows, warmup = 5, 1

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(256, 384)
        self.encoder = nn.TransformerEncoder(layer, 6)
        self.head = nn.Linear(384, 256)

    def training_step(self, batch, _):
        logits = self.head(self.encoder(self.embedding(batch[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def batches(self, count):
        return torch.randint(256, (count * 4, 33)), 4


class Monitor(Callback):
    """Logs the gradient norm the way torch offers it."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        pl_module.log("grad_norm", nn.utils.get_total_norm(gradients))


class Clock(Callback):
    """Notes when every microbatch begins: after the one before it, its step and its logging are over."""

    def __init__(self):
        self.wall, self.host = [], []

    def on_train_batch_start(self, *_):
        self.wall.append(time.perf_counter())
        self.host.append(time.process_time())


def spans(times, warmup):
    """Return the median microseconds of a microbatch that does not step, and of one that does, after the warm-up."""
    between = [(end - start) * 1e6 for start, end in zip(times, times[1:], strict=False)]
    kept = list(enumerate(between))[warmup * ACCUMULATION :]
    within = [span for index, span in kept if (index + 1) % ACCUMULATION]
    stepping = [span for index, span in kept if not (index + 1) % ACCUMULATION]
    return statistics.median(within), statistics.median(stepping)


def fit(kind, variant, n, folder):
    """Train one epoch; return the spans by the wall clock and by the processor's."""
    torch.manual_seed(0)
    module, clock = kind(), Clock()
    rows, size = module.batches(kind.windows * ACCUMULATION)
    extra = {
        "bare": [],
        "callback": [AccumulationCallback()],
        "monitors": [Monitor(), LearningRateMonitor()],
    }[variant]
    trainer = Trainer(
        accelerator="cpu",
        devices=n,
        strategy=DDPStrategy(process_group_backend="gloo") if n > 1 else "auto",
        use_distributed_sampler=False,
        accumulate_grad_batches=ACCUMULATION,
        max_epochs=1,
        callbacks=[clock, *extra],
        logger=CSVLogger(folder, name=None, version=f"{variant}-{time.monotonic_ns()}"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=size))
    return {"wall": spans(clock.wall, kind.warmup), "host": spans(clock.host, kind.warmup)}


def measure(rank, n, kinds, rounds, store, results):
    """Run the rounds on one rank; rank 0 reports."""
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if n > 1:
        os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(n))
        files = dist.FileStore(store, n)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=n, timeout=timedelta(minutes=5))
    quiet = contextlib.redirect_stderr(io.StringIO())  # the callback's own table, once a run
    with tempfile.TemporaryDirectory() as folder, quiet:
        table = {kind.__name__: interleave(kind, n, rounds, folder) for kind in kinds}
    if rank == 0:
        results.put(table)
    if n > 1:
        dist.destroy_process_group()


def interleave(kind, n, rounds, folder):
    """Return one {variant: spans} per round, the first round (a warm-up) left out."""
    taken = []
    for index in range(rounds + 1):
        order = VARIANTS[index % 3 :] + VARIANTS[: index % 3]
        taken.append({variant: fit(kind, variant, n, folder) for variant in order})
    return taken[1:]


def run(n, kinds, rounds):
    """Measure in ``n`` fresh processes."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (n, kinds, rounds, f"{folder}/store", results)
        processes = [context.Process(target=measure, args=(rank, *arguments), daemon=True) for rank in range(n)]
        for process in processes:
            process.start()
        table = results.get()
        for process in processes:
            process.join()
    return table


def ratios(rounds, clock, variant, base):
    """Return, for every round, a whole window's time over the base's."""

    def window(taken):
        within, stepping = taken[clock]
        return (ACCUMULATION - 1) * within + stepping

    return [window(taken[variant]) / window(taken[base]) for taken in rounds]


def added(rounds, part):
    """Return the microseconds of host time that the callback adds (part 0: a microbatch; 1: one that steps)."""
    return statistics.median(taken["callback"]["host"][part] - taken["bare"]["host"][part] for taken in rounds)


def add_rows(table, n, measured):
    """Add one row a workload: ratios of whole windows, and what the callback adds to a microbatch and a step."""
    for name, rounds in measured.items():
        wall = ratios(rounds, "wall", "callback", "bare")
        low, _, high = statistics.quantiles(wall, n=4)
        microbatch, stepping = added(rounds, 0), added(rounds, 1)
        table.add_row(
            f"{name}, {n} {'rank' if n == 1 else 'ranks'}",
            f"{statistics.median(taken['bare']['wall'][0] for taken in rounds) / 1000:.2f} ms",
            f"{statistics.median(wall):.3f} ({low:.3f}-{high:.3f})",
            f"{statistics.median(ratios(rounds, 'host', 'callback', 'bare')):.3f}",
            f"{statistics.median(ratios(rounds, 'host', 'callback', 'monitors')):.3f}",
            f"{microbatch:.0f} us",
            f"{stepping - microbatch:.0f} us",
        )


def main():
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    table = Table(title=f"Callback overhead, {options.rounds} interleaved rounds, medians", title_justify="left")
    table.add_column("workload")
    for heading in (
        "bare microbatch",
        "wall / bare (quartiles)",
        "host / bare",
        "host / monitors",
        "+ per microbatch",
        "+ per step",
    ):
        table.add_column(heading, justify="right")
    for n in options.ranks:
        add_rows(table, n, run(n, (Milliseconds, Transformer), options.rounds))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
