"""One pool of gloo ranks for the whole test session, so that imports are paid once.

Rank ``r`` always runs in worker ``r``: what a framework remembers of its rank (Lightning's ``rank_zero_only``)
stays true from call to call.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import random
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import cloudpickle

GRACE = 10.0  # seconds that the other ranks get to notice that one of them failed


class RankError(AssertionError):
    """A rank raised, or did not come back in time; the message holds its traceback."""


class RankPool:
    """Persistent worker processes, one per rank, grown on demand and replaced when one hangs or dies."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, multiprocessing.connection.Connection]] = []

    def run(self, n: int, fn: Callable[..., Any], args: tuple, kwargs: dict, *, timeout: float, folder: str) -> list:
        """Call ``fn(rank, n, *args, **kwargs)`` on ``n`` ranks and return their results in rank order.

        Raises:
            RankError: If a rank raised, died, or took longer than ``timeout`` seconds.
        """
        while len(self._workers) < n:
            self._workers.append(self._spawn())
        payload = cloudpickle.dumps((fn, args, kwargs))
        with tempfile.TemporaryDirectory(prefix="ranks-") as rendezvous:
            job = {"n": n, "store": f"{rendezvous}/store", "port": _free_port(), "folder": folder, "timeout": timeout}
            for rank in range(n):
                self._workers[rank][1].send_bytes(cloudpickle.dumps({**job, "rank": rank, "payload": payload}))
            return self._collect(n, timeout)

    def close(self) -> None:
        """End every worker."""
        for rank in range(len(self._workers)):
            self._end(rank)
        self._workers.clear()

    def _collect(self, n: int, timeout: float) -> list:
        results: dict[int, Any] = {}
        failures: list[tuple[int, str]] = []
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < n and (left := deadline - time.monotonic()) > 0:
            done = {*results, *(rank for rank, _ in failures)}
            waiting = {self._workers[rank][1]: rank for rank in range(n) if rank not in done}
            for connection in multiprocessing.connection.wait(list(waiting), timeout=left):
                rank = waiting[connection]
                ok, value = _receive(connection)
                if ok:
                    results[rank] = value
                else:
                    failures.append((rank, value))
                    deadline = min(deadline, time.monotonic() + GRACE)
        for rank in set(range(n)) - set(results) - {rank for rank, _ in failures}:
            failures.append((rank, f"did not come back (limit {timeout:.0f} s, or {GRACE:.0f} s after another failed)"))
            self._end(rank)
        for rank in range(n):
            if not self._workers[rank][0].is_alive():
                self._workers[rank] = self._spawn()
        if failures:
            raise RankError("\n".join(f"rank {rank} of {n}: {text}" for rank, text in failures))
        return [results[rank] for rank in range(n)]

    def _spawn(self) -> tuple[Any, multiprocessing.connection.Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,))
        process.start()
        theirs.close()
        return process, ours

    def _end(self, rank: int) -> None:
        process, connection = self._workers[rank]
        connection.close()
        process.kill()
        process.join()


def _receive(connection: multiprocessing.connection.Connection) -> tuple[bool, Any]:
    try:
        return cloudpickle.loads(connection.recv_bytes())
    except EOFError:
        return False, "the process died"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _serve(connection: multiprocessing.connection.Connection) -> None:
    """Run jobs until the session closes the pipe."""
    while True:
        try:
            job = cloudpickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            reply = cloudpickle.dumps((True, _run_job(job)))
        except BaseException:
            reply = cloudpickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(reply)


def _run_job(job: dict[str, Any]) -> Any:
    with _environment(job), _clean_state(), _process_group(job), warnings.catch_warnings():
        warnings.simplefilter("default")
        fn, args, kwargs = cloudpickle.loads(job["payload"])
        return fn(job["rank"], job["n"], *args, **kwargs)


@contextlib.contextmanager
def _environment(job: dict[str, Any]) -> Iterator[None]:
    """Set what a launcher sets, and put everything back: frameworks write to ``os.environ`` too."""
    before, folder, path = dict(os.environ), os.getcwd(), list(sys.path)
    rank, n = str(job["rank"]), str(job["n"])
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=n, LOCAL_WORLD_SIZE=n)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    os.chdir(job["folder"])
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.chdir(folder)
        sys.path[:] = path


@contextlib.contextmanager
def _clean_state() -> Iterator[None]:
    """Start every call from the same random state, and leave no framework singleton behind."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        if "accelerate" in sys.modules:
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        gc.collect()


@contextlib.contextmanager
def _process_group(job: dict[str, Any]) -> Iterator[None]:
    import torch.distributed as dist

    store = dist.FileStore(job["store"], job["n"])
    limit = timedelta(seconds=job["timeout"])
    dist.init_process_group("gloo", store=store, rank=job["rank"], world_size=job["n"], timeout=limit)
    dist.barrier()  # a job without a collective may end, and close its sockets, while another rank still connects
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
