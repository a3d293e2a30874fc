"""The tiny target of the algorithm suite, its own answers, and their features.

It is deep (12 layers) and wide in its weights, so that the default captured layers of an algorithm
exist, its answers vary from token to token, and a draft has to read the features to continue them.
One target serves a whole pytest process.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from draftcore_hf.target import TransformersTarget
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import TargetSpec
from draftcore_sdk.targets import tiny_target

LAYERS, GROWTH, ANSWER = 12, 1.5, 10
VOCABULARY = 259  # of bytes and three special tokens
# Their answers begin with one or two tokens in common: features have to tell which one follows.
QUESTIONS = ("a6", "a9", "c9")

# A loose plugin that ends training as Ctrl-C does, after the step that the variable names.
STOP_AT = "DRAFTCORE_SUITE_STOP_AT"
STOPPER = f"""import os, signal
from draftcore import hookimpl

@hookimpl
def step_finished(step):
    if os.environ.get({STOP_AT!r}) == str(step):
        signal.raise_signal(signal.SIGINT)
"""


@dataclass(frozen=True)
class Example:
    """A tiny target, questions to it with its own greedy answers, and all features of these."""

    stopper: Path  # a loose plugin that ends training after the step named by STOP_AT
    spec: TargetSpec
    prompts: list[list[int]]
    answers: list[list[int]]
    features: list[dict[str, Tensor]]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each question and its answer."""
        return [len(p) + len(a) for p, a in zip(self.prompts, self.answers, strict=True)]

    @classmethod
    @functools.cache
    def of(cls, folder: Path) -> Example:
        """Make the example of this process in a folder, or return what is made there."""
        tiny_target(folder / "target", std=0.5, num_hidden_layers=LAYERS)
        unlike_layers(folder / "target" / "model.safetensors")
        stopper = folder / "draftcore_suite_stop.py"
        stopper.write_text(STOPPER)
        spec = TransformersTarget(str(folder / "target"), device="cpu")
        prompts = [prompt(spec, text) for text in QUESTIONS]
        answers = spec.load_model().generate(prompts, ANSWER)
        vocabulary = spec.vocab_size
        everything = FeatureRequest(tuple(range(LAYERS)), True, "float32", vocabulary, True)
        features = []
        for asked, answered in zip(prompts, answers, strict=True):
            tokens_1T = torch.tensor([asked + answered])
            found = spec.load_model().features(
                tokens_1T, torch.tensor([tokens_1T.shape[1]]), everything
            )
            # Out of inference mode: autograd may save what a capture would have stored.
            features.append({name: value[0].clone() for name, value in found.items()})
        return cls(stopper, spec, prompts, answers, features)


def prompt(spec: TargetSpec, text: str) -> list[int]:
    """Token ids of a question, up to where the answer begins."""
    messages = [{"role": "user", "content": text}]
    encoded = spec.load_tokenizer().apply_chat_template(messages, add_generation_prompt=True)
    return list(encoded["input_ids"])


def unlike_layers(weights: Path) -> None:
    """Let every layer write more than all before it, so that no layer's output stands for another's."""
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= GROWTH ** int(name.split(".")[2])
    save_file(tensors, weights, metadata={"format": "pt"})


class WatchedTarget(TransformersTarget):
    """A target that remembers the tensors it has handed out."""

    def __init__(self, path: str) -> None:
        super().__init__(path, device="cpu")
        self.handed: list[Tensor] = []

    def embedding(self) -> Tensor:
        self.handed.append(super().embedding())
        return self.handed[-1]

    def head(self) -> Tensor:
        self.handed.append(super().head())
        return self.handed[-1]
