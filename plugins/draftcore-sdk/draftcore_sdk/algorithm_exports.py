"""What an algorithm's own tests ask of its exports, beside `AlgorithmSuite`: what is refused and served.

    class TestExports(ExportSuite):
        plugin, architecture = "draftcore_mine.plugin", "MyDraftModel"
        refused_configs = {"two values": ({"steps": 4, "my_config.steps": 5}, "two values of steps")}

It works with the fixtures of `algorithm_fixtures`, and with `draft` and `exported` from here. Import
these in a conftest; a module may have another `draft`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from draftcore_hf.target import TransformersTarget
from draftcore_nn.served import Host, Round, UnservableError, gaps
from torch import Tensor

from draftcore.contracts.algorithm import Draft
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError
from draftcore_sdk.algorithm_fixtures import NO_DATA, MakeDraft, Tiny, drop, put
from draftcore_sdk.exports import GONE, ROPES, change_config, change_tensors, imports_of_ours
from draftcore_sdk.suite import bound
from draftcore_sdk.targets import tiny_target
from draftcore_sdk.workbench import require_same_bits

Edit = Callable[[dict[str, Tensor]], Any]
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LENGTH = 40  # of a prompt, beyond the lengths that these RoPEs are scaled from


@pytest.fixture
def draft(make_draft: MakeDraft) -> Draft:
    return make_draft(dtype=torch.float32)


@pytest.fixture
def exported(algorithm: Tiny, draft: Draft, folder: Path) -> Path:
    algorithm.plain.export_draft(draft, folder, "serving")
    return folder


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
    reader_shares: ClassVar[frozenset[str]] = frozenset({"draftcore_nn.served"})
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
        always: dict[str, tuple[Edit, str]] = {
            "missing": (drop("fc.weight"), r"missing fc.weight \[32, 96\]"),
            "width": (put("fc.weight", torch.ones(32, 64)), r"fc.weight is \[32, 64\], not \[32, "),
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
        assert start().feature_request(target).layers == tuple(draft.config["layers"])
        for name, value in self.against.items():
            with pytest.raises(UsageError, match=f"option {name} is"):
                start(**{name: value}).feature_request(target)

    # ------------------------------------------------------------ as servers read it

    def test_the_servers_reader_shares_no_code_with_what_it_checks(self) -> None:
        package = importlib.import_module(self.plugin.partition(".")[0])
        assert (
            imports_of_ours(Path(str(package.__file__)).with_name("served.py"))
            == self.reader_shares
        )

    def test_servers_read_every_rope_and_shape_as_it_was_trained(
        self, algorithm: Tiny, tmp_path: Path
    ) -> None:
        for case, (rope, options) in self.served.items():
            small = {**algorithm.small, **options}
            found = served_gaps(self.plugin, small, rope, self.servers, tmp_path / case)
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
    plugin: str, options: Mapping[str, Any], rope: str, servers: tuple[str, ...], folder: Path
) -> dict[str, float]:
    """How far a draft is, as each server reads it, from the drafter's own log-probabilities, in nats.

    The draft has random weights and is for a target with this RoPE; both are written into `folder`.
    """
    own = bound(plugin, "algorithm", "", options)
    hooks, checked = own.hook, own.options
    path = tiny_target(folder / "target", num_hidden_layers=8, rope_parameters=ROPES[rope])
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
    hidden = [torch.randn(LENGTH, host.hidden_size, generator=generator) for _ in layers]
    state = drafter.allocate(1, LENGTH + 4)
    features = {f"hidden.{k}": x[None] for k, x in zip(layers, hidden, strict=True)}
    drafter.prefill(state, tokens_T[None], torch.tensor([LENGTH]), features, torch.tensor([last]))
    drawn = drafter.propose(state, 1.0, generator)
    assert drawn.probs_BKV is not None
    for server in servers:
        served = hooks.read_export(folder=export, server=server, options=checked)
        assert served.captured(host) == layers, f"{server} captures {served.captured(host)}"
        at = Round(host, tokens_T, last, tuple(hidden), hidden[-1])
        found[server] = float(gaps(served, at, drawn.tokens_BK[0], drawn.probs_BKV[0]).max())
    return found
