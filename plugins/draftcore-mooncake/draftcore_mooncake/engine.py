"""Guard the Mooncake library: every call that could crash, hang or mislead goes through here.

Most of the library's methods end the process when called before `setup` or after `close`; after a
fork they hang, and so would a new client in the child. So an `Engine` is made only by a successful
setup, counts the calls in progress, closes once and after them, and knows its process. Calls
return a code for each key: `CODES` has what they mean, and a lost master raises StoreAway here.

A master that starts again knows nothing: until it has heard of those who lend memory, a second or
two, it has none, and answers as a full one does. So a lender keeps a small object in its segment,
the *marker*, and puts it again when it is gone. As long as there is no marker, the lender's memory
is not there, and the store is not full.

The library reads its environment once, at its first import, which is why it is set in `load`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from importlib_metadata import PackageNotFoundError, version
from torch import Tensor

from draftcore.contracts.store import StoreAway, StoreError
from draftcore.errors import UsageError
from draftcore_mooncake import INSTALL
from draftcore_mooncake.master import answers
from draftcore_mooncake.settings import Settings

Piece = tuple[int, int]  # the address and the bytes of a part of an object
Part = tuple[int, int, int]  # where in a buffer, where in an object, and the bytes
T = TypeVar("T")

ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",  # else it logs on stderr whatever it does
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # else a wrong address takes 90 s
    "MC_RPC_TIMEOUT_MS": "10000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
}
PEER_TO_PEER = "P2PHANDSHAKE"  # in the place of a metadata server
BUILDS = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
FLOOR = "0.3.13"  # the first whose TCP port refuses addresses outside the lent memory
NEEDED = ("batch_remove", "batch_put_from_multi_buffers", "batch_upsert_from", "get_into_ranges")
NEEDED_CONFIG = ("with_hard_pin", "preferred_segments", "soft_pin_action")  # the last: FLOOR

FULL, INVALID, NOT_READY, NOT_FOUND = -200, -600, -703, -704
TRANSFER, RPC_FAIL, RPC_TIMEOUT = -800, -900, -901
UNREACHABLE = (RPC_FAIL, RPC_TIMEOUT)
CODES = {
    -1: "internal error",
    -10: "its local buffer is too small",
    -101: "the segment is not there",
    FULL: "no memory left",
    -500: "the write failed",
    INVALID: "invalid parameters, or a buffer of the wrong size",
    -601: "the master does not know this client",
    NOT_READY: "not written completely",
    NOT_FOUND: "not there",
    -705: "there already",
    -706: "being read",
    -707: "the read outlived its lease",
    -708: "being copied",
    -714: "busy",
    TRANSFER: "the transfer failed: the process that lends the memory does not answer",
    -801: "the check sum differs",
    RPC_FAIL: "the master does not answer",
    RPC_TIMEOUT: "the master does not answer in time",
}
MADV_POPULATE_WRITE = 23  # Linux 5.14
POPULATE_STEP = 32 << 20
PROBE_SECONDS = 2.0
LOOK_EVERY = 0.25  # seconds between two looks for a master that is away, and for the marker

_libc = ctypes.CDLL(None, use_errno=True)
_first_process: int | None = None  # that made an engine; one forked from it must not
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_shared: dict[Settings, Engine] = {}
_shared_mutex = threading.RLock()
_unclosed: list[Any] = []  # the library's clients whose master was away; they end with the process
logger = logging.getLogger(__name__)


def explain(code: int) -> str:
    return f"{CODES.get(code, 'unknown error')} (Mooncake's code {code})"


# ---------------------------------------------------------------- the library


def load() -> Any:
    """Import the library and check what it can do. Raises UsageError with the remedy."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if len(here := _builds()) > 1:
        raise UsageError(
            f"two builds of Mooncake are installed, {' and '.join(here)}, and overwrite each other\n"
            f"  pip uninstall {' '.join(here)}, then {INSTALL}"
        )
    try:
        library = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise UsageError(_import_problem(error)) from None
    check(library)
    return library


def check(library: Any) -> None:
    """Raise UsageError unless the library has the calls that this store is made of."""
    store, config = library.MooncakeDistributedStore, library.ReplicateConfig
    lacking = [name for name in NEEDED if not hasattr(store, name)]
    lacking += [name for name in NEEDED_CONFIG if not hasattr(config, name)]
    if lacking:
        raise UsageError(
            f"this version of Mooncake is too old: it lacks {', '.join(lacking)}\n"
            f"  pip install -U '{_builds()[0]}>={FLOOR}'"
        )


def package_folder() -> Path:
    """Return the folder of the library, where its programs lie as well."""
    return Path(importlib.import_module("mooncake").__path__[0])


def _import_problem(error: ImportError) -> str:
    text = str(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("mooncake"):
        return f"the store mooncake needs Mooncake's library, in one of its builds\n  {INSTALL}"
    if any(library in text for library in ("libibverbs", "librdmacm", "libnl-")):
        return (
            f"Mooncake's library does not load, also for tcp: {text}\n"
            "  apt-get install libibverbs1, which brings libnl-3   (on RHEL: dnf install rdma-core)"
        )
    if "libcud" in text or "libnvidia" in text:
        return (
            f"this build of Mooncake is for another CUDA, or for one where there is none: {text}\n"
            f"  pip uninstall {' '.join(_builds())}, then pip install 'draftcore-mooncake[cpu]'"
        )
    return (
        f"Mooncake's library does not load: {text}\n"
        f"  pip uninstall {' '.join(_builds())}, then {INSTALL}"
    )


def _builds() -> list[str]:
    """Return the builds of the library that are installed; the first there is, where none is known."""
    return [name for name in BUILDS if _version(name)] or [BUILDS[1]]


def _version(name: str) -> str:
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return ""


# ---------------------------------------------------------------- a client


class Engine:
    """A connected client of the library; `address` is its master's. Thread-safe.

    Raises StoreAway for a master that does not answer, and StoreError for settings it refuses.
    """

    def __init__(self, settings: Settings) -> None:
        global _first_process
        library = load()
        if _first_process not in (None, os.getpid()):
            raise StoreError(
                f"this process was forked from process {_first_process}, which uses Mooncake: the "
                "library does not survive that\n  start workers with the method 'spawn'"
            )
        self.settings, self.address = settings, settings.address
        self._process = os.getpid()
        self._users, self._calls, self._closed, self._lost = 1, 0, False, False
        self._quiet = threading.Condition()
        self._store = library.MooncakeDistributedStore()
        local = answers(self.address, seconds=PROBE_SECONDS)
        if not local:
            raise self._away("nothing answers there")
        _first_process = os.getpid()
        host = settings.host or local
        code = self._store.setup(
            host, PEER_TO_PEER, settings.segment_bytes, 0, settings.protocol, settings.devices,
            self.address,
        )  # fmt: skip
        if code:
            raise StoreError(
                f"Mooncake refuses to connect to {self.address}: {explain(code)}\n"
                f"  check that it is a master's rpc address, that host={host} is "
                "this machine's"
            )
        self.in_place = settings.protocol == "tcp"
        own = self._store.get_hostname() if settings.segment_bytes else ""
        self.segment = own or settings.segment
        self._config = library.ReplicateConfig()
        self._config.with_hard_pin = True
        if self.segment:
            self._config.preferred_segments = [self.segment]
        _engines.add(self)
        self._closing = threading.Event()
        self._marker_bytes = np.frombuffer(os.urandom(32), dtype=np.uint8)
        self._lent: _Lent | None = None
        self._lending: threading.Thread | None = None
        if settings.segment_bytes:
            self._lending = threading.Thread(target=self._lend, daemon=True)
            self._lending.start()

    @classmethod
    def share(cls, settings: Settings) -> Engine:
        """Return this process's client with these settings; a new one for settings that lend memory."""
        if settings.max_bytes is not None:
            return cls(settings)
        settings = replace(settings, name="")  # one client serves stores of several names
        with _shared_mutex:
            engine = _shared.get(settings)
            if engine is None or engine.foreign:
                engine = _shared[settings] = cls(settings)
            else:
                engine._users += 1
            return engine

    def master_answers(self) -> bool:
        return bool(answers(self.address, seconds=PROBE_SECONDS))

    @property
    def foreign(self) -> bool:
        """Say whether this process was forked from the one that made the client."""
        return os.getpid() != self._process

    def require_process(self) -> None:
        """Raise StoreError in a forked child."""
        if self.foreign:
            raise StoreError(
                f"the store at {self.address} was opened by process {self._process}, from "
                f"which this one, {os.getpid()}, was forked\n"
                "  start workers with the method 'spawn' and open the store there"
            )

    def close(self) -> None:
        """Disconnect when the last user closes; memory that was lent goes, with all it holds."""
        if self.foreign:
            return
        with _shared_mutex:
            self._users -= 1
            if self._users:
                return
            if _shared.get(self.settings) is self:
                del _shared[self.settings]
        self._closing.set()
        with self._quiet:
            self._closed = True
            self._quiet.wait_for(lambda: self._calls == 0)
        if self._lending is not None:
            self._lending.join()
        if self.master_answers():
            self._store.close()
        else:  # it would try for up to 17 s to tell the master, and no thread could run meanwhile
            _unclosed.append(self._store)

    # ------------------------------------------------------------ calls

    def put(self, keys: Sequence[str], objects: Sequence[Sequence[Piece]]) -> list[int]:
        """Store objects, each the concatenation of its pieces; return a code per key.

        A key that exists keeps what it holds, and its code is 0 all the same. A master that does
        not answer raises at once, as some of the keys may exist then, and only others may be tried.
        """
        pointers = [[pointer for pointer, _ in pieces] for pieces in objects]
        sizes = [[nbytes for _, nbytes in pieces] for pieces in objects]
        with self._call() as store:
            codes = store.batch_put_from_multi_buffers(
                list(keys), pointers, sizes, config=self._config
            )
        return self._require_master(codes)

    def replace(self, keys: Sequence[str], pieces: Sequence[Piece]) -> list[int]:
        """Store objects of one piece, also over what is there, written completely or not."""
        where = _columns(pieces)
        return self._again(
            lambda store: store.batch_upsert_from(list(keys), *where, config=self._config)
        )

    def get(self, keys: Sequence[str], pieces: Sequence[Piece]) -> list[int]:
        """Read objects into memory at least as large; return the object's bytes or a code each."""
        where = _columns(pieces)
        return self._again(lambda store: store.batch_get_into(list(keys), *where))

    def get_parts(
        self, keys: Sequence[str], parts: Sequence[tuple[Tensor, Sequence[Part]]]
    ) -> list[int]:
        """Read parts of objects into buffers of `allocate`; return the bytes read or a code each."""

        def read(store: Any) -> list[int]:
            to, lie, sizes = ([[[part[at] for part in own]] for _, own in parts] for at in range(3))
            pointers, names = [buffer.data_ptr() for buffer, _ in parts], [[key] for key in keys]
            with contextlib.ExitStack() as registered:
                for buffer, _ in parts if self.in_place else ():
                    self._register(store, buffer)
                    registered.callback(store.unregister_buffer, buffer.data_ptr())
                found = store.get_into_ranges(pointers, names, to, lie, sizes) if keys else []
            return [min(codes) if min(codes) < 0 else sum(codes) for (codes,) in found]

        return self._again(read)

    @contextlib.contextmanager
    def own_objects(self, keys: Sequence[str]) -> Iterator[dict[str, memoryview]]:
        """Give the bytes, in place, of those objects that lie in the memory lent by this process.

        They are readable inside the `with` block, and the object's as long as nobody removes it.
        """
        lent = self._lent
        if lent is None or not keys:
            yield {}
            return
        with self._call() as store:
            found = {
                key: lent.view(replicas[0])
                for key, replicas in store.batch_get_replica_desc(list(keys)).items()
                if replicas
            }
            yield {key: view for key, view in found.items() if view is not None}

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Say which objects are there and complete."""
        found = self._again(lambda store: store.batch_is_exist(list(keys)) if keys else [])
        return [code == 1 for code in found]

    def remove(self, keys: Sequence[str]) -> list[int]:
        """Remove objects, whoever reads them; return a code per key."""
        return self._again(lambda store: store.batch_remove(list(keys), True) if keys else [])

    def allocate(self, nbytes: int) -> Tensor:
        """Return memory (uint8) for `put` and `get`: touched, and registered where needed."""
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        if not self.in_place:
            with self._call() as store:
                self._register(store, memory)
        return memory

    def _register(self, store: Any, memory: Tensor) -> None:
        if code := store.register_buffer(memory.data_ptr(), memory.nbytes):
            raise StoreError(
                f"a buffer of {memory.nbytes} bytes cannot be registered: {explain(code)}"
            )

    def release(self, memory: Tensor) -> None:
        """Let go of what `allocate` returned."""
        if not self.in_place and not self._closed:
            with self._call() as store:
                store.unregister_buffer(memory.data_ptr())

    # ------------------------------------------------------------ how calls are made

    def patiently(self, attempt: Callable[[], T]) -> T:
        """Return what an attempt returns; repeat it while the master is away.

        Raises StoreAway where that takes longer than the URI's `patience`.
        """
        began, warned, patience = time.monotonic(), False, self.settings.patience
        while True:
            try:
                answer = attempt()
            except StoreAway as error:
                if time.monotonic() - began >= patience:
                    raise
                if not warned:
                    problem = str(error).partition("\n")[0]
                    logger.warning("%s; it is waited for up to %.0f s", problem, patience)
                warned = True
                self._closing.wait(LOOK_EVERY)
            else:
                if warned:
                    logger.warning("Mooncake is back after %.0f s", time.monotonic() - began)
                return answer

    @contextlib.contextmanager
    def _call(self) -> Iterator[Any]:
        self.require_process()  # before the lock, which a fork may have left held
        with self._quiet:
            if self._closed:
                raise StoreError(f"the connection to {self.address} is closed\n  open it again")
            self._calls += 1
        try:
            if self._lost and not self.master_answers():  # the library would try for 4 s
                raise self._away("nothing answers there")
            self._lost = False
            yield self._store
        finally:
            with self._quiet:
                self._calls -= 1
                self._quiet.notify_all()

    def _again(self, call: Callable[[Any], list[int]]) -> list[int]:
        """Make a call that may be repeated; a connection that broke is renewed by the library."""

        def attempt() -> list[int]:
            with self._call() as store:
                return self._require_master(call(store))

        return self.patiently(attempt)

    def _require_master(self, codes: Sequence[int]) -> list[int]:
        for code in codes:
            if code in UNREACHABLE:
                self._lost = True
                raise self._away(explain(code))
        return list(codes)

    def _away(self, why: str) -> StoreAway:
        return StoreAway(
            f"no Mooncake master at {self.address}: {why}\n  start one there (a restarted one is "
            "empty: what it held is captured again), or correct the store's URI"
        )

    # ------------------------------------------------------------ the memory that is lent

    def has_lender(self) -> bool:
        """Say whether the segment that takes what is put here is there, as far as this process knows."""
        return not self.segment or self.exist([self._marker]) == [True]

    @property
    def _marker(self) -> str:
        return f"draftcore/lender/{self.segment}"

    def _lend(self) -> None:
        """Keep the marker in the store, and touch the lent memory once.

        A put into memory that nobody has touched waits for the kernel, 12 times as long as a copy.
        """
        began = False
        while not began or not self._closing.wait(LOOK_EVERY):
            with contextlib.suppress(StoreError):  # the master is away, or this client is closed
                self._renew_marker()
                if self._lent is None and (lent := self._find_lent()) is not None:
                    self._lent = lent
                    self._touch(lent.start, lent.end)
            began = True

    def _renew_marker(self) -> None:
        with self._call() as store:
            there = self._require_master(store.batch_is_exist([self._marker]))
        if there != [1]:
            held = self._marker_bytes
            self.put([self._marker], [[(held.ctypes.data, held.nbytes)]])

    def _find_lent(self) -> _Lent | None:
        """Find the lent memory by the marker: the library says where an object lies, no more."""
        with self._call() as store:
            replicas = store.get_replica_desc(self._marker)
        if not replicas:
            return None
        found = replicas[0].get_memory_descriptor().buffer_descriptor
        lent = _Lent(found.transport_endpoint, *_mapping(found.buffer_address))
        view = lent.view(replicas[0])
        # It may lie in another process, at an address that is used here too.
        return lent if view is not None and bytes(view) == self._marker_bytes.tobytes() else None

    def _touch(self, start: int, end: int) -> None:
        for step in range(start, end, POPULATE_STEP):
            if self._closed:
                return
            nbytes = min(POPULATE_STEP, end - step)
            if _libc.madvise(ctypes.c_void_p(step), ctypes.c_size_t(nbytes), MADV_POPULATE_WRITE):
                return  # an older kernel: memory is touched as it is used


@dataclass(frozen=True)
class _Lent:
    """The memory that this process lends, and the endpoint by which others reach it."""

    endpoint: str
    start: int
    end: int

    def view(self, replica: Any) -> memoryview | None:
        """Return an object's bytes, or None if they do not lie in this memory."""
        if not replica.is_memory_replica():
            return None
        place = replica.get_memory_descriptor().buffer_descriptor
        start, end = place.buffer_address, place.buffer_address + place.size
        if place.transport_endpoint != self.endpoint or start < self.start or end > self.end:
            return None
        return memoryview(_view((start, place.size)))


def _mapping(address: int) -> tuple[int, int]:
    """Return the range of this process's mapping that holds an address; none if it is read-only."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights = line.split()[:2]
        start, end = (int(text, 16) for text in place.split("-"))
        if start <= address < end and rights.startswith("rw"):
            return start, end
    return 0, 0


def _view(piece: Piece) -> Any:
    pointer, nbytes = piece
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))


def _columns(pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
    """Return addresses and sizes, as the library takes them."""
    return [pointer for pointer, _ in pieces], [nbytes for _, nbytes in pieces]


def _keep_in_child() -> None:
    """Never run the library's destructors in a forked child, which they crash."""
    for engine in list(_engines):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine._store))


os.register_at_fork(after_in_child=_keep_in_child)
