"""The dist passes its suites; where rows come from; and that they are usable, or bad with where and why."""

from __future__ import annotations

import functools
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import pytest
from draftcore_data.conversations import BadRow, Conversation, is_learned, parse_row
from draftcore_data.files import open_files
from draftcore_data.options import DataOptions, SourceOptions
from draftcore_data.sources import finder, named, open_source, read_conversations, require_columns
from draftcore_sdk.images import ImageSuite
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.samples import SamplesSuite
from draftcore_sdk.sources import SourceSuite
from talking import Jsonl, chat

from draftcore import bind, load_plugins
from draftcore.errors import UsageError

FIND = finder(functools.partial(bind, load_plugins()))
CHAT = chat("Hi", "Yes?")["messages"]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]


class TestPlugin(PluginSuite):
    plugin = "draftcore_data.plugin"


class TestConversations(SamplesSuite):
    plugin = "draftcore_data.plugin"


class TestImages(ImageSuite):
    plugin = "draftcore_data.plugin"


def lines(*numbers: int) -> bytes:
    rows = ({"messages": CHAT, "n": number} for number in numbers)
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read(given: Any, find: Any = FIND) -> list[int]:
    return [json.loads(row)["n"] for _, row in open_source(given, find).rows()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.jsonl").write_bytes(lines(1, 2))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(3)))
    (tmp_path / "deep" / "a.jsonl").write_bytes(lines(4))
    (tmp_path / "deep" / "c.jsonl").write_bytes(lines(5))
    (tmp_path / "README.md").write_text("no rows")
    return tmp_path


class TestFiles(SourceSuite):
    plugin, name = "draftcore_data.plugin", "files"

    @pytest.fixture
    def source_uri(self, folder: Path) -> str:
        return f"files:{folder}"


# ------------------------------------------------------------ files

BELOW, A = ["deep/a.jsonl:1", "deep/c.jsonl:1"], ["a.jsonl:1", "a.jsonl:2"]


@pytest.mark.parametrize(
    ("source", "expected", "places"),
    [
        ("", [1, 2, 3, 4, 5], [*A, "b.jsonl.gz:1", *BELOW]),
        ("/a.jsonl", [1, 2], A),
        ("/b.jsonl.gz", [3], ["b.jsonl.gz:1"]),
        ("/deep", [4, 5], ["a.jsonl:1", "c.jsonl:1"]),
        ("/**/*.jsonl", [1, 2, 4, 5], [*A, *BELOW]),
        ("/[ab].j*", [1, 2, 3], [*A, "b.jsonl.gz:1"]),
    ],
)
def test_files_folders_and_globs_are_read_in_order_and_rows_named_below_what_is_common(
    folder: Path, source: str, expected: list[int], places: list[str]
) -> None:
    assert read(f"{folder}{source}") == read(f"file://{folder}{source}") == expected
    assert [place for place, _ in open_source(f"{folder}{source}", FIND).rows()] == places


def test_what_fsspec_reaches_is_read_there_and_its_key_follows_its_content() -> None:
    system, source = fsspec.filesystem("memory"), "memory://bucket/*.gz"
    system.pipe("/bucket/a.jsonl.gz", gzip.compress(lines(1, 2)))
    assert read(source) == [1, 2]
    key = open_source(source, FIND).key()
    assert open_source(source, FIND).key() == key
    system.pipe("/bucket/a.jsonl.gz", gzip.compress(lines(1, 3, 4, 5)))
    assert open_source(source, FIND).key() != key


def test_a_file_that_breaks_off_names_the_last_line_read_and_what_to_do(folder: Path) -> None:
    whole = gzip.compress(b"\n".join(lines(n) for n in range(9999)), 0)
    (folder / "b.jsonl.gz").write_bytes(whole[:-5000])
    says = r"b\.jsonl\.gz cannot be read after b\.jsonl\.gz:\d+\n.*EOFError.*\n  it is torn"
    with pytest.raises(UsageError, match=says):
        read(str(folder / "b.jsonl.gz"))


ROWS = [{"prompt": f"caf\u00e9, {n}", "completion": f"a\n{n}"} for n in range(3)]
CELLS = [f'"{row["prompt"]}"\t"{row["completion"]}"\n' for row in ROWS]
TABLE = "".join(["prompt\tcompletion\n", *CELLS])
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("array.json", json.dumps(ROWS).encode()),
        ("indented.json", json.dumps(ROWS, indent=2).encode()),
        ("objects.json", "\n".join(json.dumps(row, indent=2) for row in ROWS).encode()),
        ("in-one.json", json.dumps({"version": 1, "data": ROWS}).encode()),
        ("in-one-indented.jsonl", json.dumps({"rows": ROWS}, indent=1).encode()),
        ("no-ending", gzip.compress(LINES, mtime=0)),
        ("sixteen.jsonl", LINES.decode().encode("utf-16")),
        ("table.tsv", TABLE.encode("utf-8-sig")),
        ("table.csv.gz", gzip.compress(TABLE.replace("\t", ",").encode(), mtime=0)),
    ],
)
def test_what_is_no_json_lines_is_read_as_what_it_is(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    rows = list(open_source(str(tmp_path / name), FIND).rows())
    assert [json.loads(row) for _, row in rows] == ROWS
    assert len({place for place, _ in rows}) == len(ROWS)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("torn.json", b'[{"a": 1},\n{"a"', r"torn\.json is not valid JSON: .* line 2(.|\n)*torn"),
        ("old.csv", b"prompt,completion\ncaf\xe9,a", r"after its beginning(.|\n)*iconv -f latin1"),
    ],
)
def test_what_cannot_be_read_as_what_it_is_says_what_to_do(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=says):
        read(str(tmp_path / name))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            {"source": "b", "wieght": 2},
            r"wieght: unknown key \(did you mean 'weight'\?\); there are",
        ),
        ({"weight": 2}, "source: is missing"),
        (5, "source: Input should be a valid string, not 5"),
    ],
)
def test_a_source_of_a_list_that_is_wrong_is_told_of_by_its_number(wrong: Any, says: str) -> None:
    with pytest.raises(UsageError, match=f"^data.train, source 2: 1 wrong\n  {says}"):
        DataOptions.model_validate({"train": ["a", wrong]})


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{folder}/READM.md", r"did you mean 'README\.md'"),
        ("{folder}", "0.jsonl is a table\n  have its name end in .parquet"),
        ("{folder}/empty", "no data in the folder .*empty: there is a.json\n.*empty/"),
        ("{folder}/none", "no such data"),
        ("{folder}/*.jsn", "no such data"),
        ("{folder}/a.jsonl?split=train", "unknown option 'split'"),
        ("{folder}/*.zst", "cannot open .*zst(.|\n)*pip install zstandard"),
        (
            "nobody://bucket/train.jsonl",
            "cannot open nobody(.|\n)*Protocol not known.*\n  check the",
        ),
        ("file://{folder}/none", "no such data: file:"),
        ("file://{folder}/0.jsonl", "0.jsonl is a table"),
    ],
)
def test_what_cannot_be_opened_is_an_error_at_once(folder: Path, source: str, says: str) -> None:
    (folder / "packed.zst").write_bytes(b"(\xb5/\xfd")
    (folder / "0.jsonl").write_bytes(b"PAR1")
    (folder / "empty").mkdir()
    (folder / "empty" / "a.json").touch()
    with pytest.raises(UsageError, match=says):
        read_conversations(source.format(folder=folder), find=FIND)


def test_a_weight_is_how_often_a_row_comes_or_the_share_of_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(*range(1000)))

    def counts(weight: float) -> Counter[int]:
        return Counter(read((SourceOptions(source=str(tmp_path / "a.jsonl"), weight=weight),)))

    half, more = counts(0.5), counts(2.5)
    assert set(counts(2).values()) == {2}
    assert (set(half.values()), set(more.values())) == ({1}, {2, 3})
    assert 400 < len(half) < 600
    assert {row for row, times in more.items() if times == 3} == set(half), "always the same rows"
    assert half == counts(0.5)


def test_a_list_is_read_in_its_order_and_its_key_follows_weights_and_content(folder: Path) -> None:
    config = DataOptions.model_validate(
        {"train": [f"{folder}/deep", {"source": f"{folder}/a.jsonl", "weight": 2}]}
    )
    assert config.train is not None
    assert read(config.train) == [4, 5, 1, 1, 2, 2]
    assert named(config.train) == f"{folder}/deep, {folder}/a.jsonl"
    once = (f"{folder}/deep", f"{folder}/a.jsonl")
    assert open_source(once).key() != open_source(config.train).key()


def test_a_scheme_without_slashes_is_a_plugins(folder: Path) -> None:
    asked = list[str]()

    def find(uri: str) -> Any:
        asked.append(uri)
        return open_files(uri.replace("numbers:", f"files:{folder}/deep"))

    assert read(("numbers:", f"{folder}/a.jsonl"), find) == [4, 5, 1, 2]
    assert asked == ["numbers:", f"files:{folder}/a.jsonl"]


# ------------------------------------------------------------ tables of `datasets`


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    library, hub = map(pytest.importorskip, ("datasets", "huggingface_hub"))
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for config in (library.config, hub.constants):
        monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    library.disable_progress_bars()
    return library


@pytest.fixture
def table(datasets: Any) -> Any:
    return datasets.Dataset.from_list([{"conversations": SHAREGPT, "id": i} for i in range(3)])


class TestHfSource(SourceSuite):
    plugin, name = "draftcore_data.plugin", "hf"

    @pytest.fixture
    def source_uri(self, table: Any, tmp_path: Path) -> str:
        table.to_parquet(tmp_path / "rows.parquet")
        return f"hf:{tmp_path / 'rows.parquet'}"


def test_saved_folders_and_parquet_read_alike(datasets: Any, table: Any, tmp_path: Path) -> None:
    table.save_to_disk(tmp_path / "saved")
    datasets.load_from_disk(tmp_path / "saved").map(lambda row: row)  # leaves a cache file there
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(tmp_path / "splits")
    (data := tmp_path / "parquet" / "data").mkdir(parents=True)
    table.to_parquet(data / "train-00000.parquet")
    table.select([0]).to_parquet(data / "test-00000.parquet")
    counts = {"saved": 3, "saved?split=train": 3, "splits": 3, "splits?split=test": 1, "parquet": 4}
    counts |= {"parquet?split=train": 3, "parquet/data/test-00000.parquet": 1}
    keys = set()
    for name, count in counts.items():
        for prefix in ("", "hf:"):
            uri = f"{prefix}{tmp_path / name}"
            keys.add(open_source(uri, FIND).key())
            rows = list(read_conversations(uri, find=FIND))
            assert [row.where.rpartition(":")[2] for row in rows] == list(map(str, range(count)))
            assert all(isinstance(r, Conversation) and r.messages == tuple(CHAT) for r in rows)
    assert len(keys) == 5, "the key follows the content of the files"
    with pytest.raises(UsageError, match=r"no split 'trian' \(did you mean 'train'\?\)"):
        open_source(f"{tmp_path / 'splits'}?split=trian", FIND)


def test_a_table_that_cannot_be_read_says_what_to_check(datasets: Any, tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": "x"}]).save_to_disk(tmp_path / "saved")
    (row,) = read_conversations(str(tmp_path / "saved"), find=FIND)
    assert isinstance(row, BadRow)
    assert row.detail == "keys 'text'"
    with pytest.raises(UsageError, match=r"hf:org/none, split train(.|\n)*check the name"):
        open_source("hf:org/none", FIND)
    with pytest.raises(UsageError, match="did you mean 'split'"):
        open_source("hf:some/name?splt=train", FIND)


# ------------------------------------------------------------ rows


def saying(role: str, content: Any) -> dict[str, Any]:
    return {"messages": [*CHAT, {"role": role, "content": content}]}


def answering(**more: Any) -> dict[str, Any]:
    return {"messages": [CHAT[0], {**CHAT[1], **more}]}


def test_all_shapes_and_their_mixtures_read_alike(jsonl: Jsonl) -> None:
    source = jsonl(
        {"messages": CHAT},
        {"conversations": SHAREGPT},
        {"id": "x", "conversations": CHAT},
        {"messages": None, "conversations": SHAREGPT},
        {"prompt": "Hi", "completion": "Yes?"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"instruction": "Hi", "input": "", "output": "Yes?"},
        {"messages": [{"role": "human", "content": "Hi"}, {"role": "model", "content": "Yes?"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, CHAT[1]]},
        {"messages": [{"role": "User", "content": "Hi"}, {"from": "AI", "value": "Yes?"}]},
        {"messages": json.dumps(CHAT), "system": "", "tools": ""},
    )
    expected = [Conversation(f"train.jsonl:{line}", tuple(CHAT)) for line in range(1, 12)]
    assert list(read_conversations(source)) == expected


FAR = [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}]
TOKENS = {"input_ids": [1, 2], "loss_mask": [0, 1]}
BAD: tuple[tuple[Any, str], ...] = (
    ("{broken", "not valid JSON: Expecting property name"),
    ('{"messages": ' + "[" * 100_000, "not valid JSON: maximum recursion"),
    ('{"messages": ' + "9" * 5000 + "}", "not valid JSON: Exceeds the limit"),
    ("7", "the row is not an object: int"),
    ({"text": "x"}, "no known shape: keys 'text'"),
    ("prompt,completion", "not valid JSON: Expecting value, column 1; it begins 'prompt,comple"),
    ({"messages": 7}, "messages is not a list: int"),
    ({"messages": []}, "the conversation is empty"),
    ({"messages": ["x"]}, "a message is not an object: message 1: str"),
    ({"messages": [{"content": "x"}]}, "a message has no role: message 1"),
    (saying("asistant", "x"), "unknown role: message 3: 'asistant' (did you mean 'assistant'?)"),
    (saying("assistant", None), "a message has no content: message 3 (assistant)"),
    (saying("user", [3]), "content is neither text nor an image: message 3 (user): int"),
    (
        saying("ai", [{"type": "tool_use"}]),
        "content is neither text nor an image: message 3 (ai): to",
    ),
    (saying("assistant", [{"type": "image", "url": "x"}]), "an answer holds images, and text"),
    (saying("user", [{"type": "image_url"}]), "an image is neither a path nor a URI: message 3"),
    (saying("user", FAR), "an image is not on this machine: message 3 (user): https://a.b/c.png"),
    (saying("function_call", "add"), "a function_call is not valid JSON: Expecting value"),
    (answering(weight=0.5), "weight is not 0 or 1"),
    (answering(thinking=[3]), "reasoning is not text: message 2"),
    (answering(tool_calls=[3]), "a tool call is not an object"),
    ({"completion": "x"}, "no known shape: keys 'completion'"),
    ({"input_ids": [1, 2]}, "input_ids without loss_mask or labels"),
    ({"input_ids": [1, 2], "labels": [1]}, "input_ids and its mask are not of one length: 2 and 1"),
    ({"input_ids": [1, 0.5], "labels": [1, 2]}, "a row of tokens is not a list of integers"),
    (
        {**TOKENS, "input_ids": [True, False]},
        "a row of tokens is not a list of integers: input_ids",
    ),
    ({**TOKENS, "loss_mask": [0, 2]}, "a loss_mask has other numbers than 0 and 1"),
    ({**TOKENS, "labels": [-100, 3]}, "labels are not the tokens of input_ids at their own places"),
    ({**TOKENS, "labels": [1, 2]}, "labels and loss_mask contradict each other"),
    ({"messages": CHAT, "tools": [3]}, "tools is not a list of objects"),
    ({"messages": CHAT, "tools": "[3"}, "tools is not valid JSON: Expecting ',' delimiter"),
)


@pytest.mark.parametrize(("row", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_a_bad_row_says_where_and_why(jsonl: Jsonl, row: Any, reason: str) -> None:
    _, bad, _ = read_conversations(jsonl({"messages": CHAT}, row, {"messages": CHAT}))
    assert isinstance(bad, BadRow)
    assert str(bad).startswith(f"train.jsonl:2: {reason}")


def test_bad_bytes_and_empty_lines_keep_the_line_numbers_right(tmp_path: Path) -> None:
    good = b'{"messages": [{"role": "gpt", "content": "x"}]}'
    (tmp_path / "train.jsonl").write_bytes(b"\xef\xbb\xbf" + good + b"\n\n\xff\n" + good)
    rows = list(read_conversations(str(tmp_path / "train.jsonl")))
    assert [row.where for row in rows] == [f"train.jsonl:{line}" for line in (1, 3, 4)]
    assert [isinstance(row, BadRow) for row in rows] == [False, True, False]
    assert "not in UTF-8: 'utf-8' codec can't decode byte 0xff" in str(rows[1])


@pytest.mark.parametrize("key", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "shape", [{"conversations": SHAREGPT}, {"instruction": "Hi", "output": "Yes?"}]
)
def test_a_system_prompt_beside_a_conversation_is_its_first_turn(
    key: str, shape: dict[str, Any]
) -> None:
    row = parse_row("x", {**shape, key: "Be brief."})
    assert row == Conversation("x", ({"role": "system", "content": "Be brief."}, *CHAT))


def test_keys_that_are_not_read_are_counted() -> None:
    own, unread = {"role": "system", "content": "Own."}, Counter[str]()
    for row in (
        {"messages": CHAT, "id": 7, "score": 7, "lang": None},
        {"messages": CHAT, "prompt": "Hi", "score": 8},
        {"messages": [own, *CHAT], "system": "Another."},
        {"messages": [own, *CHAT], "system": "Own."},
        {"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 1]},
        {"text": "of no known shape"},
    ):
        parse_row("x", row, {}, unread)
    assert unread == {"score": 2, "prompt": 1, "system": 1, "attention_mask": 1}


def test_columns_say_which_names_keys_have_and_what_no_row_has_is_refused(jsonl: Jsonl) -> None:
    source = jsonl({"messages": 7, "question": "Hi", "a": "Yes?"}, {"messages": CHAT})
    rows = list(read_conversations(source, columns={"prompt": "question", "completion": "a"}))
    assert rows == [Conversation(f"train.jsonl:{line}", tuple(CHAT)) for line in (1, 2)]
    says = r"columns\.prompt: no row has 'qestion' \(did you mean 'question'\?\)\n.*question, a$"
    with pytest.raises(UsageError, match=says):
        require_columns(source, {"prompt": "qestion"})
    with pytest.raises(ValueError, match=r"no key 'promt' is read \(did you mean 'prompt'\?\)"):
        DataOptions(columns={"promt": "question"})


def test_reasoning_and_calls_are_found_by_any_name_and_need_no_content(jsonl: Jsonl) -> None:
    function = {"name": "add", "arguments": {"a": 2}}
    as_text, call = {"name": "add", "arguments": '{"a": 2}'}, {"type": "function"}
    ways: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [{**call, "function": as_text}]},
        {"role": "assistant", "function_call": as_text},
        {"from": "function_call", "value": json.dumps(function)},
    ]
    names = ("reasoning_content", "reasoning", "thinking")
    tools = ([{"name": "add"}], '[{"name": "add"}]')  # the second as columnar files keep them
    rows = [
        {"messages": [CHAT[0], {**way, name: "hm"}], "tools": tools[at % 2]}
        for way in ways
        for at, name in enumerate(names)
    ]
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}  # as Anthropic writes it
    rows.append({"messages": [CHAT[0], {**ways[1], "content": [thinking]}], "tools": tools[0]})
    answer = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    for row in read_conversations(jsonl(*rows)):
        assert isinstance(row, Conversation)
        assert row.messages[1] == {**answer, "tool_calls": [{**call, "function": function}]}
        assert row.tools == ({"name": "add"},)


def test_of_a_prompt_of_several_turns_the_completion_alone_is_learned() -> None:
    row = parse_row("x", {"prompt": [*CHAT, CHAT[0]], "completion": CHAT[1:]})
    assert isinstance(row, Conversation)
    assert [is_learned(turn) for turn in row.messages] == [True, False, True, True]


def test_reading_is_a_stream_and_the_limit_counts_rows(tmp_path: Path) -> None:
    """The tail of the file is not there yet when its head has been read."""
    path, line = tmp_path / "train.jsonl", '{"messages": [{"role": "gpt", "content": "x"}]}\n'
    path.write_text(line * 2)
    rows = read_conversations(str(path))
    next(rows)
    with path.open("a") as file:
        file.write(line * 2)
    assert len(list(rows)) == 3
    assert len(list(read_conversations(str(path), limit=2))) == 2
