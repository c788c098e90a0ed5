"""The hook's life on an Accelerator: however it is attached, whatever the loop looks like, and how it goes away."""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, data_loader
from accelerate.utils import DataLoaderConfiguration
from accelerate_loops import (
    Loop,
    Result,
    Scalar,
    counting,
    fresh,
    means,
    network,
    quick_collections,
    quiet,
    ranked,
    sequences,
    token_mean,
    train,
)
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader

from accum_plugin.accelerate import AccumulationHook
from accum_plugin.loggers import AccumulationWarning
from accum_plugin.taps import backward_tap

STEPS, BATCH = 4, 5
WHOLE = {"steps": STEPS, "batch": BATCH, "num": 2 * STEPS * BATCH}
MEANT = means(2 * STEPS * BATCH, STEPS * BATCH)


@pytest.fixture(autouse=True, scope="module")
def _collections() -> Iterator[None]:
    with quick_collections():
        yield


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    fresh()
    with quiet():
        yield


def twice_divided(loop: Loop) -> None:
    for (x,) in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loop.model(x).mean() / loop.steps)
            loop.optimizer.step()
            loop.optimizer.zero_grad()


# -- loops ----------------------------------------------------------------------------------------------------------


def several_models(loop: Loop) -> list[float]:
    """Two models with an optimizer each in one ``accumulate``; the second one's loss is divided twice."""
    accelerator, seen = loop.accelerator, []
    second = Scalar()
    optimizer = torch.optim.SGD(second.parameters(), lr=0.0)
    second, prepared = accelerator.prepare(second, optimizer)
    optimizer.register_step_pre_hook(lambda *_: seen.append(second.w.grad.item()))
    for (x,) in loop.loader:
        with accelerator.accumulate(loop.model, second):
            accelerator.backward(loop.model(x).mean())
            accelerator.backward(2.5 * second(x).mean() / STEPS)
            for each in (loop.optimizer, prepared):
                each.step()
                each.zero_grad()
    return seen


def test_several_models_in_one_block() -> None:
    warned, fixed = train(several_models, mode="warn", **WHOLE), train(several_models, **WHOLE)
    assert warned.scalars == fixed.scalars == pytest.approx(MEANT)
    assert warned.returned == pytest.approx([2.5 / STEPS * mean for mean in MEANT])
    assert fixed.returned == pytest.approx([2.5 * mean for mean in MEANT])
    assert fixed.seen == {"ACC103": 1 / STEPS}


def two_backwards(loop: Loop) -> None:
    """Two backward passes of one shape in a microbatch: two terms of it, not two microbatches."""
    for (x,) in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loop.model(x).mean())
            loop.accelerator.backward(loop.model(-x / 2).mean())
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def same_graph_twice(loop: Loop) -> None:
    for (x,) in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            loss = loop.model(x).mean()
            loop.accelerator.backward(loss, retain_graph=True)
            loop.accelerator.backward(loss)
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def gradient_in_the_loss(loop: Loop) -> None:
    """A backward pass within the forward pass: a penalty on the input's gradient."""
    for (x,) in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            x = x.clone().requires_grad_()
            out = loop.model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loop.accelerator.backward(out.mean() + (slope - 1).pow(2).mean())
            loop.optimizer.step()
            loop.optimizer.zero_grad()


@pytest.mark.parametrize("loop", [two_backwards, same_graph_twice, gradient_in_the_loss])
def test_repeated_and_nested_backward_passes(loop: Callable[[Loop], None]) -> None:
    bare, watched = train(loop, mode=None, **WHOLE), train(loop, **WHOLE)
    assert watched.alarms == []
    assert watched.gradients == bare.gradients
    assert [w.microbatches for w in watched.windows] == [STEPS, STEPS]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("divisor", [1, STEPS])
def test_unprepared_optimizer(when: str, divisor: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    hook = AccumulationHook.attach(accelerator) if when == "before" else None
    model, seen = Scalar(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    prepared, loader = accelerator.prepare(model, DataLoader(counting(2 * STEPS * BATCH), batch_size=BATCH))
    hook = hook or AccumulationHook.attach(accelerator)
    for (x,) in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(x).mean() / divisor)
            if accelerator.sync_gradients:
                optimizer.step()
                seen.append(model.w.grad.item())
                optimizer.zero_grad()
    alarms = {f.code: f.factor for f in hook.findings if f.certainty != "info"}
    hook.detach()
    assert seen == pytest.approx(MEANT)
    assert alarms == ({} if divisor == 1 else {"ACC103": 1 / STEPS})


def own_backward_and_modulo(loop: Loop) -> None:
    for index, (x,) in enumerate(loop.loader, start=1):
        loop.model(x).mean().backward()
        if index % STEPS == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def own_modulo_divided_twice(loop: Loop) -> None:
    """The Accelerator's backward divides by K although the loop does not use ``accumulate``."""
    for index, (x,) in enumerate(loop.loader, start=1):
        loop.accelerator.backward(loop.model(x).mean() / STEPS)
        if index % STEPS == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def unprepared_loader(loop: Loop) -> None:
    for x in torch.arange(1.0, 2 * STEPS * BATCH + 1, dtype=torch.float64).split(BATCH):
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loop.model(x).mean() / STEPS)
            loop.optimizer.step()
            loop.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("loop", "steps", "found"),
    [
        (own_backward_and_modulo, 1, {"ACC104": STEPS}),
        (own_modulo_divided_twice, STEPS, {"ACC103": 1 / STEPS}),
        (unprepared_loader, STEPS, {"ACC103": 1 / STEPS}),
    ],
)
def test_own_loops(loop: Callable[[Loop], None], steps: int, found: dict[str, float]) -> None:
    result = train(loop, **{**WHOLE, "steps": steps})
    assert result.seen == found
    assert result.scalars == pytest.approx(MEANT)


def two_epochs(loop: Loop) -> None:
    for _ in range(2):
        for (x,) in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(loop.model(x).mean())
                loop.optimizer.step()
                loop.optimizer.zero_grad()


def test_window_over_the_end_of_an_epoch() -> None:
    sizes = {"steps": STEPS, "batch": BATCH, "num": 6 * BATCH}
    result = train(two_epochs, plugin={"sync_with_dataloader": False}, **sizes)
    microbatch = means(6 * BATCH, BATCH)
    each = [sum(microbatch[:4]), sum(microbatch[4:] + microbatch[:2]), sum(microbatch[2:])]
    assert result.scalars == pytest.approx([total / STEPS for total in each])
    assert result.findings == []
    ended = train(two_epochs, **sizes)
    assert ended.seen == {"ACC105": 0.5}
    assert ended.scalars == pytest.approx(means(6 * BATCH, STEPS * BATCH) * 2)


def test_synchronizing_each_batch_on_purpose() -> None:
    assert train(two_epochs, plugin={"sync_each_batch": True}, **WHOLE).findings == []


def left_out(loop: Loop) -> None:
    """Batches that are drawn and not used are no microbatches."""
    for index, (x,) in enumerate(loop.loader):
        if index in (1, 4):
            continue
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loop.model(x).mean())
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def test_batches_that_are_left_out() -> None:
    result = train(left_out, steps=3, batch=BATCH, num=8 * BATCH)
    assert result.findings == []
    assert [w.effective_batch for w in result.windows] == [15, 15]


def prefetching(loop: Loop) -> None:
    """A window is drawn before its first microbatch runs; the last batch is short."""
    batches = list(loop.loader)
    for start in range(0, len(batches), STEPS):
        for (x,) in batches[start : start + STEPS]:
            loop.accelerator.backward(loop.model(x).mean() * STEPS / len(batches[start : start + STEPS]))
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def test_examples_of_prefetched_batches() -> None:
    result = train(prefetching, **{**WHOLE, "num": 2 * STEPS * BATCH + 3})
    assert [w.effective_batch for w in result.windows] == [20, 20, 3]
    assert result.alarms == []


def clip_with(clip: Callable[[Loop], Any]) -> Callable[[Loop], None]:
    def loop(loop: Loop) -> None:
        for (x,) in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(loop.model(x).mean() / STEPS)
                if loop.accelerator.sync_gradients:
                    clip(loop)
                loop.optimizer.step()
                loop.optimizer.zero_grad()

    return loop


CLIPS = {
    "accelerate norm": lambda loop: loop.accelerator.clip_grad_norm_(loop.model.parameters(), 15.0),
    "accelerate value": lambda loop: loop.accelerator.clip_grad_value_(loop.model.parameters(), 15.0),
    "torch norm": lambda loop: nn.utils.clip_grad_norm_(loop.model.parameters(), 15.0),
    "torch value": lambda loop: nn.utils.clip_grad_value_(loop.model.parameters(), 15.0),
}


@pytest.mark.parametrize("clip", CLIPS)
def test_clipping_comes_after_the_correction(clip: str) -> None:
    result = train(clip_with(CLIPS[clip]), **WHOLE)
    assert result.scalars == pytest.approx([MEANT[0], 15.0])  # 10.5 stays below the threshold, 30.5 does not
    assert [w.grad_norm for w in result.windows] == pytest.approx(MEANT)
    assert result.seen == {"ACC103": 1 / STEPS}


class Louder(torch.optim.SGD):
    """PyTorch runs the hooks of both ``step`` methods, one within the other, once plain SGD was used as well."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def slices_by_hand(loop: Loop) -> None:
    for (x,) in loop.loader:
        loop.accelerator.backward(loop.model(x).mean())
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def test_an_optimizer_that_calls_its_base_class_steps_once() -> None:
    torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)  # from now on SGD.step runs hooks of its own
    plain, louder = (train(twice_divided, optimizer=kind, **WHOLE) for kind in (torch.optim.SGD, Louder))
    assert (
        louder.scalars[::2] == louder.scalars[1::2]
    )  # the test's own hook runs twice: before the correction, and after
    assert louder.seen == plain.seen == {"ACC103": 1 / STEPS}
    assert louder.windows == plain.windows
    silent = train(slices_by_hand, steps=1, optimizer=Louder)
    assert silent.alarms == [] and len(silent.windows) == 8


def with_a_closure(loop: Loop) -> list[float]:
    """The closure runs the window; what it leaves is what the optimizer sees."""
    (rows,), seen = next(iter(loop.loader)), []

    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        for part in rows.split(BATCH):
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(loop.model(part).mean() / STEPS)
        return loop.model(rows).mean()

    loop.optimizer.optimizer.register_step_post_hook(lambda *_: seen.append(loop.model.w.grad.item()))
    for _ in range(2):
        loop.optimizer.step(closure)
    return seen


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, Louder, torch.optim.LBFGS])
def test_a_window_in_a_closure(optimizer: type[torch.optim.Optimizer]) -> None:
    whole = STEPS * BATCH
    result = train(with_a_closure, optimizer=optimizer, steps=STEPS, batch=whole, num=whole)
    assert {round(scalar, 9) for scalar in result.returned} == {(whole + 1) / 2}
    assert result.seen == {"ACC103": 1 / STEPS}
    assert [window.microbatches for window in result.windows] == [STEPS] * 2


@pytest.mark.parametrize("action", ["always", "error"])
def test_warnings_name_the_users_line_and_stop_nothing(action: str, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    hook = AccumulationHook.attach(accelerator)
    model = Scalar()
    loop = Loop(
        accelerator,
        *accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.0), DataLoader(counting(WHOLE["num"]), batch_size=BATCH)
        ),
        None,
        STEPS,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action, AccumulationWarning)
        twice_divided(loop)
    assert [finding.code for finding in hook.findings] == ["ACC103"]
    said = [(str(w.message)[:6], w.filename) for w in caught if w.category is AccumulationWarning]
    assert said == ([("ACC103", __file__)] if action == "always" else [])
    assert [record.message[:6] for record in caplog.records if record.name == "accum_plugin"] == (
        [] if action == "always" else ["ACC103"]
    )
    hook.detach()


class Single(nn.Module):
    """The scalar model in single precision: the loss scaler refuses doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x.float()


@pytest.mark.parametrize("divisor", [1, STEPS])
def test_steps_that_the_loss_scaler_skips(divisor: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)  # what mixed_precision="fp16" makes on a GPU
    hook = AccumulationHook.attach(accelerator)
    model = Single()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(counting(4 * STEPS * BATCH), batch_size=BATCH)
    prepared, stepper, loader = accelerator.prepare(model, optimizer, loader)
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.w.grad.item()))
    for index, (x,) in enumerate(loader):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(x * torch.inf if index == STEPS + 1 else x).mean() / divisor)
            stepper.step()
            stepper.zero_grad()
    meant = means(4 * STEPS * BATCH, STEPS * BATCH)
    windows, alarms = list(hook.windows), {f.code for f in hook.findings if f.certainty != "info"}
    hook.detach()
    assert seen == pytest.approx([meant[0], *meant[2:]], rel=1e-6)
    assert [w.optimizer_step for w in windows] == [0, 1, 2]  # the skipped one is no optimizer step
    assert [w.microbatches_total for w in windows] == [STEPS, 3 * STEPS, 4 * STEPS]
    assert alarms == (set() if divisor == 1 else {"ACC103"})


def joined(loop: Loop) -> None:
    """What ``join_uneven_inputs`` does on GPUs: a rank that has run out answers for the others' reductions."""
    with Join([loop.model], enable=True):
        for tokens, labels in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                logits = loop.model(tokens)
                loop.accelerator.backward(token_mean(logits, labels) / 2 + 0.1 * logits.mean())
                loop.optimizer.step()
                loop.optimizer.zero_grad()


def joined_runs(rank: int, n: int) -> list[Result]:
    keywords = {"data": sequences(10), "model": network, "batch": 2}
    keywords["accelerator"] = {"dataloader_config": DataLoaderConfiguration(even_batches=False)}
    return ranked(rank, n, [(joined, {**keywords, "steps": k, "mode": mode}) for k in (1, 2) for mode in (None, "fix")])


def test_joined_ranks_neither_hang_nor_change(ranks: Callable[..., list[list[Result]]]) -> None:
    counts = []
    for results in ranks(2, joined_runs):
        for bare, watched in (results[:2], results[2:]):
            assert watched.gradients == bare.gradients
            assert watched.alarms == []
        counts.append(len(results[0].gradients))
    assert counts == [3, 2]  # the second rank ran out first


# -- attach and detach ----------------------------------------------------------------------------------------------


def patched() -> list[Any]:
    """Everything global that the plugin may replace."""
    utils, clip, amp = torch.nn.utils, torch.nn.utils.clip_grad, torch.amp.GradScaler
    functions = [torch.autograd.backward, clip._get_total_norm, clip._clip_grads_with_norm_]
    functions += [utils.clip_grads_with_norm_, utils.clip_grad_value_, amp.scale, amp.step, amp.update]
    return functions + [data_loader.DataLoaderShard.__iter__, data_loader.DataLoaderDispatcher.__iter__]


def prepared(accelerator: Accelerator) -> tuple[Any, Any, Any]:
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return accelerator.prepare(model, optimizer, DataLoader(counting(2 * STEPS * BATCH), batch_size=BATCH))


def epoch(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, divisor: int = 1) -> list[float]:
    seen = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean() / divisor)
            optimizer.step()
            if accelerator.sync_gradients:
                seen.append(model.w.grad.item())
            optimizer.zero_grad()
    return seen


def test_detach_leaves_nothing_behind() -> None:
    before = patched()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model, optimizer, loader = prepared(accelerator)
    owners = (accelerator, model, optimizer, optimizer.optimizer)
    attributes = [dict(vars(owner)) for owner in owners]
    hooks = [len(table) for table in (model._forward_pre_hooks, model._forward_hooks)]
    hook = AccumulationHook.attach(accelerator)
    assert epoch(accelerator, model, optimizer, loader, STEPS) == pytest.approx(MEANT)
    assert patched() != before
    hook.detach()
    assert patched() == before
    for owner, saved in zip(owners, attributes):
        assert set(vars(owner)) == set(saved)
        for name in ("prepare", "accumulate", "backward", "free_memory", "end_training", "clip_grad_norm_", "log"):
            assert vars(owner).get(name) is saved.get(name)
    assert [len(table) for table in (model._forward_pre_hooks, model._forward_hooks)] == hooks
    assert not model.w._backward_hooks and not optimizer.optimizer._optimizer_step_pre_hooks
    assert not accelerator._load_model_state_pre_hook and not accelerator._save_model_state_pre_hook
    assert AccumulationHook.of(accelerator) is None
    assert hook.findings[0].code == "ACC103" and hook.last_window.gradient_scale == 1 / STEPS
    assert epoch(accelerator, model, optimizer, loader, STEPS) == pytest.approx([mean / STEPS for mean in MEANT])


def test_attaching_again_replaces_the_hook() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    first = AccumulationHook.attach(accelerator, "warn")
    second = AccumulationHook.attach(accelerator)
    assert AccumulationHook.of(accelerator) is second
    assert epoch(accelerator, *prepared(accelerator), STEPS) == pytest.approx(MEANT)
    assert first.findings == [] and len(second.findings) == 1
    second.detach()


def test_attach_says_what_it_takes() -> None:
    with pytest.raises(TypeError, match=r"trainer\.accelerator"):
        AccumulationHook.attach(Scalar())
    with pytest.raises(ValueError, match="'fixed'"):
        AccumulationHook.attach(Accelerator(cpu=True), "fixed")


def test_free_memory_ends_one_training_and_the_next_is_followed() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    hook = AccumulationHook.attach(accelerator)
    for _ in range(2):
        model, optimizer, loader = prepared(accelerator)
        assert epoch(accelerator, model, optimizer, loader, STEPS) == pytest.approx(MEANT)
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    assert [w.optimizer_step for w in hook.windows] == [0, 1, 0, 1]
    assert len(hook.findings) == 1
    hook.detach()


def test_counters_are_saved_with_the_state() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    hook = AccumulationHook.attach(accelerator)
    epoch(accelerator, *prepared(accelerator))
    accelerator.save_state("checkpoint")
    assert json.loads(Path("checkpoint/accum_plugin.json").read_text())["optimizers"][0]["steps_taken"] == 2
    hook.detach()
    fresh()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    hook = AccumulationHook.attach(accelerator, log_every_n_steps=1)
    objects = prepared(accelerator)
    accelerator.load_state("checkpoint")
    assert epoch(accelerator, *objects, STEPS) == pytest.approx(MEANT)  # looked at as closely as in a new run
    assert [w.optimizer_step for w in hook.windows] == [2, 3]
    assert [w.microbatches_total for w in hook.windows] == [3 * STEPS, 4 * STEPS]
    hook.detach()


def test_checkpoints_without_the_hook_are_read() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    objects = prepared(accelerator)
    accelerator.save_state("checkpoint")
    hook = AccumulationHook.attach(accelerator)
    accelerator.load_state("checkpoint")
    assert epoch(accelerator, *objects) == pytest.approx(MEANT)
    assert hook.findings == []
    hook.detach()


def test_two_accelerators_side_by_side() -> None:
    accelerators = [Accelerator(cpu=True, gradient_accumulation_steps=STEPS) for _ in range(2)]
    hooks = [AccumulationHook.attach(each, mode) for each, mode in zip(accelerators, ("fix", "warn"))]
    objects = [prepared(each) for each in accelerators]
    seen: tuple[list[float], list[float]] = ([], [])
    for batches in zip(objects[0][2], objects[1][2]):
        for (x,), accelerator, (model, optimizer, _), gradients in zip(batches, accelerators, objects, seen):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean() / STEPS)
                optimizer.step()
                if accelerator.sync_gradients:
                    gradients.append(model.w.grad.item())
                optimizer.zero_grad()
    assert seen[0] == pytest.approx(MEANT)
    assert seen[1] == pytest.approx([mean / STEPS for mean in MEANT])
    assert [hook.findings[0].action for hook in hooks] == ["corrected", "reported"]
    hooks[0].detach()
    assert epoch(accelerators[1], *objects[1], STEPS) == pytest.approx([mean / STEPS for mean in MEANT])
    assert len(hooks[1].windows) == 4
    hooks[1].detach()


def test_an_accelerator_that_is_thrown_away_takes_its_hook_along() -> None:
    def trained() -> weakref.ref[Any]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
        AccumulationHook.attach(accelerator)
        model, optimizer, loader = prepared(accelerator)
        epoch(accelerator, model, optimizer, loader)
        return weakref.ref(model)

    listening = len(backward_tap.listeners)
    model = trained()
    fresh()
    gc.collect()
    assert model() is None
    assert len(backward_tap.listeners) == listening
