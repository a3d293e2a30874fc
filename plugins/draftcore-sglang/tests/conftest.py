"""What the tests of both captures share: sglang on this machine's CPU where it has no CUDA device."""

import importlib.util
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `sglang_on_cpu`, in children too
if importlib.util.find_spec("draftcore_sglang_cpu") and not torch.cuda.is_available():
    from draftcore_sglang_cpu import mend_torchvision

    mend_torchvision()  # before transformers looks for it
    os.environ["SGLANG_PLATFORM"] = "draftcore_cpu"
    os.environ["TRITON_INTERPRET"] = "1"  # read when sglang defines its kernels
os.environ.setdefault("HF_HUB_OFFLINE", "1")
