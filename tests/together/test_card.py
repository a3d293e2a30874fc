"""An export's card: what somebody reads who was given the link, and nothing else does."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from tests.together.conftest import Project

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
FIGURE = re.compile(r"\*\*(\d\.\d\d) tokens a round\*\*")


def read(folder: Path) -> tuple[Any, str]:
    """Return the metadata and the text of a card, which has to be one."""
    card = ModelCard.load(folder / "README.md", ignore_metadata_errors=False)
    return card.data, card.text


def test_a_card_says_what_was_measured_of_these_weights_and_names_no_path(trained: Project) -> None:
    """Before an evaluation, after one, after one of other weights, and after somebody's edit."""
    export, target = trained.run / "export", Path(trained.config["target"]["path"])
    said = trained.cli("export").output
    assert "no acceptance was measured: draftcore eval" in said
    shown = said[said.index("to serve") :].replace("<target>", "Qwen/Qwen3-8B").strip()
    assert shown.replace(str(trained.run), "runs/my-draft").replace(target.name, "Qwen3-8B") in PAGE
    assert "No acceptance was measured." in read(export)[1]
    report = json.loads(trained.cli("eval", "eval.requests=3", "--json").stdout)
    (data, text), served = read(export), report["served"]
    assert FIGURE.findall(text) == [f"{report['acceptance_length']:.2f}"]
    assert f'"num_speculative_tokens": {served["num_drafts"]}' in text
    assert f"--speculative-num-steps {served['num_drafts']} " in text
    assert data.library_name == "draftcore"
    assert {"eagle3", "speculative-decoding", "sglang", "vllm"} <= set(data.tags)
    assert (data.base_model, data.license) == (None, None)
    words = "3 requests at once", "is to be looked up", "hf upload <you>/"
    for name in (*words, "train.jsonl", "eval.jsonl", target.name, "draftcore-eagle3 0.1.0"):
        assert name in text, name
    whole = (export / "README.md").read_text()
    assert str(Path.home()) not in whole
    assert not re.findall(r"(?<![\w.:/<>])/[\w.-]+", whole), "an absolute path"

    earlier = ("--checkpoint", trained.run / "checkpoints" / "step-00000004")
    report = json.loads(
        trained.cli("eval", "--out", trained.run / "early", *earlier, "--json").stdout
    )
    assert (export / "README.md").read_text() == whole, "of other weights"
    trained.cli("export", *earlier, "--out", early := trained.folder / "early")
    assert FIGURE.findall(read(early)[1]) == [f"{report['acceptance_length']:.2f}"]
    settings = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", whole, re.DOTALL)[0])
    assert settings["train"]["batch"] == 4

    (export / "README.md").write_text(edited := whole.replace("# ", "# Mine: ", 1))
    assert "was edited" in trained.cli("eval", "--export", export).output
    assert (export / "README.md").read_text() == edited


def test_a_card_takes_over_a_targets_name_on_the_hub_and_its_licence(
    trained: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read from the Hub's cache, without a network."""
    hub = trained.folder / "hub" / "models--org--target"
    shutil.copytree(trained.config["target"]["path"], snapshot := hub / "snapshots" / (40 * "a"))
    (snapshot / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A target\n")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(40 * "a")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub.parent))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("draftcore_eagle3.served.SERVERS", ("vllm",))
    output = trained.cli("export", "target.path=org/target", "target.revision=main").output
    assert re.search(r"not served by sglang +no conventions of a server", output)
    data, text = read(trained.run / "export")
    assert (data.base_model, data.license) == ("org/target", "apache-2.0")
    assert "vllm serve org/target --revision main --speculative-config" in text
    assert "The target's is apache-2.0" in text
