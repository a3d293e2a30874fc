"""What every algorithm must do. See `draftcore_sdk` for how to use it.

A subclass sets `plugin`, and options where the default ones are too large to be quick. The tests
run on the CPU in fp32, on a tiny random target and its own answers (`example`); a loose one-file
plugin also says where it lies, so that the command line can load it.

Capabilities switch tests on (`compile`, `disagg`, `layout:NAME`, `served:NAME`) and off:
`split_dependent` for a loss that is a mean over its micro-batch, `stop_gradient` for one whose
weights depend on the draft and are held constant in the gradient. Training is in `algorithm_training`,
what comes after it here.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from draftcore_eval.proposals import depth_of
from draftcore_nn.served import Host, ServedDraft, Suspect, gaps, leads
from draftcore_sglang.rows import HandedOver, RowError, first_draft_input, wire_row
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftcore.errors import DraftcoreError, UsageError
from draftcore_sdk.algorithm_training import require_same_bits, require_same_output
from draftcore_sdk.drafting import Drafting, Told
from draftcore_sdk.example import STOP_AT
from draftcore_sdk.internals import trained_tensors, type_error
from draftcore_sdk.prefilled import SHAPE, Log, arrivals, last_tokens, request, take_over
from draftcore_sdk.project import Project
from draftcore_sdk.workbench import SEED, Bench, snapshot

PICKLES = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class AlgorithmSuite(Drafting):
    """The behaviour of an algorithm, opened through its plugin."""

    # ------------------------------------------------------------ capability `disagg`

    def test_disagg_answers_an_empty_batch_with_an_empty_input(self, bench: Bench) -> None:
        bench.require("disagg")
        log = Log()
        found = take_over(bench, [], log)
        matrices = (found.hidden_BH, found.topk_p_BK, found.topk_index_BK)
        assert [len(tensor) for tensor in (*matrices, found.last_tokens_B)] == [0, 0, 0, 0]
        assert log.calls == []

    def test_disagg_gives_every_request_its_own_input(self, bench: Bench) -> None:
        """A request's neighbours change nothing of it, and it goes on from its own last token."""
        bench.require("disagg")
        together = take_over(bench, ["a", "b", "c"])
        for place, rid in enumerate(("a", "b", "c")):
            alone = take_over(bench, [rid])
            for name, tensor in vars(alone).items():
                assert torch.equal(vars(together)[name][place : place + 1], tensor), name
            assert torch.equal(alone.last_tokens_B, last_tokens([HandedOver(rid, {})]))

    def test_disagg_names_the_request_and_the_field_that_is_missing(self, bench: Bench) -> None:
        """Of the row that was agreed upon: prefill and decode side ask for it apart."""
        bench.require("disagg")
        row = wire_row(bench, SHAPE)
        for field in row:
            full, log = [request(rid, row) for rid in ("a", "b", "c")], Log()
            full[1] = HandedOver("b", {**full[1].row, field.name: None})
            tokens_B = last_tokens(full)
            with pytest.raises(RowError, match=f"'b': {field.name} was not sent"):
                first_draft_input(bench, arrivals(full), tokens_B, log, SHAPE, lambda found: found)
            assert log.calls == [], "something was relayed of a batch that failed"
        assert wire_row(bench, SHAPE) == row

    def test_disagg_leaves_what_it_is_given_alone(self, bench: Bench) -> None:
        bench.require("disagg")
        row = wire_row(bench, SHAPE)
        requests = [request(rid, row) for rid in ("a", "b")]
        batch, tokens_B = arrivals(requests), last_tokens(requests)
        first_draft_input(bench, batch, tokens_B, Log(), SHAPE, lambda found: found)
        assert torch.equal(tokens_B, last_tokens(requests)), "the last tokens were altered"
        untouched = arrivals(requests)
        assert torch.equal(batch.seq_lens_B, untouched.seq_lens_B), "the lengths were altered"
        for one in requests:
            require_same_bits(given(one), given(request(one.rid, row)))

    def test_disagg_publishes_then_stashes_and_only_with_overlap(self, bench: Bench) -> None:
        """By the core, after the answer was checked: a hook that writes itself does it too early."""
        bench.require("disagg")
        log = Log()
        found = take_over(bench, ["a", "b"], log)
        assert log.calls == [("publish", [3, 5], [10, 11]), ("stash", [3, 5], found)]
        log = Log()
        take_over(bench, ["a", "b"], log, overlap=False)
        assert log.calls == []

    # ------------------------------------------------------------ decoding

    def test_the_drafter_reads_what_training_captured(self, bench: Bench) -> None:
        asked, captured = bench.drafter(bench.trained.draft).request, bench.request()
        known = {*asked.names, asked.dtype} <= {*captured.names, captured.dtype}
        assert known, f"it asks for {asked}, and training for {captured}"

    # ------------------------------------------------------------ drafter: through graphs

    def test_rounds_that_are_recorded_as_graphs_decode_the_same(self, bench: Bench) -> None:
        """Three rows padded to four; what waits for the device is refused."""
        draft, prompts = bench.trained.draft, bench.example.prompts
        if hasattr(bench.drafter(draft), "depth"):
            pytest.skip("rounds of trees are not recorded")
        recorded = bench.decode_recorded(draft, prompts)
        assert [one.tokens for one in recorded] == [
            one.tokens for one in bench.decode(draft, prompts)
        ]

    def test_a_drafter_follows_weights_that_are_updated_in_place(self, bench: Bench) -> None:
        """Evaluation during training keeps its drafter, and the graphs that read these weights."""
        draft, prompts = bench.build(seed=SEED + 1), bench.example.prompts
        kept, learned = bench.drafter(draft), trained_tensors(bench.trained.draft)
        with torch.no_grad():
            draft.module.load_state_dict(learned, strict=False)
        assert bench.decode(draft, prompts, kept) == bench.decode(draft, prompts)

    # ------------------------------------------------------------ export

    def test_an_export_reads_back_as_the_draft_and_changes_nothing_in_it(
        self, bench: Bench, tmp_path: Path
    ) -> None:
        """In bits, in its loss and in its drafts."""
        draft, prompts, batch = bench.trained.draft, bench.example.prompts, bench.batch
        before = snapshot(draft)
        for layout in bench.claimed("layout"):
            bench.export(bench.begun, tmp_path / "another" / layout, layout)
            folder = bench.export(draft, tmp_path / layout, layout)
            exported = sorted(file.name for file in folder.iterdir())
            require_same_bits(snapshot(draft), before)
            assert not draft.module.training, "exporting leaves the draft in another mode"
            again, other = bench.read(folder), bench.read(folder)
            assert again.module is not other.module, "what is read twice is one draft"
            again.module.eval()
            require_same_bits(snapshot(again), before, "read back, ")
            assert again.frozen == draft.frozen, f"{set(again.frozen)} are frozen when read back"
            ours, theirs = bench.loss(again, batch), bench.loss(draft, batch)
            require_same_output(ours, theirs, "read back and before, it has")
            same = bench.decode(again, prompts) == bench.decode(draft, prompts)
            assert same, "an export that was read back drafts other tokens"
            assert again.config == draft.config, f"its config is {again.config} when read back"
            for name, parameter in draft.module.named_parameters():
                can = again.module.get_parameter(name).requires_grad
                assert can == parameter.requires_grad, f"{name}: trainable is {can} when read back"
            there = {file.name for file in folder.parent.iterdir()}
            assert there <= {"another", *bench.claimed("layout")}, (
                f"it writes beside its folder: {there}"
            )
            written = sorted(file.name for file in folder.iterdir())
            assert written == exported, f"importing leaves {written}, exporting {exported}"
            files = [file for file in folder.rglob("*") if file.is_file()]
            pickled = [file.name for file in files if file.read_bytes()[:2] in PICKLES]
            assert not pickled, f"a pickle may run code where it is read: {', '.join(pickled)}"

    def test_an_export_without_one_of_its_tensors_is_refused(
        self, bench: Bench, tmp_path: Path
    ) -> None:
        """Or read as the same draft; one that is random in part looks like a bad one."""
        draft = bench.trained.draft
        for layout in bench.claimed("layout"):
            folder = bench.export(draft, tmp_path / layout, layout)
            for file in folder.glob("*.safetensors"):
                tensors = load_file(file)
                for name in tensors:
                    others = {other: value for other, value in tensors.items() if other != name}
                    save_file(others, file, metadata={"format": "pt"})
                    with suppress(DraftcoreError):
                        again = bench.read(folder)
                        said = f"{name} is not there, and nothing is said: "
                        require_same_bits(snapshot(again), snapshot(draft), said)
                save_file(tensors, file, metadata={"format": "pt"})

    def test_an_unknown_layout_is_refused(self, bench: Bench, tmp_path: Path) -> None:
        assert bench.claimed("layout")
        with pytest.raises(UsageError, match="no-such-layout"):
            bench.export(bench.trained.draft, tmp_path / "export", "no-such-layout")
        assert not any((tmp_path / "export").iterdir())

    def test_servers_draft_what_the_drafter_does(self, bench: Bench, tmp_path: Path) -> None:
        """An export, read anew by a server's conventions, gives the drafter's layers and drafts.

        Drafts are drawn, so that their distributions can be compared: our own algorithms differ by
        3e-5 nats (2026-11). Greedy drafts are the most probable ones, or within as much of them.
        """
        for server in bench.claimed("served"):
            folder = bench.export(bench.trained.draft, tmp_path / server, "serving")
            served = bench.served(folder, server)
            host, drafter = Host.of(bench.example.spec), bench.drafter(bench.trained.draft)
            told = Told(drafter, bench.learned, [*map(len, bench.example.prompts)])
            greedy, drawn = told.propose(), told.propose(1.0)
            layers, own = served.captured(host), drafter.request.layers
            assert layers == own, f"{server} would capture the layers {layers}, the drafter {own}"
            assert drawn.probs_BKV is not None
            require_members(served, host, folder, bench)
            for row, drawn_K in enumerate(drawn.tokens_BK):
                at = bench.round(row, served.captured(host), host)
                gap = float(gaps(served, at, drawn_K, drawn.probs_BKV[row]).max())
                assert gap < 1e-3, f"{server}, prompt {row}: {gap:.2g} nats apart"
                lead = float(leads(served, at, greedy.tokens_BK[row]).max())
                assert lead < 1e-3, f"{server}, prompt {row}: another draft leads by {lead:.2g}"

    def test_an_unknown_server_is_refused(self, bench: Bench, tmp_path: Path) -> None:
        assert bench.claimed("served")
        folder = bench.export(bench.trained.draft, tmp_path / "export", "serving")
        with pytest.raises(UsageError, match="no-such-server"):
            bench.served(folder, "no-such-server")

    # ------------------------------------------------------------ the command line

    def test_runs_decode_losslessly_and_resume_to_the_same_bits(self, bench: Bench) -> None:
        """Offline, whole and evaluated on the way the one; the other colocated, in two processes, and

        stopped by Ctrl-C.
        """
        whole = Project(bench, "whole", f"file:{bench.folder / 'features'}")
        stopped = Project(bench, "stopped")
        with stopped.begin("train", **{STOP_AT: "1"}) as stopping:
            whole.cli("train", "train.eval_every=2")
            assert list(whole.losses()) == [1, 2, 3, 4]
            said, _ = stopping.communicate()
        assert stopping.returncode == 130, said
        assert "interrupted: step " in said
        stopped.cli("train")
        losses, expected = stopped.losses(), whole.losses()
        for step, cause in {
            1: "what is of the process counts: earlier runs, hash(), the order of a set",
            2: "what a checkpoint does not hold counts: it is stopped and resumed after step 1",
            3: "an evaluation changes the draft or a random state: it is after step 2",
            4: "what a checkpoint does not hold counts, or an evaluation changes something",
        }.items():
            both = f"{losses[step]} stopped and resumed, {expected[step]} whole"
            assert losses[step] == expected[step], f"the loss of step {step} is {both}\n{cause}"
        assert json.loads(whole.cli("eval", "--json"))["lossless"] is True


def require_members(served: ServedDraft, host: Host, folder: Path, bench: Bench) -> None:
    """Ask a reading what `verify` asks it, beside its logits."""
    most, facts, draft = served.most, served.facts, bench.trained.draft
    assert most is None or type(most) is int, f"`most` is a number or None, not {most!r}"
    least = depth_of(bench.drafter(draft))
    assert most is None or most >= least, f"`most` is {most}, and the drafter proposes {least}"
    known = {"vocab_size": host.vocab_size, "hidden_size": host.hidden_size}
    for name, value in {**known, "num_target_layers": host.num_layers}.items():
        assert facts.get(name) in (None, value), f"facts: {name} is {facts[name]}, not {value}"
    exported = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    missing = set(served.ignored) - exported
    assert not missing, f"it ignores what is not in the export: {', '.join(sorted(missing))}"
    for suspect in served.suspects(host, draft.config):
        assert isinstance(suspect, Suspect), f"suspects() gives a {type(suspect).__name__}"
        mistake = type_error(suspect.draft, ServedDraft, f"the draft of {suspect.cause!r}")
        assert not mistake, mistake


def given(handed: HandedOver) -> dict[str, Tensor]:
    """The fields of a row that were sent."""
    return {name: values for name, values in handed.row.items() if values is not None}
