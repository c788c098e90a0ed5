"""Start the demo's ranks once, run every section in them, and bring the measurements back."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import queue
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

MAX_RANKS = 32  # the digits have 1797 rows: enough for 3 steps of 16 rows on this many ranks
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


class DemoError(RuntimeError):
    """The demo cannot run, or a rank failed; the message says what to do."""


def run_demo(ranks: int = 8, *, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure every section of the demo on ``ranks`` real processes.

    Args:
        ranks: Data-parallel ranks to start, 1 to 32.
        progress: Called with one short line whenever another measurement starts.

    Returns:
        JSON-serialisable measurements: ``ranks``, ``rows`` (the table of two losses by two reductions),
        ``incomplete_window`` and ``ragged_tokens``.

    Raises:
        DemoError: If ``ranks`` is out of range, scikit-learn is missing, or a rank failed.
    """
    _check(ranks)
    progress(f"starting {ranks} {'rank' if ranks == 1 else 'ranks'} (they import torch and lightning once)")
    with _single_threaded(), tempfile.TemporaryDirectory(prefix="accum-plugin-demo-") as folder:
        context = _context()
        messages = context.Queue()
        arguments = (ranks, folder, messages)
        processes = [context.Process(target=_rank_main, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            return _listen(messages, processes, progress)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _check(ranks: int) -> None:
    if not 1 <= ranks <= MAX_RANKS:
        raise DemoError(f"--ranks {ranks} is out of range; give a number of processes from 1 to {MAX_RANKS}")
    if importlib.util.find_spec("sklearn") is None:
        raise DemoError("the demo trains on scikit-learn's digits; install it: pip install 'accum-plugin[demo]'")


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Many ranks share few cores: give each one thread, through the environment they inherit."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _context() -> Any:
    """Fork the ranks from one clean process that has done the imports, where the platform can."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["accum_plugin.demo.sections"])
    return context


def _listen(messages: Any, processes: list[Any], progress: Callable[[str], None]) -> dict[str, Any]:
    while True:
        try:
            kind, content = messages.get(timeout=0.5)
        except queue.Empty:
            lost = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
            if lost:
                raise DemoError(f"rank {lost[0]} ended with exit code {processes[lost[0]].exitcode}") from None
            continue
        if kind == "progress":
            progress(content)
        elif kind == "error":
            raise DemoError(content)
        else:
            return content


def _rank_main(rank: int, n: int, folder: str, messages: Any) -> None:
    """Join the process group and measure; rank 0 reports, every rank reports a failure."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
    if sys.platform in _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK[sys.platform])
    try:
        with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            result = _measure(rank, n, folder, messages)
    except Exception:
        messages.put(("error", f"rank {rank} failed:\n{traceback.format_exc()}"))
    else:
        if rank == 0:
            messages.put(("result", result))


def _measure(rank: int, n: int, folder: str, messages: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from accum_plugin.demo.sections import measure_all

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=120))
    try:
        return measure_all(n, lambda text: messages.put(("progress", text)) if rank == 0 else None)
    finally:
        dist.destroy_process_group()
