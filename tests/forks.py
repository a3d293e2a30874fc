"""Starts this project's commands as forks of a process that has imported torch and transformers.

Imported anew by each of the hundreds of processes that tests start, these take most of the tests'
time. `Popen` stands in subprocess's place while tests run (`conftest.py`), and forks where the command
is `python -m draftcore ...` or `python -m pytest ...`. The child has the arguments, environment,
folder, descriptors, signals and parent that an executed one has, and /proc shows the same of it;
it starts its own children likewise. Everything else is executed, as are these where the environment
says what Python or a library reads at its start, or has EXECUTE in it.

All children of tests take SIGINT and SIGHUP, which a shell's background job and nohup ignore.
"""

import ctypes
import multiprocessing
import multiprocessing.util
import os
import runpy
import signal
import site
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import invalidate_caches
from inspect import signature
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any
from unittest import mock

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "draftcore.run.train",
        "draftcore_data.rows",
        "draftcore_disagg.produce",
        "draftcore_eval.evaluation",
        "draftcore_file.store",
        "draftcore_hf.capture",
        "pytest",
        "torch.distributed.fsdp",
        "transformers.models.qwen3.modeling_qwen3",
    ]
)
EXECUTE = "TESTS_EXECUTE"
# Of the server and its forks: they hash strings otherwise than the tests themselves.
HASHES = {"PYTHONHASHSEED": "1"}
ENVIRONMENT = "TESTS_ENVIRONMENT"  # the folder of the virtual environment in which a fork is to be
FORKED = ("draftcore", "pytest")
PATH = list(sys.path)  # as this process began, before tests made plugins importable
AT_START = ("PYTHON", "OMP_", "MKL_", "HF_", "TRANSFORMERS_", "TORCH", "LD_", "LC_", EXECUTE)
PR_SET_MM, PR_SET_MM_MAP, PR_SET_MM_MAP_SIZE, PR_SET_CHILD_SUBREAPER = 35, 14, 15, 36
CLONE_NEWNET, NETWORK = 0x40000000, "/proc/thread-self/ns/net"
# Of a private method, which has had these names since Python 3.11.
ARGUMENTS = list(signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]
PIPES = "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"
# Words, environment, folder, whether in a session of its own, what it does first, where it imports from.
Command = tuple[
    Sequence[str], Mapping[str, str], str | None, bool, Callable[[], object] | None, list[str]
]


def take_signals(more: Callable[[], object] | None = None) -> None:
    """Let this process be interrupted and hung up, whatever its parent ignores; then do more."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if more is not None:
        more()


class Popen(subprocess.Popen[Any]):
    """subprocess.Popen, which forks where it may."""

    direct = False  # from this process itself, which has imported all and used nothing of it yet

    def _execute_child(self, *values: Any) -> None:
        call = dict(zip(ARGUMENTS, values, strict=True))
        command = [os.fsdecode(word) for word in call["args"]] if not call["shell"] else []
        env = dict(os.environ if call["env"] is None else call["env"])
        if not self._forkable(command, env):
            if not self.direct:
                call["preexec_fn"] = partial(take_signals, call["preexec_fn"])
            super()._execute_child(*call.values())  # type: ignore[misc]
            return
        pipes = call["p2cread"], call["c2pwrite"], call["errwrite"]
        places = dict(enumerate(pipe if pipe != -1 else at for at, pipe in enumerate(pipes)))
        places |= {fd: fd for fd in call["pass_fds"]}
        preexec = call["preexec_fn"] if self.direct else partial(take_signals, call["preexec_fn"])
        path = list(sys.path) if self.direct else PATH
        child: Command = command, env, call["cwd"], call["start_new_session"], preexec, path
        if self.direct:
            sys.stdout.flush()
            sys.stderr.flush()
            self.pid = os.fork()
            if not self.pid:
                become(child, places)
        else:
            self.pid = fork_as_ours(child, places)
        self._child_created = True
        self._close_pipe_fds(*(call[name] for name in PIPES))  # type: ignore[attr-defined]

    def _forkable(self, command: list[str], env: Mapping[str, str]) -> bool:
        def at_start(environment: Mapping[str, str]) -> dict[str, str]:
            return {
                name: value
                for name, value in environment.items()
                if name.startswith(AT_START) and name != "PYTHONPATH"
                if (name, value) not in HASHES.items()
            }

        module = command[command.index("-m") + 1] if command[1:3].count("-m") else ""
        size = ctypes.byref(ctypes.c_uint())
        return (
            ctypes.CDLL(None).prctl(PR_SET_MM, PR_SET_MM_MAP_SIZE, size, 0, 0) == 0  # for `_show`
            and command[:1] == [sys.executable]
            and module in (FORKED[:1] if self.direct else FORKED)
            and at_start(env) == at_start(os.environ)
            and EXECUTE not in env
        )


@cache
def start_server() -> None:
    with mock.patch.dict(os.environ, HASHES):  # which Python reads at its start
        forkserver.ensure_running()


def start_process(work: Callable[..., Any], *args: Any) -> ForkServerProcess:
    """Let a fork of the server do some work, in this process's network."""
    start_server()
    network = os.open(NETWORK, os.O_RDONLY)  # which may be another than when the server began
    process = CONTEXT.Process(target=_in_network, args=(DupFd(network), work, args))
    process.start()
    os.close(network)
    return process


def _in_network(network: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not os.path.samestat(os.fstat(there := network.detach()), os.stat(NETWORK)):
        ctypes.CDLL(None).setns(there, CLONE_NEWNET)
    os.close(there)
    work(*args)


def fork_as_ours(command: Command, places: Mapping[int, int]) -> int:
    """Let the server fork a child that becomes this process's; return its pid."""
    libc = ctypes.CDLL(None)
    reader, writer = os.pipe()
    fds = {at: DupFd(fd) for at, fd in places.items()}
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # whose parent has ended, is this process's
    try:
        start_process(_fork, command, fds, DupFd(writer)).join()
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
    os.close(writer)
    with open(reader) as answer:
        return int(answer.read())


def _fork(command: Command, fds: Mapping[int, Any], writer: Any) -> None:
    between, answer = os.getpid(), writer.detach()
    places = {at: fd.detach() for at, fd in fds.items()}
    if pid := os.fork():
        os.write(answer, str(pid).encode())
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0005)
    become(command, places)


def become(command: Command, places: Mapping[int, int]) -> None:
    """Be the process that the command would be, on these descriptors by their places; end as it does."""
    try:
        argv, env, folder, new_session, preexec, sys.path[:] = command
        _take_descriptors(places)
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]  # closed here
        os.environ.clear()
        os.environ.update({**env, **HASHES})
        if folder is not None:
            os.chdir(folder)
        if new_session:
            os.setsid()
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if preexec is not None:
            preexec()
        if ENVIRONMENT in env:
            _enter(Path(env[ENVIRONMENT]))
        _show(argv, env)
        os._exit(_run(argv, env))
    except BaseException:
        traceback.print_exc()
        os._exit(255)


def _take_descriptors(places: Mapping[int, int]) -> None:
    """Have each descriptor at its place, and no other one."""
    above = max([*places, *places.values(), 2]) + 1
    for at, fd in enumerate(places.values(), above):
        os.dup2(fd, at)
    for at, place in enumerate(places, above):
        os.dup2(at, place)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in places:
            with suppress(OSError):  # that of the listing
                os.close(fd)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(fd, "w" if fd else "r", 1 if fd == 2 else -1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _enter(environment: Path) -> None:
    """Be in this environment: its interpreter and packages, with nothing of ours imported yet."""
    for name in [name for name in sys.modules if name.startswith("draftcore")]:
        del sys.modules[name]
    library = str(Path(os.__file__).parent)
    sys.path[:] = [p for p in sys.path if p.startswith(library) and "site-packages" not in p]
    sys.prefix = sys.exec_prefix = str(environment)
    sys.executable = str(environment / "bin" / "python")
    (packages,) = environment.glob("lib/python*/site-packages")
    site.addsitedir(str(packages))
    invalidate_caches()


def _run(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run the module of a command as Python does; return the exit status."""
    at = argv.index("-m")
    sys.argv[:] = ["-m", *argv[at + 2 :]]
    safe = "-P" in argv[:at] or "PYTHONSAFEPATH" in env
    first = [] if safe else [os.getcwd()]
    first += [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    sys.path[:0] = first
    if argv[at + 1] == FORKED[0]:
        Popen.direct, subprocess.Popen = True, Popen  # type: ignore[misc]
    code: Any = 0
    try:
        runpy.run_module(argv[at + 1], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code or 0) & 0xFF


class _Map(ctypes.Structure):
    """prctl(2)'s struct prctl_mm_map."""

    _fields_ = (
        *((f"at_{number}", ctypes.c_uint64) for number in range(12)),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def _show(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Let /proc show this command and environment, by which tests find processes."""
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    _show.kept = text = ctypes.create_string_buffer(words + variables)  # type: ignore[attr-defined]
    # Of proc(5): what begins and ends where, from the 26th field on; three of them are together.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:]
    stat = [0, 0, 0, 0, *map(int, fields)]
    code, stack, data = stat[26:28], stat[28], stat[45:48]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    start = ctypes.addressof(text)
    ends = [start, start + len(words), start + len(words), start + len(words + variables)]
    values = [*code, *data, libc.sbrk(0), stack, *ends, 0]
    new = _Map(*values, 0, 0xFFFFFFFF)
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(new), ctypes.sizeof(new), 0):
        raise OSError(ctypes.get_errno(), "the kernel shows no other command of this process")
