"""The configuration of a run, from YAML and overrides; URIs of stores and channels, and sizes in them."""

from pathlib import Path

import pytest

from draftcore.config import RESERVED, load_config
from draftcore.errors import UsageError
from draftcore.uris import format_size, holds_secret, parse_size, parse_uri

YAML = "run: here\ntarget: {path: there}\nalgorithm: {name: mine}\n"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("colour=red", "colour: unknown key; there are run, target, data, algorithm"),
        ("train.epoch=3", "train.epoch: unknown key (did you mean 'epochs'?)"),
        ("runner.prefill.backend=auto", "runner.prefill.backend: unknown key; there are name, plu"),
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
        ("topology.options={a: 3}", "topology.launcher starts nothing: set topology.ranks"),
        ('run=""', "run: '.' names no folder of its own"),
        ('run="a\\0b"', r"run: 'a\x00b' names no folder of its own"),
        ("topology.ranks=0", "topology.ranks: Input should be greater than or equal to 1"),
        ("train.batch=!!float 4", "train.batch: Input should be a valid integer, not 4.0"),
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
        ("run: a\nrun: b", ["run.yaml is not YAML: ", "the key 'run' is given twice"]),
        ("run: {lr: !far 3}", ["is not YAML: ", "determine a constructor for the tag '!far'"]),
        ("run: " + "[" * 1500, ["run.yaml is not YAML: ", "recursion"]),
        ("a: &a [*a]", ["run.yaml is not YAML: ", "Circular reference"]),
    ],
)
def test_a_file_that_is_no_mapping_repeats_or_never_ends_is_named(
    tmp_path: Path, text: str | None, says: list[str]
) -> None:
    name = "other.yaml" if text is None else "run.yaml"
    (tmp_path / name).write_bytes((text or "").encode("latin-1"))
    with pytest.raises(UsageError) as caught:
        load_config(tmp_path / "run.yaml")
    for one in says:
        assert one in str(caught.value)


def test_an_alias_is_a_copy_that_an_override_changes_alone(tmp_path: Path) -> None:
    drafts = "drafts: {a: &a {algorithm: {name: mine}}, b: *a}"
    (tmp_path / "run.yaml").write_text(f"run: here\ntarget: {{path: there}}\n{drafts}")
    config = load_config(tmp_path / "run.yaml", ["drafts.a.algorithm.name=other"])
    assert [draft.algorithm.name for draft in config.drafts.values()] == ["other", "mine"]
    for label in RESERVED:
        with pytest.raises(UsageError, match=f"no draft can be labelled '{label}'"):
            load_config(tmp_path / "run.yaml", [f"drafts={{{label}: {{algorithm: {{name: a}}}}}}"])


# ------------------------------------------------------------ URIs


@pytest.mark.parametrize(
    ("text", "host", "path"),
    [
        ("file:a/b", "", "a/b"),
        ("file:/a/b", "", "/a/b"),
        ("file:///a/b", "", "/a/b"),
        ("file:a%20b%3F", "", "a b?"),
        ("memory", "", ""),
        ("memory://?n=1", "", ""),
        ("x://10.0.0.5:6379/run%207?n=1", "10.0.0.5:6379", "/run 7"),
        ("x://[::1]:50051", "[::1]:50051", ""),
    ],
)
def test_a_path_may_be_relative_or_absent_and_follow_a_host(
    text: str, host: str, path: str
) -> None:
    uri = parse_uri(text, known=["n"], host=True)
    assert (uri.text, uri.scheme, uri.host, uri.path) == (text, text.partition(":")[0], host, path)


def test_an_unknown_option_and_a_host_where_there_are_only_paths_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'max_byte' \(did you mean 'max_bytes'\?\)"):
        parse_uri("memory:?max_byte=3", known=["max_bytes"])
    with pytest.raises(UsageError, match="names the host 'some'"):
        parse_uri("file://some/where")
    with pytest.raises(UsageError, match="gives the option 'n' twice"):
        parse_uri("memory:?n=3&n=4", known=["n"])
    with pytest.raises(UsageError, match="cannot be printed"):
        parse_uri("file:a%00b")


@pytest.mark.parametrize("text", ["", "ten", "10 gigs", "-1", "1.5.2MiB", "9" * 400])
def test_a_size_that_is_none_is_explained(text: str) -> None:
    with pytest.raises(UsageError, match="500MiB, 10GiB or 4096"):
        parse_size(text)


def test_sizes_are_shown_for_people_and_may_be_options() -> None:
    assert parse_uri("x:?limit=1.5GiB", known=["limit"]).size("limit") == 3 << 29
    assert parse_uri("x:").size("limit") is None
    shown = [format_size(nbytes) for nbytes in (0, 1023, 1536, 5 << 30, 3000 << 40)]
    assert shown == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB", "3000.0 TiB"]
    assert [parse_size(text) for text in ("4096", "2kB", "1.5 KiB")] == [4096, 2000, 1536]


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("x://me:hunter2@host:6379?prefix=a", True),
        ("x://me:hun/ter2@host", True),
        ("x://host?prefix=a&Password=hunter2", True),
        ("x://host?auth_token=hunter2", True),
        ("x://host:6379/1?prefix=a&tls=on&key=me.pem", False),
        ("file:///mnt/me@work/features?max_bytes=1GiB", False),
        ("file:me@work/pass", False),
    ],
)
def test_a_secret_in_a_uri_is_noticed(text: str, secret: bool) -> None:
    assert holds_secret(text) is secret
