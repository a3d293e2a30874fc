"""What the tests of both captures share: sglang on this machine's CPU where it has no CUDA device."""

import importlib.util
import os

import torch

if importlib.util.find_spec("draftcore_sglang_cpu") and not torch.cuda.is_available():
    from draftcore_sglang_cpu import mend_torchvision

    mend_torchvision()  # before transformers looks for it
    os.environ["SGLANG_PLATFORM"] = "draftcore_cpu"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
