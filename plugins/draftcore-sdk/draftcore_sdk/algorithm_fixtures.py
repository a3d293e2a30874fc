"""For an algorithm's own tests: a tiny target, drafts for it, samples; what its exports must refuse and say.

A conftest imports the fixtures and adds one, `algorithm`, that says what they are made for:

    from draftcore_sdk.algorithm_fixtures import *  # Tiny, and all fixtures

    @pytest.fixture(scope="session")
    def algorithm() -> Tiny:
        return Tiny(MyAlgorithm, MyOptions, {"num_layers": 2}, ["hidden.1", "last_hidden"], shape={})

With them works `ExportSuite`, beside `AlgorithmSuite`; a module may have another `draft`:

    class TestExports(ExportSuite):
        plugin, architecture = "draftcore_mine.plugin", "MyDraftModel"
        refused_configs = {"two values": ({"steps": 4, "my_config.steps": 5}, "two values of steps")}
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from draftcore_hf.target import TransformersTarget
from draftcore_nn.served import Host, Round, UnservableError, gaps
from torch import Tensor, nn

from draftcore.contracts.algorithm import (
    DataSummary,
    Draft,
    DraftBatch,
    Sample,
    SampleId,
    StepContext,
    StepOutput,
)
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError
from draftcore_sdk.exports import GONE, ROPES, change_config, change_tensors
from draftcore_sdk.suite import bound
from draftcore_sdk.targets import tiny_target
from draftcore_sdk.workbench import as_ratio, require_same_bits, summed

MakeTarget = Callable[..., TargetSpec]
MakeDraft = Callable[..., Draft]
MakeSamples = Callable[..., list[Sample]]
WIDTH = 32
NO_DATA = DataSummary("", 0, 0, 0, 0, {})
Edit = Callable[[dict[str, Tensor]], Any]
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LENGTH = 40  # of a prompt, beyond the lengths that these RoPEs are scaled from
SHAPE = {"hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 8, "head_dim": 8}


@dataclass(frozen=True)
class Tiny:
    """An algorithm at a size for tests: its class and options, and what keeps it small.

    `small` are the options of every draft, `shape` goes to `tiny_target`, `features` are those of
    samples, with token ids below `tokens`. `std` is that of a draft's random weights: large, as flat
    distributions hide mistakes.
    """

    made_with: Callable[[Any], Any]  # its options
    options: Callable[..., Any]
    small: Mapping[str, Any]
    features: Sequence[str]
    shape: Mapping[str, Any]
    summary: DataSummary = NO_DATA
    tokens: int = 250
    std: float = 0.2

    @property
    def plain(self) -> Any:
        """The algorithm with its default options."""
        return self.made_with(self.options())


@pytest.fixture(scope="session")
def make_target(algorithm: Tiny, tmp_path_factory: pytest.TempPathFactory) -> MakeTarget:
    """Save a Qwen3 with random weights; keyword arguments go to `tiny_target`."""

    def make(**changes: Any) -> TargetSpec:
        shape = {**SHAPE, **algorithm.shape, **changes}
        folder = tiny_target(tmp_path_factory.mktemp("target"), **shape)
        return TransformersTarget(str(folder), device="cpu")

    return make


@pytest.fixture(scope="session")
def target(make_target: MakeTarget) -> TargetSpec:
    return make_target()


@pytest.fixture
def make_draft(algorithm: Tiny, target: TargetSpec) -> MakeDraft:
    """Build a draft for the tiny target, in fp64, through the hook; arguments are options."""

    def make(of: TargetSpec = target, dtype: torch.dtype = torch.float64, **options: Any) -> Draft:
        torch.manual_seed(2)
        settings = algorithm.options(**{**algorithm.small, **options})
        draft: Draft = algorithm.made_with(settings).build_draft(of, algorithm.summary)
        draft.module.to(dtype)
        for parameter in draft.module.parameters():
            nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=algorithm.std)
        return draft

    return make


@pytest.fixture
def make_samples(algorithm: Tiny) -> MakeSamples:
    """Draw random samples of these lengths, about three in four of their tokens to be learned."""

    def make(*lengths: int) -> list[Sample]:
        generator, samples = torch.Generator().manual_seed(3), list[Sample]()
        for index, length in enumerate(lengths):
            tokens_T = torch.randint(algorithm.tokens, (length,), generator=generator)
            learned_T = torch.rand(length, generator=generator) < 0.75
            form: Any = {"size": (length, WIDTH), "generator": generator, "dtype": torch.float64}
            features = {name: torch.randn(**form) for name in algorithm.features}
            samples.append(Sample(SampleId(f"3.{index}", 1), tokens_T, learned_T, features))
        return samples

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Name a folder for an export, which is not there yet."""
    return tmp_path / "export"


@pytest.fixture
def draft(make_draft: MakeDraft) -> Draft:
    return make_draft(dtype=torch.float32)


@pytest.fixture
def exported(algorithm: Tiny, draft: Draft, folder: Path) -> Path:
    algorithm.plain.export_draft(draft, folder, "serving")
    return folder


# ---------------------------------------------------------------- training


def accumulate(
    algorithm: Any, draft: Draft, batches: Sequence[DraftBatch], context: StepContext
) -> tuple[StepOutput, list[Tensor]]:
    """Run micro-batches as one update; return what their outputs sum up to, and the gradients."""
    draft.module.zero_grad()
    output = as_ratio(summed([algorithm.forward_loss(draft, batch, context) for batch in batches]))
    torch.autograd.backward([output.numerator / output.denominator])
    gradients = [p.grad.clone() for p in draft.module.parameters() if p.grad is not None]
    return output, gradients


def use_exact_frequencies(module: nn.Module, theta: float = 10000.0) -> None:
    """Replace the rotary frequencies, computed in fp32, by the same in fp64."""
    frequency = module.get_buffer("rotary.inverse_frequency")
    exact = theta ** -(torch.arange(len(frequency), dtype=torch.float64) / len(frequency))
    torch.testing.assert_close(frequency, exact, rtol=1e-6, atol=0)
    frequency.copy_(exact)


# ---------------------------------------------------------------- exports


def drop(name: str) -> Callable[[dict[str, Tensor]], Any]:
    """Return an edit of an export's tensors that takes one out."""
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    """Return an edit of an export's tensors that sets one."""
    return lambda tensors: tensors.update({name: tensor})


class ExportSuite:
    """What reading an export refuses by name, and that servers read every shape as it was trained."""

    plugin: ClassVar[str]
    architecture: ClassVar[str]
    servers: ClassVar[tuple[str, ...]] = ("sglang", "vllm")
    # By case: fields of config.json (`section.name` those of a section), and what the refusal says.
    refused_configs: ClassVar[Mapping[str, tuple[Mapping[str, Any], str]]] = {}
    refused_tensors: ClassVar[Mapping[str, tuple[Edit, str]]] = {}
    # By case: tensors that vLLM has no place for, and what sglang leaves unread.
    stray: ClassVar[Mapping[str, tuple[Edit, tuple[str, ...]]]] = {}
    # By case: the name of a target's RoPE, and the options of a draft that servers read with it.
    served: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]] = {"default": ("default", {})}
    # What `tiny_target` is told of the targets of these.
    hosts: ClassVar[Mapping[str, Any]] = {"num_hidden_layers": 8}
    reader_shares: ClassVar[frozenset[str]] = frozenset({"draftcore_nn.served"})
    # A matrix of each export, [32, n]: its name in files, and how wide it is.
    matrix: ClassVar[tuple[str, int]] = ("fc.weight", 96)
    # Options of a draft that a warm start begins from, those that it may set all the same, and must not.
    kept: ClassVar[dict[str, Any]] = {}
    free: ClassVar[dict[str, Any]] = {}
    against: ClassVar[dict[str, Any]] = {}

    def test_a_config_we_would_compute_differently_is_refused(
        self, algorithm: Tiny, exported: Path, target: TargetSpec
    ) -> None:
        others = target.vocab_size + 1
        always: dict[str, tuple[Mapping[str, Any], str]] = {
            "another architecture": ({"architectures": ["X"]}, self.architecture),
            "no width": ({"hidden_size": GONE}, "hidden_size"),
            "another vocabulary": (
                {"vocab_size": others}, f"vocab_size {others}, the target {target.vocab_size}",
            ),
            "biases": ({"attention_bias": True}, "attention_bias: True"),
            "positions that change with length": ({"rope_parameters": DYNAMIC}, "'dynamic'"),
        }  # fmt: skip
        whole = (exported / "config.json").read_text()
        for case, (fields, message) in {**always, **self.refused_configs}.items():
            for name, value in fields.items():
                section, _, field = name.rpartition(".")
                change_config(exported, section, **{field: value})
            require_refused(algorithm, exported, target, case, message)
            (exported / "config.json").write_text(whole)

    def test_damaged_tensors_are_refused_by_name(
        self, algorithm: Tiny, exported: Path, target: TargetSpec
    ) -> None:
        name, width = self.matrix
        narrow = put(name, torch.ones(WIDTH, width - WIDTH))
        always: dict[str, tuple[Edit, str]] = {
            "missing": (drop(name), rf"missing fc.weight \[32, {width}\]"),
            "width": (narrow, rf"fc.weight is \[32, {width - WIDTH}\], not \[32, "),
        }
        whole = (exported / "model.safetensors").read_bytes()
        for case, (edit, message) in {**always, **self.refused_tensors}.items():
            change_tensors(exported, edit)
            require_refused(algorithm, exported, target, case, message)
            (exported / "model.safetensors").write_bytes(whole)

    def test_a_warm_start_takes_over_weights_and_shape_and_refuses_another(
        self, algorithm: Tiny, make_draft: MakeDraft, folder: Path, target: TargetSpec
    ) -> None:
        draft = make_draft(dtype=torch.float32, **self.kept)
        algorithm.plain.export_draft(draft, folder, "serving")

        def start(**options: Any) -> Any:
            return algorithm.made_with(algorithm.options(warm_start=str(folder), **options))

        again = start(**self.free).build_draft(target, NO_DATA)
        assert again.config == draft.config
        require_same_bits(again.module.state_dict(), draft.module.state_dict())
        assert start().feature_request(target).layers == tuple(draft.config.get("layers", ()))
        for name, value in self.against.items():
            with pytest.raises(UsageError, match=f"option {name} is"):
                start(**{name: value}).feature_request(target)

    # ------------------------------------------------------------ as servers read it

    def test_the_servers_reader_shares_no_code_with_what_it_checks(self) -> None:
        package = importlib.import_module(self.plugin.partition(".")[0])
        reader = Path(str(package.__file__)).with_name("served.py").read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(reader)))
        imported = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        imported |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
        assert {name for name in imported if name.startswith("draftcore")} == self.reader_shares

    def test_servers_read_every_rope_and_shape_as_it_was_trained(
        self, algorithm: Tiny, tmp_path: Path
    ) -> None:
        for case, (rope, options) in self.served.items():
            small = {**algorithm.small, **options}
            shape = {**self.hosts, "rope_parameters": dict(ROPES[rope])}  # transformers adds to it
            found = served_gaps(self.plugin, small, shape, self.servers, tmp_path / case)
            assert max(found.values()) < 1e-3, f"{case}: {found} nats apart"

    def test_servers_read_no_unknown_kind_of_draft(self, algorithm: Tiny, exported: Path) -> None:
        change_config(exported, architectures=["SomeDraftModel"])
        with pytest.raises(UnservableError, match=self.architecture):
            algorithm.plain.read_export(exported, self.servers[0])

    def test_a_tensor_without_a_place_is_unread_by_sglang_and_refused_by_vllm(
        self, algorithm: Tiny, exported: Path
    ) -> None:
        whole = (exported / "model.safetensors").read_bytes()
        for name, (edit, ignored) in self.stray.items():
            change_tensors(exported, edit)
            assert algorithm.plain.read_export(exported, "sglang").ignored == ignored
            with pytest.raises(UnservableError, match=f"no place for: {name}"):
                algorithm.plain.read_export(exported, "vllm")
            (exported / "model.safetensors").write_bytes(whole)


def require_refused(
    algorithm: Tiny, folder: Path, target: TargetSpec, case: str, message: str
) -> None:
    said = "nothing"
    try:
        algorithm.plain.import_draft(folder, target)
    except UsageError as error:
        said = str(error)
    assert re.search(message, said), f"{case}: reading it says {said}"


def served_gaps(
    plugin: str, options: Mapping[str, Any], shape: Mapping[str, Any], servers: tuple[str, ...],
    folder: Path,
) -> dict[str, float]:  # fmt: skip
    """How far a draft is, as each server reads it, from the drafter's own log-probabilities, in nats.

    The draft has random weights and is for a target of this shape; both are written into `folder`.
    """
    own = bound(plugin, "algorithm", "", options)
    hooks, checked = own.hook, own.options
    path = tiny_target(folder / "target", **shape)
    target = TransformersTarget(str(path), device="cpu")
    draft = hooks.build_draft(target=target, data=NO_DATA, options=checked)
    torch.manual_seed(4)
    for parameter in draft.module.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    export = folder / "export"
    hooks.export_draft(draft=draft, folder=export, layout="serving", options=checked)
    host, generator, found = Host.of(target), torch.Generator().manual_seed(1), dict[str, float]()
    tokens_T, last = torch.randint(250, (LENGTH,), generator=generator), 99
    drafter = hooks.drafter(draft=draft, target=target.load_model(), options=checked)
    layers = drafter.request.layers
    *hidden, state_TH = torch.randn(len(layers) + 1, LENGTH, host.hidden_size, generator=generator)
    state = drafter.allocate(1, LENGTH + 4)
    features = {f"hidden.{k}": x[None] for k, x in zip(layers, hidden, strict=True)}
    features |= {"last_hidden": state_TH[None]}
    drafter.prefill(state, tokens_T[None], torch.tensor([LENGTH]), features, torch.tensor([last]))
    drawn = drafter.propose(state, 1.0, generator)
    assert drawn.probs_BKV is not None
    for server in servers:
        served = hooks.read_export(folder=export, server=server, options=checked)
        assert served.captured(host) == layers, f"{server} captures {served.captured(host)}"
        at = Round(host, tokens_T, last, tuple(hidden), state_TH)
        found[server] = float(gaps(served, at, drawn.tokens_BK[0], drawn.probs_BKV[0]).max())
    return found
