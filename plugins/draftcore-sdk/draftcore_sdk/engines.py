"""What every engine must do. See `draftcore_sdk` for how to use it.

The target is a tiny random one in fp32. The draft is an EAGLE-3 draft whose weights are drawn, and which
reads a layer near the last: some of its drafts are accepted without any training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from draftcore_eval.decode import EagerRunner, speculate
from draftcore_eval.engines import Answer, Engine, Serving
from draftcore_eval.options import EvalOptions
from draftcore_eval.report import Decoded

from draftcore.contracts.algorithm import DataSummary
from draftcore.errors import DraftcoreError
from draftcore_sdk.internals import bind, load_plugins
from draftcore_sdk.suite import Suite
from draftcore_sdk.targets import ROWS, tiny_target

NEW, SHORT, DRAFTS = 24, 7, 3  # tokens of an answer, of a shorter one, drafts a round
LAYERS, KNOWN = (1, 2, 4), 250  # captured layers, and tokens that the draft can propose


class EngineSuite(Suite):
    """The behaviour of an engine, started through its plugin for a target alone and with a draft.

    `target_config` sets sizes of the target, where the engine runs no others.
    """

    target_config: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture(scope="class")
    def served(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> tuple[Serving, Path, list[list[Decoded]]]:
        """Return what is to be served, another export, and what our decoder decodes by the two."""
        folder, registry = tmp_path_factory.mktemp("engine"), load_plugins()
        place = {"dtype": "float32", "device": "cpu", "path": str(folder / "target")}
        tiny_target(folder / "target", **self.target_config)
        binding = bind(registry, "target", "hf", place)
        target = binding.hook.target(name="hf", options=binding.options)
        options = {"num_drafts": DRAFTS, "layers": LAYERS, "draft_vocab_size": KNOWN}
        algorithm = bind(registry, "algorithm", "eagle3", options)
        exports, decoded, model = [], [], target.load_model()
        for seed in range(2):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                data, given = DataSummary("", 1, 1, 1, 1, {}), {"options": algorithm.options}
                draft = algorithm.hook.build_draft(target=target, data=data, **given)
                draw_weights(draft.module.eval())
            exports.append(folder / f"export-{seed}")
            exports[-1].mkdir()
            hook: Any = algorithm.hook
            hook.export_draft(draft=draft, folder=exports[-1], layout="serving", **given)
            runner = EagerRunner(model, hook.drafter(draft=draft, target=model, **given))
            decoded.append(speculate(runner, ROWS, EvalOptions(max_new_tokens=NEW)))
        longest = max(map(len, ROWS)) + NEW
        return Serving(folder / "target", exports[0], DRAFTS, longest), exports[1], decoded

    @pytest.fixture(scope="class")
    def drafted(self, served: Any) -> Iterator[Engine]:
        engine: Engine = self.open("engine", serving=replace(served[0], requests=2))
        yield engine
        engine.close()

    def test_alone_the_targets_own_tokens_come_one_a_round(self, served: Any) -> None:
        """Up to the limit that is asked for."""
        serving, _, (right, _) = served
        engine: Engine = self.open("engine", serving=replace(serving, export=None, num_drafts=0))
        try:
            for decoded, limit in zip(right, (NEW, SHORT, 2), strict=True):
                answer = engine.decode(decoded.prompt, limit)
                require_tokens(answer, decoded.tokens[:limit])
                said = f"{answer.rounds} rounds for {limit} tokens, of which the prefill gives one"
                assert answer.rounds == len(answer.tokens) - 1, said
        finally:
            engine.close()

    def test_with_a_draft_tokens_are_the_same_and_rounds_our_decoders(
        self, served: Any, drafted: Engine
    ) -> None:
        """Also for two prompts at once; what is said of positions fits the rounds."""
        require_rounds(drafted, served[2][0])

    def test_a_draft_that_is_loaded_drafts(self, served: Any, drafted: Engine) -> None:
        """Where weights can be changed without a new start; and the first can be loaded again."""
        if (load := getattr(drafted, "load_draft", None)) is None:
            pytest.skip("it has no load_draft")
        serving, other, (first, second) = served
        load(other)
        require_rounds(drafted, second)
        load(serving.export)
        require_rounds(drafted, first[:1])

    def test_a_folder_without_a_draft_is_an_error_that_names_it(
        self, served: Any, tmp_path: Path
    ) -> None:
        (empty := tmp_path / "no-draft-here").mkdir()
        with pytest.raises(DraftcoreError, match="no-draft-here"):
            self.open("engine", serving=replace(served[0], export=empty)).close()

    def test_nothing_that_was_started_lives_on_when_it_is_closed(self, served: Any) -> None:
        before = children()
        self.open("engine", serving=served[0]).close()
        assert not (left := children() - before), f"processes live on: {sorted(left)}"


def draw_weights(module: Any) -> None:
    """Draw a draft's weights so that it drafts by the last of its layers, and by all the others a little."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.ndim == 2 and "lm_head" not in name:
                weight.normal_(0, 0.02 if name == "fc.weight" else 0.1)
        width = module.fc.weight.shape[0]
        module.fc.weight[:, 2 * width :] += torch.eye(width)


def require_tokens(answer: Answer, right: Sequence[int]) -> None:
    assert list(answer.tokens) == list(right), f"it answers {answer.tokens}, the target {right}"


def require_rounds(engine: Engine, right: Sequence[Decoded]) -> None:
    """Ask for all at once, and compare with what our decoder did."""
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda one: engine.decode(one.prompt, NEW), right))
    for answer, decoded in zip(answers, right, strict=True):
        require_tokens(answer, decoded.tokens)
        own, where = len(decoded.accepted), f"after a prompt of {len(decoded.prompt)} tokens"
        said = f"it takes {answer.rounds} rounds {where}, the draft as it was exported takes {own}"
        assert answer.rounds == own, f"{said}: `draftcore served` finds why"
        if (by_position := answer.accepted) is not None:
            kept = len(answer.tokens) - 1 - answer.rounds
            fits = list(by_position) == sorted(by_position, reverse=True)
            fits &= len(by_position) <= DRAFTS and sum(by_position) >= kept
            assert fits, f"it says that {by_position} were accepted, its answer has {kept} drafts"


def children(process: str = "self") -> set[str]:
    """Return the numbers of the processes that one started and that are there, and of theirs."""
    found = set[str]()
    for file in Path("/proc", process, "task").glob("*/children"):
        for child in file.read_text().split():
            found |= {child, *children(child)}
    return found
