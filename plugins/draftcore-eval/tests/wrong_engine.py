"""Engines that decode by our own decoder, each with the mistake that its name says; a one-file plugin."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from draftcore_eval.causes import put
from draftcore_eval.decode import EagerRunner, speculate
from draftcore_eval.engines import Answer, Serving
from draftcore_eval.options import EvalOptions
from draftcore_eval.report import Decoded
from torch import nn

from draftcore import bind, hookimpl, load_plugins
from draftcore.contracts.offers import Offer

IDS = "eagle_aux_hidden_state_layer_ids"


def lower(config: dict[str, Any]) -> None:
    config[IDS] = [layer - 1 for layer in config[IDS]]
    config["eagle_config"][IDS] = [layer - 1 for layer in config["eagle_config"][IDS]]


def pairs(module: Any) -> None:
    for part in (module.midlayer.self_attn.q_proj, module.midlayer.self_attn.k_proj):
        heads = part.weight.data.unflatten(0, (-1, 8, 2))
        part.weight.data = torch.stack([heads[:, :, 0], heads[:, :, 1]], 1).flatten(0, 2)


def four_bits(module: Any) -> None:
    weight = module.lm_head.weight.data
    for start in range(0, weight.shape[1], 32):
        block = weight[:, start : start + 32]
        scale = block.abs().max(1, keepdim=True).values / 7
        weight[:, start : start + 32] = (block / scale).round() * scale


def normed_residual(module: Any) -> None:
    layer, finish = module.midlayer, module.midlayer.finish
    layer.finish = lambda hidden, attended: finish(layer.hidden_norm(hidden), attended)


def in_bfloat16(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()


ONE = threading.Lock()  # a model runs one prompt at a time
Change = Callable[[Any], object]
# What is changed in config.json, and in the draft that is read.
CONFIGS: dict[str, Change] = {
    "lower-layers": lower,
    "other-rope": lambda config: put("rope_theta", 1e6, config),
    "fed-back-normed": lambda config: config.update(norm_output=True),
    "causal": lambda config: config.update(is_causal=True),
    "mask-token": lambda config: config["dflash_config"].update(mask_token_id=0),
}
MODULES: dict[str, Change] = {
    "no-norm": lambda m: setattr(m.midlayer, "hidden_norm", nn.Identity()),
    "unread-norm": lambda m: m.midlayer.input_layernorm.weight.data.fill_(1),
    "unordered-rows": pairs,
    "residual": normed_residual,
    "vocabulary": lambda m: m.d2t.zero_(),
    "bfloat16": in_bfloat16,
    "quantised-head": four_bits,
    "odd": lambda m: m.fc.weight.data.mul_(1.5),
}
NAMES = ("right", *CONFIGS, *MODULES, "fewer-drafts", "begins", "short", "lossy", "rounded")


@hookimpl
def describe() -> list[Offer]:
    return [Offer("engine", name) for name in NAMES]


@functools.cache
def target_in(folder: Path) -> Any:
    """Open a target, whose model is read once."""
    place = {"path": str(folder), "dtype": "float32", "device": "cpu"}
    found = bind(load_plugins(), "target", "hf", place)
    return found.hook.target(name="hf", options=found.options)


@functools.cache
def plain(folder: Path, prompt: tuple[int, ...], limit: int) -> Answer:
    (tokens,) = target_in(folder).load_model().generate([prompt], limit)
    return Answer(tuple(tokens), len(tokens) - 1)


class Wrong:
    """An engine with one mistake, if any."""

    def __init__(self, name: str, serving: Serving) -> None:
        self.name, self.folder, self.runner = name, serving.target, None
        self.drafts = serving.num_drafts
        self.answers: dict[tuple[int, ...], Decoded] = {}
        if serving.export is None:
            return
        target = target_in(serving.target)
        with tempfile.TemporaryDirectory() as folder:
            export = Path(shutil.copytree(serving.export, folder, dirs_exist_ok=True))
            config = json.loads((file := export / "config.json").read_text())
            CONFIGS.get(name, lambda given: None)(config)
            file.write_text(json.dumps(config))
            kind = "dflash" if "dflash_config" in config else "eagle3"
            drafts = serving.num_drafts - (name == "fewer-drafts") if kind == "eagle3" else None
            algorithm = bind(load_plugins(), "algorithm", kind, {"num_drafts": drafts})
            hook, options = algorithm.hook, algorithm.options
            built = hook.import_draft(folder=export, target=target, options=options)
        MODULES.get(name, lambda given: None)(built.module)
        model = target.load_model()
        self.runner = EagerRunner(model, hook.drafter(draft=built, target=model, options=options))
        if (asked := serving.export.parent / "asked.json").exists():  # all at once, to be quick
            limit, prompts = json.loads(asked.read_text())
            options = EvalOptions(max_new_tokens=limit)
            decoded = speculate(self.runner, [self.read(prompt) for prompt in prompts], options)
            self.answers = {(limit, *one.prompt): one for one in decoded}

    def read(self, prompt: Sequence[int]) -> list[int]:
        return [257, *prompt] if self.name == "begins" else [*prompt]

    def decode(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        prompt = self.read(prompt)
        if self.runner is None:
            return plain(self.folder, tuple(prompt), max_new_tokens)
        if (found := self.answers.get((max_new_tokens, *prompt))) is None:
            options = EvalOptions(max_new_tokens=max_new_tokens)
            with ONE:
                (found,) = speculate(self.runner, [prompt], options)
        if self.name == "short":
            found.tokens.pop()
        asked = (max_new_tokens, *prompt)
        rounded = self.name == "rounded" and self.answers
        if (self.name == "lossy" and sum(prompt) % 2) or (rounded and asked == min(self.answers)):
            found.tokens[-1] ^= 1
        positions = range(self.runner.drafter.num_drafts)
        accepted = tuple(sum(count > k for count in found.accepted) for k in positions)
        more = bool(rounded and asked == max(self.answers))
        return Answer(tuple(found.tokens), len(found.accepted) + more, accepted)

    def command(self) -> str:
        return f"serve <target> <draft> --drafts {self.drafts}"

    def close(self) -> None:
        """The target is kept for the next."""


@hookimpl
def engine(name: str, serving: Serving) -> Wrong:
    return Wrong(name, serving)
