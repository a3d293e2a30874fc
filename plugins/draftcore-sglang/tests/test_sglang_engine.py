"""The engine `sglang` on the CPU: sglang's own code for EAGLE-3, whose kernels Triton's interpreter runs.

A round takes half a second of a processor, so heads are few.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("sglang")

from draftcore_disagg.local import free_port
from draftcore_sdk.engines import NEW, EngineSuite, require_rounds
from draftcore_sdk.loopback import only_loopback
from draftcore_sdk.serving import Serving
from draftcore_sglang import served as engines
from draftcore_sglang.client import Server
from draftcore_sglang.disagg import VARIABLE
from draftcore_sglang.options import EngineOptions
from sglang_on_cpu import ARGUMENTS

from draftcore.errors import DraftcoreError, UsageError

pytestmark = pytest.mark.sglang
ARGS = {name: ARGUMENTS[name] for name in ARGUMENTS.keys() - {"dtype", "max_running_requests"}}
ARGS |= {"attention_backend": "triton", "triton_attention_num_kv_splits": 1}
MOONCAKE: dict[str, Any] = {
    "MOONCAKE_PROTOCOL": "tcp",
    "MC_FORCE_TCP": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
}


class TestSglangEngine(EngineSuite):
    plugin, name = "draftcore_sglang.plugin", "sglang"
    options: ClassVar[dict[str, Any]] = {"algorithm": "EAGLE3", "args": ARGS}
    target_config: ClassVar[dict[str, Any]] = {"num_attention_heads": 1, "num_key_value_heads": 1}

    @pytest.mark.smoke
    def test_a_server_that_runs_is_asked_as_it_is_or_refused(
        self, served: Any, drafted: Any
    ) -> None:
        """It goes on when it is left."""
        serving, _, (right, _) = served
        running = replace(serving, url=drafted.server.url)
        engine = self.open("engine", serving=running)
        require_rounds(engine, right[:1])
        engine.close()
        for change, says in (
            ({"num_drafts": 7}, "serves 3 drafts a round, and 7 are to be served"),
            ({"context": 511}, "takes 512 tokens, 2 of which stay empty, and .* up to 511"),
        ):
            with pytest.raises(UsageError, match=says):
                self.open("engine", serving=replace(running, **change))
        drafted.close()
        with pytest.raises(DraftcoreError, match="does not answer"):
            self.open("engine", serving=running)

    def test_two_servers_that_share_a_request_give_its_tokens_in_as_many_rounds(
        self, served: Any, tmp_path: Path
    ) -> None:
        """One prefills, the other decodes; keys, values and the draft's row cross by Mooncake over TCP.

        The decode server makes its first draft input by draftcore's EAGLE-3.
        """
        serving, _, (right, _) = served
        shared = engines.arguments(serving, EngineOptions(**self.options))
        bootstrap: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_port": free_port()}
        shared |= {
            "host": "127.0.0.1", "disaggregation_transfer_backend": "mooncake",
            "disaggregation_bootstrap_port": bootstrap["bootstrap_port"],
        }  # fmt: skip
        decode: dict[str, Any] = {"disaggregation_decode_retraction_backup": "cpu_tensor"}
        decode |= {"num_reserved_decode_tokens": 64}

        def start(mode: str, more: dict[str, Any], **environment: Any) -> Serving:
            own = {"port": free_port(), "disaggregation_mode": mode, **more}
            command = [sys.executable, "-m", "sglang.launch_server"]
            command += engines.flags({**shared, **own})
            log = tmp_path / f"{mode}.log"
            return Serving(command, own["port"], log, **MOONCAKE, **environment)

        with only_loopback(), ThreadPoolExecutor(2) as pool, ExitStack() as stack:
            asked = [
                pool.submit(start, "prefill", {}),
                pool.submit(start, "decode", decode, **{VARIABLE: "eagle3"}),
            ]
            servers = [stack.enter_context(one.result()) for one in asked]
            for room, expected in enumerate(right[:2], 1):
                greedy = {"temperature": 0, "max_new_tokens": NEW}
                prompt = {"input_ids": list(expected.prompt), "sampling_params": greedy}
                body = {**prompt, **bootstrap, "bootstrap_room": room}
                both = [pool.submit(Server(one.url).post, body, 300) for one in servers]
                answer = engines.read_answer(both[1].result(), serving.num_drafts)
                assert list(answer.tokens) == list(expected.tokens)
                assert answer.rounds == len(expected.accepted)
