"""Worker processes that outlive the candidates they handle: a crash or a hang costs one task and one restart.

A `Pool` keeps its processes between calls, so each imports its libraries once. The parent never runs a candidate.
Functions and arguments travel by pickle, so both must be importable in the child, which gets the parent's `sys.path`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

START_SECONDS = 180.0
POLL_SECONDS = 0.2


class WorkerError(RuntimeError):
    """A worker process cannot even start: the machine or the installation is at fault, not a candidate."""


class Interrupted(Exception):
    """The user asked to stop; what was finished before is kept."""


@dataclass(frozen=True)
class Outcome:
    """What became of one task: its `value`, or the `reason` of failure ("" = none) with `detail` for people.

    Reasons: "crashed", "timed out", or the `reason` attribute of the exception raised (its type's name without one).
    """

    value: Any = None
    reason: str = ""
    detail: str = ""


class Pool:
    """`size` processes that call `setup()` once and then serve tasks; a context manager.

    Args:
        size: number of processes.
        setup: called in each process before its first task (its imports); its time counts towards no task.
        log: file that takes what the processes print.
        environment: variables added to the processes' environment.
        interrupted: polled while waiting; once it returns True, `map` ends the busy processes and raises Interrupted.
    """

    def __init__(
        self,
        size: int,
        setup: Callable[[], Any],
        log: Path,
        environment: Mapping[str, str],
        interrupted: Callable[[], bool],
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._interrupted = interrupted
        self._workers = [_Process(setup, log, environment) for _ in range(size)]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()

    def map(
        self,
        function: Callable[..., Any],
        tasks: Sequence[tuple[Any, ...]],
        seconds: float,
        enough: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, Outcome]]:
        """Call `function(*task)` for each task, in parallel; yield (index of the task, outcome) as they end.

        A task that takes longer than `seconds` is killed with its process. Once `enough()` no further task starts.

        Raises:
            WorkerError: a process does not start.
            Interrupted: see the class.
        """
        waiting = list(enumerate(tasks))[::-1]
        try:
            while (waiting and not enough()) or any(worker.busy for worker in self._workers):
                for worker in self._workers:
                    if worker.ready and not worker.busy and waiting and not enough():
                        index, task = waiting.pop()
                        worker.submit(index, function, task, seconds)
                wait([worker.connection for worker in self._workers], POLL_SECONDS)
                if self._interrupted():
                    raise Interrupted
                for worker in self._workers:
                    if (ended := worker.poll()) is not None:
                        yield ended
        finally:
            for worker in self._workers:
                if worker.busy:
                    worker.restart()

    def settle(self) -> None:
        """Wait until no process is starting any more; raises as `map` does."""
        while not all(worker.ready for worker in self._workers):
            wait([worker.connection for worker in self._workers], POLL_SECONDS)
            if self._interrupted():
                raise Interrupted
            for worker in self._workers:
                worker.poll()

    def restart(self) -> None:
        """Replace every process by a fresh one, e.g. after a candidate that may have written out of bounds."""
        for worker in self._workers:
            worker.restart()


class _Process:
    """One child, from the parent's side: starting -> ready <-> busy, restarted on death or at its deadline."""

    def __init__(self, setup: Callable[[], Any], log: Path, environment: Mapping[str, str]) -> None:
        self._setup, self._log, self._environment = setup, log, environment
        self.start()

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = (
            os.environ
            | dict(self._environment)
            | {"PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path)}
        )
        program = f"from {__name__} import serve; serve({theirs.fileno()}, {os.getpid()})"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the terminal's Ctrl-C is for the parent alone
            )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.ready = False
        self._task: int | None = None
        self._deadline = time.monotonic() + START_SECONDS
        with contextlib.suppress(OSError):  # died already: poll() reports it
            self.connection.send_bytes(pickle.dumps((self._setup, ())))

    @property
    def busy(self) -> bool:
        return self._task is not None

    def submit(self, index: int, function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> None:
        self._task, self._seconds, self._deadline = index, seconds, time.monotonic() + seconds
        with contextlib.suppress(OSError):  # died while idle: poll() reports it
            self.connection.send_bytes(pickle.dumps((function, arguments)))

    def poll(self) -> tuple[int, Outcome] | None:
        """The task that ended since the last call; None while nothing did."""
        try:
            answer: Outcome | None = pickle.loads(self.connection.recv_bytes()) if self.connection.poll() else None
        except (EOFError, OSError):
            self._process.wait()
            answer = Outcome(reason="crashed", detail=f"the worker ended with {_exit(self._process.returncode)}")
        if answer is None and time.monotonic() > self._deadline and not (self.ready and not self.busy):
            answer = Outcome(
                reason="timed out", detail=f"no result after {self._seconds if self.ready else START_SECONDS:g} s"
            )
        if answer is None:
            return None
        if not self.ready:
            if answer.reason:
                self.stop()
                raise WorkerError(
                    f"worker did not start: {answer.reason}: {answer.detail}; what it printed is in {self._log}"
                )
            self.ready = True
            return None
        index, self._task = self._task, None
        if answer.reason in ("crashed", "timed out"):
            self.restart()
        return None if index is None else (index, answer)

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its compilers too
        self._process.wait()
        self.connection.close()


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def serve(descriptor: int, parent: int) -> None:
    """The child's side: answer (function, arguments) messages with an `Outcome` until the parent is gone."""
    PR_SET_PDEATHSIG = 1  # a hanging kernel never sees the closed connection, so the system ends us with the parent
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    connection = Connection(descriptor)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments = pickle.loads(message)
            answer = pickle.dumps(Outcome(function(*arguments)))
        except Exception as error:
            traceback.print_exc()
            reason = getattr(error, "reason", type(error).__name__)
            last = (str(error).strip() or type(error).__name__).splitlines()[-1]
            answer = pickle.dumps(Outcome(reason=str(reason), detail=last[:500]))
        try:
            connection.send_bytes(answer)
        except OSError:
            return
