"""The user's wish to stop a search, from a signal or from code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether the user asked to stop: the first SIGINT or SIGTERM asks, a second SIGINT ends at once.

    A flag, because an exception would be raised inside whatever callback of TVM happens to run.
    """

    def __init__(self) -> None:
        self._asked = False

    def __call__(self) -> bool:
        """Whether to stop."""
        return self._asked

    def ask(self) -> None:
        """Stop as soon as possible."""
        self._asked = True

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Listen to the signals while the context lasts (in the main thread; elsewhere only `ask` works)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.getsignal(number) for number in numbers]

        def handle(number: int, frame: FrameType | None) -> None:
            if self._asked and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._asked = True

        for number in numbers:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, old in zip(numbers, before, strict=True):
                signal.signal(number, old)
