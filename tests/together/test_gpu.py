"""The pipeline on a CUDA device: `nox -s gpu`."""

import json

import pytest
import torch

from draftcore.records import FeatureRequest
from draftcore.target import TargetModel, TargetSpec

pytestmark = pytest.mark.gpu

CUDA = ("target.device=cuda", "train.device=cuda")


@pytest.mark.parametrize("store", ["file", "memory"])
def test_a_draft_trains_decodes_and_exports_on_cuda(project, store):
    kept = () if store == "file" else ("store=memory",)
    project.cli("train", *CUDA, *kept, "train.eval_every=3", "train.eval_prompts=2")
    report = json.loads(project.cli("eval", *CUDA, "--json").stdout)
    assert report["lossless"] is True
    project.cli("export", *CUDA)
    again = project.cli("eval", *CUDA, "--export", project.run / "export", "--json").stdout
    assert json.loads(again)["acceptance_length"] == report["acceptance_length"]


def test_bf16_trains_over_fp32_masters_and_decodes_losslessly_up_to_ties(project):
    halves = ("target.dtype=bfloat16", "train.precision=bf16")
    project.cli("train", *CUDA, *halves)
    assert all(loss > 0 for loss in project.losses().values())
    report = json.loads(project.cli("eval", *CUDA, *halves, "--json").stdout)
    assert report["lossless"] is True
    assert all(tie["gap"] < 1.0 for tie in report["ties"])


def test_a_run_begun_on_the_cpu_goes_on_on_cuda(project):
    project.cli("train", "train.max_steps=2")
    assert "resuming from step 2" in project.cli("train", *CUDA).output
    assert len(project.losses()) == 6


def test_features_on_cuda_are_those_of_the_cpu(target_folder):
    """fp32 on both; the bound is that of sums of 48 products in another order."""
    tokens_BT = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(0))
    lengths_B, request = torch.tensor([40, 17, 33]), FeatureRequest((1, 4), True, "float32")
    found = {}
    for device in ("cpu", "cuda"):
        target = TargetModel(TargetSpec(str(target_folder), device=device))
        found[device] = target.features(tokens_BT.to(device), lengths_B.to(device), request)
    for name in request.names:
        for row, length in enumerate(lengths_B.tolist()):
            here, there = found["cpu"][name][row, :length], found["cuda"][name][row, :length].cpu()
            torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-4)
