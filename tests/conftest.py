"""Fixtures shared by every test module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus.report import summary
from pool import RankPool

CORPUS: pytest.StashKey[dict[str, Any]] = pytest.StashKey()  # what the corpus's rows came to, by id


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the corpus's table, where its rows have run."""
    verdicts = config.stash.get(CORPUS, {})
    if verdicts:
        terminalreporter.section("corpus")
        terminalreporter.write_line("\n".join(summary(list(verdicts.values()))))


@pytest.fixture(scope="session")
def _rank_pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def ranks(_rank_pool: RankPool, tmp_path: Path) -> Callable[..., list[Any]]:
    """Run a function on real gloo ranks: ``ranks(n, fn, *args, **kwargs)`` returns each rank's result.

    ``fn(rank, n, *args, **kwargs)`` runs in ``n`` worker processes in which ``torch.distributed`` is initialized
    and the launcher's environment variables are set, seeded alike, in the test's own temporary folder. The keyword
    ``timeout`` (240 seconds) is the pool's; everything else goes to ``fn``. A rank that raises or hangs fails the
    test with its traceback, and the pool goes on.
    """

    def run(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 240.0, **kwargs: Any) -> list[Any]:
        return _rank_pool.run(n, fn, args, kwargs, timeout=timeout, folder=str(tmp_path))

    return run
