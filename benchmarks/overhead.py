"""What the callback costs: a Trainer with it, against the bare Trainer and against the usual monitors.

Run ``python benchmarks/overhead.py [--repeat N] [--ranks 1 2]``. The three train at the same time, each in its own
process, and take turns after every microbatch: no two run at once, and the times compared were taken within
milliseconds of each other, so that what else the machine does falls on all three alike. The ratios are medians over
windows of 4 microbatches, by the wall clock. The microseconds are the median time spent in the plugin's own functions,
for a microbatch that does not step, and for the step on top of one (on several ranks with the wait for the others).
Steps that log are rare (1 in 50) and do not move a median.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
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
from accum_plugin.sentinel import _Watch
from accum_plugin.session import Session

ACCUMULATION = 4
LOST = 300.0  # seconds without a turn after which a process gives up
VARIANTS = ("bare", "callback", "monitors")


class Milliseconds(LightningModule):
    """A network whose forward and backward take about a millisecond on one core."""

    windows, warmup = 300, 20

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

    windows, warmup = 22, 2

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


class Stopwatch:
    """Adds up the time spent in the plugin: in every function through which a framework enters it."""

    entrances = (
        (AccumulationCallback, [name for name in vars(AccumulationCallback) if name.startswith("on_")]),
        (
            Session,
            [
                "before_backward",
                "after_backward",
                "before_clip",
                "after_norm",
                "before_step",
                "after_step",
                "on_zero_grad",
            ],
        ),
        (_Watch, ["_observe"]),
    )

    def __init__(self):
        self.spent, self.inside = 0.0, False
        for owner, names in self.entrances:
            for name in names:
                setattr(owner, name, self.timed(getattr(owner, name)))

    def timed(self, function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            if self.inside:
                return function(*args, **kwargs)
            self.inside, began = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside = False
                self.spent += time.perf_counter() - began

        return wrapper

    def take(self):
        """Microseconds since the last call."""
        spent, self.spent = self.spent, 0.0
        return spent * 1e6


class Turns(Callback):
    """Runs one microbatch, with whatever follows it until the next begins, then gives the turn to the next process."""

    def __init__(self, mine, following):
        self.mine, self.following, self.plugin = mine, following, Stopwatch()
        self.wall, self.host, self.began = [], [], None

    def on_train_batch_start(self, *_):
        if self.began:
            self.give_turn()
        if not self.mine.acquire(timeout=LOST):
            raise TimeoutError("the process whose turn it was is gone")
        self.plugin.take()
        self.began = time.perf_counter()

    def on_train_end(self, *_):
        self.give_turn()

    def give_turn(self):
        self.wall.append((time.perf_counter() - self.began) * 1e6)
        self.host.append(self.plugin.take())
        self.following.release()


def fit(kind, variant, n, repeat, turns, folder):
    """Train one epoch."""
    torch.manual_seed(0)
    module = kind()
    rows, size = module.batches(kind.windows * repeat * ACCUMULATION)
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
        callbacks=[turns, *extra],
        logger=CSVLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=size))


def measure(kind, variant, rank, n, repeat, turns, folder, results):
    """Be one rank of one variant; rank 0 reports microseconds for each microbatch: all, and the plugin's."""
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if n > 1:
        os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(n))
        files = dist.FileStore(f"{folder}/{variant}", n)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=n, timeout=timedelta(minutes=5))
    clock = Turns(*turns)
    with contextlib.redirect_stderr(io.StringIO()):  # the callback's own table
        fit(kind, variant, n, repeat, clock, f"{folder}/{variant}-logs")
    if rank == 0:
        results.put((variant, clock.wall, clock.host))
    if n > 1:
        dist.destroy_process_group()


def run(n, kind, repeat):
    """Train the three variants on ``n`` ranks each, in turns; return {variant: (wall, host)}, warm-up left out."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        gates = [[context.Semaphore(int(index == 0)) for index in range(len(VARIANTS))] for _ in range(n)]
        for rank in range(n):
            for index, variant in enumerate(VARIANTS):
                turns = (gates[rank][index], gates[rank][(index + 1) % len(VARIANTS)])
                arguments = (kind, variant, rank, n, repeat, turns, folder, results)
                processes.append(context.Process(target=measure, args=arguments, daemon=True))
        for process in processes:
            process.start()
        measured = [results.get(timeout=2 * LOST) for _ in VARIANTS]
        for process in processes:
            process.join()
    skip = kind.warmup * ACCUMULATION
    return {variant: (wall[skip:], host[skip:]) for variant, wall, host in measured}


def ratios(ours, theirs):
    """Return, for every window, our time over theirs."""
    starts = range(0, len(ours), ACCUMULATION)
    return [sum(ours[i : i + ACCUMULATION]) / sum(theirs[i : i + ACCUMULATION]) for i in starts]


def add_row(table, n, kind, measured):
    """Add a workload: ratios of whole windows, and what the callback adds to a microbatch and to a step."""
    (wall, host), (bare_wall, _) = measured["callback"], measured["bare"]
    low, middle, high = statistics.quantiles(ratios(wall, bare_wall), n=4)
    within = statistics.median(span for index, span in enumerate(host) if (index + 1) % ACCUMULATION)
    stepping = statistics.median(host[ACCUMULATION - 1 :: ACCUMULATION])
    table.add_row(
        f"{kind.__name__}, {n} {'rank' if n == 1 else 'ranks'}",
        f"{statistics.median(bare_wall) / 1000:.2f} ms",
        f"{middle:.3f} ({low:.3f}-{high:.3f})",
        f"{statistics.median(ratios(wall, measured['monitors'][0])):.3f}",
        f"{within:.0f} us",
        f"{stepping - within:.0f} us",
    )


def main():
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=1, help="multiplies the number of steps")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    table = Table(title="A Trainer with AccumulationCallback, against others (medians)", title_justify="left")
    table.add_column("workload")
    for heading in ("microbatch", "/ bare (quartiles)", "/ monitors", "plugin, microbatch", "plugin, step"):
        table.add_column(heading, justify="right")
    console = Console(width=110)
    for n in options.ranks:
        for kind in (Milliseconds, Transformer):
            console.print(f"... {kind.__name__}, ranks: {n}")
            add_row(table, n, kind, run(n, kind, options.repeat))
    console.print(table)


if __name__ == "__main__":
    main()
