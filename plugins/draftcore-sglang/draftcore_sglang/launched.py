"""A server of sglang that is started here, on loopback, by the Python of another environment or this one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from draftcore_disagg.local import Child, free_port

from draftcore.contracts.run import RunEnded
from draftcore.errors import UsageError, one_line, raised
from draftcore.stopping import asked_to_stop
from draftcore_sglang import INSTALL
from draftcore_sglang.client import Server, ServerAway
from draftcore_sglang.internals import LAUNCHER
from draftcore_sglang.options import EngineOptions

EXACT = {"TRITON_F32_DEFAULT": "ieee"}  # float32 products in float32, not in TF32
STOP = 20.0  # seconds in which a server may end by itself
VERSION = "import importlib.metadata as m; print(m.version('sglang'))"


class Launched:
    """A server, with all that it starts. Raises UsageError for a Python without sglang."""

    def __init__(self, flags: Sequence[str], options: EngineOptions) -> None:
        python, port = os.path.expanduser(options.python or sys.executable), free_port()
        require_sglang(python)
        self.url, self.patience = f"http://127.0.0.1:{port}", options.patience
        self.beside = tempfile.TemporaryDirectory(prefix="draftcore-sglang-")
        where = ["--host=127.0.0.1", f"--port={port}"]
        command = [python, "-m", LAUNCHER, *flags, *where]
        self.child = Child(
            "sglang", command, Path(self.beside.name, "log"), {**EXACT, **os.environ}
        )
        self.child.start()

    def wait(self, server: Server) -> None:
        """Wait until it answers. Raises ServerAway with the cause where it does not."""
        deadline = time.monotonic() + self.patience
        while True:
            try:
                server.get("/model_info", 10)
                return
            except ServerAway as error:
                if self.child.code is not None or time.monotonic() > deadline:
                    raise self.away(error) from None
            if asked_to_stop:
                raise RunEnded("asked to stop", "interrupted")
            time.sleep(0.2)

    def away(self, error: ServerAway) -> ServerAway:
        """Say why it does not answer, by its log."""
        if (process := self.child.process) is None:
            return ServerAway("the sglang server that was started here is closed")
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)  # what broke a connection may be its end
        if (code := self.child.code) is None:
            return error
        # It kills itself where one of its processes breaks, and its log says why; or somebody killed it.
        causes = self.child.errors(4) or self.child.tail(6).splitlines() * (code > 0)
        return ServerAway(
            "\n  ".join([
                f"sglang has ended, with status {code}", *map(one_line, causes),
                "its releases run on GPUs; what else it wants is set by --option args.NAME=VALUE, and on "
                "a CPU llamacpp and vllm serve drafts",
            ])
        )  # fmt: skip

    def close(self) -> None:
        """End it; harmless twice."""
        self.child.end(STOP)
        self.beside.cleanup()


def require_sglang(python: str) -> None:
    try:
        subprocess.run([python, "-c", VERSION], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(
            f"{python} has no sglang: {raised(error)}\n  set --option python to the Python of an "
            f"environment that has it, or {INSTALL}"
        ) from error
