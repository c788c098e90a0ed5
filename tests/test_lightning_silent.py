"""Correct recipes that look odd: no alarm, and every gradient bit-identical to a run without the callback."""

from __future__ import annotations

import contextlib

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning_loops import QUIET, Loop, alone, examples, fits, identical, network, numbers
from test_lightning_cases import global_mean, hooked
from torch import nn
from torch.utils.checkpoint import checkpoint

from accum_plugin.lightning import AccumulationCallback

BATCHES = list(zip(*(part.split(5) for part in examples(60))))
SINGLE = [(features.float(), labels) for features, labels in BATCHES]


def cross_entropy(loop, batch, index):
    return F.cross_entropy(loop.model(batch[0]), batch[1])


def smoothed(loop, batch, index):
    return F.cross_entropy(loop.model(batch[0]), batch[1], label_smoothing=0.1)


def half_mse(loop, batch, index):
    return 0.5 * F.mse_loss(loop.model(batch[0]), torch.ones(len(batch[0]), 4, dtype=torch.float64))


def half_square(loop, batch, index):
    return (loop.model(batch[0]) - 1).pow(2).mean() / 2


def half_a_coefficient(loop, batch, index):
    return cross_entropy(loop, batch, index) * 0.5


def prior_preservation(loop, batch, index):
    """Diffusers: one half of the batch are instances, the other the class prior, with a weight of its own."""
    instance, prior = loop.model(batch[0][:4]).chunk(2)
    return F.mse_loss(instance, torch.ones_like(instance)) + 0.5 * F.mse_loss(prior, torch.zeros_like(prior))


def min_snr(loop, batch, index):
    losses = (loop.model(batch[0]) - 1).pow(2).mean(dim=1)
    return (losses * torch.linspace(0.1, 1.0, len(losses), dtype=torch.float64)).mean()


def several_terms(loop, batch, index):
    out = loop.model(batch[0])
    data = F.cross_entropy(out, batch[1], reduction="none").mean() + 0.1 * out.pow(2).sum() / len(out)
    return data + 1e-3 * sum(parameter.pow(2).sum() for parameter in loop.parameters())


def constant_normalizer(loop, batch, index):
    return F.cross_entropy(loop.model(batch[0]), batch[1], reduction="sum") / (len(batch[0]) * 7)


def constant_over_padding(loop, batch, index):
    labels = batch[1].index_fill(0, torch.arange(index % 3), -100)
    return F.cross_entropy(loop.model(batch[0]), labels, reduction="sum") / (len(labels) * 7)


def even_mask(loop, batch, index):
    mask = (torch.arange(len(batch[1])) < 4).double()
    return (F.cross_entropy(loop.model(batch[0]), batch[1], reduction="none") * mask).sum() / mask.sum()


def even_padding(loop, batch, index):
    return F.cross_entropy(loop.model(batch[0]), torch.cat([torch.full((2,), -100), batch[1][2:]]))


def ragged_padding(loop, batch, index):
    return F.cross_entropy(loop.model(batch[0]), torch.cat([torch.full((index % 3,), -100), batch[1][index % 3 :]]))


def alternating_tasks(loop, batch, index):
    return half_square(loop, batch, index) if index % 2 else cross_entropy(loop, batch, index)


def sometimes_regularized(loop, batch, index):
    loss = cross_entropy(loop, batch, index)
    return loss + 0.1 * loop.model(batch[0]).pow(2).mean() if index % 2 else loss


def recomputed(reentrant):
    def step(loop, batch, index):
        features = batch[0].clone().requires_grad_()
        hidden = checkpoint(loop.model[:2], features, use_reentrant=reentrant)
        return F.cross_entropy(loop.model[2](hidden), batch[1])

    return step


class Weighted(nn.Module):
    """A network whose two losses have learned weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_variance = network(), nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def losses(self, batch):
        out = self.net(batch[0])
        return F.cross_entropy(out, batch[1]), F.mse_loss(out, torch.ones_like(out))


def uncertainty(loop, batch, index):
    (one, two), (a, b) = loop.model.losses(batch), loop.model.log_variance
    return torch.exp(-a) * one + a + torch.exp(-b) * two + b


def uncertainty_as_a_list(loop, batch, index):
    losses, log_variance = torch.stack(loop.model.losses(batch)), loop.model.log_variance
    return (torch.exp(-log_variance) * losses + log_variance).sum()


def frozen():
    model = network()
    model[0].requires_grad_(False)
    return model


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.idle, self.net = nn.Parameter(torch.zeros(1, dtype=torch.float64)), network()

    def forward(self, features):
        return self.net(features)


def divided_by_hand(num_steps, clip=None):
    """S13: manual optimization that divides by ``K`` itself, as Lightning's documentation has it."""

    def step(loop, batch, index):
        loop.manual_backward(cross_entropy(loop, batch, index) / num_steps)
        if (index + 1) % num_steps == 0:
            optimizer = loop.optimizers()
            if clip:
                loop.clip_gradients(optimizer, gradient_clip_val=clip, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    return step


def gradients_divided(loop, batch, index):
    """The division comes after backward."""
    loop.manual_backward(cross_entropy(loop, batch, index))
    if (index + 1) % 3 == 0:
        for parameter in loop.parameters():
            parameter.grad.div_(3)
        loop.optimizers().step()
        loop.optimizers().zero_grad()


def two_backwards(loop, batch, index):
    out = loop.model(batch[0])
    loop.optimizers().zero_grad()
    loop.manual_backward(F.cross_entropy(out, batch[1]), retain_graph=True)
    loop.manual_backward(0.1 * out.pow(2).mean())
    loop.optimizers().step()


def sharpness_aware(loop, batch, index):
    """SAM: the first gradient only says where to look, and is thrown away."""
    optimizer = loop.optimizers()
    optimizer.zero_grad()
    loop.manual_backward(cross_entropy(loop, batch, index))
    moves = [0.05 * parameter.grad for parameter in loop.parameters()]
    with torch.no_grad():
        torch._foreach_add_(list(loop.parameters()), moves)
    optimizer.zero_grad()
    loop.manual_backward(cross_entropy(loop, batch, index))
    with torch.no_grad():
        torch._foreach_sub_(list(loop.parameters()), moves)
    optimizer.step()


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.g = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6)).double()
        self.d = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def two_adams(loop):
    return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (loop.model.g, loop.model.d)]


def adversarial(*, toggle=True, cadence=1, together=False, num_steps=1):
    """DCGAN: the critic's loss on real and on fake examples, in two backward passes that look the same."""

    def step(loop, batch, index):
        generator, critic = loop.optimizers()
        model, real, last = loop.model, batch[0], (index + 1) % num_steps == 0
        made = model.g(torch.randn(len(real), 2, dtype=torch.float64))
        yes, no = torch.ones(len(real), 1).double(), torch.zeros(len(real), 1).double()
        bce = F.binary_cross_entropy_with_logits
        with _toggled(loop, critic, toggle):
            if index % num_steps == 0:
                critic.zero_grad()
            losses = [bce(model.d(real), yes), bce(model.d(made.detach()), no)]
            for loss in [sum(losses) / 2] if together else losses:
                loop.manual_backward(loss / num_steps)
            if last:
                critic.step()
        if index % cadence:
            return
        with _toggled(loop, generator, toggle):
            if index % num_steps == 0:
                generator.zero_grad()
            loop.manual_backward(bce(model.d(made), yes) / num_steps)
            if last:
                generator.step()

    return step


@contextlib.contextmanager
def _toggled(loop, optimizer, toggle):
    if toggle:
        loop.toggle_optimizer(optimizer)
    yield
    if toggle:
        loop.untoggle_optimizer(optimizer)


def wasserstein(loop, batch, index):
    """Several critic steps and a gradient penalty for each generator step."""
    generator, critic = loop.optimizers()
    model = loop.model
    for _ in range(3):
        with _toggled(loop, critic, True):
            real = batch[0].clone().requires_grad_()
            made, scores = model.g(torch.randn(len(real), 2, dtype=torch.float64)).detach(), model.d(real)
            (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
            loss = model.d(made).mean() - scores.mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()
            critic.zero_grad()
            loop.manual_backward(loss)
            critic.step()
    with _toggled(loop, generator, True):
        generator.zero_grad()
        loop.manual_backward(-model.d(model.g(torch.randn(5, 2, dtype=torch.float64))).mean())
        generator.step()


def two_parts(loop):
    return [torch.optim.SGD(loop.model[place].parameters(), lr=0.1) for place in (0, 2)]


def shared_loss(loop, batch, index):
    loop.manual_backward(cross_entropy(loop, batch, index) / 3)
    if (index + 1) % 3 == 0:
        for optimizer in loop.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class OwnStep(torch.optim.Adam):
    """A subclass that forwards: both its step and the inner one call the step hooks."""

    def step(self, closure=None):
        return super().step(closure)


def scaled(init_scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


class Reads(L.Callback):
    """S19: a callback that reads Lightning's own idea of the loss, which is divided by ``K``."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


SINGLE_NET = {"model": lambda: network(torch.float32), "batches": SINGLE, "K": 3}
ADVERSARIAL = {"model": Gan, "optimizers": two_adams, "manual": True}
JOBS = {
    "mean": {"step": cross_entropy, "K": 3},
    "float32": {"step": cross_entropy, **SINGLE_NET},
    "S7 half mse": {"step": half_mse, "K": 2},
    "S7 half square": {"step": half_square, "K": 2},
    "S7 half": {"step": half_a_coefficient, "K": 2},
    "S7 prior preservation": {"step": prior_preservation, "K": 2},
    "S7 min-SNR": {"step": min_snr, "K": 2},
    "S8 label smoothing": {"step": smoothed, "K": 2},
    "S9 several terms": {"step": several_terms, "K": 3},
    "constant normalizer": {"step": constant_normalizer, "K": 3},
    "even mask": {"step": even_mask, "K": 3},
    "even padding": {"step": even_padding, "K": 3},
    "ragged padding, K = 1": {"step": ragged_padding},
    "uncertainty weights": {"step": uncertainty, "K": 2, "model": Weighted},
    "uncertainty weights as a list": {"step": uncertainty_as_a_list, "K": 2, "model": Weighted},
    "alternating tasks": {"step": alternating_tasks, "K": 2},
    "a term now and then": {"step": sometimes_regularized, "K": 2},
    "S13": {"step": divided_by_hand(3), "manual": True},
    "S13 clipped": {"step": divided_by_hand(3, clip=0.01), "manual": True},
    "gradients divided": {"step": gradients_divided, "manual": True},
    "two backward passes": {"step": two_backwards, "manual": True},
    "SAM": {"step": sharpness_aware, "manual": True},
    "S15 DCGAN": {"step": adversarial(), **ADVERSARIAL},
    "S15 cadence": {"step": adversarial(cadence=3), **ADVERSARIAL},
    "S15 not toggled": {"step": adversarial(toggle=False), **ADVERSARIAL},
    "S15 one backward": {"step": adversarial(together=True), **ADVERSARIAL},
    "S15 accumulated": {"step": adversarial(num_steps=2), **ADVERSARIAL},
    "S15 accumulated, one backward": {"step": adversarial(num_steps=2, together=True), **ADVERSARIAL},
    "S15 Wasserstein": {"step": wasserstein, **ADVERSARIAL},
    "two optimizers, one loss": {"step": shared_loss, "optimizers": two_parts, "manual": True},
    "S19": {"step": cross_entropy, "K": 3, "fresh": lambda: {"callbacks": [Reads()]}},
    "S20 clipped by norm": {"step": cross_entropy, "K": 3, "gradient_clip_val": 0.01},
    "clipped by value": {"step": cross_entropy, "K": 3, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "scheduler of K": {
        "step": cross_entropy,
        "max_epochs": 4,
        "fresh": lambda: {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})]},
    },
    "checkpointing": {"step": recomputed(False), "K": 3},
    "reentrant checkpointing": {"step": recomputed(True), "K": 3},
    "LBFGS": {"step": cross_entropy, "optimizers": lambda loop: torch.optim.LBFGS(loop.parameters(), max_iter=4)},
    "own step": {"step": cross_entropy, "K": 3, "optimizers": lambda loop: OwnStep(loop.parameters())},
    "AdamW": {"step": cross_entropy, "K": 3, "optimizers": lambda loop: torch.optim.AdamW(loop.parameters())},
    "frozen part": {"step": cross_entropy, "K": 3, "model": frozen},
    "a parameter without gradient": {"step": cross_entropy, "K": 3, "model": Unused},
    "bf16": {"step": cross_entropy, **SINGLE_NET, "precision": "bf16-mixed"},
    "fp16": {"step": cross_entropy, **SINGLE_NET, "fresh": lambda: scaled(2.0**10)},
    "fp16 clipped": {"step": cross_entropy, **SINGLE_NET, "fresh": lambda: scaled(2.0**10), "gradient_clip_val": 0.01},
    "fp16 that overflows": {"step": cross_entropy, **SINGLE_NET, "fresh": lambda: scaled(2.0**18), "max_epochs": 3},
}


@pytest.mark.parametrize("name", JOBS)
def test_silent_and_untouched(name):
    job = {"model": network, "batches": BATCHES, **JOBS[name]}
    bare = alone(mode=None, **job)
    for mode in ("warn", "fix"):
        run = alone(mode=mode, **job)
        assert run.alarms() == [] and run.warned == []
        assert identical(run, bare)
        assert all(window.correction == 1.0 for window in run.windows)


@pytest.mark.parametrize("sizes", [[5, 5, 3], [5, 2, 4], [3, 5]])
def test_s23_short_batches_on_one_process_without_accumulation(sizes):
    batches = numbers(1, sum(sizes)).split(sizes)
    job = {"step": lambda s, b, i: s.model(b).mean(), "batches": batches}
    assert identical(alone(mode="fix", **job), alone(mode=None, **job)) and not alone(mode="fix", **job).findings


def deep():
    torch.manual_seed(7)
    layers = [layer for _ in range(60) for layer in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(6, 4)).double()


def test_verifying_a_deep_network_is_no_microbatch_of_its_own():
    run = alone(step=cross_entropy, batches=BATCHES, K=3, model=deep, keywords={"verify": True})
    assert run.findings == []
    assert [window.microbatches_total for window in run.windows] == [3, 6, 9, 12]


def test_windows_tell_the_truth_about_a_correct_run():
    run = alone(step=cross_entropy, batches=BATCHES, K=3, model=network, gradient_clip_val=1e-3)
    assert [window.microbatches for window in run.windows] == [3] * 4
    assert [window.microbatches_total for window in run.windows] == [3, 6, 9, 12]
    assert [window.effective_batch for window in run.windows] == [15] * 4
    assert [window.units for window in run.windows] == [15.0] * 4
    assert [window.gradient_scale for window in run.windows] == pytest.approx([1.0] * 4)
    norms = [float(grad.norm()) for grad in run.grads]  # before clipping: above the threshold (S20)
    assert [window.grad_norm for window in run.windows] == pytest.approx(norms) and min(norms) > 1e-3


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_one_callback_in_two_fits_with_validation_before_and_in_between():
    class Validated(Loop):
        def validation_step(self, batch, batch_idx):
            self.log("val", cross_entropy(self, batch, batch_idx))

        def val_dataloader(self):
            return torch.utils.data.DataLoader(BATCHES[:2], batch_size=None)

    def train(callbacks):
        loop = Validated(network(), cross_entropy)
        loader = torch.utils.data.DataLoader(BATCHES, batch_size=None)
        trainer = L.Trainer(
            accumulate_grad_batches=3, max_epochs=1, val_check_interval=0.5, callbacks=callbacks, **QUIET
        )
        trainer.validate(loop, verbose=False)
        trainer.fit(loop, loader)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(loop, loader)
        return loop

    callback = AccumulationCallback()
    with_it, without = train([callback]), train([])
    assert all(map(torch.equal, with_it.grads, without.grads)) and len(with_it.grads) == len(without.grads)
    assert not [finding for finding in callback.findings if finding.certainty != "info"]
    assert [window.microbatches for window in callback.windows][-4:] == [3] * 4


def test_s22_a_head_that_forwards_its_count():
    transformers = pytest.importorskip("transformers")

    def tiny():
        torch.manual_seed(1)
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        return transformers.ViTForImageClassification(
            transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.0, **sizes)
        )

    torch.manual_seed(0)
    batches = [(torch.randn(5, 3, 8, 8), torch.randint(0, 3, (5,))) for _ in range(4)]
    job = {"step": lambda s, b, i: s.model(b[0], labels=b[1]).loss, "batches": batches, "K": 2, "model": tiny}
    run = alone(mode="fix", **job)
    assert run.alarms() == [] and identical(run, alone(mode=None, **job))


# -- real ranks -------------------------------------------------------------------------------------------------------


def averaging_hook(name):
    def started(loop):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        loop.trainer.strategy.model.register_comm_hook(None, getattr(default_hooks, name))

    return started


def last_only(num_steps):
    """S13 with DDP's own ``no_sync``."""

    def step(loop, batch, index):
        last = (index + 1) % num_steps == 0
        with contextlib.nullcontext() if last else loop.trainer.strategy.model.no_sync():
            loop.manual_backward(cross_entropy(loop, batch, index) / num_steps)
        if last:
            loop.optimizers().step()
            loop.optimizers().zero_grad()

    return step


def finding_unused():
    return {"strategy": DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)}


def undone_average(loop, batch, index):
    """The global mean times the number of ranks, which undoes DDP's average."""
    return global_mean(loop, batch, index) * dist.get_world_size()


def rank_jobs(n, K):
    features, labels = examples(n * 30)
    batches = [list(zip(features[rank::n].split(5), labels[rank::n].split(5))) for rank in range(n)]
    single = [[(x.float(), y) for x, y in part] for part in batches]
    x = [list(numbers(1, 30 * n)[rank::n].split(5)) for rank in range(n)]
    sizes = [[5, 9, 4, 7, 5], [7, 4, 10, 5, 4], [4, 8, 5, 9, 4]]
    uneven = [list(zip(features[r::n].split(sizes[r]), labels[r::n].split(sizes[r]))) for r in range(n)]
    net = {"model": network, "batches": batches, "K": K}
    net32 = {"model": lambda: network(torch.float32), "batches": single, "K": K}
    return {
        "mean": {"step": cross_entropy, **net},
        "S9": {"step": several_terms, **net},
        "S6": {"step": constant_over_padding, **net, "batches": uneven},
        "S6, K = 1": {"step": constant_over_padding, **net, "batches": uneven, "K": 1},
        "S13 no_sync": {"step": last_only(K), **net, "manual": True},
        "S16 sum hook, global mean": {"step": global_mean, "batches": x, "K": K, "started": hooked},
        "average undone": {"step": undone_average, "batches": x, "K": K},
        "S17 every microbatch": {"step": divided_by_hand(K), **net, "manual": True},
        "S18 fp16 hook": {"step": cross_entropy, **net32, "started": averaging_hook("fp16_compress_hook")},
        "S18 all-reduce hook": {"step": cross_entropy, **net32, "started": averaging_hook("allreduce_hook")},
        "S15": {"step": adversarial(), "batches": batches, "fresh": finding_unused, **ADVERSARIAL},
        "unused": {"step": cross_entropy, **net, "model": Unused, "fresh": finding_unused},
        "frozen": {"step": cross_entropy, **net, "model": frozen},
        "clipped": {"step": cross_entropy, **net, "gradient_clip_val": 0.01},
        "fp16": {"step": cross_entropy, **net32, "fresh": lambda: scaled(2.0**10)},
        "overflow": {"step": cross_entropy, **net32, "fresh": lambda: scaled(2.0**24), "max_epochs": 2},
    }


@pytest.mark.parametrize(("n", "K"), [(2, 3), (3, 2)])
def test_silent_on_real_ranks(ranks, n, K):
    results = ranks(n, fits, rank_jobs(n, K), ["fix", None], timeout=300)
    for name in rank_jobs(n, K):
        for result in results:
            assert result[name, "fix"].alarms() == [], name
            assert identical(result[name, "fix"], result[name, None]), name
