"""Every reader against the gradient itself.

The oracle: a term says that the loss is ``w * sum_i l_i`` with ``w`` the product of its scales (over its count, for a
mean). So the gradient of the loss must equal ``w`` times the gradient of the unit losses summed up by an explicit
formula, and the count must equal the units counted by hand.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from accum_plugin.loss_graph import LossReading, Term, read_loss

IGNORED = -100


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def predictions(*shape: int, seed: int = 1) -> Tensor:
    """Return a non-leaf tensor that requires a gradient, as a model puts one out."""
    return seeded(*shape, seed=seed).requires_grad_().clone()


def only_term(loss: Tensor, **keywords: Tensor) -> Term:
    reading = read_loss(loss, **keywords)
    assert reading.unreadable is None
    assert len(reading.terms) == 1
    return reading.terms[0]


def product(term: Term) -> float:
    factor = 1.0
    for scale in term.scales:
        factor = factor / scale.value if scale.divides else factor * scale.value
    return factor


def weight_of(term: Term) -> float:
    return product(term) / term.units[0] if term.kind == "mean" else product(term)


def assert_reads(loss: Tensor, unit_sum: Tensor, pred: Tensor, kind: str, count: float) -> Term:
    """Check kind, count, and the weight of a unit against the gradient with respect to ``pred``."""
    term = only_term(loss)
    assert (term.kind, term.units[0]) == (kind, pytest.approx(count))
    (seen,) = torch.autograd.grad(loss, pred, retain_graph=True)
    (unit,) = torch.autograd.grad(unit_sum, pred, retain_graph=True)
    torch.testing.assert_close(seen, weight_of(term) * unit, rtol=1e-6, atol=1e-9)
    return term


def nll_by_hand(logits: Tensor, target: Tensor) -> Tensor:
    """Return ``log sum_c exp z_c - z_y`` per row (classes last), zero where the target is ignored."""
    picked = logits.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (logits.exp().sum(-1).log() - picked) * (target != IGNORED)


TARGET = torch.tensor([0, 3, IGNORED, 2, 1, 1, IGNORED, 4])
CLASS_WEIGHT = torch.tensor([0.5, 2.0, 1.5, 0.25, 3.0], dtype=torch.float64)


@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(how: str, smoothing: float, weighted: bool) -> None:
    logits = predictions(8, 5)
    class_weight = CLASS_WEIGHT if weighted else torch.ones(5, dtype=torch.float64)
    valid = TARGET != IGNORED
    unit = nll_by_hand(logits, TARGET) * class_weight[TARGET.clamp(min=0)]
    log_probs = logits - logits.exp().sum(-1, keepdim=True).log()
    smooth = -(log_probs * class_weight).sum(-1) * valid
    unit_sum = ((1 - smoothing) * unit + smoothing / 5 * smooth).sum()
    loss = F.cross_entropy(
        logits, TARGET, weight=class_weight if weighted else None, label_smoothing=smoothing, reduction=how
    )
    count = sum(class_weight[label].item() for label in TARGET.tolist() if label != IGNORED)
    term = assert_reads(loss, unit_sum, logits, how, count)
    assert term.key == f"nll({how})"
    assert term.rows == 8
    if how == "sum":
        assert 6 in term.units and 8 in term.units


def test_cross_entropy_over_positions() -> None:
    logits, target = predictions(3, 5, 4), torch.tensor([[0, 1, 2, IGNORED], [3, IGNORED, IGNORED, 4], [1, 1, 1, 1]])
    units = nll_by_hand(logits.transpose(1, 2), target).sum()
    assert_reads(F.cross_entropy(logits, target), units, logits, "mean", 9)
    smoothed = only_term(F.cross_entropy(logits, target, label_smoothing=0.2))
    assert (smoothed.kind, smoothed.units, smoothed.rows) == ("mean", (9.0,), 3)


def test_unreduced_cross_entropy_counts_valid_targets() -> None:
    logits = predictions(8, 5)
    loss = F.cross_entropy(logits, TARGET, reduction="none").sum() / 6
    term = assert_reads(loss, nll_by_hand(logits, TARGET).sum(), logits, "sum", 6)
    assert term.units == (6, 8)
    assert (term.scales[0].value, term.scales[0].divides, term.scales[0].integral) == (6, True, True)
    smoothed = F.cross_entropy(logits, TARGET, reduction="none", label_smoothing=0.1).sum()
    assert only_term(smoothed).units == (6, 8)
    weighted = F.cross_entropy(logits, TARGET, reduction="none", weight=CLASS_WEIGHT).sum()
    assert only_term(weighted).units == (pytest.approx(sum(CLASS_WEIGHT[[0, 3, 2, 1, 1, 4]].tolist())), 6, 8)


def test_soft_targets() -> None:
    logits, target = predictions(8, 5), seeded(8, 5, seed=3).softmax(-1)
    units = -((logits - logits.exp().sum(-1, keepdim=True).log()) * target).sum()
    loss = F.cross_entropy(logits, target)
    term = only_term(loss)
    assert term.kind == "sum" and 8 in [round(count, 9) for count in term.units]
    (seen,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (unit,) = torch.autograd.grad(units, logits)
    # The part outside the reduction is -1/8: the sign belongs to the scales here.
    torch.testing.assert_close(seen, -product(term) * unit)


PRED, OTHER = (6, 4), seeded(6, 4, seed=2)
BINARY = (seeded(6, 4, seed=4) > 0).double()
ELEMENTWISE = {
    "mse": (lambda p, r: F.mse_loss(p, OTHER, reduction=r), lambda p: (p - OTHER) ** 2),
    "l1": (lambda p, r: F.l1_loss(p, OTHER, reduction=r), lambda p: (p - OTHER).abs()),
    "smooth_l1": (
        lambda p, r: F.smooth_l1_loss(p, OTHER, reduction=r),
        lambda p: torch.where((p - OTHER).abs() < 1, (p - OTHER) ** 2 / 2, (p - OTHER).abs() - 0.5),
    ),
    "huber": (
        lambda p, r: F.huber_loss(p, OTHER, reduction=r, delta=2.0),
        lambda p: torch.where((p - OTHER).abs() < 2, (p - OTHER) ** 2 / 2, 2 * (p - OTHER).abs() - 2),
    ),
    "bce": (
        lambda p, r: F.binary_cross_entropy(p.sigmoid(), BINARY, reduction=r),
        lambda p: (1 + p.exp()).log() - BINARY * p,
    ),
    "bce_with_logits": (
        lambda p, r: F.binary_cross_entropy_with_logits(p, BINARY, reduction=r),
        lambda p: (1 + p.exp()).log() - BINARY * p,
    ),
    "soft_margin": (
        lambda p, r: F.soft_margin_loss(p, BINARY * 2 - 1, reduction=r),
        lambda p: (1 + (-p * (BINARY * 2 - 1)).exp()).log(),
    ),
    "poisson_nll": (lambda p, r: F.poisson_nll_loss(p, OTHER.abs(), reduction=r), lambda p: p.exp() - OTHER.abs() * p),
    "hinge_embedding": (
        lambda p, r: F.hinge_embedding_loss(p, BINARY * 2 - 1, reduction=r),
        lambda p: torch.where(BINARY == 1, p, (1 - p).clamp(min=0)),
    ),
}


@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_losses(name: str, how: str) -> None:
    loss, unit = ELEMENTWISE[name]
    pred = predictions(*PRED)
    term = assert_reads(loss(pred, how), unit(pred).sum(), pred, how, 24)
    assert term.value_squared == (name == "mse")
    if how == "sum":
        assert 6 in term.units


LABELS = torch.tensor([0, 1, 2, 3, 1, 1])
ROWWISE = {
    "multi_margin": (
        lambda p, r: F.multi_margin_loss(p, LABELS, reduction=r),
        lambda p: sum(
            (1 - p[i, LABELS[i]] + p[i, c]).clamp(min=0) / 4 for i in range(6) for c in range(4) if c != LABELS[i]
        ),
    ),
    "multilabel_margin": (
        lambda p, r: F.multilabel_margin_loss(p, torch.tensor([[0, -1, -1, -1]] * 6), reduction=r),
        lambda p: sum((1 - p[i, 0] + p[i, c]).clamp(min=0) / 4 for i in range(6) for c in (1, 2, 3)),
    ),
    "multilabel_soft_margin": (
        lambda p, r: F.multilabel_soft_margin_loss(p, BINARY, reduction=r),
        lambda p: ((1 + p.exp()).log() - BINARY * p).mean(1).sum(),
    ),
    "triplet": (
        lambda p, r: F.triplet_margin_loss(p, OTHER, OTHER + 1, margin=9.0, reduction=r, eps=0.0),
        lambda p: (((p - OTHER) ** 2).sum(1).sqrt() - ((p - OTHER - 1) ** 2).sum(1).sqrt() + 9).clamp(min=0).sum(),
    ),
    "cosine_embedding": (
        lambda p, r: F.cosine_embedding_loss(p, OTHER, torch.ones(6), reduction=r),
        lambda p: (1 - (p * OTHER).sum(1) / (p.norm(dim=1) * OTHER.norm(dim=1))).sum(),
    ),
    "margin_ranking": (
        lambda p, r: F.margin_ranking_loss(p[:, 0], OTHER[:, 0], torch.ones(6), margin=0.5, reduction=r),
        lambda p: (OTHER[:, 0] - p[:, 0] + 0.5).clamp(min=0).sum(),
    ),
}


@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("name", ROWWISE)
def test_losses_of_one_value_per_row(name: str, how: str) -> None:
    loss, unit_sum = ROWWISE[name]
    pred = predictions(*PRED)
    value = loss(pred, how)
    term = only_term(value)
    assert term.kind == how and 6 in term.units
    (seen,) = torch.autograd.grad(value, pred, retain_graph=True)
    (unit,) = torch.autograd.grad(unit_sum(pred), pred)
    # A divisor C inside the row (the mean over classes) is part of the unit loss, not a scale.
    torch.testing.assert_close(seen, product(term) / (6 if how == "mean" else 1) * unit, rtol=1e-5, atol=1e-8)


def test_gaussian_nll() -> None:
    pred = predictions(*PRED)
    loss = F.gaussian_nll_loss(pred, OTHER, torch.full((6, 4), 2.0, dtype=torch.float64))
    assert_reads(loss, ((pred - OTHER) ** 2 / 2).sum(), pred, "mean", 24)


def test_kl_divergence() -> None:
    log_q, p = predictions(6, 4), seeded(6, 4, seed=5).softmax(-1)
    units = -(p * log_q).sum()
    batchmean = F.kl_div(log_q, p, reduction="batchmean")
    term = only_term(batchmean)
    assert term.kind == "sum" and 6 in [round(count, 9) for count in term.units] and 24 in term.units
    (seen,) = torch.autograd.grad(batchmean, log_q, retain_graph=True)
    (unit,) = torch.autograd.grad(units, log_q, retain_graph=True)
    torch.testing.assert_close(seen, product(term) * unit)
    with pytest.warns(UserWarning, match="batchmean"):
        mean = F.kl_div(log_q, p, reduction="mean")
    assert_reads(mean, units, log_q, "mean", 24)


def test_ctc() -> None:
    logits, lengths = predictions(10, 3, 6), torch.tensor([4, 3, 2])
    targets, inputs = torch.tensor([[1, 2, 3, 4], [5, 1, 2, 1], [3, 4, 1, 1]]), torch.tensor([10, 9, 8])
    log_probs = logits.log_softmax(-1)
    alone = [
        F.ctc_loss(log_probs[:, i : i + 1], targets[i : i + 1], inputs[i : i + 1], lengths[i : i + 1], reduction="none")
        for i in range(3)
    ]
    mean = F.ctc_loss(log_probs, targets, inputs, lengths)
    assert_reads(mean, sum(value.sum() / n for value, n in zip(alone, (4, 3, 2), strict=True)), logits, "mean", 3)
    total = only_term(F.ctc_loss(log_probs, targets, inputs, lengths, reduction="sum"))
    assert total.kind == "sum" and {9, 3} <= set(total.units)


MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
MASKED_SUMS = {
    "product with bool": lambda v: (v * MASK).sum(),
    "product with int": lambda v: (MASK.long() * v).sum(),
    "product with float": lambda v: (v * MASK.double()).sum(),
    "product with half": lambda v: (v * MASK.bfloat16()).sum(),
    "flat": lambda v: (v.reshape(-1) * MASK.reshape(-1)).sum(),
    "where": lambda v: torch.where(MASK, v, 0.0).sum(),
    "where not": lambda v: torch.where(~MASK, 0.0, v).sum(),
    "masked_fill": lambda v: v.masked_fill(~MASK, 0.0).sum(),
    "indexed": lambda v: v[MASK].sum(),
    "masked_select": lambda v: v.masked_select(MASK).sum(),
    "rows first": lambda v: (v * MASK).sum(1).sum(),
    "two masks": lambda v: (v * (MASK | (torch.arange(4) == 3)) * (MASK | (torch.arange(4) < 3))).sum(),
    "dot": lambda v: torch.dot(v.reshape(-1), MASK.reshape(-1).double()),
    "nansum": lambda v: torch.where(MASK, v, torch.nan).nansum(),
}


@pytest.mark.parametrize("name", MASKED_SUMS)
def test_masked_sums_count_what_the_mask_lets_through(name: str) -> None:
    pred = predictions(3, 4)
    units = (pred**2)[0, :3].sum() + (pred**2)[1, 0] + (pred**2)[2].sum()
    assert_reads(MASKED_SUMS[name](pred**2), units, pred, "sum", 8)


def test_masked_mean_in_its_spellings() -> None:
    pred = predictions(3, 4)
    units = (pred**2)[MASK].sum()
    outside = assert_reads((pred**2 * MASK).sum() / MASK.sum(), units, pred, "sum", 8)
    inside = assert_reads((pred**2 * MASK / MASK.sum()).sum(), units, pred, "sum", 8)
    assert [scale.value for scale in outside.scales] == [scale.value for scale in inside.scales] == [8]
    assert_reads((pred**2)[MASK].mean(), units, pred, "mean", 8)
    assert_reads((pred**2 * MASK).mean(), units, pred, "mean", 12)


def test_broadcast_masks_and_weights() -> None:
    pred, row_mask = predictions(3, 4), torch.tensor([[True], [False], [True]])
    assert only_term((pred**2 * row_mask).sum()).units[0] == 8
    assert only_term(((pred**2).sum(1) * row_mask[:, 0]).sum()).units[0] == 2
    weights = torch.tensor([0.5, 2.0, 0.25])
    assert only_term(((pred**2).mean(1) * weights).sum()).units == (2.75, 3)
    # Advantages have signs; their sum counts nothing.
    assert only_term((pred.log_softmax(1)[:, 0] * torch.tensor([1.0, -2.0, 0.5])).sum()).units == (3,)


def test_a_mask_of_one_element_is_no_scale() -> None:
    term = only_term((predictions(1, 1) ** 2 * torch.ones(1, 1)).sum())
    assert (term.units, term.scales) == ((1.0,), ())


def test_nested_reductions() -> None:
    pred = predictions(3, 4)
    squared = pred**2
    total = squared.sum()
    assert_reads(squared.mean(1).mean(), total / 4, pred, "mean", 3)
    assert_reads(squared.sum(1).mean(), total, pred, "mean", 3)
    assert_reads(squared.mean(0).mean(), total, pred, "mean", 12)
    assert_reads(squared.mean(0).sum(), total, pred, "mean", 3)
    assert_reads(squared.sum((0, 1)), total, pred, "sum", 12)
    assert_reads(squared.mean(dim=(-1, -2)), total, pred, "mean", 12)
    assert only_term(squared.sum(1).sum()).units == (12, 3)
    assert only_term(predictions(2, 3, 4).pow(2).sum()).units == (24, 2, 6)
    assert_reads((squared.sum(1) / 4).mean(), total / 4, pred, "mean", 3)


def test_balance_loss_of_experts_is_a_mean_over_the_batch() -> None:
    pred, fraction = predictions(6, 4), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    assert_reads((fraction * pred.mean(0)).sum() * 4, (pred * fraction).sum(), pred, "mean", 6)
    mask = torch.tensor([1, 1, 0, 1, 1, 0], dtype=torch.float64)[:, None]
    masked_mean = (pred * mask).sum(0) / mask.expand(6, 4).sum(0)
    assert_reads((fraction * masked_mean).sum(), (pred * mask * fraction).sum(), pred, "mean", 4)


def test_arithmetic_keeps_order_sign_and_spelling() -> None:
    pred = predictions(3, 4)
    loss = -(3.0 * (pred.mean() / 4) * torch.tensor(2)) / torch.tensor(5.0)
    term = assert_reads(loss, pred.sum(), pred, "mean", 12)
    assert term.key == "div/neg/mul/mul/div/mean"
    written = [(scale.value, scale.divides, scale.integral) for scale in term.scales]
    assert written == [(5.0, True, False), (-1, False, True), (2, False, True), (3.0, False, False), (4, True, True)]
    assert_reads(1 - pred.mean(), pred.sum(), pred, "mean", 12)
    assert_reads(pred.mean() - 1, pred.sum(), pred, "mean", 12)
    assert_reads((pred / 3).mean(), pred.sum(), pred, "mean", 12)


def test_views_casts_and_clones_pass_through() -> None:
    pred = predictions(3, 4)
    loss = pred.mean().clone().reshape(1).unsqueeze(0).squeeze().float().double()
    assert_reads(loss, pred.sum(), pred, "mean", 12)
    assert_reads(pred.mean().unsqueeze(0).mean(), pred.sum(), pred, "mean", 12)


def test_autocast() -> None:
    layer, inputs = nn.Linear(3, 5), seeded(8, 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(layer(inputs), TARGET) / 4
    term = only_term(loss)
    assert (term.kind, term.units, term.scales[0].value, term.key) == ("mean", (6.0,), 4, "div/nll(mean)")


def test_a_criterion_with_backward_hooks() -> None:
    criterion = nn.CrossEntropyLoss()
    criterion.register_full_backward_hook(lambda *_: None)
    logits = predictions(8, 5)
    assert_reads(criterion(logits, TARGET), nll_by_hand(logits, TARGET).sum(), logits, "mean", 6)


def test_loss_scale_is_no_part_of_the_reading() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = predictions(3, 4).mean() / 4
    term = only_term(scaler.scale(loss), loss_scale=scaler._scale)
    assert (term.key, [scale.value for scale in term.scales]) == ("div/mean", [4])
    by_value = only_term(loss * 1024.0, loss_scale=scaler._scale)
    assert [scale.value for scale in by_value.scales] == [4]
    assert [scale.value for scale in only_term(loss * 8.0, loss_scale=scaler._scale).scales] == [8.0, 4]


# ---------------------------------------------------------------------------------------------------------- terms


def test_terms_keep_their_own_accounts_and_hooks_scale_one_alone() -> None:
    first, second = predictions(8, 5), predictions(3, 4, seed=7)

    def loss() -> Tensor:
        return (F.cross_entropy(first, TARGET) + 0.1 * second.pow(2).sum() / 12) / 2

    reading = read_loss(loss())
    assert reading.signature == "div/add.0/nll(mean) + div/add.1/div/mul/sum"
    assert [term.kind for term in reading.terms] == ["mean", "sum"]
    assert [[scale.value for scale in term.scales] for term in reading.terms] == [[2], [2, 12, 0.1]]
    plain = torch.autograd.grad(loss(), (first, second), retain_graph=True)
    for index in range(2):
        hooked = loss()
        term = read_loss(hooked).terms[index]
        term.node.register_prehook(lambda grads: tuple(3.0 * grad for grad in grads))
        grads = torch.autograd.grad(hooked, (first, second), retain_graph=True)
        factors = [3.0 if place == index else 1.0 for place in range(2)]
        for grad, want, factor in zip(grads, plain, factors, strict=True):
            torch.testing.assert_close(grad, want * factor)


def test_alpha_and_differences() -> None:
    first, second = predictions(4), predictions(6, seed=3)
    reading = read_loss(torch.add(first.mean(), second.sum(), alpha=0.5) - 0.25 * first.sum())
    assert [term.kind for term in reading.terms] == ["mean", "sum", "sum"]
    assert [product(term) for term in reading.terms] == [1.0, 0.5, -0.25]


def test_a_list_divided_by_its_length_is_one_mean() -> None:
    pred = predictions(8, 5)
    pieces = [slice(0, 3), slice(3, 5), slice(5, 8)]

    def losses(count: int) -> list[Tensor]:
        return [pred[piece].pow(2).mean() for piece in pieces[:count]]

    unit_sum = sum(losses(3))
    by_hand = assert_reads(sum(losses(3)) / 3, unit_sum, pred, "mean", 3)
    assert_reads(torch.stack(losses(3)).mean(), sum(losses(3)), pred, "mean", 3)
    assert_reads(torch.cat([loss.view(1) for loss in losses(3)]).mean(), sum(losses(3)), pred, "mean", 3)
    for count in (1, 2):  # the key names the same term, however long the list is
        assert only_term(sum(losses(count)) / count).key == by_hand.key
    separate = read_loss(sum(losses(3)))
    assert [term.kind for term in separate.terms] == ["mean"] * 3
    assert len({term.key for term in separate.terms}) == 3
    weighted = read_loss((1.0 * losses(3)[0] + 0.5 * losses(3)[1]) / 2)
    assert [product(term) for term in weighted.terms] == [0.5, 0.25]


def test_a_sum_in_pieces_is_one_sum() -> None:
    logits = predictions(8, 5)
    chunks = [F.cross_entropy(logits[i : i + 4], TARGET[i : i + 4], reduction="sum") for i in (0, 4)]
    assert_reads(sum(chunks) / 6, nll_by_hand(logits, TARGET).sum(), logits, "sum", 6)


def test_the_list_hook_scales_the_whole_list() -> None:
    pred = predictions(4)

    def loss() -> Tensor:
        return sum(pred[i : i + 2].mean() for i in (0, 2)) / 2

    (plain,) = torch.autograd.grad(loss(), pred, retain_graph=True)
    hooked = loss()
    only_term(hooked).node.register_prehook(lambda grads: tuple(2.0 * grad for grad in grads))
    torch.testing.assert_close(torch.autograd.grad(hooked, pred)[0], 2.0 * plain)


def test_penalties_depend_on_parameters_only() -> None:
    model = nn.Linear(3, 5).double()
    data_term = F.cross_entropy(model(seeded(8, 3)), TARGET)
    penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
    gram = (model.weight.T @ model.weight - torch.eye(3)).pow(2).mean()
    reading = read_loss(data_term + 0.1 * penalty + model.weight.norm() + gram)
    assert [term.kind for term in reading.terms] == ["mean", "penalty", "penalty", "penalty"]
    assert reading.terms[1].scales[0].value == 0.1


def test_the_toy_fixture_is_no_penalty() -> None:
    weight, x = nn.Parameter(torch.tensor(2.0)), torch.arange(1.0, 17.0)
    assert_reads((weight * x).mean(), (weight * x).sum(), weight, "mean", 16)
    assert only_term((weight * x).sum() / 16).units == (16,)
    assert only_term(((weight - x) ** 2).mean()).kind == "mean"


def test_learned_coefficients() -> None:
    log_variance, sigma = nn.Parameter(torch.tensor([0.3, -0.2])), nn.Parameter(torch.tensor(2.0))
    pred = predictions(3, 4).float()

    def loss() -> Tensor:
        first = torch.exp(-log_variance[0]) * pred.mean() + log_variance[0]
        return first + pred.pow(2).sum() / (2 * sigma**2) + sigma.log() + sigma

    terms = read_loss(loss()).terms
    assert [term.kind for term in terms] == ["mean", "penalty", "sum", "penalty", "penalty"]
    assert [product(term) for term in terms[:3:2]] == pytest.approx([math.exp(-0.3), 1 / 8])
    assert not any(scale.integral for term in terms for scale in term.scales)
    assert terms[4].node is None  # a bare parameter: a hook there would touch what other terms contribute
    # The gradient of the coefficient belongs to the term and is scaled with it.
    plain = torch.autograd.grad(loss(), (log_variance, sigma), retain_graph=True)
    hooked = loss()
    read_loss(hooked).terms[0].node.register_prehook(lambda grads: (0.0 * grads[0],))
    seen = torch.autograd.grad(hooked, (log_variance, sigma), retain_graph=True)
    torch.testing.assert_close(seen[0], torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(seen[1], plain[1])


# -------------------------------------------------------------------------------------------------------- coupled

with torch.random.fork_rng():
    torch.manual_seed(0)
    TOWER, OTHER_TOWER = nn.Linear(3, 5), nn.Linear(3, 5)
QUERIES, KEYS = seeded(8, 3, seed=8).float(), seeded(8, 3, seed=9).float()
TEMPERATURE = nn.Parameter(torch.tensor(0.5))


def _nt_xent() -> Tensor:
    z = F.normalize(torch.cat([TOWER(QUERIES), TOWER(KEYS)]), dim=1)
    similarity = (z @ z.t() / 0.1).masked_fill(torch.eye(16, dtype=torch.bool), -1e9)
    return F.cross_entropy(similarity, torch.arange(16).roll(8))


COUPLED = {
    "clip": lambda: F.cross_entropy(TOWER(QUERIES) @ OTHER_TOWER(KEYS).t() * TEMPERATURE.exp(), torch.arange(8)),
    "clip, transposed": lambda: F.cross_entropy((TOWER(QUERIES) @ OTHER_TOWER(KEYS).t()).t(), torch.arange(8)),
    "nt-xent": _nt_xent,
    "einsum": lambda: F.cross_entropy(torch.einsum("nd,md->nm", TOWER(QUERIES), TOWER(KEYS)), torch.arange(8)),
    "siglip": lambda: -F.logsigmoid(TOWER(QUERIES) @ TOWER(KEYS).t() * TEMPERATURE + 1.0).sum() / 8,
    "logsumexp": lambda: torch.logsumexp(TOWER(QUERIES) @ TOWER(KEYS).t(), 1).mean(),
    "in a list": lambda: torch.stack([_nt_xent(), _nt_xent()]).mean(),
    "root of a mean": lambda: F.mse_loss(TOWER(QUERIES), KEYS.repeat(1, 2)[:, :5]).sqrt(),
    "ratio (dice)": lambda: 1 - TOWER(QUERIES).sigmoid().sum() / TOWER(QUERIES).sigmoid().add(1).sum(),
    "entropy of the mean": lambda: (TOWER(QUERIES).softmax(1).mean(0) * TOWER(QUERIES).softmax(1).mean(0).log()).sum(),
    "spread over the batch": lambda: F.relu(1 - TOWER(QUERIES).std(0)).mean(),
    "largest of two": lambda: torch.maximum(TOWER(QUERIES).mean(), TOWER(KEYS).mean()),
}


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_losses(name: str) -> None:
    loss = COUPLED[name]()
    terms = read_loss(loss).terms
    assert [term.kind for term in terms] == ["coupled"] * len(terms) and terms


# Those whose targets are not written for the whole batch can be asked about its halves.
SPLITTABLE = ["siglip", "logsumexp", "root of a mean", "ratio (dice)", "entropy of the mean", "largest of two"]


@pytest.mark.parametrize("name", SPLITTABLE)
def test_coupled_losses_are_no_mean_or_sum_of_their_halves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys = QUERIES, KEYS
    whole, halves = COUPLED[name]().item(), []
    for half in (slice(0, 4), slice(4, 8)):
        monkeypatch.setitem(globals(), "QUERIES", queries[half])
        monkeypatch.setitem(globals(), "KEYS", keys[half])
        halves.append(COUPLED[name]().item())
    assert abs(sum(halves) / 2 - whole) > 1e-5
    assert abs(sum(halves) - whole) > 1e-5


NORMALIZED_HEAD, EMBEDDING = nn.Parameter(seeded(10, 5).float()), nn.Embedding(10, 5)
UNCOUPLED = {
    "classifier": lambda: F.cross_entropy(TOWER(QUERIES), TARGET),
    "head without bias": lambda: F.cross_entropy(F.linear(TOWER(QUERIES), NORMALIZED_HEAD), TARGET),
    "normalized head": lambda: F.cross_entropy(
        16 * F.linear(F.normalize(TOWER(QUERIES)), F.normalize(NORMALIZED_HEAD)), TARGET
    ),
    "tied head": lambda: F.cross_entropy(EMBEDDING(TARGET.clamp(min=0)) @ EMBEDDING.weight.t(), TARGET),
    "low-rank head": lambda: F.cross_entropy(
        QUERIES @ (TOWER.weight + 0.5 * (TOWER.weight @ TOWER.weight.t() @ TOWER.weight)).t(), TARGET
    ),
    "attention": lambda: F.cross_entropy(
        TOWER(torch.softmax(TOWER(QUERIES) @ TOWER(QUERIES).t(), 1) @ QUERIES), TARGET
    ),
    "frozen keys": lambda: F.cross_entropy(TOWER(QUERIES) @ TOWER(KEYS).t().detach(), torch.arange(8)),
    "cosine of pairs": lambda: F.cosine_similarity(TOWER(QUERIES), OTHER_TOWER(KEYS)).mean(),
}


@pytest.mark.parametrize("name", UNCOUPLED)
def test_heads_and_attention_are_not_coupled(name: str) -> None:
    assert only_term(UNCOUPLED[name]()).kind == "mean"


# ----------------------------------------------------------------------------------------------------- unreadable


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 2


def _checkpointed() -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda x: F.cross_entropy(TOWER(x), TARGET), QUERIES, use_reentrant=False)


def _compiled() -> Tensor:
    return torch.compile(lambda inputs: F.cross_entropy(TOWER(inputs), TARGET), backend="aot_eager")(QUERIES)


def _added_twice() -> Tensor:
    value = TOWER(QUERIES).mean()
    return value + 0.5 * value


UNREADABLE = {
    "does not require gradients": lambda: QUERIES.detach().mean(),
    "DoubledBackward": lambda: Doubled.apply(TOWER(QUERIES).mean()),
    "one element of a larger tensor": lambda: TOWER(QUERIES)[0, 0],
    "has shape": lambda: TOWER(QUERIES),
    "packed away": _checkpointed,
    "CompiledFunctionBackward, a compiled function": _compiled,
    "several paths": _added_twice,
    "no parameter": lambda: torch.ones((), requires_grad=True) * 2,
    "65 terms": lambda: sum(TOWER(QUERIES).mean() for _ in range(65)),
    "reduces nothing": lambda: TEMPERATURE * torch.ones(1),
    "unreduced value": lambda: F.mse_loss(TOWER(QUERIES)[:1, :1].reshape(()), torch.zeros(()), reduction="none"),
}


@pytest.mark.parametrize("reason", UNREADABLE)
def test_what_cannot_be_read_is_said(reason: str) -> None:
    reading = read_loss(UNREADABLE[reason]())
    assert reading.terms == () and reading.signature == ""
    assert reason in reading.unreadable


def test_a_reading_does_not_recompute_checkpointed_activations() -> None:
    calls = []

    def forward(x: Tensor) -> Tensor:
        calls.append(1)
        return F.cross_entropy(TOWER(x), TARGET)

    loss = torch.utils.checkpoint.checkpoint(forward, QUERIES, use_reentrant=False)
    read_loss(loss)
    assert len(calls) == 1


def test_counts_on_a_device_stay_there() -> None:
    """The meta device has shapes and no values: whatever wanted a value on the host would raise."""
    logits = torch.randn(8, 5, device="meta", requires_grad=True) * 1.0
    target, mask = torch.zeros(8, dtype=torch.long, device="meta"), torch.ones(8, device="meta")
    losses = F.cross_entropy(logits, target, reduction="none")
    mean, masked = only_term(F.cross_entropy(logits, target)), only_term((losses * mask).sum() / mask.sum())
    for count in (mean.units[0], masked.units[0], masked.scales[0].value, only_term(losses.sum()).units[0]):
        assert isinstance(count, Tensor) and count.device.type == "meta" and count.dim() == 0
    assert masked.units[1] == 8 and not masked.scales[0].integral
    assert only_term(F.mse_loss(logits, logits.detach())).units == (40,)


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class ReturnsItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(3, 5), nn.Linear(2, 2)

    def forward(self, inputs: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.layer(inputs)
        return {"logits": logits, "loss": F.cross_entropy(logits, target), "extra": logits.pow(2).sum()}


def test_the_sink_of_ddp(one_rank: None) -> None:
    model = nn.parallel.DistributedDataParallel(ReturnsItsLoss(), find_unused_parameters=True)
    out = model(QUERIES.detach(), TARGET)
    assert out["loss"].grad_fn.name() == "_DDPSinkBackward"
    reading: LossReading = read_loss(out["loss"] / 4 + 0.1 * out["extra"])
    assert reading.signature == "add.0/div/nll(mean) + add.1/mul/sum"
    assert [term.units[0] for term in reading.terms] == [6.0, 40]
