"""Tasks in processes of their own, and lines that say how far they are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TypeVar

from tkv.demo import DemoError

Task = TypeVar("Task")
Result = TypeVar("Result")

_QUIET_SECONDS = 8.0


@dataclass
class Progress:
    """Progress lines on stderr.

    Args:
        label: what the lines are about.
        started: ``time.monotonic()`` at the start of the command, which all processes share.
    """

    label: str
    started: float
    _stage: str = ""
    _said: float = 0.0

    def stage(self, text: str) -> None:
        """A new stage of the work; always a line."""
        self._stage = text
        self._say(text)

    def layer(self, layer: int, layers: int) -> None:
        """How far the stage is; a line only if there was none for a while."""
        if time.monotonic() - self._said >= _QUIET_SECONDS:
            self._say(f"{self._stage}, layer {layer + 1} of {layers}")

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        # In one write, so that lines of several processes do not mix.
        sys.stderr.write(f"[{self._said - self.started:5.0f} s] {self.label}: {text}\n")
        sys.stderr.flush()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_tasks(function: Callable[[Task], Result], tasks: Sequence[Task], workers: int) -> list[Result]:
    """``[function(task) for task in tasks]``, in up to `workers` processes at a time; here, one after the other, if that is 1.

    Whatever ends the wait early, an error in a task or Ctrl-C, ends the processes too; and they end by themselves if this one is gone.

    Args:
        function: of a module's top level.
        tasks: started in this order.
        workers: processes.

    Raises:
        DemoError: a process was killed.
    """
    workers = min(workers, len(tasks))
    if workers <= 1:
        return [function(task) for task in tasks]
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(max(1, cores() // workers),))
    try:
        futures = _without_interrupts(lambda: [pool.submit(function, task) for task in tasks])
        wait(futures, return_when=FIRST_EXCEPTION)
        failed = next((future for future in futures if future.done() and future.exception() is not None), None)
        results = [future.result() for future in ([failed] if failed else futures)]
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise DemoError("a process was ended from outside, perhaps for lack of memory: try --workers 1") from error
        raise
    pool.shutdown()
    return results


def _without_interrupts(start: Callable[[], list]) -> list:
    """Call `start` with Ctrl-C off: processes started meanwhile ignore it for good, and leave it to this one to end them."""
    if threading.current_thread() is not threading.main_thread():
        return start()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return start()
    finally:
        signal.signal(signal.SIGINT, handler)


def _start_worker(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
