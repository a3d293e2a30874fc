"""A target on two ranks: on the CPU over gloo, and on two CUDA devices (`nox -s gpu`)."""

import importlib.util
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import active_children
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from draftcore_hf.capture import LocalCapture
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.captures import batch, features_of
from draftcore_sdk.targets import tiny_target
from draftcore_sglang.capture import SglangCapture
from draftcore_sglang.internals import Limits, Settings
from draftcore_sglang.options import SglangOptions
from draftcore_sglang.ranks import Ranks

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import TargetSpec
from draftcore.errors import DraftcoreError

REQUEST = FeatureRequest((0, 1, 2, 3), True, "float32")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], list(range(30, 61))]
OPTIONS = SglangOptions(tp=2, max_tokens=128)


def write_target(folder: Path, dtype: str, device: str) -> TargetSpec:
    # Heads that two ranks can share, of a width that CUDA attention has kernels for.
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    tiny_target(folder, hidden_size=64, num_hidden_layers=4, **shape)
    return TransformersTarget(str(folder), dtype=dtype, device=device)


def largest_gap(found: SglangCapture, target: TargetSpec) -> float:
    """Between both captures, relative to the largest number of each feature."""
    asked = batch(members=PROMPTS)
    (expected,) = LocalCapture(target, REQUEST).features([asked])
    gaps = [
        float((mine[name] - theirs[name]).abs().max() / theirs[name].abs().max())
        for mine, theirs in zip(features_of(found, asked), expected.features, strict=True)
        for name in REQUEST.names
    ]
    return max(gaps)


def require_engine_ended(forward: Callable[[], object]) -> None:
    """Kill rank 1. A queue would skip a batch that fails by a DraftcoreError, and no batch is at fault."""
    pids = [process.pid for process in active_children() if process.name.startswith("sglang-")]
    (killed,) = [process.pid for process in active_children() if process.name == "sglang-1"]
    os.kill(killed or 0, signal.SIGKILL)
    says = rf"engine of .* has ended: rank 1 .*\n.*{killed}, exit status -9"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=says):
            forward()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def answer(settings: Settings, rank: int, port: int, meeting: str, pipe: Connection) -> None:
    """Be a rank that computes nothing, as sglang may be missing here."""
    pipe.send((False, Limits(1, 1, 1)))
    while True:
        pipe.recv()
        pipe.send((False, {}))


def test_an_engine_that_has_died_ends_the_process_that_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork = multiprocessing.get_context("fork")  # ranks that compute nothing need no fresh process
    monkeypatch.setattr("torch.multiprocessing.get_context", lambda method: fork)
    monkeypatch.setattr("draftcore_sglang.ranks.serve", answer)
    ranks = Ranks(Settings("target", None, "float32", "cpu", 2, 1, 1, "{}"))
    assert ranks.forward(PROMPTS, (), {}) == {}
    require_engine_ended(lambda: ranks.forward(PROMPTS, (), {}))


@pytest.mark.sglang
class TestOnTheCpu:
    def test_two_ranks_capture_what_transformers_does(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # sglang binds a rank to the cores of a NUMA node, or to those named here; and with ranks it
        # compiles the embedding, which without a kernel for it takes minutes on a CPU.
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
        psutil = pytest.importorskip("psutil")  # which sglang requires
        target = write_target(tmp_path, "float32", "cpu")
        capture = SglangCapture(target, REQUEST, OPTIONS)
        assert largest_gap(capture, target) < 1e-5
        ranks = [psutil.Process(rank.pid) for rank in active_children()]
        links = [link for rank in ranks for link in rank.net_connections()]
        assert {link.laddr.ip for link in links if link.status == "LISTEN"} == {"127.0.0.1"}
        assert not torch.distributed.is_initialized(), "no rank lives in this process"
        require_engine_ended(lambda: features_of(capture, batch(members=PROMPTS)))
        capture.close()

    def test_a_rank_that_cannot_start_ends_all_with_its_reason(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0")
        target = write_target(tmp_path, "float32", "cpu")
        with pytest.raises(DraftcoreError, match=r"rank \d .* failed[\s\S]*all ranks were ended"):
            SglangCapture(target, REQUEST, OPTIONS)


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
class TestOnCuda:
    @pytest.mark.parametrize("tp", [1, 2])
    def test_features_are_those_of_transformers_and_stay_on_the_device(
        self, tmp_path: Path, tp: int
    ) -> None:
        """bf16, in which 1.4e-2 of the largest number was measured on an H200."""
        if torch.cuda.device_count() < tp:
            pytest.skip("needs two CUDA devices")
        target = write_target(tmp_path, "bfloat16", "cuda")
        args = {"attention_backend": "triton"}  # that every build of the kernels has
        capture = SglangCapture(target, REQUEST, SglangOptions(tp=tp, max_tokens=128, args=args))
        assert largest_gap(capture, target) < 3e-2
        for features in features_of(capture, batch(members=PROMPTS)):
            assert {value.device.type for value in features.values()} == {"cuda"}
        capture.close()
        assert not torch.distributed.is_initialized()
