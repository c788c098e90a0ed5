"""What happens around the gradient, on a real Trainer: each kind once wrong and once right."""

from __future__ import annotations

import json

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from accum_plugin.lightning import AccumulationCallback
from accum_plugin.loggers import AccumulationWarning
from accum_plugin.session import AccumulationError

pytestmark = pytest.mark.filterwarnings("ignore")
ALARMS = ("certain", "suspected")
QUIET = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)


class Scalar(L.LightningModule):
    """One weight; the loss of an example is ``w * x``, so that the gradient is the mean of ``x``."""

    def __init__(self, step=None, schedule=None, automatic=True, layers=None, lr=0.1):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.layers = layers
        self.step, self.schedule, self.lr = step, schedule, lr
        self.automatic_optimization = automatic

    def loss(self, batch):
        return (self.w * batch[0]).mean()

    def training_step(self, batch, index):
        return self.step(self, batch, index) if self.step else self.loss(batch)

    def validation_step(self, batch, index):
        self.log("val", self.w.detach())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return optimizer if self.schedule is None else self.schedule(self, optimizer)


def fit(model=None, K=4, b=2, N=16, epochs=1, mode="warn", ckpt=None, validate=False, callback=None, **keywords):
    callback = callback or AccumulationCallback(mode)
    data = DataLoader(TensorDataset(torch.arange(1.0, N + 1, dtype=torch.float64)), batch_size=b)
    options = {**QUIET, "accelerator": "cpu", "devices": 1, "max_epochs": epochs, **keywords}
    options["accumulate_grad_batches"] = K
    options["callbacks"] = [callback, *options.get("callbacks", [])]
    trainer = L.Trainer(**options)
    trainer.fit(model or Scalar(), data, data if validate else None, ckpt_path=ckpt, weights_only=False)
    callback.trainer = trainer
    return callback


def found(callback, *certainties):
    return {f.code: f for f in callback.findings if not certainties or f.certainty in certainties}


def by_hand(steps, clip=None, last=False):
    """Manual optimization with an own modulo, the loss divided by hand."""

    def step(module, batch, index):
        optimizer = module.optimizers()
        module.manual_backward(module.loss(batch) / steps)
        whole = (index + 1) % steps == 0 or last and module.trainer.is_last_batch
        if clip:
            clip(module, whole)
        if whole:
            optimizer.step()
            optimizer.zero_grad()

    return step


def clip(module, threshold=1.0):
    torch.nn.utils.clip_grad_norm_(module.parameters(), threshold)


# -- ACC204 -----------------------------------------------------------------------------------------------------------


def test_clipping_in_training_step():
    def step(module, batch, index):
        clip(module)
        return module.loss(batch)

    callback = fit(Scalar(step), mode="fix")
    assert "after 1, 2, 3 of 4 microbatches" in found(callback, "certain")["ACC204"].message
    assert set(found(callback, *ALARMS)) == {"ACC204"}


def test_clipping_after_every_backward():
    class Hooked(Scalar):
        def on_after_backward(self):
            clip(self)

    assert set(found(fit(Hooked()), *ALARMS)) == {"ACC204"}
    manual = fit(Scalar(by_hand(4, clip=lambda module, whole: clip(module)), automatic=False), K=1, mode="fix")
    assert set(found(manual, *ALARMS)) == {"ACC204"}


def test_clipping_at_the_end_of_the_window_is_silent():
    assert found(fit(gradient_clip_val=1.0, epochs=2)) == {}
    assert found(fit(gradient_clip_val=0.5, gradient_clip_algorithm="value")) == {}

    class Own(Scalar):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            clip(self)

    assert found(fit(Own())) == {}
    manual = Scalar(by_hand(4, clip=lambda module, whole: clip(module) if whole else None), automatic=False)
    assert found(fit(manual, K=1, mode="fix", epochs=2)) == {}


def test_a_logged_norm_above_the_threshold_is_silent():
    callback = fit(gradient_clip_val=1.0)
    assert found(callback) == {} and callback.last_window.grad_norm == pytest.approx(12.5)


def test_measuring_the_norm_is_silent():
    class Measured(Scalar):
        def on_after_backward(self):
            clip(self, float("inf"))
            torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])

    assert found(fit(Measured())) == {}


def test_raise_stops_before_the_first_step_that_was_clipped_inside():
    class Hooked(Scalar):
        def on_after_backward(self):
            clip(self)

    callback = AccumulationCallback("raise")
    with pytest.raises(AccumulationError, match="ACC204"):
        fit(Hooked(), callback=callback)
    assert not callback.windows


# -- ACC206 and L16 ---------------------------------------------------------------------------------------------------


def scaled(scaler=None):
    scaler = scaler or torch.amp.GradScaler("cpu", init_scale=1024.0)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


class Float(Scalar):
    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.w = torch.nn.Parameter(torch.zeros(()))

    def loss(self, batch):
        return (self.w * batch[0].float()).mean()


def test_clipped_before_unscaling():
    class Hooked(Float):
        def on_after_backward(self):
            if not self.trainer.fit_loop._should_accumulate():
                clip(self)

    finding = found(fit(Hooked(), **scaled()), "certain")["ACC206"]
    assert "off by a factor of 1024" in finding.message

    manual = Float(by_hand(4, clip=lambda module, whole: clip(module) if whole else None), automatic=False)
    assert set(found(fit(manual, K=1, **scaled()), *ALARMS)) == {"ACC206"}


def test_the_trainers_clipping_unscales_first():
    assert found(fit(Float(), gradient_clip_val=1.0, **scaled())) == {}


def test_skipped_steps_are_no_optimizer_steps():
    class Overflow(Float):
        def on_after_backward(self):
            if self.trainer.fit_loop.total_batch_idx == 7:  # the second window
                self.w.grad.fill_(float("inf"))

    def schedule(module, optimizer):
        return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda step: 1.0), "interval": "step"}]

    callback = fit(Overflow(schedule=schedule), N=32, **scaled())
    assert [window.optimizer_step for window in callback.windows] == [0, 1, 2]  # 4 windows, 1 skipped
    finding = found(callback)["ACC203"]
    assert finding.certainty == "info" and "1 optimizer step was skipped" in finding.message
    assert set(found(callback)) == {"ACC203"}
    assert callback.last_window.microbatches_total == 16


# -- ACC203 and ACC209 ------------------------------------------------------------------------------------------------


def stepping_scheduler(guarded):
    def step(module, batch, index):
        by_hand(4)(module, batch, index)
        if not guarded or (index + 1) % 4 == 0:
            module.lr_schedulers().step()

    return Scalar(step, lambda module, o: ([o], [LambdaLR(o, lambda step: 1.0)]), automatic=False)


def test_scheduler_stepped_by_hand():
    assert "4 times for one optimizer step" in found(fit(stepping_scheduler(False), K=1), "certain")["ACC203"].message
    assert found(fit(stepping_scheduler(True), K=1)) == {}


def test_scheduler_stepped_in_training_step_as_well():
    def step(module, batch, index):
        module.lr_schedulers().step()
        return module.loss(batch)

    def schedule(module, o):
        return [o], [{"scheduler": LambdaLR(o, lambda step: 1.0), "interval": "step"}]

    assert set(found(fit(Scalar(step, schedule), N=32), *ALARMS)) == {"ACC203"}


def test_what_lightning_steps_is_silent():
    def schedules(module, o):
        return [o], [
            {"scheduler": LambdaLR(o, lambda step: 1.0), "interval": "step"},
            {"scheduler": LambdaLR(o, lambda step: 1.0), "interval": "epoch"},
            {"scheduler": LambdaLR(o, lambda step: 1.0), "interval": "step", "frequency": 2},
            {"scheduler": ReduceLROnPlateau(o), "interval": "epoch", "monitor": "val"},
        ]

    callback = fit(Scalar(schedule=schedules), epochs=3, validate=True, num_sanity_val_steps=0, val_check_interval=0.5)
    assert found(callback) == {}


def horizon(make, interval):
    def schedule(module, o):
        return {"optimizer": o, "lr_scheduler": {"scheduler": make(o), "interval": interval}}

    return Scalar(schedule=schedule)


CASES = {  # 40 examples, 2 each, K = 4, 3 epochs: 60 microbatches, 15 optimizer steps
    "cosine": lambda length: lambda o: CosineAnnealingLR(o, T_max=length),
    "linear": lambda length: lambda o: LinearLR(o, 1.0, 0.0, total_iters=length),
    "one cycle": lambda length: lambda o: OneCycleLR(o, 0.1, total_steps=length),
}


@pytest.mark.parametrize("name", CASES)
def test_horizon(name):
    def run(length, interval):
        return found(fit(horizon(CASES[name](length), interval), N=40, epochs=3))

    per_epoch = run(15, "epoch")["ACC209"]
    assert per_epoch.certainty == "certain" and "15 long" in per_epoch.message and "3 times in all" in per_epoch.message
    assert 'interval="step"' in per_epoch.hint and per_epoch.optimizer_step == 0
    microbatches = run(60, "step")["ACC209"]
    assert microbatches.certainty == "certain" and "in microbatches" in microbatches.message
    assert "4 times too long" in microbatches.message and microbatches.hint == "Set it to 15."
    assert run(15, "step") == run(3, "epoch") == run(100, "step") == {}


def test_horizon_from_estimated_stepping_batches_is_silent():
    def schedule(module, o):
        total = int(module.trainer.estimated_stepping_batches)
        scheduler = OneCycleLR(o, 0.1, total_steps=total)
        return {"optimizer": o, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    assert found(fit(Scalar(schedule=schedule), N=36, epochs=2)).keys() == {"ACC105"}  # 18 microbatches: a short window
    assert found(fit(Scalar(schedule=schedule), N=32, epochs=9, max_steps=7)) == {}


def test_warmup_in_the_wrong_unit():
    finding = found(fit(horizon(lambda o: LinearLR(o, 0.1, 1.0, total_iters=10), "epoch"), N=40, epochs=3))["ACC209"]
    assert finding.certainty == "suspected" and "never ends" in finding.message
    assert found(fit(horizon(lambda o: LinearLR(o, 0.1, 1.0, total_iters=10), "step"), N=40, epochs=3)) == {}


# -- ACC205 -----------------------------------------------------------------------------------------------------------


def test_microbatches_left_over():
    callback = fit(Scalar(by_hand(4), automatic=False), K=1, N=20)  # 10 batches
    finding = found(callback, "certain")["ACC205"]
    assert "2 microbatches were" in finding.message
    assert set(found(callback, *ALARMS)) == {"ACC205"}


def test_microbatches_left_over_and_cleared():
    class Clearing(Scalar):
        def on_train_epoch_start(self):
            self.optimizers().zero_grad()

    callback = fit(Clearing(by_hand(4), automatic=False), K=1, N=20, epochs=2)
    assert set(found(callback, *ALARMS)) == {"ACC205"}


def test_windows_that_are_stepped_on_are_silent():
    assert found(fit(N=16, epochs=2)) == {}
    assert found(fit(Scalar(by_hand(4), automatic=False), K=1, N=16, epochs=2)) == {}


def test_an_interrupted_training_is_silent():
    def step(module, batch, index):
        if index == 6:
            raise KeyError
        by_hand(4)(module, batch, index)

    callback = AccumulationCallback("warn")
    with pytest.raises(KeyError):
        fit(Scalar(step, automatic=False), K=1, callback=callback)
    assert found(callback) == {}


# -- ACC202 and S19 ---------------------------------------------------------------------------------------------------


def test_a_step_of_the_users_own_inside_the_window():
    class Own(Scalar):
        def on_after_backward(self):
            self.optimizers().optimizer.step()

    finding = found(fit(Own()), "certain")["ACC202"]
    assert finding.factor == 0.25 and "Trainer(accumulate_grad_batches=4)" in finding.message


def test_an_engine_that_accumulates_by_itself_is_silent():
    class Engine(torch.optim.SGD):
        """Steps every fourth call, as DeepSpeed's optimizer does."""

        calls = 0

        def step(self, closure=None):
            loss = closure() if closure is not None else None
            Engine.calls += 1
            if Engine.calls % 4 == 0:
                super().step()
                super().zero_grad()
            return loss

        def zero_grad(self, set_to_none=True):
            pass

    class Strategy(SingleDeviceStrategy):
        @property
        def handles_gradient_accumulation(self):
            return True

    class Module(Scalar):
        seen = 0

        def on_before_optimizer_step(self, optimizer):
            Module.seen += 1

        def configure_optimizers(self):
            return Engine(self.parameters(), lr=0.1)

    callback = fit(Module(), strategy=Strategy(torch.device("cpu")))
    assert Module.seen == 8
    assert found(callback, *ALARMS) == {}


# -- ACC301 -----------------------------------------------------------------------------------------------------------


def test_batch_statistics():
    def step(module, batch, index):
        return module.layers(batch[0][:, None].float()).mean()

    norm = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4))
    finding = found(fit(Scalar(step, layers=norm)))["ACC301"]
    assert finding.certainty == "info" and "1 layer normalizes over the 2 examples" in finding.message
    assert "'layers.1', BatchNorm1d" in finding.message
    assert found(fit(Scalar(step, layers=torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.GroupNorm(2, 4))))) == {}
    assert "ACC301" not in found(fit(Scalar(step, layers=norm), K=1))


# -- ACC401 -----------------------------------------------------------------------------------------------------------


def saved(tmp_path, name="first.ckpt", **keywords):
    callback = fit(**{"N": 32, **keywords})
    path = tmp_path / name
    callback.trainer.save_checkpoint(path)
    return path, callback


def test_resumed_with_another_effective_batch(tmp_path):
    path, first = saved(tmp_path)
    callback = fit(K=2, N=32, epochs=2, ckpt=path)
    finding = found(callback, "certain")["ACC401"]
    assert "accumulation steps 4 -> 2" in finding.message and "0.1" in finding.message
    assert set(found(callback)) == {"ACC401"}
    assert callback.last_window.microbatches_total == 32 and callback.last_window.optimizer_step == 4 + 8 - 1


@pytest.mark.parametrize("K, b, lr", [(4, 2, 0.1), (2, 4, 0.1), (8, 1, 0.1), (2, 2, 0.05)])
def test_resumed_alike_or_with_another_rate_is_silent(tmp_path, K, b, lr):
    class Rate(Scalar):
        def on_train_start(self):  # a checkpoint brings its own learning rate back
            for group in self.optimizers().optimizer.param_groups:
                group["lr"] = lr

    path, _ = saved(tmp_path)
    assert found(fit(Rate(), K=K, b=b, N=32, epochs=2, ckpt=path)) == {}


def test_resumed_in_the_middle_of_a_window(tmp_path):
    class Saving(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if index == 5:  # 2 microbatches into the second window
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    fit(callbacks=[Saving()])
    callback = fit(ckpt=tmp_path / "middle.ckpt")
    assert callback.last_window.microbatches_total == 8
    assert callback.last_window.microbatches == 2 and callback.last_window.optimizer_step == 1


# -- ranks ------------------------------------------------------------------------------------------------------------


def on_ranks(rank, n):
    """Every case that needs ranks, in one call."""
    results = {}

    def run(name, model, error=None, static=False, **keywords):
        callback = AccumulationCallback("warn")
        strategy = DDPStrategy(process_group_backend="gloo", static_graph=static)
        try:
            fit(model, callback=callback, devices=n, strategy=strategy, **keywords)
        except RuntimeError as raised:
            assert error is not None and error in str(raised), raised
        window = callback.last_window
        results[name] = {f.code: (f.certainty, f.message) for f in callback.findings}, window and window.effective_batch

    run("padded", Scalar(), K=1, b=3, N=5)
    run("even", Scalar(), K=1, b=3, N=6)
    run("static", Scalar(), K=3, N=12 * n, static=True, error="expect_autograd_hooks_")
    run("often", Scalar(by_hand(3), automatic=False), K=1, N=12 * n)
    run("deferred", Scalar(), K=3, N=12 * n)

    def raw(module, batch, index):
        module.loss(batch).backward()
        module.optimizers().step()
        module.optimizers().zero_grad()

    run("bypassed", Scalar(raw, automatic=False), K=1, N=12 * n)
    norm = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4))
    module = Scalar(lambda m, batch, i: m.layers(batch[0][:, None].float()).mean() + 0 * m.w, layers=norm)
    run("statistics", module, K=1, N=12 * n)
    return results


def test_two_ranks(ranks):
    for results in ranks(2, on_ranks):
        codes = {name: found for name, (found, _) in results.items()}
        assert codes["padded"].keys() == {"ACC402"} and "6 examples of 5" in codes["padded"]["ACC402"][1]
        assert results["padded"][1] == 5 and results["even"] == ({}, 6)
        certainty, message = codes["static"]["ACC110"]
        assert certainty == "certain" and "static_graph=True" in message
        assert codes["deferred"] == {}
        assert {code: c for code, (c, _) in codes["often"].items()} == {"ACC207": "info"}
        assert "3 times in a window of 3 microbatches" in codes["often"]["ACC207"][1]
        assert {"ACC208", "ACC111"} <= codes["bypassed"].keys()
        assert {code: c for code, (c, _) in codes["statistics"].items()} == {"ACC301": "info"}
        json.dumps(results)


# -- nothing is left behind -------------------------------------------------------------------------------------------


def test_everything_is_put_back():
    names = [(torch.nn.utils.clip_grad, "_clip_grads_with_norm_"), (torch.nn.utils, "clip_grad_value_")]
    names += [(torch.amp.GradScaler, name) for name in ("scale", "step", "update")]
    before = [getattr(owner, name) for owner, name in names]
    fit()
    assert [getattr(owner, name) for owner, name in names] == before

    def step(module, batch, index):
        raise KeyError

    with pytest.raises(KeyError):
        fit(Scalar(step))
    assert [getattr(owner, name) for owner, name in names] == before


@pytest.mark.filterwarnings("default::accum_plugin.loggers.AccumulationWarning")
def test_what_is_only_worth_knowing_warns_nobody():
    norm = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4))
    module = Scalar(lambda m, batch, i: m.layers(batch[0][:, None].float()).mean(), layers=norm)
    with pytest.warns() as caught:
        fit(module)
        fit(Scalar(by_hand(4), automatic=False), K=1, N=20)
    messages = [str(w.message)[:6] for w in caught if issubclass(w.category, AccumulationWarning)]
    assert messages == ["ACC205"]
