"""What a user gets wrong, through the command line: what was asked, what is there, what to do."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shlex
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner
from draftcore_sdk.stores import mount_small
from draftcore_sdk.targets import conversations, tiny_target

import draftcore
from draftcore.cli import main
from draftcore.plugins.registry import load_plugins
from tests.forks import start_process
from tests.together.conftest import ODD

if TYPE_CHECKING:
    from tests.together.conftest import Project


def refused(
    project: Project, verb: str, *arguments: object, code: int = 2, says: Sequence[str] = ()
) -> str:
    result = project.cli(verb, *arguments, ok=False)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    for text in says:
        assert text in result.output
    return result.output


# ------------------------------------------------------------ the configuration

EMPTY = Path(draftcore.__file__).with_name("py.typed")
TWO = "algorithm=null 'drafts={blocks: {algorithm: {name: dflash}}, domino: {algorithm: {name: domino}}}'"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("train algorithm.options.tt_length=3", ["tt_length", "'ttt_length'", "eagle3"]),
        ("train algorithm.options.layers=[1,2,9]", ["9", "0"]),
        ("train algorithm.options.draft_vocab_size=9999", ["9999", "259"]),
        ("train algorithm.name=eagle33", ["(did you mean 'eagle3'?)", "installed: "]),
        ("train store=s3:bucket", ["s3", "file"]),
        ("train store=file:/dev/shm/refused?volatile=on", ["for itself", "keeps nothing"]),
        ("train capture.name=hff", ["(did you mean 'hf'?)", "installed: "]),
        ("train runner.prefill.name=graps", ["(did you mean 'graphs'?)", "installed: "]),
        ("train channel=tpc", ["(did you mean 'tcp'?)", "installed: "]),
        ("train topology.producer=2", ["topology.producer", "producers"]),
        ("train train.device=gpu", ["'gpu'", "cuda:N"]),
        ("train target.device=gpu", ["'gpu'", "cuda:N"]),
        ("train target.tensor_parallel=2 train.eval_every=1", ["set train.eval_prompts=0"]),
        ("train target.path=./nowhere", ["./nowhere", "target.path"]),
        ("train data.max_skiped=0.5", ["(did you mean 'max_skipped'?)", "max_length", "plugin"]),
        ("train data.train=nowhere.jsonl", ["nowhere.jsonl"]),
        ("train data.eval=nowhere.jsonl", ["nowhere.jsonl"]),
        (f"train data.eval={EMPTY}", ["data.eval: ", "holds no row"]),
        ("train data.eval=null train.eval_every=1", ["set data.eval"]),
        ("capture store=auto", ["file:"]),
        ("eval", ["draftcore train"]),
        ("eval eval.temperature=1e-300", ["temperature", "0 is greedy"]),
        ("eval --draft mine", ["no draft 'mine'", "--draft", "leave"]),
        (f"eval --draft dominos {TWO}", ["dominos", "domino", "blocks"]),
        (f"export --out somewhere {TWO}", ["--out", "--draft"]),
        (f"train {TWO} drafts.domino.train.batch=3", ["drafts.domino.train.batch", "clip"]),
        (f"train {TWO} drafts.domino.algorithm.name=dominoes", ["dominoes", "domino"]),
        ("train 'drafts={a: {algorithm: {name: dflash}}}'", ["either algorithm", "or drafts"]),
        ("train algorithm=null", ["either algorithm", "or drafts"]),
        (
            "train 'algorithm={name: odd}' capture.name=sglang",
            [
                "'odd' asks for the target's topk",
                "'sglang' does not give them\n  set capture.name=",
            ],
        ),
        ("train train.compile=on train.shard=true", ["or train.shard is on"]),
        ("train 'algorithm={name: odd}' train.compile=on", ["'odd' has no capability compile"]),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work_with_what_there_is(
    project: Project, arguments: str, says: list[str]
) -> None:
    project.plugins = [ODD]
    refused(project, *shlex.split(arguments), says=says)
    assert not (project.run / "checkpoints").exists()
    if "train.compile" not in arguments:
        assert not (project.run / "data" / "train" / "rows.bin").exists(), "not a row is rendered"
    if "shm:refused" in arguments:  # another worker may be at it
        assert not [path for path in Path("/dev/shm").iterdir() if "refused" in path.name]


@pytest.mark.parametrize("key", ["channel", "store", "data.train"])
def test_a_password_in_a_uri_is_refused_never_shown_nor_kept(project: Project, key: str) -> None:
    uri = "redis://me:hunter2@host:6379?prefix=a"
    override = f"{key}=[{{source: '{uri}'}}]" if key == "data.train" else f"{key}={uri}"
    output = refused(project, "train", override, says=[f"{key}: its URI holds", "environment"])
    files = (file for file in project.run.rglob("*") if file.is_file())
    assert not any("hunter2" in text for text in (output, *(f.read_text() for f in files)))


# ------------------------------------------------------------ files that are none, numbers, terminals

NO_FILE = "is a pipe, a socket or a device\n  put a file in its place"
ON, PLAIN = "train train.epochs=2", "eval --export run/plain"
LAST = "run/checkpoints/step-00000006/"
FILES = {
    "run.yaml": "eval", "train.jsonl": ON, "eval.jsonl": "eval",
    "a.jinja": f"{ON} data.chat_template=a.jinja",
    "run/run.json": ON, "run/metrics.jsonl": "status", "run/queue.json": "status",
    "run/data/train/lock": ON, "run/data/train/dataset.json": ON, "run/data/train/rows.bin": ON,
    f"{LAST}COMPLETE": "eval", f"{LAST}state.json": "eval", f"{LAST}draft.safetensors": "eval",
    "features/manifest.json": ON, "features/shard-*": ON,
    "target/config.json": "eval", "target/model.safetensors": "eval", "target/tokenizer.json": "eval",
    "run/export/draftcore.json": "eval --export run/export",
    "run/plain/config.json": PLAIN, "run/plain/model.safetensors": PLAIN,
}  # fmt: skip


def test_what_is_no_file_is_refused_by_its_kind_in_the_place_of_each_that_is_read(
    trained: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be waited for, or read, for ever."""
    monkeypatch.chdir(trained.folder)
    shutil.copytree(trained.config["target"]["path"], "target")
    own = ("target.path=target", "store=file:features", "train.max_steps=9")
    trained.cli("export")
    shutil.copytree("run/export", "run/plain", ignore=shutil.ignore_patterns("draftcore.json"))
    trained.cli("capture", *own)
    for file, words in FILES.items():
        place = max(Path().glob(file), default=Path(file))
        there = place.exists() and place.rename(tmp_path / "aside")
        os.mkfifo(place)
        refused(trained, *shlex.split(words), *own, says=[f"{place.name} {NO_FILE}"])
        place.unlink()
        if there:
            there.rename(place)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.jsonl")
        for data in ("socket.jsonl", "/dev/zero"):
            refused(trained, "train", f"data.train={data}", says=[f"{data} {NO_FILE}"])


def numbers(command: click.Command, *above: str) -> Iterator[list[str]]:
    """Yield what gives nan to each option of a verb, and of those below it, that takes a number."""
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from numbers(inner, *above, name)
    for option in command.params:
        if isinstance(option.type, click.types.FloatParamType):
            yield [*above, "run.yaml", option.opts[0], "nan"]


def test_nan_is_no_number_of_any_verb(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.folder)
    verbs = {name: verb for p in load_plugins().ready for name, verb in p.verbs.items()}
    asked = [words for name, verb in verbs.items() for words in numbers(verb, name)]
    assert {words[-2] for words in asked} >= {"--patience", "--temperature", "--seconds", "--lr"}
    for words in asked:
        out = ["--out", "a.jsonl", "--in-process"] * ("regenerate" in words)
        result = CliRunner().invoke(main, [*words, *out])
        assert (result.exit_code, "nan" in result.output) == (2, True), result.output
    for key in ("train.lr", "train.rank_timeout", "eval.temperature", "data.max_skipped"):
        refused(project, "eval", f"{key}=.nan", says=[key.partition(".")[2], "finite number"])


def test_what_others_wrote_never_controls_the_terminal(project: Project, tmp_path: Path) -> None:
    escape, shown = "\x1b[2J", "\\x1b[2J"
    target = tiny_target(tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "model_type": escape}))
    (folder := tmp_path / "rows").mkdir()
    (folder / f"{escape}.jsonl").write_text(
        "{torn\n" + (project.folder / "train.jsonl").read_text()
    )
    label = f'drafts={{"a{escape}\\0": {{algorithm: {{name: eagle3}}}}}}'
    for words in (["train", f"target.path={target}"], ["train", "algorithm=null", label]):
        said = refused(project, *words, says=[shown])
        assert not {"\x1b", "\0"} & set(said)
    said = project.cli("capture", f"data.train={folder}").output
    assert f"not valid JSON ({shown}.jsonl:1)" in said
    assert "\x1b" not in said


# ------------------------------------------------------------ the target and the data


def test_a_target_that_cannot_serve_says_what_it_lacks(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model id that nobody has is told apart from a broken folder."""
    plain = tiny_target(tmp_path / "plain", chat_template=None)
    refused(project, "train", f"target.path={plain}", says=["chat template"])
    narrow = tiny_target(tmp_path / "narrow", vocab_size=250, pad_token_id=None, eos_token_id=1)
    small = ("algorithm.options.draft_vocab_size=99", f"target.path={narrow}")
    refused(project, "train", *small, says=["wrote the token 257", "has 250 rows"])
    shallow = tiny_target(tmp_path / "shallow", num_hidden_layers=3)
    unset = "algorithm.options.layers=null"
    refused(project, "train", f"target.path={shallow}", unset, says=["layers"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    gone = refused(project, "train", "target.path=nobody/nothing", says=["'nobody/nothing'"])
    (target := tmp_path / "empty").mkdir()
    broken = refused(project, "train", f"target.path={target}", says=[str(target)])
    assert "huggingface.co" in gone
    assert "huggingface.co" not in broken


def test_data_that_teaches_nothing_is_refused_and_bad_rows_are_named(project: Project) -> None:
    file = project.folder / "train.jsonl"
    rows = file.read_text()
    question = '{"messages": [{"role": "user", "content": "hello"}]}\n'
    for text, says in (("", "train.jsonl"), (question, "assistant")):
        file.write_text(text)
        refused(project, "train", says=[says])
    file.write_text(rows + "{not json\n")
    refused(project, "train", "data.bad_rows=refuse", says=["train.jsonl:25"])
    assert "train.jsonl:25" in project.cli("train", "train.max_steps=1").stderr


def test_a_non_finite_gradient_names_the_sample_and_stops(project: Project, tmp_path: Path) -> None:
    """One sample's loss turns nan; the run stops before the update, and the others are innocent."""
    plugin = tmp_path / "poison.py"
    plugin.write_text(
        "from draftcore import hookimpl\n"
        "@hookimpl(wrapper=True)\n"
        "def forward_loss(draft, batch, context):\n"
        "    output = yield\n"
        "    from draftcore.contracts.algorithm import StepOutput\n"
        "    factor = float('nan') if batch.token_ids_BT.shape[1] > 150 else 1.0\n"
        "    return StepOutput(output.numerator * factor, output.denominator, output.counts)\n"
    )
    conversations(project.folder / "train.jsonl", ["one", "two", "long " * 30, "four"])
    project.plugins = [plugin]
    said = refused(project, "train", code=1, says=["row 2 (sample"])
    assert "row 1" not in said


# ------------------------------------------------------------ stores and disks


def test_a_store_of_other_features_or_data_or_in_part_is_refused(trained: Project) -> None:
    shutil.rmtree(trained.run)
    layers = "algorithm.options.layers=[0,2,4]"
    refused(trained, "train", layers, says=["hidden.1", "hidden.0"])
    part = f"store=file:{trained.folder}/part"
    trained.cli("train", part, "train.max_steps=1")
    shutil.rmtree(trained.run)
    refused(trained, "train", part, "data.train=null", says=["data.train"])
    conversations(trained.folder / "train.jsonl", 30)
    refused(trained, "train", says=["other data"])


def test_a_full_store_loses_nothing_and_goes_on_when_there_is_room(project: Project) -> None:
    store = f"file:{project.folder / 'small'}"
    refused(project, "capture", f"store={store}?max_bytes=400KiB", code=1, says=["max_bytes"])
    assert not list((project.folder / "small").glob("*.tmp*"))
    assert "were there" in project.cli("capture", f"store={store}").output
    project.cli("train", f"store={store}", "train.max_steps=1")


def on_a_small_disk(project: Project, features: str, log: str) -> None:
    """Run verbs on a file system of 400 KiB of this process's own, which becomes larger."""
    remount = 32
    with open(log, "w") as said:
        for verb in ("capture", "train", "train") if mount_small(Path(features), 400 << 10) else ():
            result = project.cli(verb, ok=False)
            print(json.dumps([verb, result.exit_code, result.output]), file=said)
            if verb == "train":
                where = (b"tmpfs", features.encode(), b"tmpfs")
                ctypes.CDLL(None).mount(*where, remount, b"size=64m")


def test_a_full_disk_stops_a_run_that_goes_on_when_there_is_room(project: Project) -> None:
    """On a real file system of 400 KiB, which a remount then makes larger."""
    (features := project.folder / "features").mkdir()
    log = project.folder / "said"
    process = start_process(on_a_small_disk, project, str(features), str(log))
    process.join(300)
    assert process.exitcode == 0
    if not (said := log.read_text()):
        pytest.skip("needs user namespaces for a file system of its own")
    (*capture, before), (*stopped, said_then), (*whole, _) = map(json.loads, said.splitlines())
    assert (capture, stopped, whole) == (["capture", 1], ["train", 1], ["train", 0])
    assert re.search(r"need \d+\.\d .iB, .* has 400\.0 KiB free", before)  # before it began
    assert "full" in said_then  # stopped on the way
    assert "Traceback" not in before + said_then


# ------------------------------------------------------------ a run that was begun


def test_a_run_goes_on_only_as_it_was_begun(trained: Project, tmp_path: Path) -> None:
    other = ("algorithm.name=dflash", "algorithm.options={}")
    refused(trained, "eval", *other, says=["dflash", "eagle3"])
    other_target = f"target.path={tiny_target(tmp_path / 'other', seed=5)}"
    refused(trained, "eval", other_target, says=["another target"])
    refused(trained, "train", "train.lr=0.1", says=["train.lr", "0.003", "0.1"])
    refused(trained, "train", "train.batch_tokens=99", says=["batch_tokens: None then, 99 now"])
    for text in ("", "{}", "[]"):
        (trained.run / "run.json").write_text(text)
        refused(trained, "train", says=["run.json", "delete it", "another run folder"])


def test_a_run_folder_that_is_a_file_is_named(project: Project) -> None:
    project.run.write_text("")
    refused(project, "train", code=1, says=[str(project.run), "exists", "check the path"])


def test_an_export_has_a_known_layout_and_an_empty_folder_and_is_read(trained: Project) -> None:
    """Where there is no room it leaves nothing: no file may be larger than 4 KiB here, which

    safetensors reports in an error of its own.
    """
    refused(trained, "export", "--layout", "onnx", says=["onnx", "serving"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        refused(trained, "export", code=1, says=["cannot write the export", "--out"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(trained.run.glob("*export*"))
    trained.cli("export")
    refused(trained, "export", says=["not empty"])
    refused(trained, "eval", "--export", trained.folder, says=["config.json"])


def test_an_evaluation_is_shown_also_where_its_report_cannot_be_written(trained: Project) -> None:
    (trained.run / "eval").write_text("")
    says = ["acceptance length", "run/eval", "check the path"]
    refused(trained, "eval", code=1, says=says)
