"""llama.cpp itself: it drafts what was trained, prompt by prompt, and a wrong file shows in the rounds.

Run by `nox -s llamacpp`. The drafts are trained on the target's own answers to the prompts that are asked,
which takes seconds: what is tried is serving, and drafts that are often right show mistakes best.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from draftcore_eval.api import evaluate
from draftcore_eval.engines import Answer, Serving
from draftcore_llamacpp import convert, engine, methods
from draftcore_llamacpp.engine import LlamaCpp
from draftcore_llamacpp.files import write_gguf
from draftcore_llamacpp.options import LlamaCppOptions
from draftcore_llamacpp.target import target_keys, target_tensors
from draftcore_sdk.engines import EngineSuite

import draftcore
from draftcore.errors import DraftcoreError, UsageError

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
TARGET = QUICKSTART / "target"
PROMPTS, LONGEST, CONTEXT = 20, 64, 640
DRAFTS: dict[str, tuple[dict[str, Any], int]] = {  # options, steps
    "eagle3": (
        {"draft_vocab_size": 2048, "ttt_length": 2, "intermediate_size": 384, "supervise": "predicted"},
        40,
    ),
    "dflash": (BLOCKS := {"num_layers": 2, "block_size": 8, "num_anchors": 16, "loss_decay_gamma": 4}, 120),
    "dflash2": ({**BLOCKS, "selector_rank": 32, "selector_top_k": 15}, 120),
    "dspark": ({"num_layers": 2, "num_anchors": 16, "markov_rank": 64, "ce_weight": 1.0}, 120),
}  # fmt: skip
OPTIONS = LlamaCppOptions()


class TestLlamaCpp(EngineSuite):
    plugin = "draftcore_llamacpp.plugin"


@dataclass
class Trained:
    """A draft's export, and what `draftcore eval` counts of it, by prompt."""

    export: Path
    length: float
    rows: Sequence[Any]


def serving(export: Path | None, num_drafts: int = 7, **more: Any) -> Serving:
    return Serving(TARGET, export, num_drafts, CONTEXT, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def settings(folder: Path) -> dict[str, Any]:
    """The settings of a run that learns the target's own answers to the prompts it is asked."""
    lines = (QUICKSTART / "data" / "eval.jsonl").read_text().splitlines()[:PROMPTS]
    (asked := folder / "asked.jsonl").write_text("\n".join(lines) + "\n")
    data = {"eval": str(asked), "max_length": 512}
    target = {"path": str(TARGET), "dtype": "float32", "device": "cpu"}
    run = {"run": str(folder / "run"), "algorithm": {"name": "eagle3"}}
    with draftcore.open_run({**run, "target": target, "data": data}) as opened:
        prompts = opened.data.prompts().token_ids
        answers = opened.target.load_model().generate(prompts, LONGEST)
    with (folder / "train.jsonl").open("w") as stream:
        for prompt, answer in zip(prompts, answers, strict=True):
            learned = [0] * len(prompt) + [1] * len(answer)
            row = {"input_ids": [*prompt, *answer], "loss_mask": learned}
            stream.write(json.dumps(row) + "\n")
    return {
        **run,
        "target": target,
        "data": {**data, "train": str(folder / "train.jsonl")},
        "eval": {"batch": PROMPTS, "max_new_tokens": LONGEST},
    }


@pytest.fixture(scope="module")
def trained(settings: dict[str, Any], folder: Path) -> Callable[[str], Trained]:
    made: dict[str, Trained] = {}

    def train(name: str) -> Trained:
        if name not in made:
            options, steps = DRAFTS[name]
            config = {
                **settings,
                "run": str(folder / name),
                "algorithm": {"name": name, "options": options},
                "train": {
                    **{"batch": 4, "accumulate": 1, "lr": 2e-3, "warmup_ratio": 0.05},
                    **{"epochs": steps, "max_steps": steps, "checkpoint_every": steps},
                    **{"eval_every": 0, "eval_prompts": 0, "device": "cpu"},
                },
            }
            draftcore.train(config)
            (export,) = draftcore.export(config)
            (report,) = evaluate(config)
            made[name] = Trained(export, report.acceptance_length, report.rows)
        return made[name]

    return train


@pytest.fixture(scope="module")
def prompts(settings: dict[str, Any]) -> Sequence[Sequence[int]]:
    with draftcore.open_run(settings) as run:
        prompts: Sequence[Sequence[int]] = run.data.prompts().token_ids
        return prompts


@pytest.fixture(scope="module")
def server() -> Iterator[LlamaCpp]:
    """A server of the target, which drafts are loaded into."""
    started = LlamaCpp(serving(None), OPTIONS)
    yield started
    started.close()


@pytest.fixture(scope="module")
def plain(server: LlamaCpp, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    return [server.decode(prompt, LONGEST) for prompt in prompts]


@pytest.mark.parametrize("name", DRAFTS)
def test_llama_cpp_drafts_what_was_trained_prompt_by_prompt(
    name: str, trained: Callable[[str], Trained], server: LlamaCpp, plain: list[Answer],
    prompts: Sequence[Sequence[int]],
) -> None:  # fmt: skip
    draft = trained(name)
    assert draft.length >= 1.5
    server.load_draft(draft.export)
    drafted = [server.decode(prompt, LONGEST) for prompt in prompts]
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert [answer.rounds for answer in plain] == [len(answer.tokens) - 1 for answer in plain]
    assert [answer.rounds for answer in drafted] == [row["rounds"] for row in draft.rows]
    assert [len(answer.tokens) for answer in drafted] == [row["tokens"] for row in draft.rows]
    for answer in drafted:
        accepted = answer.accepted or ()
        kept = len(answer.tokens) - 1 - answer.rounds
        assert sum(accepted) in (kept, kept + 1)  # the end token may be a draft
        assert len(accepted) == 7
        assert max(accepted) <= answer.rounds


def shifted(right: Any, config: Any) -> list[int]:
    return [layer - 1 for layer in right.target_layers(config)]


def with_keys(**changed: Any) -> Callable[..., Any]:
    more = {name.replace("__", "."): value for name, value in changed.items()}
    return lambda right, config: {**right.keys(config), **more}


def unordered(right: Any, name: str, tensor: Any, config: Any) -> Any:
    return right.tensor(name, tensor, config) if name == "d2t" else tensor


MASK = "tokenizer__ggml__mask_token_id"
MISTAKES: dict[str, dict[str, Any]] = {
    "eagle3, layers one less": {"target_layers": shifted},
    "eagle3, rows not reordered": {"tensor": unordered},
    "eagle3, norm before residual": {"keys": with_keys(__norm_before_residual=True)},
    "eagle3, RoPE base": {"keys": with_keys(__rope__freq_base=1e6)},
    "dflash, layers one less": {"target_layers": shifted},
    "dflash, mask token": {"keys": with_keys(**{MASK: 7})},
    "dflash, causal": {"keys": with_keys(__attention__causal=True)},
    "dflash, RoPE base": {"keys": with_keys(__rope__freq_base=1e6)},
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_conversion_shows_in_the_rounds_of_a_prompt_and_in_no_output(
    mistake: str, trained: Callable[[str], Trained], server: LlamaCpp, plain: list[Answer],
    prompts: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    name, _, _ = mistake.partition(",")
    draft = trained(name)
    right = next(method for method in methods.METHODS.values() if method.name == name)
    wrong = copy.copy(right)
    for method, answer in MISTAKES[mistake].items():
        setattr(wrong, method, functools.partial(answer, right))
    monkeypatch.setattr(convert, "method_of", lambda config, folder: wrong)
    server.load_draft(draft.export)
    for prompt, row, own in zip(prompts, draft.rows, plain, strict=True):
        answer = server.decode(prompt, LONGEST)
        assert answer.tokens == own.tokens
        if answer.rounds != row["rounds"]:
            return
    pytest.fail(f"{mistake}: no prompt shows it")


def test_rounds_are_counted_where_a_character_takes_several_tokens(
    trained: Callable[[str], Trained], plain: list[Answer], prompts: Sequence[Sequence[int]],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Of such a character the server sends the last token alone. Here each end of a line is half of one."""
    keys = target_keys(TARGET, "f32")
    texts = keys["tokenizer.ggml.tokens"]
    newline, half = texts.index("Ċ"), texts.index("Ã")
    texts[newline], texts[half] = texts[half], texts[newline]
    write_gguf(file := tmp_path / "target.gguf", "qwen3", keys, target_tensors(TARGET), "f32")
    draft = trained("eagle3")
    started = LlamaCpp(serving(draft.export), LlamaCppOptions(target=file))
    ended = next(row for row in range(PROMPTS) if len(plain[row].tokens) < LONGEST)
    for row in (0, ended):
        answer = started.decode(prompts[row], LONGEST)
        assert newline in answer.tokens
        assert answer.accepted is None
        assert (answer.tokens, answer.rounds) == (plain[row].tokens, draft.rows[row]["rounds"])
    started.close()


def test_a_server_that_runs_is_asked_and_goes_on(
    trained: Callable[[str], Trained], server: LlamaCpp, plain: list[Answer],
    prompts: Sequence[Sequence[int]],
) -> None:  # fmt: skip
    server.load_draft(trained("eagle3").export)
    found = LlamaCpp(serving(None, url=server.url), OPTIONS)
    assert found.decode(prompts[0], LONGEST) == server.decode(prompts[0], LONGEST)
    with pytest.raises(UsageError, match="was found, and keeps its draft"):
        found.load_draft(trained("eagle3").export)
    found.close()
    assert server.decode(prompts[0], 8).tokens == plain[0].tokens[:8]
    with pytest.raises(DraftcoreError, match=r"refuses a prompt of 900 tokens \(status 400\)"):
        server.decode([5] * 900, 8)


def test_a_crash_of_llama_cpp_is_an_error_that_says_so(
    trained: Callable[[str], Trained], server: LlamaCpp, prompts: Sequence[Sequence[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """While it reads a file of another architecture, and while it decodes with a layer that is not there."""

    class Last(methods.DFlash):
        def keys(self, config: Any) -> Any:
            layers = [8] * len(self.target_layers(config))  # no layer of the target has this input
            return {**super().keys(config), ".target_layers": layers}

    export = trained("dflash").export
    monkeypatch.setattr(convert, "method_of", lambda config, folder: Last())
    server.load_draft(export)
    with pytest.raises(DraftcoreError, match=r"llama\.cpp ended by SIGABRT while it decoded a"):
        server.decode(prompts[0], LONGEST)
    monkeypatch.setattr(Last, "name", "no-such-architecture")
    with pytest.raises(DraftcoreError, match=r"llama\.cpp ended .* while it read its files"):
        server.load_draft(export)


def test_a_block_is_served_whole_or_not_at_all(trained: Callable[[str], Trained]) -> None:
    with pytest.raises(UsageError, match="trained with 7 alone\n  ask for 7, all of a block"):
        LlamaCpp(serving(trained("dflash").export, num_drafts=3), OPTIONS)


def test_without_the_wheel_the_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'draftcore-llamacpp\[serve\]'"):
        LlamaCpp(serving(None), OPTIONS)
