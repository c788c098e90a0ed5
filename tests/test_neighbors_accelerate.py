"""What happens around the gradient, on real Accelerate loops: each kind once wrong and once right."""

from __future__ import annotations

import contextlib
import functools
import json
import types

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, GradientAccumulationPlugin
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from accum_plugin.accelerate import AccumulationHook
from accum_plugin.session import AccumulationError

pytestmark = pytest.mark.filterwarnings("ignore")
ALARMS = ("certain", "suspected")
HOOKS: list[AccumulationHook] = []


@pytest.fixture(autouse=True)
def _detach():
    yield
    while HOOKS:
        HOOKS.pop().detach()


class Scalar(torch.nn.Module):
    """One weight; the loss of an example is ``w * x``, so that the gradient is the mean of ``x``."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return self.w * x


class Loop:
    """An Accelerator with a hook, a model, an optimizer and a loader, ready for a loop of the test's own."""

    def __init__(self, K=4, b=2, N=16, mode="warn", model=None, prepare_optimizer=True, scheduler=None, **keywords):
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        steps = {"gradient_accumulation_steps": K} if K else {}
        self.accelerator = Accelerator(cpu=True, **steps, **keywords)
        self.hook = AccumulationHook.attach(self.accelerator, mode)
        HOOKS.append(self.hook)
        self.model = model or Scalar()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        data = torch.arange(1.0, N + 1, dtype=torch.float64)
        self.model, self.loader = self.accelerator.prepare(self.model, DataLoader(TensorDataset(data), batch_size=b))
        if prepare_optimizer:
            self.optimizer = self.accelerator.prepare(self.optimizer)

    def prepare_scheduler(self):
        self.scheduler = self.accelerator.prepare(self.scheduler)
        return self

    def run(self, epochs=1, clip=None, after=None, loss=lambda out: out.mean()):
        """The documented loop."""
        for _ in range(epochs):
            for (x,) in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(loss(self.model(x)))
                    if clip:
                        clip(self)
                    self.optimizer.step()
                    if self.scheduler is not None:
                        self.scheduler.step()
                    self.optimizer.zero_grad()
                    if after:
                        after(self)
        return self

    def by_hand(self, steps, epochs=1, clip=None, last=False):
        """An own modulo, the loss divided by hand, as in the documentation without ``accumulate``."""
        for _ in range(epochs):
            for index, (x,) in enumerate(self.loader):
                self.accelerator.backward(self.model(x).mean() / steps)
                whole = (index + 1) % steps == 0 or last and index + 1 == len(self.loader)
                if clip:
                    clip(self, whole)
                if whole:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        return self

    def found(self, *certainties):
        return {f.code: f for f in self.hook.findings if not certainties or f.certainty in certainties}


def clip(loop, threshold=1.0):
    loop.accelerator.clip_grad_norm_(loop.model.parameters(), threshold)


# -- ACC204 -----------------------------------------------------------------------------------------------------------


def test_clipping_every_microbatch_tells_the_norms():
    loop = Loop(K=4, b=1, N=4)
    for _ in range(4):  # four microbatches of norm 2 in one direction, clipped at 1
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loop.model(torch.full((1,), 8.0)).mean())
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    finding = loop.found("certain")["ACC204"]
    assert "norms were 2, 3, 3, 3, where the whole window's is about 8" in finding.message
    assert "after 1, 2, 3, 4 of 4 microbatches" in finding.message


@pytest.mark.parametrize("how", ["accelerator", "norm", "value", "two calls"])
def test_every_way_to_clip_is_seen(how):
    def clipper(loop):
        parameters = list(loop.model.parameters())
        if how == "accelerator":
            loop.accelerator.clip_grad_norm_(parameters, 1.0)
        elif how == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, max_norm=1.0)
        elif how == "value":
            torch.nn.utils.clip_grad_value_(parameters, clip_value=1.0)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
            torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)

    assert set(Loop().run(clip=clipper).found(*ALARMS)) == {"ACC204"}


def test_clipping_at_the_end_of_the_window_is_silent():
    guarded = Loop().run(clip=lambda loop: clip(loop) if loop.accelerator.sync_gradients else None)
    assert guarded.found() == {}


def test_measuring_the_norm_inside_the_window_is_silent():
    def measure(loop):
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), float("inf"))
        torch.nn.utils.get_total_norm([p.grad for p in loop.model.parameters()])

    assert Loop().run(clip=measure).found() == {}
    assert Loop(K=1).by_hand(4, clip=lambda loop, whole: measure(loop)).found() == {}


def test_clipping_in_an_own_modulo():
    wrong = Loop(K=1, mode="fix").by_hand(4, epochs=2, clip=lambda loop, whole: clip(loop))
    assert set(wrong.found(*ALARMS)) == {"ACC204"}
    right = Loop(K=1, mode="fix").by_hand(4, epochs=2, clip=lambda loop, whole: clip(loop) if whole else None)
    assert right.found() == {}


def test_raise_stops_before_the_first_step_that_was_clipped_inside():
    loop = Loop(mode="raise")
    with pytest.raises(AccumulationError, match="ACC204"):
        loop.run(clip=clip)
    assert not loop.hook.windows


def test_the_norm_returned_by_clipping_is_the_corrected_gradients():
    norms = []

    def keep(loop):
        if loop.accelerator.sync_gradients:
            norms.append(float(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1000.0)))

    loop = Loop(mode="fix").run(clip=keep, loss=lambda out: out.mean() / 4)
    assert set(loop.found()) == {"ACC103"}
    assert norms == pytest.approx([4.5, 12.5]) == [window.grad_norm for window in loop.hook.windows]


# -- ACC202 -----------------------------------------------------------------------------------------------------------


def test_unprepared_optimizer_steps_at_every_microbatch():
    finding = Loop(K=4, prepare_optimizer=False).run().found("certain")["ACC202"]
    assert finding.factor == 0.25 and "prepare()" in finding.hint


def test_unprepared_optimizer_in_a_loop_that_waits_is_silent():
    loop = Loop(K=4, prepare_optimizer=False)
    for (x,) in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loop.model(x).mean())
            if loop.accelerator.sync_gradients:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    assert loop.found() == {}


def test_accumulate_without_steps():
    assert Loop(K=None).run().found(*ALARMS) == {}
    finding = Loop(K=None).run(loss=lambda out: out.mean() / 4).found("suspected")["ACC202"]
    assert finding.factor == 0.25 and "gradient_accumulation_steps=4" in finding.hint
    assert Loop(K=None).run(loss=lambda out: out.sum() / len(out)).found(*ALARMS) == {}
    assert Loop(K=None).run(loss=lambda out: 0.5 * out.mean()).found(*ALARMS) == {}


def test_slices_of_the_last_batch_step_each_time():
    def sliced(**keywords):
        loop = Loop(K=None, b=8, **keywords)
        for (x,) in loop.loader:
            for part in x.split(2):
                with loop.accelerator.accumulate(loop.model):
                    loop.accelerator.backward(loop.model(part).mean())
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
        return loop

    wrong = sliced(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4))
    finding = wrong.found("certain")["ACC202"]
    assert "sync_with_dataloader" in finding.message and finding.factor == 0.25
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    assert sliced(gradient_accumulation_plugin=plugin).found() == {}


def test_prepared_objects_called_unguarded_are_silent():
    loop = Loop(scheduler=lambda o: CosineAnnealingLR(o, T_max=2)).prepare_scheduler().run()
    loop.accelerator.end_training()
    assert loop.found() == {}


# -- ACC203 and ACC209 ------------------------------------------------------------------------------------------------


def test_unprepared_scheduler_runs_K_times_too_fast():
    loop = Loop(scheduler=lambda o: LambdaLR(o, lambda step: 1.0)).run(epochs=2)
    finding = loop.found("certain")["ACC203"]
    assert "4 times for one optimizer step of 4 microbatches" in finding.message


def test_unprepared_scheduler_in_a_run_of_one_step():
    loop = Loop(N=8, scheduler=lambda o: LambdaLR(o, lambda step: 1.0)).run()
    assert set(loop.found("certain")) == {"ACC203"}
    loop.hook.detach()
    assert set(loop.found("certain")) == {"ACC203"}


def test_schedulers_that_keep_step_are_silent():
    def guarded(loop):
        if loop.accelerator.sync_gradients:
            each_step.step()

    loop = Loop()
    each_step = LambdaLR(loop.optimizer.optimizer, lambda step: 1.0)
    each_epoch = LambdaLR(loop.optimizer.optimizer, lambda step: 1.0)
    for _ in range(3):
        loop.run(after=guarded)
        each_epoch.step()
    loop.accelerator.end_training()
    assert loop.found() == {}


def schedule(step, *, num_training_steps):
    return max(0.0, 1.0 - step / num_training_steps)


HORIZONS = {
    "cosine": lambda length, o: CosineAnnealingLR(o, T_max=length),
    "linear": lambda length, o: LinearLR(o, 1.0, 0.1, total_iters=length),
    "one cycle": lambda length, o: OneCycleLR(o, 0.1, total_steps=length),
    "lambda": lambda length, o: LambdaLR(o, functools.partial(schedule, num_training_steps=length)),
    "sequential": lambda length, o: SequentialLR(
        o, [LinearLR(o, 0.1, 1.0, total_iters=1), CosineAnnealingLR(o, T_max=length - 1)], milestones=[1]
    ),
}


@pytest.mark.parametrize("name", HORIZONS)
def test_horizon_in_microbatches(name):
    # 24 microbatches, 6 steps
    wrong = Loop(N=24, scheduler=functools.partial(HORIZONS[name], 24)).prepare_scheduler().run(epochs=2)
    assert wrong.found("suspected")["ACC209"]
    wrong.accelerator.end_training()
    message = wrong.found("suspected")["ACC209"].message
    assert "24 long" in message and "in microbatches" in message and "Set it to 6" in message
    right = Loop(N=24, scheduler=functools.partial(HORIZONS[name], 6)).prepare_scheduler().run(epochs=2)
    right.accelerator.end_training()
    assert right.found() == {}


def test_a_training_cut_short_is_silent():
    loop = Loop(scheduler=lambda o: CosineAnnealingLR(o, T_max=100)).prepare_scheduler().run()
    loop.accelerator.end_training()
    assert loop.found() == {}


# -- ACC205 -----------------------------------------------------------------------------------------------------------


def test_microbatches_left_over_at_the_end():
    loop = Loop(K=1, N=20).by_hand(4)  # 10 microbatches
    assert "2 microbatches were" in loop.found()["ACC205"].message
    loop.hook.detach()
    assert set(loop.found(*ALARMS)) == {"ACC205"}


def test_microbatches_left_over_and_cleared_by_the_next_epoch():
    loop = Loop(K=1, N=20)
    for _ in range(2):
        loop.optimizer.zero_grad()
        loop.by_hand(4)
    loop.hook.detach()
    assert set(loop.found(*ALARMS)) == {"ACC205"}


def test_left_over_microbatches_that_are_stepped_on_are_silent():
    whole = Loop(K=1, N=16).by_hand(4, epochs=2)
    carried = Loop(
        K=None, N=12, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    ).run(epochs=2)
    for loop in (whole, carried):
        loop.hook.detach()
        assert loop.found() == {}


def test_an_exception_is_no_end_of_training():
    loop = Loop(K=1, N=20)
    with pytest.raises(KeyError):
        try:
            loop.by_hand(4)
            raise KeyError
        finally:
            loop.hook.detach()
    assert loop.found() == {}


# -- ACC206 -----------------------------------------------------------------------------------------------------------


class Scaled(Loop):
    """A loop with a GradScaler of its own, on the CPU."""

    def train(self, order, epochs=1):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        for index, (x,) in enumerate(batch for _ in range(epochs) for batch in self.loader):
            self.scaler.scale(self.model(x).mean() / 4).backward()
            order(self, (index + 1) % 4 == 0)
        self.hook.detach()
        return self.found(*ALARMS)


def finish(loop):
    loop.scaler.step(loop.optimizer.optimizer)
    loop.scaler.update()
    loop.optimizer.zero_grad()


def test_clipped_before_unscaling():
    def wrong(loop, whole):
        if whole:
            clip(loop)
            finish(loop)

    found = Scaled(K=1).train(wrong)
    assert set(found) == {"ACC206"} and "off by a factor of 1024" in found["ACC206"].message

    def right(loop, whole):
        if whole:
            loop.scaler.unscale_(loop.optimizer.optimizer)
            clip(loop)
            finish(loop)

    assert Scaled(K=1).train(right) == {}


def test_scaler_updated_inside_a_window():
    other = torch.nn.Parameter(torch.ones(1))
    second = torch.optim.SGD([other], lr=0.1)

    def wrong(loop, whole):
        if whole:
            finish(loop)
        else:
            other.grad = torch.ones(1)
            loop.scaler.step(second)
            loop.scaler.update()

    found = Scaled(K=1).train(wrong)
    assert found["ACC206"].cause == "update" and "from 1024 to 2048" in found["ACC206"].message


def test_an_overflow_is_counted_and_no_mistake():
    def right(loop, whole):
        if whole:
            if len(seen) == 0:
                loop.model.w.grad.fill_(float("inf"))
            seen.append(whole)
            finish(loop)

    seen: list[bool] = []
    loop = Scaled(K=1)
    assert loop.train(right, epochs=2) == {}
    assert [window.optimizer_step for window in loop.hook.windows] == [0, 1, 2]  # 4 windows, 1 skipped
    assert loop.hook.last_window.microbatches_total == 16


# -- ACC208 -----------------------------------------------------------------------------------------------------------


def test_backward_bypassed():
    def raw(loop, divisor=1):
        for (x,) in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                (loop.model(x).mean() / divisor).backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        return loop

    found = raw(Loop(K=4)).found("certain")
    assert set(found) == {"ACC208", "ACC104"} and found["ACC104"].factor == 4.0
    assert raw(Loop(K=4), divisor=4).found(*ALARMS) == {}
    assert raw(Loop(K=1)).found(*ALARMS) == {}


# -- ACC301 -----------------------------------------------------------------------------------------------------------


def test_batch_statistics():
    def net(*layers):
        return torch.nn.Sequential(torch.nn.Linear(1, 4), *layers, torch.nn.Linear(4, 1)).double()

    def run(model, K=4):
        loop = Loop(K=K, model=model)
        for (x,) in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(loop.model(x[:, None]).mean())
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        return loop.found()

    found = run(net(torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.BatchNorm1d(4)))
    assert found["ACC301"].certainty == "info"
    assert "2 layers normalize over the 2 examples" in found["ACC301"].message
    assert "'1', BatchNorm1d" in found["ACC301"].message
    assert run(net(torch.nn.GroupNorm(2, 4), torch.nn.LayerNorm(4))) == {}
    assert run(net(torch.nn.BatchNorm1d(4).eval())).keys() <= {"ACC301"}
    frozen = net(torch.nn.BatchNorm1d(4))
    frozen[1].train = lambda mode=True: frozen[1]  # stays in eval()
    frozen[1].training = False
    assert run(frozen) == {}
    assert "ACC301" not in run(net(torch.nn.BatchNorm1d(4)), K=1)


# -- ACC401 -----------------------------------------------------------------------------------------------------------


def resumed(folder, K, b, lr=0.1, **first):
    loop = Loop(**{"K": 4, "b": 2, "N": 32, **first}).run()
    loop.accelerator.save_state(str(folder))
    total = loop.hook.last_window.microbatches_total
    again = Loop(K=K, b=b, N=32)
    again.accelerator.load_state(str(folder))
    for group in again.optimizer.param_groups:
        group["lr"] = lr
    return again.run(), total


def test_resumed_with_another_effective_batch(tmp_path):
    loop, total = resumed(tmp_path / "a", K=2, b=2)
    finding = loop.found("certain")["ACC401"]
    assert "accumulation steps 4 -> 2" in finding.message and "2 x 4 x 1 = 8" in finding.message
    assert loop.hook.last_window.microbatches_total == total + 16
    assert loop.hook.last_window.optimizer_step == 4 + 8 - 1


@pytest.mark.parametrize("K, b, lr", [(4, 2, 0.1), (2, 4, 0.1), (8, 1, 0.1), (2, 2, 0.05)])
def test_resumed_alike_or_with_another_rate_is_silent(tmp_path, K, b, lr):
    loop, _ = resumed(tmp_path / "a", K=K, b=b, lr=lr)
    assert loop.found() == {}


def test_resumed_in_the_middle_of_a_window(tmp_path):
    loop = Loop(K=4, N=16)
    for index, (x,) in enumerate(loop.loader):
        if index == 6:
            loop.accelerator.save_state(str(tmp_path))
            break
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loop.model(x).mean())
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    again = Loop(K=4, N=16)
    again.accelerator.load_state(str(tmp_path))
    again.loader = again.accelerator.skip_first_batches(again.loader, 6)
    again.run()
    assert again.hook.last_window.microbatches_total == 8
    assert again.hook.last_window.microbatches == 2 and again.hook.last_window.optimizer_step == 1
    assert "ACC401" not in again.found()


# -- A15 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine, expected", [(8, {"ACC202"}), (4, set()), ("auto", set())])
def test_deepspeed_and_the_accelerator_disagree(engine, expected):
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    plugin = types.SimpleNamespace(deepspeed_config={"gradient_accumulation_steps": engine})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(accelerator.state), "deepspeed_plugin", plugin, raising=False)
        hook = AccumulationHook.attach(accelerator, "warn")
    assert {f.code for f in hook.findings} == expected
    for finding in hook.findings:
        assert "gradient_accumulation_steps=8" in finding.message and "gradient_accumulation_steps=4" in finding.message
        assert finding.evidence == "configuration"


# -- ranks ------------------------------------------------------------------------------------------------------------


def on_ranks(rank, n):
    """Every case that needs ranks, in one call."""
    found = {}

    def note(name, loop):
        loop.hook.detach()
        found[name] = {f.code: (f.certainty, f.message) for f in loop.hook.findings}

    def padded(name, **keywords):
        loop = Loop(K=2, b=2, N=5, **keywords)
        loop.run()
        note(name, loop)
        return loop.hook.last_window.effective_batch if loop.hook.last_window else None

    # 3 batches of 2 for 2 ranks: 8 of 5; the window holds all, 5 of them distinct
    sizes = padded("padded"), Loop(K=2, b=2, N=8).run().hook.last_window.effective_batch
    even = Loop(K=2, b=2, N=8 * n).run()
    note("even", even)
    dropped = Loop(K=2, b=2, N=8, dataloader_config=DataLoaderConfiguration(even_batches=False))
    dropped.run()
    note("dropped", dropped)
    for name, length in (("scheduler fits", 4 * n), ("scheduler per process", 4), ("scheduler in microbatches", 8 * n)):
        loop = Loop(K=2, b=2, N=16 * n, scheduler=functools.partial(HORIZONS["cosine"], length)).prepare_scheduler()
        note(name, loop.run())
    note("unprepared", Loop(K=3, b=2, N=18 * n, prepare_optimizer=False).run())
    often = Loop(K=1, b=2, N=12 * n)
    note("often", often.by_hand(3))
    each = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    quiet = Loop(K=None, b=2, N=12 * n, gradient_accumulation_plugin=each)
    note("on purpose", quiet.run())
    clipped = Loop(K=3, b=2, N=18 * n)
    note("clipped", clipped.run(clip=clip))
    own = Loop(K=1, b=2, N=18 * n)
    for index, (x,) in enumerate(own.loader):  # own no_sync, clipped at the end only
        whole = (index + 1) % 3 == 0
        with contextlib.nullcontext() if whole else own.accelerator.no_sync(own.model):
            own.accelerator.backward(own.model(x).mean() / 3)
            torch.nn.utils.clip_grad_norm_(own.model.parameters(), 1.0 if whole else float("inf"))
        if whole:
            own.optimizer.step()
            own.optimizer.zero_grad()
    note("own no_sync", own)
    static = Loop(K=3, b=2, N=6 * n, kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
    note("static", static)
    return found, sizes


def test_two_ranks(ranks):
    results = ranks(2, on_ranks)
    for found, sizes in results:
        assert found["padded"].keys() == {"ACC402"}
        assert "8 examples of 5" in found["padded"]["ACC402"][1] and "3 repeats" in found["padded"]["ACC402"][1]
        assert sizes == (5, 8)
        assert found["even"] == found["dropped"] == {}
        assert found["scheduler fits"] == {}
        assert "2 times too short" in found["scheduler per process"]["ACC209"][1]
        assert "2 times too long" in found["scheduler in microbatches"]["ACC209"][1]
        assert {"ACC202", "ACC111"} <= found["unprepared"].keys()
        assert {c: v[0] for c, v in found["often"].items()} == {"ACC207": "info"}
        assert found["on purpose"] == found["own no_sync"] == {}
        assert found["clipped"].keys() == {"ACC204"}
        assert found["static"].keys() == {"ACC110"} and "static_graph" in found["static"]["ACC110"][1]
    json.dumps(results)


# -- nothing is left behind -------------------------------------------------------------------------------------------


def test_everything_is_put_back():
    names = [(torch.nn.utils.clip_grad, "_clip_grads_with_norm_"), (torch.nn.utils, "clip_grad_value_")]
    names += [(torch.amp.GradScaler, name) for name in ("scale", "step", "update")]
    before = [getattr(owner, name) for owner, name in names]
    loop = Loop()
    assert all(getattr(owner, name) is not old for (owner, name), old in zip(names, before))
    loop.run()
    loop.hook.detach()
    assert [getattr(owner, name) for owner, name in names] == before
