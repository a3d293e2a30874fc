"""The pipeline on a CUDA device: `nox -s gpu`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from draftcore_graphs.plugin import describe
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.targets import tiny_target

from draftcore.contracts.capture import FeatureRequest
from tests.together.conftest import OPTIONS

if TYPE_CHECKING:
    from tests.together.conftest import NewProject, Project


pytestmark = pytest.mark.gpu

CUDA = ("target.device=cuda", "train.device=cuda")
HALVES = ("target.dtype=bfloat16", "train.precision=auto")
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
DRAFTS = {name: {"algorithm": {"name": name, "options": given}} for name, given in OPTIONS.items()}


def require_losses(project: Project, right: dict[int, float], rel: float = 5e-3) -> None:
    """Compare with another run's: fp32 sums in another order, of which Adam makes more by each step."""
    assert project.losses() == pytest.approx(right, rel=rel)


@pytest.mark.parametrize("store", ["file", "auto"])
def test_a_draft_trains_decodes_and_exports_on_cuda(
    project: Project, original: Project, store: str
) -> None:
    kept = () if store == "file" else ("store=auto",)
    project.cli("train", *CUDA, *kept, "train.eval_every=3", "train.eval_prompts=2")
    require_losses(project, original.losses())
    report = json.loads(project.cli("eval", *CUDA, "--json").stdout)
    assert report["lossless"] is True
    project.cli("export", *CUDA)
    again = project.cli("eval", *CUDA, "--export", project.run / "export", "--json").stdout
    assert json.loads(again)["acceptance_length"] == report["acceptance_length"]


def test_bf16_trains_over_fp32_masters_and_decodes_losslessly_up_to_ties(
    project: Project, original: Project
) -> None:
    """The losses of fp32 but for rounding, with which a teacher's best token may be another."""
    assert "trained in bf16 on cuda" in project.cli("train", *CUDA, *HALVES).output
    require_losses(project, original.losses(), rel=0.3)
    report = json.loads(project.cli("eval", *CUDA, *HALVES, "--json").stdout)
    assert report["lossless"] is True
    assert all(tie["gap"] < 1.0 for tie in report["ties"])


def test_a_run_begun_on_the_cpu_goes_on_on_cuda(tmp_path: Path, new_project: NewProject) -> None:
    there, here = (new_project(tmp_path / name) for name in ("there", "here"))
    for project, device in ((here, ()), (there, CUDA)):
        project.cli("train", "train.max_steps=2")
        assert "resuming from step 2" in project.cli("train", *device).output
    require_losses(there, here.losses())


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
    one, two = (new_project(tmp_path / name, **changes, train=train) for name in ("one", "two"))
    one.cli("train", *CUDA)
    two.torchrun(*CUDA, "train.max_steps=2")
    again = two.cli("train", *CUDA, "train.max_steps=3").output
    assert "eagle3: resuming from step 2 of 3" in again
    assert "eagle3: complete: step 5 of 5, 26 samples" in two.torchrun(*CUDA)
    for label in DRAFTS:
        assert two.losses(label) == pytest.approx(one.losses(label), rel=1e-4)


@two_devices
def test_two_devices_train_in_bf16(tmp_path: Path, new_project: NewProject) -> None:
    """To the losses of one device that adds up as many batches, but for their rounding."""
    one, two = (new_project(tmp_path / name) for name in ("one", "two"))
    one.cli("train", *CUDA, *HALVES, "train.accumulate=2")
    two.torchrun(*CUDA, *HALVES)
    assert len(two.losses()) == 3  # steps of a batch for each device
    require_losses(two, one.losses(), rel=0.02)


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

BACKENDS = {
    o.name: o.capabilities for o in describe() if o.kind == "graph" and o.name != "recording"
}


def graphs(phase: str, backend: str) -> str:
    """The override that runs a phase through a graph backend; `eager` is none."""
    return f"runner.{phase}={{name: graphs, options: {{backend: {backend}}}}}"


@pytest.mark.parametrize("algorithm", OPTIONS)
def test_decoding_through_every_backend_is_that_of_eager_or_refused(
    tmp_path: Path, new_project: NewProject, algorithm: str
) -> None:
    """Lossless, and with the same drafts accepted; fp32. What only prefills compiles nothing."""
    chosen = {"name": algorithm, "options": OPTIONS[algorithm]}
    project = new_project(tmp_path, algorithm=chosen)
    project.cli("train", *CUDA)

    def decoded(backend: str) -> dict[str, Any]:
        result = project.cli("eval", *CUDA, graphs("decode", backend), "--json")
        report = json.loads(result.stdout)
        assert report["lossless"] is True
        return {key: report[key] for key in ("tokens", "rounds", "acceptance_by_position")}

    eager = decoded("eager")
    for backend, able in BACKENDS.items():
        if "phase:prefill" in able:
            refused = project.cli("eval", *CUDA, graphs("decode", backend), ok=False)
            assert "the rule 'phase' refuses it" in refused.output
        else:
            assert decoded(backend) == eager, backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_trains_to_the_losses_of_eager_on_features_that_graphs_captured(
    tmp_path: Path, new_project: NewProject, backend: str
) -> None:
    """And evaluates in training through graphs as well, while more is captured.

    fp32; the two differ in how the mask is made, and `piecewise` in kernels: in the last bits.
    """
    evaluated = (
        "train.eval_every=3",
        "train.eval_prompts=2",
        "store=auto",
        graphs("decode", "full"),
    )
    found = {}
    for name in ("eager", backend):
        project = new_project(tmp_path / name)
        project.cli("train", *CUDA, graphs("prefill", name), *evaluated)
        found[name] = project.losses(), project.evaluations()
    (losses, evaluations), (ours, judged) = found["eager"], found[backend]
    assert ours == pytest.approx(losses, rel=1e-4 if backend != "piecewise" else 1e-3)
    assert len(judged) == len(evaluations) == 2
