"""The pipeline on a CUDA device: `nox -s gpu`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.targets import tiny_target

from draftcore.contracts.capture import FeatureRequest
from tests.together.conftest import OPTIONS

if TYPE_CHECKING:
    from tests.together.conftest import NewProject, Project


pytestmark = pytest.mark.gpu

CUDA = ("target.device=cuda", "train.device=cuda")
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
DRAFTS = {name: {"algorithm": {"name": name, "options": given}} for name, given in OPTIONS.items()}


@pytest.mark.parametrize("store", ["file", "auto"])
def test_a_draft_trains_decodes_and_exports_on_cuda(project: Project, store: str) -> None:
    kept = () if store == "file" else ("store=auto",)
    project.cli("train", *CUDA, *kept, "train.eval_every=3", "train.eval_prompts=2")
    report = json.loads(project.cli("eval", *CUDA, "--json").stdout)
    assert report["lossless"] is True
    project.cli("export", *CUDA)
    again = project.cli("eval", *CUDA, "--export", project.run / "export", "--json").stdout
    assert json.loads(again)["acceptance_length"] == report["acceptance_length"]


def test_bf16_trains_over_fp32_masters_and_decodes_losslessly_up_to_ties(project: Project) -> None:
    halves = ("target.dtype=bfloat16", "train.precision=bf16")
    project.cli("train", *CUDA, *halves)
    assert all(loss > 0 for loss in project.losses().values())
    report = json.loads(project.cli("eval", *CUDA, *halves, "--json").stdout)
    assert report["lossless"] is True
    assert all(tie["gap"] < 1.0 for tie in report["ties"])


def test_a_run_begun_on_the_cpu_goes_on_on_cuda(project: Project) -> None:
    project.cli("train", "train.max_steps=2")
    assert "resuming from step 2" in project.cli("train", *CUDA).output
    assert len(project.losses()) == 6


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=two_devices)])
def test_features_on_cuda_are_those_of_the_cpu(tmp_path: Path, devices: int) -> None:
    """fp32 on both; the bound is that of sums of 48 products in another order."""
    folder = tiny_target(tmp_path, vocab_size=260)  # which two devices can share
    tokens_BT = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(0))
    lengths_B = torch.tensor([40, 17, 33])
    request = FeatureRequest((1, 4), True, "float32", topk=2, embeddings=True)
    found = {}
    for device in ("cpu", "cuda"):
        share = devices if device == "cuda" else 1
        target = TransformersTarget(str(folder), device=device, tensor_parallel=share).load_model()
        place = target.device
        found[device] = target.features(tokens_BT.to(place), lengths_B.to(place), request)
    for name in request.names:
        for row, length in enumerate(lengths_B.tolist()):
            here, there = found["cpu"][name][row, :length], found["cuda"][name][row, :length].cpu()
            torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-4)


@two_devices
def test_two_devices_give_the_update_of_one(tmp_path: Path, new_project: NewProject) -> None:
    """Over NCCL; then one device goes on from their checkpoint, and two from its own."""
    changes = {"algorithm": None, "drafts": DRAFTS, "samples": 26}
    train = {"batch": 2, "accumulate": 3, "schedule": "constant", "eval_every": 2}
    one = new_project(tmp_path / "one", **changes, train=train)
    one.cli("train", *CUDA)
    two = new_project(tmp_path / "two", **changes, train=train)
    two.torchrun(*CUDA, "train.max_steps=2")
    assert (
        "eagle3: resuming from step 2 of 3" in two.cli("train", *CUDA, "train.max_steps=3").output
    )
    assert "eagle3: complete: step 5 of 5, 26 samples" in two.torchrun(*CUDA)
    for label in DRAFTS:
        ours, theirs = two.losses(label), one.losses(label)
        assert ours == pytest.approx(theirs, rel=1e-4)


@two_devices
def test_two_devices_train_in_bf16(project: Project) -> None:
    halves = ("target.dtype=bfloat16", "train.precision=bf16")
    project.torchrun(*CUDA, *halves)
    assert len(project.losses()) == 3  # steps of a batch for each device
    assert all(loss > 0 for loss in project.losses().values())


@two_devices
def test_an_error_on_one_device_ends_the_other(tmp_path: Path, project: Project) -> None:
    """Whose main thread waits in a collective that nothing will end."""
    failing = tmp_path / "failing.py"
    failing.write_text(
        "import os\n"
        "from draftcore import hookimpl\n"
        "from draftcore.errors import DraftcoreError\n"
        "@hookimpl(wrapper=True)\n"
        "def forward_loss(context):\n"
        "    if context.step == 3 and os.environ['RANK'] == '1':\n"
        "        raise DraftcoreError('this rank has had enough')\n"
        "    return (yield)\n"
    )
    began = time.monotonic()
    output = project.torchrun(*CUDA, plugin=failing, ok=False)
    assert "error: this rank has had enough" in output
    assert "error: rank 1 failed" in output
    assert time.monotonic() - began < 90


# ---------------------------------------------------------------- through graphs


def graphs(phase: str, backend: str) -> str:
    """The override that runs a phase through a graph backend; `eager` is none."""
    return f"runner.{phase}={{name: graphs, options: {{backend: {backend}}}}}"


@pytest.mark.parametrize("algorithm", OPTIONS)
def test_decoding_through_graphs_is_that_of_eager(
    tmp_path: Path, new_project: NewProject, algorithm: str
) -> None:
    """Lossless, and with the same drafts accepted; fp32."""
    chosen = {"name": algorithm, "options": OPTIONS[algorithm]}
    project = new_project(tmp_path, algorithm=chosen)
    project.cli("train", *CUDA)
    found = {}
    for backend in ("eager", "full", "breakable"):
        result = project.cli("eval", *CUDA, graphs("decode", backend), "--json")
        found[backend] = json.loads(result.stdout)
        assert found[backend]["lossless"] is True
    lengths = {name: report["acceptance_length"] for name, report in found.items()}
    assert len(set(lengths.values())) == 1, lengths


@pytest.mark.parametrize("backend", ["full", "breakable", "piecewise"])
def test_a_draft_trains_on_features_that_graphs_captured(project: Project, backend: str) -> None:
    """And evaluates in training through graphs as well, while more is captured."""
    both = (graphs("prefill", backend), graphs("decode", "full"))
    evaluated = ("train.eval_every=3", "train.eval_prompts=2")
    project.cli("train", *CUDA, *both, *evaluated, "store=auto")
    assert len(project.losses()) == 6


def test_eager_and_graphs_train_alike(tmp_path: Path, new_project: NewProject) -> None:
    """fp32; the two differ in how the mask is made, so in the last bits of a feature."""
    losses = {}
    for backend in ("eager", "full"):
        project = new_project(tmp_path / backend)
        project.cli("train", *CUDA, graphs("prefill", backend))
        losses[backend] = project.losses()
    assert losses["full"] == pytest.approx(losses["eager"], rel=1e-4)
