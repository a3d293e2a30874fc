"""The configuration of a run, from YAML and overrides."""

from pathlib import Path

import pytest

from draftcore.config import GONE, RunConfig, load_config
from draftcore.errors import UsageError

YAML = "run: here\ntarget: {path: there}\nalgorithm: {name: mine}\n"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("graphs.prefill.backend=auto", "graphs: is gone; now it is runner.prefill"),
        ("colour=red", "colour: unknown key; there are run, target, data, algorithm"),
        ("train.epoch=3", "train.epoch: unknown key (did you mean 'epochs'?)"),
        ("runner.prefill.backend=auto", "runner.prefill.backend: unknown key; there are name, plu"),
        ("train.batch=lots", "train.batch: Input should be a valid integer"),
        ("train.batch", "'train.batch' is not KEY=VALUE"),
        ("train.seed.deep.down=3", "train.seed: Input should be a valid integer"),
        ("run.folder=x", "override 'run.folder=x': 'run' is a value, not a section"),
        ("train.betas=[1", "cannot read the value '[1'"),
        ("drafts.data.algorithm.name=mine", "set either algorithm"),
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
    overrides = ["train.lr=1e-4", "train.batch=2", "train.batch=3", "algorithm.options.layers=[1]"]
    config = load_config(tmp_path / "run.yaml", overrides)
    assert (config.train.lr, config.train.batch) == (1e-4, 3)
    assert config.algorithm is not None
    assert config.algorithm.options == {"layers": [1]}


def test_what_is_gone_is_no_key() -> None:
    assert not GONE.keys() & RunConfig.model_fields.keys()
