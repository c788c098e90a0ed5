"""Running rows: on real ranks, several rows in one call, each without the plugin and with it."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from corpus.case import Case, Outcome, Verdict, judge

MODES = (None, "fix")


def verdicts(cases: Iterable[Case], ranks: Callable[..., list[Any]]) -> list[Verdict]:
    """Run rows and judge them.

    Args:
        cases: The rows.
        ranks: ``ranks(n, fn, ids, timeout=...)``, runs a function on ``n`` ranks.
    """
    chosen, judged = list(cases), []
    for n in sorted({case.n for case in chosen}):
        group = [case for case in chosen if case.n == n]
        results = run_alone(group) if n == 1 else ranks(n, run_on_rank, [case.id for case in group], timeout=200.0)
        judged += [_judged(case, [result[case.id] for result in results]) for case in group]
    return judged


def _judged(case: Case, results: list[dict[str | None, Outcome | str]]) -> Verdict:
    errors = [outcome for result in results for outcome in result.values() if isinstance(outcome, str)]
    if errors:
        return Verdict(case, found=case.silent, problems=[errors[0]])
    plain, watched = ([result[mode] for result in results] for mode in MODES)
    return judge(case, plain, watched)


def run_alone(cases: list[Case]) -> list[dict[str, Any]]:
    """Run rows of one rank in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _frozen():
            return [{case.id: _run(case, 0) for case in cases}]
    finally:
        torch.set_num_threads(threads)


def run_on_rank(rank: int, n: int, ids: list[str]) -> dict[str, Any]:
    """Run rows on one rank of several."""
    from corpus.table import CASES

    with _frozen():
        return {case.id: _run(case, rank) for case in CASES if case.id in ids}


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Keep what is imported out of the garbage collector: frameworks collect at every end, over a million objects."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _run(case: Case, rank: int) -> dict[str | None, Outcome | str]:
    return {mode: _once(case, rank, mode) for mode in MODES}


def _once(case: Case, rank: int, mode: str | None) -> Outcome | str:
    torch.manual_seed(0)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            return case.loop(case.setting(rank, mode))
        except Exception:  # the row fails, the others go on
            return traceback.format_exc()
        finally:
            logging.disable(logging.NOTSET)
