"""The configuration of a run, from YAML and overrides."""

from pathlib import Path

import pytest

from draftcore.config import RESERVED, load_config
from draftcore.errors import UsageError

YAML = "run: here\ntarget: {path: there}\nalgorithm: {name: mine}\n"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("colour=red", "colour: unknown key; there are run, target, data, algorithm"),
        ("train.epoch=3", "train.epoch: unknown key (did you mean 'epochs'?)"),
        ("runner.prefill.backend=auto", "runner.prefill.backend: unknown key; there are name, plu"),
        ("train.batch=lots", "train.batch: Input should be a valid integer"),
        ("train.batch", "'train.batch' is not KEY=VALUE"),
        ("train.seed.deep.down=3", "train.seed: Input should be a valid integer"),
        ("run.folder=x", "override 'run.folder=x': 'run' is a value, not a section"),
        ("train.betas=[1", "cannot read the value '[1'"),
        ("drafts.data.algorithm.name=mine", "set either algorithm"),
        ("train.batch=true", "train.batch: Input should be a valid integer, not True"),
        ("train.lr='3e-4'", "train.lr: Input should be a valid number, not '3e-4'"),
        ("train.clip=.inf", "train.clip: Input should be a finite number, not inf"),
        (f"train.seed={'9' * 5000}", f"cannot read the value '{'9' * 79}: Exceeds the limit"),
        ("train.epochs=1000000000000", "train.epochs: Input should be less than or equal to 10"),
        ("train.betas=[0.9,1]", "train.betas.1: Input should be less than 1"),
        ("topology.launcher=mine", "topology.launcher starts nothing: set topology.ranks"),
        ('run=""', "run: '.' names no folder of its own"),
    ],
)
def test_what_is_wrong_with_a_key_is_said_with_the_keys_that_there_are(
    tmp_path: Path, override: str, says: str
) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    with pytest.raises(UsageError) as caught:
        load_config(tmp_path / "run.yaml", [override])
    assert says in str(caught.value)


def test_overrides_are_read_as_yaml_in_order(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    overrides = ["train.lr=3e-4", "train.batch=2", "train.batch=3", "algorithm.options.layers=[1]"]
    config = load_config(tmp_path / "run.yaml", overrides)
    assert (config.train.lr, config.train.batch) == (3e-4, 3)
    assert config.algorithm is not None
    assert config.algorithm.options == {"layers": [1]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, ["cannot read", "YAML files", "other.yaml"]),
        ("", ["run.yaml is empty", "at least run"]),
        ("- a\n- b\n", ["holds a list", "at least run"]),
        ("run: x\n  y: [\n", ["is not YAML", 'run.yaml", line 2', "correct it"]),
        ("run: \xff", ["cannot read", "UTF-8"]),
    ],
)
def test_a_file_that_is_no_mapping_is_named(
    tmp_path: Path, text: str | None, says: list[str]
) -> None:
    name = "other.yaml" if text is None else "run.yaml"
    (tmp_path / name).write_bytes((text or "").encode("latin-1"))
    with pytest.raises(UsageError) as caught:
        load_config(tmp_path / "run.yaml")
    for one in says:
        assert one in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run: there", "the key 'run' is given twice"),
        ("train: {lr: !far 3}", "could not determine a constructor for the tag '!far'"),
        ("train: " + "[" * 1500, "recursion"),
        ("a: &a [*a]", "Circular reference"),
    ],
)
def test_a_file_that_says_a_thing_twice_or_without_end_is_no_yaml(
    tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "run.yaml").write_text(YAML + text)
    with pytest.raises(UsageError, match=rf"run\.yaml is not YAML: (.|\n)*{says}"):
        load_config(tmp_path / "run.yaml")


def test_an_alias_is_a_copy_that_an_override_changes_alone(tmp_path: Path) -> None:
    drafts = "drafts: {a: &a {algorithm: {name: mine}}, b: *a}"
    (tmp_path / "run.yaml").write_text(f"run: here\ntarget: {{path: there}}\n{drafts}")
    config = load_config(tmp_path / "run.yaml", ["drafts.a.algorithm.name=other"])
    assert [draft.algorithm.name for draft in config.drafts.values()] == ["other", "mine"]
    for label in RESERVED:
        with pytest.raises(UsageError, match=f"no draft can be labelled '{label}'"):
            load_config(tmp_path / "run.yaml", [f"drafts={{{label}: {{algorithm: {{name: a}}}}}}"])
