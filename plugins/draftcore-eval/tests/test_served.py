"""`draftcore served`: a draft that an engine serves as trained, and what it does where it is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner, Result
from draftcore_eval import api
from draftcore_eval.causes import IMPOSSIBLE, Variants
from draftcore_eval.engines import Serving
from draftcore_eval.served import Asking, Served, compare, decode_here, named, rounds_until
from draftcore_sdk.targets import tiny_target
from safetensors.torch import load_file, save_file

import draftcore
from draftcore import bind, load_plugins, open_draft, open_run
from draftcore.cli import main
from draftcore.errors import UsageError

ENGINES = Path(__file__).with_name("wrong_engine.py")
PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
# Of each draft its options, the steps that it is trained, and the tokens of an answer.
DRAFTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "eagle3": ({"layers": [1, 2, 4], "draft_vocab_size": 250, "ttt_length": 2, "num_drafts": 3}, 120, 40),
    "dflash": ({"num_layers": 2, "layers": [1, 3], "block_size": 5, "num_anchors": 16}, 90, 24),
}  # fmt: skip
# What each wrong engine's cause begins with.
CAUSES = {
    "lower-layers": "layers: the engine feeds the outputs [0, 1, 3], each one below",
    "other-rope": "rope base: the engine takes rope_theta for 1000000.0",
    "fed-back-normed": "norm_output: the engine takes norm_output for true",
    "no-norm": "norm: midlayer.hidden_norm is left out",
    "unread-norm": "norm: the weights of midlayer.input_layernorm were not loaded",
    "unordered-rows": "row order: rows of q_proj and k_proj are as they are",
    "residual": "norm_before_residual: ",
    "vocabulary": "vocabulary: d2t is not read",
    "bfloat16": "dtype: the draft is computed in bfloat16",
    "quantised-head": "quantised: the head is in 4 bits",
    "fewer-drafts": "number of drafts: 2 of 3",
    "begins": "prompt: of its token ids",
    "causal": "causality: the engine takes is_causal for true",
    "mask-token": "mask token: the engine takes mask_token_id for 0",
}


class Trained(NamedTuple):
    """A run whose draft was trained on the target's own answers to the eval prompts, and its export."""

    yaml: Path
    export: Path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All rows of its head have 10 in common: no choice depends on that, and fewer bits round it coarsely."""
    folder = tiny_target(tmp_path_factory.mktemp("wide"), std=0.3)
    weights = load_file(file := folder / "model.safetensors")
    weights["lm_head.weight"] += 10
    save_file(weights, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return {name: train(name, target, tmp_path_factory.mktemp(name)) for name in DRAFTS}


def train(name: str, target: Path, folder: Path) -> Trained:
    """Train a draft until some of its drafts are accepted."""
    options, steps, limit = DRAFTS[name]
    rows = [
        {"messages": [{"role": "user", "content": f"q{i}?" * (1 + 29 * (i == 5))}],
         "category": ("odd", "even")[i % 2]} for i in range(6)
    ]  # fmt: skip
    (asked := folder / "eval.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config: dict[str, Any] = {
        "run": str(folder / "run"),
        "target": {"path": str(target), "dtype": "float32", "device": "cpu"},
        "data": {"eval": str(asked), "max_length": 256},
        "algorithm": {"name": name, "options": options},
        "train": {"batch": 3, "lr": 0.01, "epochs": steps, "max_steps": steps, "device": "cpu",
                  "checkpoint_every": steps, "eval_every": 0, "log_every": steps},
        "eval": {"max_new_tokens": limit},
    }  # fmt: skip
    with open_run(config) as run:
        prompts = [list(ids) for ids in run.data.prompts().token_ids]
        answers = run.target.load_model().generate(prompts, limit)
    learned = [
        {"input_ids": [*ids, *answer], "loss_mask": [0] * (len(ids) - 1) + [1] * (len(answer) + 1)}
        for ids, answer in zip(prompts, answers, strict=True)
    ]
    (taught := folder / "train.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in learned))
    config["data"]["train"] = str(taught)
    (yaml := folder / "run.yaml").write_text(json.dumps(config))
    draftcore.train(yaml, say=lambda line: None)
    (export,) = draftcore.export(yaml, say=lambda line: None)
    (export.parent / "asked.json").write_text(json.dumps([limit, prompts]))
    return Trained(yaml, export)


@pytest.fixture(scope="module")
def served(trained: dict[str, Trained]) -> Iterator[Any]:
    """Compare a draft with a wrong engine; what each mistake decodes is decoded once for all engines."""
    registry, given = load_plugins([ENGINES]), {}
    with ExitStack() as stack:
        for name, one in trained.items():
            run: Any = stack.enter_context(open_run(one.yaml, (), registry))
            draft, options = run.drafts[0], run.evaluation().options
            built, ids = open_draft(draft, None, None)[0], run.data.prompts().token_ids
            variants = Variants(draft, one.export, ids, options)
            for mistake in variants.mistakes():
                with suppress(*IMPOSSIBLE):
                    variants.decode(mistake, range(len(ids)))
            given[name] = variants, *decode_here(draft, built, ids, options), one.export
        yield lambda name, engine: compare(*given[name], (), Asking(engine))


def test_each_mistake_of_an_engine_is_named_with_the_first_token_that_shows_it(served: Any) -> None:
    """One test, as what they share takes half a minute: each worker would make it anew."""
    for engine, named_as in CAUSES.items():
        found: Served = served("dflash" if engine in ("causal", "mask-token") else "eagle3", engine)
        assert not found.as_trained, engine
        causes = [cause for cause, remedy in found.causes if remedy]
        assert len(causes) < 4, "few mistakes give the same rounds"
        assert any(cause.startswith(named_as) for cause in causes), found.to_json()
        assert found.first is not None
        assert found.here[found.first.prompt].tokens[found.first.token] == found.first.id
        if engine == "lower-layers":
            assert "\n".join([f"{name:28}  {said}" for name, said in found.lines()][-3:]) in PAGE


def test_of_a_mistake_that_nobody_knows_the_first_token_is_found_by_asking(
    served: Any, trained: dict[str, Trained], target: Path
) -> None:
    found: Served = served("eagle3", "odd")
    assert (found.as_trained, found.causes) == (False, [])
    assert found.first is not None
    row, serving = found.first.prompt, Serving(target, trained["eagle3"].export, 3, 300)
    hook = bind(load_plugins([ENGINES]), "engine", "odd").hook
    engine = hook.engine(name="odd", serving=serving, options=None)
    for tokens, same in ((2, True), (found.first.token, True), (found.first.token + 1, False)):
        rounds = engine.decode(found.prompts[row], tokens).rounds
        assert (rounds == rounds_until(found.here[row], tokens)) is same


def test_in_16_bits_rounds_of_alike_sums_and_an_output_that_part_are_roundings(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not served("eagle3", "rounded").as_trained
    monkeypatch.setattr("draftcore_eval.served.HALF", ("float32",))
    found = served("eagle3", "rounded")
    assert (len(found.outputs), found.different) == (1, []), "farther apart than roundings part"
    monkeypatch.setattr("draftcore_eval.served.FAR", 1e9)
    assert (found := served("eagle3", "rounded")).as_trained
    assert all(f"the {what}" in str(found.ties) for what in ("rounds of all", "target's two best"))
    assert not served("eagle3", "lossy").as_trained
    assert not served("eagle3", "odd").as_trained


def cli(*words: object) -> Result:
    """Ask a wrong engine two prompts by the command line."""
    given = ["--plugin", ENGINES, "served", *words, "eval.prompts=2"]
    return CliRunner().invoke(main, list(map(str, given)))


def test_a_draft_that_is_served_as_trained_is_said_to_be(trained: dict[str, Trained]) -> None:
    """Its newest checkpoint, or an export that is there; by position, category and context."""
    one = trained["eagle3"]
    done = cli(one.yaml, "--engine", "right", "--json", "--export", one.export)
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)
    assert found["served_as_trained"]
    assert found["acceptance_length"]["engine"] == found["acceptance_length"]["here"] > 1
    assert found["acceptance_by_position"]["engine"] == found["acceptance_by_position"]["here"]
    counts = [(name, group["prompts"]) for name, group in found["groups"].items()]
    assert counts == [("odd", 1), ("even", 1), ("prompts of below 128 tokens", 2)]


def test_another_output_is_told_from_a_tie_and_an_answer_that_breaks_off_is_refused(
    trained: dict[str, Trained],
) -> None:
    yaml = trained["eagle3"].yaml
    lossy = cli(yaml, "--engine", "lossy")
    assert lossy.exit_code == 1
    assert all(what in lossy.output for what in ("1 of 2 are those of plain", "is not lossless"))
    tied = cli(yaml, "--engine", "lossy", "eval.tie_bound=1e9")
    assert tied.exit_code == 0, tied.output
    assert "2 of 2 are those of plain decoding, 1 of them up to a tie" in tied.output
    assert ": at token 40 the target's two best are" in tied.output
    short = cli(yaml, "--engine", "short", "--requests", 2)
    assert (short.exit_code, "answered 0 of 2 prompts" in short.output) == (1, True)


def test_a_url_is_asked_whose_server_it_is() -> None:
    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "mine", "owned_by": "llamacpp"}]}')

    with HTTPServer(("127.0.0.1", 0), Models) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.handle_request).start()
        assert named(f"{url}/v1/") == ("llamacpp", url)
    with pytest.raises(UsageError, match="no server of OpenAI's API answers"):
        named(url)


def test_the_number_of_drafts_that_is_fastest_on_an_engine_goes_into_the_card(
    trained: dict[str, Trained],
) -> None:
    """With the engine's command, and with what was measured of these weights alone."""
    one = trained["eagle3"]
    said, registry = list[str](), load_plugins([ENGINES])
    asked: dict[str, Any] = {"engine": "right", "speed": True, "registry": registry}
    api.served(one.yaml, "eval.prompts=2", say=said.append, **asked)
    speed = json.loads((file := one.export.parent / "speed-right.json").read_text())
    rounds = [figures["rounds"] for figures in speed["drafts"].values()]
    assert list(speed["drafts"]) == ["1", "2", "3"]
    assert rounds[-1] < rounds[0]
    assert speed["plain"]["rounds"] == speed["plain"]["tokens"] - 2 > rounds[0]
    fastest = max(speed["drafts"], key=lambda n: speed["drafts"][n]["tokens_per_second"])
    line = f"serve <target> <draft> --drafts {fastest}"
    assert f"to serve with right:\n  {line}" in said
    card = (one.export / "README.md").read_text()
    assert f"With right:\n\n```bash\n{line}\n```" in card
    assert "- right\n" in card
    file.write_text(json.dumps({**speed, "weights": "of another step"}))
    draftcore.export(one.yaml, force=True, say=lambda line: None)
    assert line not in (one.export / "README.md").read_text()
