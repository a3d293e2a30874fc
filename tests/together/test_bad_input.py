"""What a user gets wrong, through the command line: what was asked, what is there, what to do."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import xxhash
from draftcore_sdk.targets import conversations, tiny_target

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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("train train.epoch=3", ["train.epoch: unknown key (did you mean 'epochs'?)"]),
        ("train algorithm.options.tt_length=3", ["tt_length", "'ttt_length'", "eagle3"]),
        ("train algorithm.options.layers=[1,2,9]", ["9", "0"]),
        ("train algorithm.options.draft_vocab_size=9999", ["9999", "259"]),
        ("train algorithm.name=eagle", ["(did you mean 'eagle3'?)", "installed: "]),
        ("train store=s3:bucket", ["s3", "file"]),
        ("train capture.name=hff", ["(did you mean 'hf'?)", "installed: "]),
        ("train runner.prefill.name=graps", ["(did you mean 'graphs'?)", "installed: "]),
        ("train channel=tpc", ["(did you mean 'tcp'?)", "installed: "]),
        ("train train.device=gpu", ["'gpu'", "cuda:N"]),
        ("train target.device=gpu", ["'gpu'", "cuda:N"]),
        ("train target.tensor_parallel=2 train.eval_every=1", ["set train.eval_prompts=0"]),
        ("train target.path=./nowhere", ["./nowhere", "target.path"]),
        ("train data.train=nowhere.jsonl", ["nowhere.jsonl"]),
        ("train data.max_skiped=0.5", ["(did you mean 'max_skipped'?)", "max_length", "plugin"]),
        ("capture store=auto", ["file:"]),
        ("eval", ["draftcore train"]),
        ("eval --draft mine", ["no draft 'mine'", "--draft", "leave"]),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work_with_what_there_is(
    project: Project, arguments: str, says: list[str]
) -> None:
    refused(project, *arguments.split(), says=says)
    assert not (project.run / "checkpoints").exists()


@pytest.mark.parametrize("key", ["channel", "store"])
def test_a_password_in_a_uri_is_refused_and_neither_shown_nor_kept(
    project: Project, key: str
) -> None:
    uri = f"{key}=redis://me:hunter2@host:6379?prefix=a"
    output = refused(project, "train", uri, says=[f"{key}: its URI holds", "in the environment"])
    files = (file for file in project.run.rglob("*") if file.is_file())
    assert not any("hunter2" in text for text in (output, *(f.read_text() for f in files)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ["is empty", "at least run"]),
        ("- a\n- b\n", ["holds a list", "at least run"]),
        ("run: x\n  y: [\n", ["is not YAML", 'run.yaml", line 2', "correct it"]),
        ("run: \xff", ["cannot read", "UTF-8"]),
        (None, ["cannot read", "other.yaml"]),
    ],
)
def test_a_configuration_that_is_no_mapping_is_named(
    project: Project, text: str | None, says: list[str]
) -> None:
    if text is None:
        project.yaml.rename(project.folder / "other.yaml")
    else:
        project.yaml.write_bytes(text.encode("latin-1"))
    refused(project, "train", says=["run.yaml", *says])


# ------------------------------------------------------------ the target and the data


def test_a_target_that_cannot_serve_says_what_it_lacks(project: Project, tmp_path: Path) -> None:
    plain = tiny_target(tmp_path / "plain", chat_template=None)
    refused(project, "train", f"target.path={plain}", says=["chat template"])
    shallow = tiny_target(tmp_path / "shallow", num_hidden_layers=3)
    unset = "algorithm.options.layers=null"
    refused(project, "train", f"target.path={shallow}", unset, says=["layers"])


def test_a_model_id_that_nobody_has_is_told_apart_from_a_broken_folder(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    gone = refused(project, "train", "target.path=nobody/nothing", says=["'nobody/nothing'"])
    target = project.folder / "empty"
    target.mkdir()
    broken = refused(project, "train", f"target.path={target}", says=[str(target)])
    assert "huggingface.co" in gone
    assert "huggingface.co" not in broken


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "train.jsonl"), ('{"messages": [{"role": "user", "content": "hello"}]}\n', "assistant")],
)
def test_data_without_anything_to_learn_is_refused(project: Project, text: str, says: str) -> None:
    (project.folder / "train.jsonl").write_text(text)
    refused(project, "train", says=[says])


def test_bad_rows_are_named_by_line_and_skipped_or_refused(project: Project) -> None:
    with (project.folder / "train.jsonl").open("a") as stream:
        stream.write("{not json\n")
    refused(project, "train", "data.bad_rows=refuse", says=["train.jsonl:25"])
    assert "train.jsonl:25" in project.cli("train", "train.max_steps=1").stderr


def test_a_non_finite_gradient_names_the_sample_and_keeps_the_weights(
    project: Project, tmp_path: Path
) -> None:
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
    result = project.cli("train", ok=False, plugin=plugin)
    assert result.exit_code == 1, result.output
    assert "row 2 (sample" in result.output
    assert "row 1" not in result.output


# ------------------------------------------------------------ stores and disks


def test_a_store_of_other_features_or_data_is_refused(project: Project) -> None:
    project.cli("capture")
    refused(project, "train", "algorithm.options.layers=[0,2,4]", says=["hidden.1", "hidden.0"])
    conversations(project.folder / "train.jsonl", 30)
    refused(project, "train", says=["other data"])


def test_an_incomplete_capture_without_data_is_refused(project: Project) -> None:
    project.cli("train", "train.max_steps=1")
    shutil.rmtree(project.run)
    refused(project, "train", "data.train=null", says=["data.train"])


def test_a_full_store_loses_nothing_and_goes_on_when_there_is_room(project: Project) -> None:
    store = f"file:{project.folder / 'small'}"
    refused(project, "capture", f"store={store}?max_bytes=400KiB", code=1, says=["max_bytes"])
    assert not list((project.folder / "small").glob("*.tmp*"))
    assert "were there" in project.cli("capture", f"store={store}").output
    project.cli("train", f"store={store}", "train.max_steps=1")


def test_a_full_disk_stops_a_run_that_goes_on_when_there_is_room(project: Project) -> None:
    """On a real file system of 400 KiB, which a remount then makes larger."""
    features = project.folder / "features"
    features.mkdir()
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=400k tmpfs {features}"
    if shutil.which("unshare") is None or subprocess.run([*alone, mount]).returncode:
        pytest.skip("needs unshare and user namespaces for a file system of its own")
    verb = f"{sys.executable} -m draftcore"
    script = (
        f"{mount}; {verb} capture {project.yaml}; echo capture $?; {verb} train {project.yaml}; "
        f"echo train $?; mount -o remount,size=64m {features}; {verb} train {project.yaml}; echo $?"
    )
    done = subprocess.run([*alone, script], capture_output=True, text=True, timeout=200)
    assert "capture 1" in done.stdout
    assert re.search(r"need \d+\.\d .iB, .* has 400\.0 KiB free", done.stderr)  # before it began
    assert "train 1" in done.stdout
    assert "full" in done.stderr  # stopped on the way
    assert done.stdout.endswith("checkpoints\n0\n"), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------ a run that was begun


@pytest.mark.parametrize(
    ("file", "change", "code", "says"),
    [
        ("state.json", lambda data: data[:-9], 1, ["state.json", "damaged", "checkpoint before"]),
        ("state.json", lambda data: data.replace(b"1", b"2"), 1, ["state.json", "digest"]),
        (
            "draft.safetensors",
            lambda data: data[:-1] + bytes([data[-1] ^ 1]),
            1,
            ["draft.safetensors", "digest"],
        ),
        ("COMPLETE", lambda data: data[:20], 1, ["COMPLETE", "damaged"]),
        ("COMPLETE", lambda data: b"", 1, ["COMPLETE", "damaged"]),
        ("COMPLETE", lambda data: data.replace(b": 2,", b": 3,"), 2, ["the format 3", "reads 2"]),
    ],
)
def test_an_old_newer_or_damaged_checkpoint_says_what_of_it_is_wrong(
    project: Project, file: str, change: Callable[[bytes], bytes], code: int, says: list[str]
) -> None:
    project.cli("train", "train.max_steps=1")
    altered = project.run / "checkpoints" / "step-00000001" / file
    altered.write_bytes(change(altered.read_bytes()))
    refused(project, "train", code=code, says=says)


def test_a_run_goes_on_only_as_it_was_begun(project: Project, tmp_path: Path) -> None:
    project.cli("train", "train.max_steps=1")
    other = ("algorithm.name=dflash", "algorithm.options={}")
    refused(project, "eval", *other, says=["dflash", "eagle3"])
    other_target = f"target.path={tiny_target(tmp_path / 'other', seed=5)}"
    refused(project, "eval", other_target, says=["another target"])
    refused(project, "train", "train.lr=0.1", says=["train.lr", "0.003", "0.1"])
    for text in ("", "{}", "[]"):
        (project.run / "run.json").write_text(text)
        refused(project, "train", says=["run.json", "delete it", "another run folder"])


def test_a_checkpoint_of_a_plugin_that_is_gone_names_the_pip_line(project: Project) -> None:
    project.cli("train", "train.max_steps=1")
    state = project.run / "checkpoints" / "step-00000001" / "state.json"
    data = json.loads(state.read_text())
    data["plugins"].append(
        {"name": "gone", "dist": "draftcore-gone", "version": "1.2", "origin": None}
    )
    state.write_text(json.dumps(data))
    mark = state.with_name("COMPLETE")
    manifest = json.loads(mark.read_text())
    manifest["files"]["state.json"] = xxhash.xxh3_128(state.read_bytes()).hexdigest()
    mark.write_text(json.dumps(manifest))
    refused(project, "eval", says=["pip install", "draftcore-gone"])


def test_a_run_folder_that_is_a_file_is_named(project: Project) -> None:
    project.run.write_text("")
    refused(project, "train", code=1, says=[str(project.run), "exists", "check the path"])


def test_an_export_is_of_a_known_layout_in_an_empty_folder_and_read_from_one(
    project: Project,
) -> None:
    project.cli("train", "train.max_steps=1")
    refused(project, "export", "--layout", "onnx", says=["onnx", "serving"])
    project.cli("export", "train.max_steps=1")
    refused(project, "export", says=["not empty"])
    refused(project, "eval", "--export", project.folder, says=["config.json"])


def test_an_export_that_finds_no_room_leaves_nothing(project: Project) -> None:
    """No file may be larger than 4 KiB here, which safetensors reports in an error of its own."""
    project.cli("train", "train.max_steps=1")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        refused(project, "export", code=1, says=["cannot write the export", "--out"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(project.run.glob("*export*"))


def test_an_evaluation_is_shown_also_where_its_report_cannot_be_written(project: Project) -> None:
    project.cli("train", "train.max_steps=1")
    (project.run / "eval").write_text("")
    says = ["acceptance length", "run/eval", "check the path"]
    refused(project, "eval", code=1, says=says)
