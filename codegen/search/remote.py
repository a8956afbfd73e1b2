"""Measuring on another machine, through TVM's RPC: candidates are built here, shipped as they are, and run there.

TVM's tracker finds a machine of the wanted kind and lends it to one search at a time; its server has a process for each
session. What travels are our own messages: the modules are loaded there by our launchers in a worker that never imports
TVM, as they are here (a candidate that crashes or hangs costs that worker, not the session).

Whoever reaches the tracker or the server may run any code there: for networks that are trusted.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright.codegen.build import source_digest
from tilewright.codegen.search.worker import POLL_SECONDS, START_SECONDS, Interrupted, Outcome, Pool, WorkerError

_FUNCTION = "tilewright.search.measure"
_NETWORK_SECONDS = 60.0  # for a message and its answer, beside what is done in between
_CONNECT_SECONDS = 10.0
FIRST_PORT, LAST_PORT = 9090, 9199


@dataclass(frozen=True)
class Address:
    """Where to ask for a measuring machine.

    Attributes:
        host, port: of the tracker.
        key: the kind of machine, as its `tilewright measure` named it.
    """

    host: str
    port: int
    key: str

    @staticmethod
    def parse(tracker: str, key: str) -> Address:
        """Of HOST:PORT and a key.

        Raises:
            ValueError: not of that form.
        """
        host, colon, port = tracker.rpartition(":")
        if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise ValueError(f"got {tracker!r}, expected HOST:PORT")
        return Address(host, int(port), key)


@dataclass(frozen=True)
class _Shipped:
    """A folder of this machine under the name that it has on the other."""

    name: str


@dataclass
class _Message:
    """What travels: folders that are new, then a task, or (function None) the wish for a fresh worker."""

    sources: str
    setup: Callable[[], Any]
    folders: dict[str, bytes] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    task: Any = ()
    seconds: float = 0.0


def _sources() -> str:
    """What both sides must have in common: messages hold functions and classes by their names."""
    return source_digest("tilewright.codegen.search.runner")


# ---- the machine that searches ----


class Remote:
    """One worker on another machine: what `Pool` is for a worker here.

    Args:
        address: of the tracker.
        setup: as for `Pool`.
        interrupted: as for `Pool`.

    Raises:
        WorkerError: no tracker answers there.
    """

    def __init__(self, address: Address, setup: Callable[[], Any], interrupted: Callable[[], bool]) -> None:
        self._setup, self._interrupted = setup, interrupted
        self._names: dict[tuple[Path, int], str] = {}
        self._run = self._aside(lambda: _connect(address), START_SECONDS, f"tracker {address.host}:{address.port}")

    def __exit__(self, *_: object) -> None:
        del self._run  # ends the session

    def restart(self) -> None:
        """Replace the worker there by a fresh one."""
        self._send(_Message(_sources(), self._setup), START_SECONDS)

    def map(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], seconds: float
    ) -> Iterator[tuple[int, Outcome]]:
        """As `Pool.map`, one task after the other. Folders that a task names are shipped first, each once.

        Raises:
            WorkerError: the machine is gone, has another tilewright, or its worker does not start.
            Interrupted: as there.
        """
        for index, task in enumerate(tasks):
            message = _Message(_sources(), self._setup, {}, function, (), seconds)
            message.task = self._shipped(task, message.folders)
            yield index, self._send(message, seconds + START_SECONDS)

    def _shipped(self, value: Any, new: dict[str, bytes]) -> Any:
        if isinstance(value, Path):
            known = (value, value.stat().st_mtime_ns)
            if known not in self._names:
                name = self._names[known] = str(len(self._names))
                new[name] = _packed(value)
            return _Shipped(self._names[known])
        return _mapped(value, lambda item: self._shipped(item, new))

    def _send(self, message: _Message, seconds: float) -> Outcome:
        data = pickle.dumps(message)
        answer = self._aside(lambda: self._run(data), seconds + _NETWORK_SECONDS, "the measuring machine")
        outcome: Outcome = pickle.loads(bytes(answer))
        if outcome.reason == WorkerError.__name__:
            raise WorkerError(f"on the measuring machine: {outcome.detail}")
        return outcome

    def _aside(self, call: Callable[[], Any], seconds: float, what: str) -> Any:
        """The call's result; it waits in a thread, for it would not notice that the user wants to stop."""
        result: list[Any] = []
        failed: list[Exception] = []

        def work() -> None:
            try:
                result.append(call())
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        for _ in range(int(seconds / POLL_SECONDS) + 1):
            thread.join(POLL_SECONDS)
            if not thread.is_alive():
                break
            if self._interrupted():
                raise Interrupted
        if result:
            return result[0]
        reason = (str(failed[0]).strip() or type(failed[0]).__name__).splitlines()[-1] if failed else "no answer"
        raise WorkerError(f"{what}: {reason}")


def _connect(address: Address) -> Callable[[bytes], Any]:
    _reach(address)
    from tvm import rpc

    session = rpc.connect_tracker(address.host, address.port).request(address.key)
    run: Callable[[bytes], Any] = session.get_function(_FUNCTION)
    return run


def _reach(address: Address) -> None:
    """Raises OSError where nothing listens: TVM would try for a minute."""
    socket.create_connection((address.host, address.port), _CONNECT_SECONDS).close()


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The parts of a tuple, list or dict through `function`; all else as it is."""
    if type(value) in (tuple, list):
        return type(value)(function(item) for item in value)
    if type(value) is dict:
        return {name: function(item) for name, item in value.items()}
    return value


def _packed(folder: Path) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz", compresslevel=1) as tar:
        tar.add(folder, ".")
    return data.getvalue()


# ---- the machine that measures ----


class _Session:
    """What a session's process keeps: one worker, and a folder for what is shipped."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tilewright-measure-", dir=Path.cwd()))
        self._pool: Pool | None = None

    def answer(self, data: bytes) -> bytes:
        """A pickled `Outcome` for a pickled `_Message`."""
        try:
            outcome = self._outcome(pickle.loads(data))
        except Exception as error:
            outcome = Outcome(reason=WorkerError.__name__, detail=(str(error) or type(error).__name__)[:500])
        return pickle.dumps(outcome)

    def _outcome(self, message: _Message) -> Outcome:
        if message.sources != _sources():
            raise WorkerError("its tilewright has other sources than the searching machine's; install the same there")
        for name, data in message.folders.items():
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                tar.extractall(self._folder / name, filter="data")
        if self._pool is None:
            self._pool = Pool(1, message.setup, self._folder / "worker.log", {}, lambda: False)
        if message.function is None:
            self._pool.restart()
            return Outcome()
        task = self._placed(message.task)
        return next(outcome for _, outcome in self._pool.map(message.function, [task], message.seconds))

    def _placed(self, value: Any) -> Any:
        return self._folder / value.name if isinstance(value, _Shipped) else _mapped(value, self._placed)


def _register() -> None:
    """Give the server's sessions (forked after this) our function."""
    import tvm_ffi

    sessions: list[_Session] = []

    def measure(data: Any) -> bytes:
        if not sessions:
            sessions.append(_Session())
        return sessions[0].answer(bytes(data))

    tvm_ffi.register_global_func(_FUNCTION, measure, override=True)


def serve(address: Address, host: str) -> Any:
    """Offer this machine to the tracker's searches, in a process of its own; the server (`terminate()` ends it).

    Args:
        address: of the tracker, and the key to be known by.
        host: the address under which this machine is reached.

    Raises:
        OSError: no tracker listens there.
    """
    _reach(address)
    os.environ["TVM_USE_RUNTIME_LIB"] = "1"  # the compiler has nothing to do here
    from tvm import rpc

    return rpc.Server(
        host,
        port=FIRST_PORT,
        port_end=LAST_PORT,
        tracker_addr=(address.host, address.port),
        key=address.key,
        custom_addr=host,
        server_init_callback=_register,
        silent=True,
    )
