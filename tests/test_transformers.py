"""transformers' Trainer with a hook on its Accelerator: tiny stock models, and the mistakes people make around them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_loops import fresh, quick_collections, quiet
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import SequentialSampler

from accum_plugin import Finding, WindowRecord
from accum_plugin.accelerate import AccumulationHook

transformers = pytest.importorskip("transformers")

STEPS, BATCH = 4, 5
TINY = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def language_model() -> nn.Module:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(vocab_size=32, num_key_value_heads=2, max_position_embeddings=32, **TINY)
    return transformers.LlamaForCausalLM(config).double()


def image_classifier() -> nn.Module:
    torch.manual_seed(3)
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **TINY)
    return transformers.ViTForImageClassification(config).double()


def texts(num: int, length: int = 9) -> list[dict[str, Tensor]]:
    """Token sequences whose labels end at different places."""
    generator = torch.Generator().manual_seed(5)
    examples = []
    for _ in range(num):
        tokens = torch.randint(0, 32, (length,), generator=generator)
        labels = tokens.clone()
        labels[int(torch.randint(3, length + 1, (), generator=generator)) :] = -100
        examples.append({"input_ids": tokens, "labels": labels})
    return examples


def images(num: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn(num, 3, 8, 8, generator=generator, dtype=torch.float64)
    return [{"pixel_values": p, "labels": int(torch.randint(0, 3, (), generator=generator))} for p in pixels]


def token_loss(model: nn.Module, inputs: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten(), reduction=reduction)


class InOrder(transformers.Trainer):
    """The stock Trainer, examples in the data set's order."""

    def _get_train_sampler(self, *args: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class LocalMean(InOrder):
    """T1: ``compute_loss`` returns the mean over its own tokens."""

    def compute_loss(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None, **_: Any) -> Tensor:
        return token_loss(model, inputs)


class SumOverCount(InOrder):
    """T3: ``compute_loss`` divides by the count of all ranks, which then average."""

    def compute_loss(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None, **_: Any) -> Tensor:
        return token_loss(model, inputs, "sum") / num_items_in_batch


class DividedByHand(InOrder):
    """The stock loss, divided by K once more."""

    def compute_loss(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None, **_: Any) -> Tensor:
        return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch) / STEPS


def mean_of_outputs(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """T2: a ``compute_loss_func`` that ignores the count."""
    return functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@dataclasses.dataclass
class Trained:
    """What one Trainer run left.

    Args:
        gradients: All gradients before each optimizer step, by parameter name.
        findings: The hook's.
        windows: The hook's.
        history: The Trainer's own log.
        folder: Its output directory.
    """

    gradients: list[dict[str, Tensor]]
    findings: list[Finding]
    windows: list[WindowRecord]
    history: list[dict[str, Any]]
    folder: str

    @property
    def alarms(self) -> dict[str, float | None]:
        return {finding.code: finding.factor for finding in self.findings if finding.certainty != "info"}


class Watch(transformers.TrainerCallback):
    """Keeps the gradients that the optimizer is about to see."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        bare = getattr(model, "module", model)
        self.gradients.append({name: p.grad.clone() for name, p in bare.named_parameters() if p.grad is not None})


def fit(
    trainer: type[transformers.Trainer] = InOrder,
    *,
    mode: str | None = "fix",
    model: Callable[[], nn.Module] = language_model,
    data: Sequence[Any] = (),
    steps: int = STEPS,
    batch: int = BATCH,
    loss: Callable[..., Tensor] | None = None,
    resume: str | None = None,
    **arguments: Any,
) -> Trained:
    """Train once over ``data`` at learning rate 0, a hook attached to the Trainer's Accelerator or not."""
    fresh()
    folder = tempfile.mkdtemp(dir=".")
    settings = {
        "output_dir": folder, "per_device_train_batch_size": batch, "gradient_accumulation_steps": steps,
        "num_train_epochs": 1, "learning_rate": 0.0, "optim": "sgd", "max_grad_norm": 0.0, "use_cpu": True,
        "report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    watch = Watch()
    with quiet():
        args = transformers.TrainingArguments(**{**settings, **arguments})
        made = trainer(model(), args, train_dataset=list(data), compute_loss_func=loss, callbacks=[watch])
        hook = AccumulationHook.attach(made.accelerator, mode) if mode else None
        made.train(resume_from_checkpoint=resume)
    findings, windows = (list(hook.findings), list(hook.windows)) if hook else ([], [])
    if hook is not None:
        hook.detach()
    return Trained(watch.gradients, findings, windows, made.state.log_history, folder)


def fits(rank: int, n: int, runs: Sequence[dict[str, Any]]) -> list[Trained]:
    """Train several times on a rank of the pool."""
    with quick_collections():
        return [fit(**run) for run in runs]


def full_batch(model: Callable[[], nn.Module], data: Sequence[Any], size: int) -> list[dict[str, Tensor]]:
    """Gradient of the mean over each window's tokens or images, as one batch on one process."""
    gradients = []
    for start in range(0, len(data), size):
        chunk, net = data[start : start + size], model()
        if "input_ids" in chunk[0]:
            token_loss(net, {key: torch.stack([each[key] for each in chunk]) for key in chunk[0]}).backward()
        else:
            pixels = torch.stack([each["pixel_values"] for each in chunk])
            labels = torch.tensor([each["labels"] for each in chunk])
            functional.cross_entropy(net(pixel_values=pixels).logits, labels).backward()
        gradients.append({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
    return gradients


def assert_equal_to(meant: list[dict[str, Tensor]], trained: Trained) -> None:
    """Every gradient is what was meant. The model computes parts of its loss in float32, whatever its weights are."""
    assert len(trained.gradients) == len(meant)
    for seen, wanted in zip(trained.gradients, meant):
        flat = torch.cat([seen[name].flatten() for name in wanted])
        target = torch.cat([gradient.flatten() for gradient in wanted.values()])
        assert (flat - target).norm() < 2e-7 * target.norm()


def assert_factor(factor: float, warned: Trained, fixed: Trained) -> None:
    """Without correction the norm is off by about the factor, and by exactly it in the record."""
    assert [w.gradient_scale for w in warned.windows] == pytest.approx([factor] * len(warned.windows))
    assert [w.gradient_scale for w in fixed.windows] == pytest.approx([factor] * len(fixed.windows))


STOCK = {"trainer": InOrder}
T1, T2, T3 = {"trainer": LocalMean}, {"trainer": InOrder, "loss": mean_of_outputs}, {"trainer": SumOverCount}


def same_bits(one: Trained, other: Trained) -> bool:
    pairs = list(zip(one.gradients, other.gradients, strict=True))
    return bool(pairs) and all(set(a) == set(b) and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs)


def check_silent(n: int, bare: Trained, watched: Trained, meant: list[dict[str, Tensor]]) -> None:
    assert watched.alarms == {} and {f.code for f in watched.findings} <= {"ACC207", "ACC402"}
    assert same_bits(bare, watched)
    assert_equal_to(meant, watched)
    assert [w.gradient_scale for w in watched.windows] == pytest.approx([1.0] * len(meant))
    assert [w.correction for w in watched.windows] == [1.0] * len(meant)


def silent_runs(n: int) -> list[dict[str, Any]]:
    """Stock: a language model with an incomplete last window of 2 microbatches (S2), images in whole ones (S22)."""
    both = ({"mode": None}, {"mode": "fix"})
    language = [{**STOCK, **mode, "data": texts(6 * n * BATCH)} for mode in both]
    return language + [{**STOCK, **mode, "data": images(8 * n * BATCH), "model": image_classifier} for mode in both]


def check_silent_runs(n: int, results: list[Trained]) -> None:
    size = n * STEPS * BATCH
    check_silent(n, *results[:2], full_batch(language_model, texts(6 * n * BATCH), size))
    check_silent(n, *results[2:], full_batch(image_classifier, images(8 * n * BATCH), size))


def test_stock_on_one_process() -> None:
    check_silent_runs(1, fits(0, 1, silent_runs(1)))


def wrong_runs(n: int) -> list[dict[str, Any]]:
    """T1, T2, T3 with two whole windows and one of 2 microbatches; T2 without accumulation."""
    data = texts(10 * n * BATCH)
    accumulated = [{**case, "mode": mode, "data": data} for case in (T1, T2, T3) for mode in ("warn", "fix")]
    return accumulated + [{**T2, "mode": mode, "data": data[: 2 * n * BATCH], "steps": 1} for mode in ("warn", "fix")]


def check_wrong_runs(n: int, results: list[Trained]) -> None:
    meant = full_batch(language_model, texts(10 * n * BATCH), n * STEPS * BATCH)
    uneven = {"ACC106"} | ({"ACC107"} if n > 1 else set())
    ranks = {"ACC102": n} if n > 1 else {}
    expected = [{"ACC104": STEPS}, {"ACC104": STEPS, **ranks}, {"ACC101": 1 / n} if n > 1 else {}]
    for index, factors in enumerate(expected):
        warned, fixed = results[2 * index : 2 * index + 2]
        assert_equal_to(meant, fixed)
        for run in (warned, fixed):
            assert {code: f for code, f in run.alarms.items() if code not in uneven} == pytest.approx(factors)
        assert all(f.action == "corrected" for f in fixed.findings if f.certainty == "certain")
    whole, last = STEPS, 2  # microbatches
    for run, scales in zip(results[::2], ([whole, whole, last], [n * whole, n * whole, n * last], [1 / n] * 3)):
        assert [w.gradient_scale for w in run.windows] == pytest.approx(scales)
    alone = results[6:]
    assert_equal_to(full_batch(language_model, texts(2 * n * BATCH), n * BATCH), alone[1])
    assert {code: f for code, f in alone[0].alarms.items() if code != "ACC107"} == pytest.approx(ranks)


def test_wrong_losses_on_one_process() -> None:
    check_wrong_runs(1, fits(0, 1, wrong_runs(1)))


def test_two_ranks(ranks: Callable[..., list[list[Trained]]]) -> None:
    for results in ranks(2, fits, silent_runs(2) + wrong_runs(2), timeout=300):
        check_silent_runs(2, results[:4])
        check_wrong_runs(2, results[4:])


def test_three_ranks(ranks: Callable[..., list[list[Trained]]]) -> None:
    data = texts(3 * 4 * BATCH)
    runs = [{**T2, "data": data}, {**T3, "data": data}, silent_runs(3)[3]]
    meant = full_batch(language_model, data, 3 * STEPS * BATCH)
    for counted, averaged, stock in ranks(3, fits, runs, timeout=300):
        assert (counted.alarms["ACC102"], counted.alarms["ACC104"]) == (3.0, STEPS)
        assert averaged.alarms == {"ACC101": pytest.approx(1 / 3)}
        assert_equal_to(meant, counted)
        assert_equal_to(meant, averaged)
        assert stock.alarms == {}


def test_second_division_is_seen_in_the_first_window() -> None:
    """``K`` is not in the Accelerator; the Trainer's own arguments have it."""
    data = images(2 * STEPS * BATCH)
    result = fit(DividedByHand, data=data, model=image_classifier)
    assert result.alarms == {"ACC103": 1 / STEPS}
    assert result.findings[0].optimizer_step == 0
    assert_equal_to(full_batch(image_classifier, data, STEPS * BATCH), result)


def test_examples_of_prefetched_batches() -> None:
    """The Trainer draws a whole window before it runs the first microbatch; the last batch is a short one."""
    result = fit(data=texts(2 * STEPS * BATCH + 3))
    assert [w.effective_batch for w in result.windows] == [20, 20, 3]


def test_metrics_and_findings_in_the_trainers_own_logs() -> None:
    result = fit(LocalMean, data=texts(3 * STEPS * BATCH), logging_steps=2, logging_first_step=True)
    logged = [entry for entry in result.history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [1, 2]
    for entry in logged:
        assert entry["accum/gradient_scale"] == pytest.approx(STEPS)
        assert entry["accum/correction"] == pytest.approx(1 / STEPS)
        assert entry["accum/effective_batch"] == STEPS * BATCH
        assert entry["accum/optimizer_steps"] == entry["step"]
        assert entry["accum/grad_norm"] == pytest.approx(entry["grad_norm"])  # both after correction
    assert any("ACC104" in message for message in logged[0]["accum/findings"])
    assert "accum/findings" not in logged[1]
    assert not any(key.startswith("accum/") for key in result.history[-1])  # the summary at the end has no window


def test_findings_go_to_tensorboard_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    result = fit(LocalMean, data=texts(STEPS * BATCH), report_to="tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert "train/accum/gradient_scale" in events.Tags()["scalars"]
    assert events.Scalars("train/accum/gradient_scale")[0].value == pytest.approx(STEPS)
    assert "accum/ACC104/text_summary" in events.Tags()["tensors"]
    assert not (tmp_path / result.folder / "findings.jsonl").exists()


def test_findings_without_a_reporter(tmp_path: Path) -> None:
    result = fit(LocalMean, data=texts(STEPS * BATCH))
    assert '"ACC104"' in (tmp_path / result.folder / "findings.jsonl").read_text()


def test_nothing_stays_behind() -> None:
    before = transformers.Trainer.log, transformers.Trainer.train
    fit(data=texts(BATCH))
    assert (transformers.Trainer.log, transformers.Trainer.train) == before


def test_clipping_by_the_trainer() -> None:
    """The norm that is logged and clipped is the corrected one."""
    data = texts(STEPS * BATCH)
    (meant,) = full_batch(language_model, data, STEPS * BATCH)
    norm = torch.cat([gradient.flatten() for gradient in meant.values()]).norm().item()
    clipped = fit(LocalMean, data=data, max_grad_norm=norm / 2)
    flat = torch.cat([gradient.flatten() for gradient in clipped.gradients[0].values()])
    assert flat.norm().item() == pytest.approx(norm / 2, rel=1e-4)
    assert clipped.history[0]["grad_norm"] == pytest.approx(norm, rel=1e-6)


def test_resumed_training_goes_on_counting() -> None:
    """The Trainer's checkpoints hold nothing of the hook: its own step count is taken over."""
    data = texts(4 * STEPS * BATCH)
    first = fit(data=data, max_steps=2, save_strategy="steps", save_steps=2)
    resumed = fit(LocalMean, data=data, max_steps=4, resume=str(Path(first.folder) / "checkpoint-2"))
    assert [w.optimizer_step for w in resumed.windows] == [2, 3]
    assert_equal_to(full_batch(language_model, data, STEPS * BATCH)[2:], resumed)
    assert [entry["accum/optimizer_steps"] for entry in resumed.history if "loss" in entry][-2:] == [3.0, 4.0]


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(29))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def sentences(num: int) -> list[dict[str, str]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 12, (num,), generator=generator).tolist()
    words = [torch.randint(0, 29, (length,), generator=generator).tolist() for length in lengths]
    return [{"text": " ".join(f"w{word}" for word in each)} for each in words]


@pytest.mark.parametrize("packing", [False, True])
def test_supervised_fine_tuning(packing: bool) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    def tune(mode: str | None) -> Trained:
        settings = {
            "output_dir": "tuned", "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": STEPS,
            "learning_rate": 0.0, "optim": "sgd", "max_grad_norm": 0.0, "use_cpu": True, "bf16": False,
            "report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
            "dataloader_pin_memory": False, "num_train_epochs": 1, "max_length": 16, "packing": packing,
        }  # fmt: skip
        fresh()
        watch = Watch()
        with quiet():
            args, data = trl.SFTConfig(**settings), datasets.Dataset.from_list(sentences(50))
            known = {"train_dataset": data, "processing_class": tokenizer(), "callbacks": [watch]}
            trainer = trl.SFTTrainer(language_model().float(), args, **known)
            hook = AccumulationHook.attach(trainer.accelerator, mode) if mode else None
            trainer.train()
        found, windows = (list(hook.findings), list(hook.windows)) if hook else ([], [])
        if hook is not None:
            hook.detach()
        return Trained(watch.gradients, found, windows, trainer.state.log_history, "")

    bare, watched = tune(None), tune("fix")
    assert watched.findings == []
    assert same_bits(bare, watched)
    assert [w.gradient_scale for w in watched.windows] == pytest.approx([1.0] * len(watched.windows))
    assert "accum/units" in watched.history[0] and "mean_token_accuracy" in watched.history[0]


SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
from test_transformers import LocalMean, STEPS, BATCH, fit, texts

result = fit(LocalMean, mode=None, data=texts(STEPS * BATCH))
print(json.dumps(result.history[0]))
"""


def test_with_the_flag_alone(tmp_path: Path) -> None:
    """An unmodified script: the hook is on the Trainer's Accelerator, and writes into the Trainer's logs."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    environment = {**os.environ, "ACCELERATE_ACCUM_PLUGIN": "fix", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    entry = json.loads(done.stdout.splitlines()[-1])
    assert (entry["accum/gradient_scale"], entry["accum/correction"]) == pytest.approx((STEPS, 1 / STEPS))
    assert any("ACC104" in message for message in entry["accum/findings"])
