"""Which losses come out right, what the split probe says about others, and what ``verify=True`` costs.

Run ``python benchmarks/losses.py [losses] [probe] [verify] [--repeat N]``; without names, all three tables. Everything
is measured on real runs, on gloo ranks of this machine.

* ``losses``: the largest deviation of any window's gradient from that of the same examples in one batch on one process,
  from the same weights, relative to that gradient's largest element, in float64; without the plugin and with it. The
  microbatches are ragged in examples and in tokens, and the last window is incomplete.
* ``probe``: the verdicts of ``split_probe``, and how often it ran the loss.
* ``verify``: what the first window takes longer with ``verify=True``, in optimizer steps of the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.table import Table
from torch import nn

from accum_plugin.accelerate import AccumulationHook
from accum_plugin.equivalence.probe import split_probe
from accum_plugin.lightning import AccumulationCallback

LENGTH, FEATURES, CLASSES = 5, 6, 4
LONGEST = 16  # what a constant normalizer takes for the length
STEPS = 3  # K; no count of examples equals it, or the number of ranks
SIZES = ((5, 8, 4, 7, 10, 5, 9, 4), (7, 4, 9, 8, 5, 11, 4, 10))  # examples, for each rank: windows of 3, 3 and 2
ROUNDING = 1e-12  # float64; above it the table says what the plugin said
ACCUMULATION, WINDOWS = 4, 5  # where verify=True is timed
QUIET = {
    "accelerator": "cpu",
    "use_distributed_sampler": False,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def network(*layers):
    """A classifier of every token, the same on every call."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(FEATURES, 8), *layers, nn.Tanh(), nn.Linear(8, CLASSES)).double()


def microbatches():
    """Every rank's microbatches: ragged sequences, labels -100 behind their ends, and for pairs the rejected ones."""
    generator = torch.Generator().manual_seed(11)

    def microbatch(size):
        lengths = torch.randint(1, LENGTH + 1, (size, 1), generator=generator)
        labels = torch.randint(0, CLASSES, (size, LENGTH), generator=generator)
        rejected = torch.randint(0, CLASSES, (size, LENGTH), generator=generator)
        behind = torch.arange(LENGTH) >= lengths
        features = torch.randn(size, LENGTH, FEATURES, generator=generator, dtype=torch.float64)
        return {"x": features, "y": labels.masked_fill(behind, -100), "rejected": rejected.masked_fill(behind, -100)}

    return [[microbatch(size) for size in sizes] for sizes in SIZES]


def windows(ranks, steps):
    """Cut every rank's microbatches into windows: all microbatches of each, over all ranks."""
    return [[batch for row in ranks for batch in row[i : i + steps]] for i in range(0, len(ranks[0]), steps)]


def joined(window):
    """The window's examples as one batch."""
    return {key: torch.cat([batch[key] for batch in window]) if part.dim() else part for key, part in window[0].items()}


def tokens(batch):
    """Labels that count."""
    return (batch["y"] != -100).sum()


# -- kinds of loss: loss(model, batch) as one rank runs it on one microbatch ------------------------------------------


def token_losses(model, batch, labels="y"):
    """Cross entropy of every token, 0 where the label does not count."""
    return F.cross_entropy(model(batch["x"]).transpose(1, 2), batch[labels], reduction="none")


def example_mean(model, batch):
    return F.cross_entropy(model(batch["x"])[:, 0], batch["y"][:, 0])


def mean_of_tokens(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def token_mean(model, batch):
    return mean_of_tokens(model(batch["x"]), batch["y"])


def masked_mean(model, batch):
    mask = (batch["y"] != -100).double()
    return (token_losses(model, batch) * mask).sum() / mask.sum()


def over_ranks_count(model, batch):
    count = tokens(batch)
    if dist.is_initialized():
        dist.all_reduce(count)
    return token_losses(model, batch).sum() / count


def over_window_count(model, batch):
    return token_losses(model, batch).sum() / batch["window_tokens"]


def mean_of_sequence_means(model, batch):
    return (token_losses(model, batch).sum(1) / (batch["y"] != -100).sum(1)).mean()


def preference(model, batch):
    """DPO's loss, for a reference policy that knows nothing."""
    logits = model(batch["x"]).transpose(1, 2)
    chosen, rejected = (-F.cross_entropy(logits, batch[key], reduction="none").sum(1) for key in ("y", "rejected"))
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def two_terms(model, batch):
    logits = model(batch["x"])
    return mean_of_tokens(logits, batch["y"]) + 0.1 * logits[:, 0].square().mean()


def divided_by_hand(model, batch):
    return token_mean(model, batch) / STEPS


def mean_of_places(model, batch):
    return token_losses(model, batch).sum() / batch["y"].numel()


def constant_normalizer(model, batch):
    """The longest generation allowed is no count of this batch: a choice, and the plugin's to leave alone."""
    return token_losses(model, batch).sum() / (len(batch["y"]) * LONGEST)


class LanguageModel(nn.Module):
    """Returns its loss, as transformers' heads do."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x, y):
        logits = self.network(x)
        return SimpleNamespace(loss=mean_of_tokens(logits, y), logits=logits)


def in_forward(model, batch):
    return model(x=batch["x"], y=batch["y"]).loss


compiled_mean_of_tokens = torch.compile(mean_of_tokens, backend="aot_eager")


def compiled(model, batch):
    return compiled_mean_of_tokens(model(batch["x"]), batch["y"])


class FusedTokenMean(torch.autograd.Function):
    """A token mean as fused kernels have it: one node in the graph, which shows nothing."""

    @staticmethod
    def forward(ctx, logits, labels):
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            loss = mean_of_tokens(logits, labels)
            (grad,) = torch.autograd.grad(loss, logits)
        ctx.save_for_backward(grad)
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def fused(model, batch):
    return FusedTokenMean.apply(model(batch["x"]), batch["y"])


@dataclass(frozen=True)
class Kind:
    """A kind of loss.

    Args:
        loss: ``loss(model, batch)``.
        meant: The same on one process with one batch, where that is written differently.
        model: Makes the model.
        steps: Microbatches in a window.
        keywords: Keywords of the callback and the hook.
    """

    loss: Callable[..., torch.Tensor]
    meant: Callable[..., torch.Tensor] | None = None
    model: Callable[[], nn.Module] = network
    steps: int = STEPS
    keywords: dict[str, Any] = field(default_factory=dict)


TOKENS = {"units": tokens, "normalization": "mean"}
KINDS = {
    "mean over examples": Kind(example_mean),
    "token mean, ignore_index": Kind(token_mean),
    "masked sum / mask.sum()": Kind(masked_mean),
    "sum / all ranks' tokens": Kind(over_ranks_count),
    "sum / the window's tokens": Kind(over_window_count),
    "mean of sequences' means": Kind(mean_of_sequence_means),
    "preference over pairs": Kind(preference),
    "two terms": Kind(two_terms),
    "two terms, K = 1": Kind(two_terms, steps=1),
    "token mean / K by hand": Kind(divided_by_hand, token_mean),
    "sum / (batch * padded length)": Kind(mean_of_places),
    f"sum / (batch * {LONGEST})": Kind(constant_normalizer),
    "in the model's forward": Kind(in_forward, model=LanguageModel),
    "compiled": Kind(compiled, token_mean),
    "compiled, units=": Kind(compiled, token_mean, keywords=TOKENS),
    "autograd.Function": Kind(fused, token_mean),
    "autograd.Function, units=": Kind(fused, token_mean, keywords=TOKENS),
}


# -- wrappers: train one epoch, with the plugin (a mode) or without (None) --------------------------------------------


class Remembering(torch.optim.SGD):
    """Keeps the weights it stepped from, and the gradients it stepped with."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.steps = []
        self.register_step_post_hook(lambda *_: self.steps[-1].append(self.flat(lambda parameter: parameter.grad)))
        self.register_step_pre_hook(lambda *_: self.steps.append([self.flat(lambda parameter: parameter)]))

    def flat(self, of):
        return torch.cat([of(p).detach().reshape(-1) for p in self.param_groups[0]["params"]]).clone()


def loader_of(batches):
    """A loader of microbatches that are made already."""
    return torch.utils.data.DataLoader(batches, batch_size=1, collate_fn=lambda items: items[0])


def with_accelerate(kind, mode, rank, batches):
    """A hand-written loop. Return weights and gradients of each step, and the codes of what was said."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=kind.steps)
    hook = AccumulationHook.attach(accelerator, mode, **kind.keywords) if mode else None
    model = kind.model()
    remembering = Remembering(model.parameters())
    dealt = [batch for step in zip(*batches, strict=True) for batch in step]  # accelerate deals them out in turn
    model, optimizer, loader = accelerator.prepare(model, remembering, loader_of(dealt))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(kind.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    codes = [finding.code for finding in hook.findings] if hook else []
    if hook:
        hook.detach()
    return remembering.steps, codes


class Module(LightningModule):
    """Trains a kind of loss."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.model = kind, kind.model()
        self.optimizer = Remembering(self.model.parameters())

    def training_step(self, batch, _):
        return self.kind.loss(self.model, batch)

    def configure_optimizers(self):
        return self.optimizer


class Summing(DDPStrategy):
    """DDP with a hook that adds gradients up and does not average."""

    def setup(self, trainer):
        super().setup(trainer)
        self.model.register_comm_hook(None, self.add_up)

    @staticmethod
    def add_up(_, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


def with_lightning(kind, mode, rank, batches, strategy=DDPStrategy):
    """A Trainer. Return weights and gradients of each step, and the codes of what was said."""
    module = Module(kind)
    callbacks = [AccumulationCallback(mode, **kind.keywords)] if mode else []
    strategy = strategy(process_group_backend="gloo")
    options = {"devices": len(batches), "strategy": strategy, "accumulate_grad_batches": kind.steps, **QUIET}
    Trainer(callbacks=callbacks, **options).fit(module, loader_of(batches[rank]))
    return module.optimizer.steps, [finding.code for finding in callbacks[0].findings] if callbacks else []


def with_lightning_summing(kind, mode, rank, batches):
    """A Trainer whose ranks' gradients are added up."""
    return with_lightning(kind, mode, rank, batches, Summing)


WRAPPERS = {
    "1 process\nAccelerate": (1, with_accelerate),
    "2 ranks averaged\nAccelerate": (2, with_accelerate),
    "2 ranks averaged\nLightning": (2, with_lightning),
    "2 ranks summed\nLightning": (2, with_lightning_summing),
}


# -- the table of losses ----------------------------------------------------------------------------------------------


def on_ranks(n, work, *arguments):
    """Run ``work(rank, n, *arguments)`` in ``n`` new processes; return the results in the order of the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(be_rank, (n, folder, work, arguments), nprocs=n)
        return [torch.load(f"{folder}/result{rank}", weights_only=False) for rank in range(n)]


def be_rank(rank, n, folder, work, arguments):
    """Be one of ``n`` ranks."""
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if n > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # accelerate asks for them, nobody uses them
        files = dist.FileStore(f"{folder}/store", n)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=n, timeout=timedelta(minutes=2))
    with contextlib.redirect_stderr(io.StringIO()):  # the plugin's own table
        result = work(rank, n, *arguments)
    torch.save(result, f"{folder}/result{rank}")
    if n > 1:
        dist.barrier()
        dist.destroy_process_group()


def counted(n, steps):
    """The microbatches of ``n`` ranks, each with the number of its window's tokens."""
    batches = microbatches()[:n]
    for window in windows(batches, steps):
        total = sum(tokens(batch) for batch in window)
        for batch in window:
            batch["window_tokens"] = total
    return batches


def train(rank, n):
    """Train every kind in every wrapper for ``n`` ranks, without the plugin and with it."""
    return {
        (name, column, mode): run(kind, mode, rank, counted(n, kind.steps))
        for name, kind in KINDS.items()
        for column, (size, run) in WRAPPERS.items()
        if size == n
        for mode in (None, "fix")
    }


def deviation(kind, steps, n):
    """Return the largest deviation of a window's gradient from what was meant."""
    worst = 0.0
    for (weights, seen), window in zip(steps, windows(counted(n, kind.steps), kind.steps), strict=True):
        model = kind.model()
        nn.utils.vector_to_parameters(weights, model.parameters())
        (kind.meant or kind.loss)(model, joined(window)).backward()
        meant = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
        worst = max(worst, float((seen - meant).abs().max() / meant.abs().max()))
    return worst


def same(runs, others):
    """Whether two sets of ranks stepped with the same gradients, to the last bit."""
    return all(torch.equal(a[1], b[1]) for one, other in zip(runs, others) for a, b in zip(one[0], other[0]))


def losses_table(repeat):
    """Kinds of loss, by wrappers."""
    title = f"Deviation from one batch on one process, without the plugin -> with it (K = {STEPS}, float64)"
    table = Table(title=title, title_justify="left")
    table.add_column("loss", no_wrap=True)
    for column in WRAPPERS:
        table.add_column(column, justify="right")
    results = {n: on_ranks(n, train) for n in (1, 2)}
    for name, kind in KINDS.items():
        cells = []
        for column, (n, _) in WRAPPERS.items():
            without, fixed = ([result[name, column, mode] for result in results[n]] for mode in (None, "fix"))
            before, after = (max(deviation(kind, steps, n) for steps, _ in runs) for runs in (without, fixed))
            lines = [f"{before:.1e} -> {after:.1e}"]
            if after > ROUNDING:
                codes = sorted(set(fixed[0][1])) or ["silent"]
                lines += ["left alone"] * same(without, fixed)
                lines += [" ".join(codes[i : i + 2]) for i in range(0, len(codes), 2)]
            cells.append("\n".join(lines))
        table.add_row(name, *cells)
    return table


# -- the split probe --------------------------------------------------------------------------------------------------


def sum_of_examples(model, batch):
    return F.cross_entropy(model(batch["x"])[:, 0], batch["y"][:, 0], reduction="sum")


def info_nce(model, batch):
    """Two views of each example, told apart from those of the others."""
    one, two = (F.normalize(model(batch["x"][:, place])) for place in (0, 1))
    return F.cross_entropy(one @ two.T / 0.1, torch.arange(len(one)))


def normalized_mean(model, batch):
    return F.cross_entropy(model(batch["x"][:, 0]), batch["y"][:, 0])


def noisy_mean(model, batch):
    noise = 0.1 * torch.randn_like(batch["x"])
    return example_mean(model, batch | {"x": batch["x"] + noise})


PROBED = {
    "mean": (example_mean, network()),
    "sum": (sum_of_examples, network()),
    "token mean, ragged": (token_mean, network()),
    "InfoNCE": (info_nce, network()),
    "mean, model with BatchNorm": (normalized_mean, network(nn.BatchNorm1d(8))),
    "mean with noise on its inputs": (noisy_mean, network()),
}


def probe_table(repeat):
    """Verdicts of the split probe."""
    batch = microbatches()[0][1]
    table = Table(title=f"The split probe on {len(batch['x'])} examples", title_justify="left")
    table.add_column("loss", no_wrap=True)
    for heading in ("verdict", "residual", "loss runs"):
        table.add_column(heading, justify="right")
    table.add_column("reason")
    for name, (loss, model) in PROBED.items():
        runs = []

        def counted_loss(part, loss=loss, model=model, runs=runs):
            runs.append(1)
            return loss(model, part)

        verdict = split_probe(counted_loss, batch, modules=[model])
        table.add_row(name, verdict.kind, f"{verdict.residual:.1e}", str(len(runs)), verdict.reason)
    return table


# -- verify=True ------------------------------------------------------------------------------------------------------


class Transformer(LightningModule):
    """An encoder of about a million parameters that predicts bytes."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(256, 128)
        self.encoder = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)
        self.head = nn.Linear(128, 256)

    def training_step(self, batch, _):
        logits = self.head(self.encoder(self.embedding(batch[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(Callback):
    """Takes the wall time of each window, its optimizer step included."""

    def __init__(self):
        self.seconds = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % ACCUMULATION == 0:
            self.began = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % ACCUMULATION == 0:
            self.seconds.append(time.perf_counter() - self.began)


def timed(n, verify, rank):
    """Train a few windows; return their seconds."""
    torch.manual_seed(rank)
    rows = torch.randint(256, (WINDOWS * ACCUMULATION * 8, 33))
    torch.manual_seed(0)
    clock, plugin = Clock(), AccumulationCallback(verify=verify)
    strategy = DDPStrategy(process_group_backend="gloo") if n > 1 else "auto"
    options = {"devices": n, "strategy": strategy, "accumulate_grad_batches": ACCUMULATION, **QUIET}
    trainer = Trainer(callbacks=[clock, plugin], **options)
    trainer.fit(Transformer(), torch.utils.data.DataLoader(rows, batch_size=8))
    if plugin.findings:
        raise RuntimeError(f"not a run to time: {plugin.findings}")
    return clock.seconds


def time_both(rank, n, repeat):
    """Time runs with ``verify=True`` and without, in turns."""
    timed(n, True, rank)  # warms up
    return [(timed(n, True, rank), timed(n, False, rank)) for _ in range(repeat)]


def verify_table(repeat):
    """What verify=True costs."""
    parameters = sum(parameter.numel() for parameter in Transformer().parameters())
    size = f"a transformer of {parameters / 1e6:.2f} M parameters, K = {ACCUMULATION}"
    table = Table(title=f"verify=True, {size} (medians of {repeat} runs)", title_justify="left")
    table.add_column("ranks")
    for heading in ("a step", "first window", "with verify=True", "more, in steps (quartiles)"):
        table.add_column(heading, justify="right")
    for n in (1, 2):
        pairs = on_ranks(n, time_both, repeat)[0]
        step = statistics.median(span for _, plain in pairs for span in plain[2:])
        low, middle, high = statistics.quantiles([(checked[0] - plain[0]) / step for checked, plain in pairs], n=4)
        firsts = [statistics.median(run[0] for run in runs) for runs in zip(*((p, c) for c, p in pairs))]
        spans = (f"{span * 1000:.0f} ms" for span in (step, *firsts))
        table.add_row(str(n), *spans, f"{middle:.1f} ({low:.1f}-{high:.1f})")
    return table


def main():
    """Measure and print the tables."""
    tables = {"losses": losses_table, "probe": probe_table, "verify": verify_table}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help=f"{', '.join(tables)}; all if left out")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each kind that are timed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120)
    for name in options.tables or tables:
        console.print(f"... {name}")
        console.print(tables[name](options.repeat))


if __name__ == "__main__":
    main()
