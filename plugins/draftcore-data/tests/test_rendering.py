"""What is learned of conversations: the mask, compared as text with what a person says was written.

Every template here is written by hand after a family of real ones, and every expectation is a
literal: the assistant's words and its end-of-turn token, nothing else. Where a template writes an
answer otherwise in history than when the model gives it, it is what the model said, as it was served.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftcore_data import rendering
from draftcore_data.conversations import BadRow, Rendered, parse_row
from draftcore_data.options import DataOptions
from draftcore_data.rendering import (
    CALLS_LOST,
    FORMAT,
    MARKED_QUESTION,
    NO_END,
    REASONING_LOST,
    SPLIT,
    Renderer,
)
from draftcore_sdk.targets import byte_tokenizer
from talking import MakeTokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from draftcore.errors import UsageError


def template(name: str) -> str:
    """Return a chat template after a family of real ones; a line may end where a block does."""
    file = Path(__file__).parent / "templates" / f"{name}.jinja"
    return file.read_text(encoding="utf-8").removesuffix("\n")


CHATML, LLAMA3, MISTRAL, PHI, VICUNA = map(
    template, ("chatml", "llama3", "mistral", "phi", "vicuna")
)
# Reasoning is kept in the turns after the last question, where even an empty block is written.
QWEN3_THINKING = template("qwen3").replace("{{ block }}", "")
QWEN3_NO_THINKING = template("qwen3").replace("{{ block }}", "<think>\n\n</think>\n\n")
# The generation prompt opens a think block; the text of an answer has it stripped off.
R1, MARKED, NO_END_OF_TURN, TOOLS = map(template, ("r1", "marked", "no_end_of_turn", "tools"))
# Old templates know no add_generation_prompt.
CHATML_ALONE, VICUNA_ALONE = (one.split("{% if add_gen")[0] for one in (CHATML, VICUNA))


def talk(*said: str, **fields: Any) -> list[dict[str, Any]]:
    """A conversation that the user begins; the fields are those of the last turn."""
    roles = ("user", "assistant") * len(said)
    turns = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return [*turns[:-1], {**turns[-1], **fields}]


TWO_TURNS = talk("What is 2+2?", "Four.", "Why?", "It is the sum.")
NAMED = {"tool_calls": [{"name": "add"}]}


def parsed(messages: Any, **more: Any) -> Any:
    return parse_row("train.jsonl:1", {"messages": messages, **more})


def render(tokenizer: PreTrainedTokenizerFast, row: Any, **options: Any) -> list[Any]:
    """The rows of a conversation, of its messages or parsed."""
    row = parsed(row) if isinstance(row, list) else row
    return list(Renderer(tokenizer, DataOptions(**options)).render([row]))


def learned(tokenizer: PreTrainedTokenizerFast, rendered: Any) -> list[str]:
    """The text of each unbroken run of masked-in tokens."""
    assert isinstance(rendered, Rendered), rendered
    pairs = zip(rendered.token_ids.tolist(), rendered.loss_mask, strict=True)
    runs = [[i for i, _ in run] for keep, run in groupby(pairs, key=lambda p: p[1]) if keep]
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def replaced(old: str, new: str, template: str = CHATML) -> str:
    assert old in template
    return template.replace(old, new)


def ending(end: str, *answers: str) -> list[str]:
    return [answer + end for answer in answers]


END, THOUGHT, NONE = "<|im_end|>", "<think>\nhm\n</think>\n\n", "<think>\n\n</think>\n\n"
BOTH = ("Four.", "It is the sum.")
SYSTEM, TOOL = ({"role": role, "content": "4"} for role in ("system", "tool"))
LEARNED: dict[str, tuple[str, list[Any], list[str]]] = {
    "chatml": (CHATML, TWO_TURNS, ending(END, *BOTH)),
    "mistral": (MISTRAL, TWO_TURNS, ending("</s>", " Four.", " It is the sum.")),
    "phi-final-eos": (PHI, TWO_TURNS, ending("<|end|>", *BOTH)),
    "marked": (MARKED, TWO_TURNS, ending(END, *BOTH)),
    "no-end-of-turn-token": (NO_END_OF_TURN, TWO_TURNS, [*BOTH]),
    "no-generation-prompt": (CHATML_ALONE, TWO_TURNS, ending(END, *BOTH)),
    "header-without-newline": (VICUNA, TWO_TURNS, ending("</s>", " Four.", " It is the sum.")),
    "header-with-a-space": (VICUNA_ALONE, TWO_TURNS, ending("</s>", " Four.", " It is the sum.")),
    "space-at-the-end-of-a-header": (
        replaced("ASSISTANT:{% endif", "ASSISTANT: {% endif", VICUNA), talk("Hi", "\nFour."), ["\nFour.</s>"],
    ),
    "a-think-block-that-markers-enclose-and-the-prompt-has": (
        replaced(
            "{% generation %}", "{% generation %}<think>",
            replaced("assistant\n{% endif", "assistant\n<think>{% endif", MARKED),
        ),
        TWO_TURNS, ending(END, *BOTH),
    ),
    "empty-think-block-in-an-answer": (
        QWEN3_THINKING, TWO_TURNS, ending(END, "Four.", f"{NONE}It is the sum."),
    ),
    "reasoning-that-the-prompt-opened": (R1, talk("?", f"{THOUGHT}Four."), ["\n\nFour.</s>"]),
    "system-unicode-and-an-end-of-turn-in-content": (
        CHATML, [SYSTEM, *talk("Hi", f"Hé, 日本!\n{END}", "Hi", "no")],
        ending(END, f"Hé, 日本!\n{END}", "no"),
    ),
    # The header's newline and the answer's first merge into one token, which is the prompt's.
    "token-over-the-edge": (CHATML, talk("Hi", "\n\nFour."), ["\nFour.<|im_end|>"]),
    "assistant-first-user-last": (CHATML, talk("", "Hm!", "Hi", "no", "?")[1:], ending(END, "Hm!", "no")),
    "llama3-trims-content": (
        LLAMA3, talk("Hi", "  Four. \n", "?", "\nsum "), ending("<|eot_id|>", "Four.", "sum"),
    ),
    "content-is-trimmed-on-the-right": (
        replaced("m.content }}", "m.content.rstrip() }}"), talk("Hi", " Four. \n", "?", "sum"),
        ending(END, " Four.", "sum"),
    ),
    "content-is-rewritten-in-place": (
        replaced("m.content }}", "m.content.replace('2', 'two') }}"), talk("2?", "2+2", "?", "2"),
        ending(END, "two+two", "two"),
    ),
    "tool-calls-belong-to-the-answer": (
        TOOLS, [*talk("2+2?", "Well.", **NAMED), TOOL, *talk("", "Four.")[1:]],
        ending("<|end|>", "Well.<tool_call>add</tool_call>", "Four."),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "expected"), LEARNED.values(), ids=LEARNED)
def test_what_is_learned_is_what_the_assistant_wrote(
    make_tokenizer: MakeTokenizer, template: str, messages: list[Any], expected: list[str]
) -> None:
    tokenizer = make_tokenizer(template, bos_token="<s>", eos_token="</s>")
    theirs = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    for last_turn_only, wanted in ((False, expected), (True, expected[-1:])):
        (rendered,) = render(tokenizer, messages, last_turn_only=last_turn_only)
        assert learned(tokenizer, rendered) == wanted
        assert rendered.token_ids.tolist() == theirs


def test_offsets_survive_normalizers_and_metaspace() -> None:
    """A SentencePiece-like tokenizer prepends and replaces characters before it counts them."""
    words = ["▁Hi", "▁user", "▁assistant", "▁Four.", "▁", "\n", "<unk>"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    changes = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(changes)
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.add_special_tokens(["[INST]", "[/INST]", "</s>"])
    template = replaced(" [/INST]", "[/INST]", MISTRAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", chat_template=template
    )
    (rendered,) = render(tokenizer, talk("Hi", "Four.", "Hi"))
    (kept,) = learned(tokenizer, rendered)
    assert "Four." in kept
    assert kept.endswith("</s>")
    assert "Hi" not in kept


CALL = {"function": {"name": "add", "arguments": '{"a": 2}'}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str | None, thought: str = "", *calls: Any, **more: Any) -> dict[str, Any]:
    turn = {"role": "assistant", "content": text, "reasoning": thought, "tool_calls": [*calls]}
    return {**{key: value for key, value in turn.items() if value or key == "content"}, **more}


REASONING_FIELD = replaced("{{ m.content", "<think>{{ m.reasoning_content }}</think>{{ m.content")
CLOSED_THINK_BLOCK = replaced("assistant\n", "assistant\n<think></think>", REASONING_FIELD)
COUNTED = replaced("m.content }}", "m.content }} ({{ m.content | length }})")
CALL_WITHOUT_END = replaced("<|end|>", "{% if m.tool_calls %}?{% else %}<|end|>{% endif %}", TOOLS)
REWRITES, NO_PROMPT = "rewrites its content", "not the generation prompt"
EMPTY = "an answer is empty in the rendered text: message 2"
LONGER_THAN_PROBE = talk("a", "longer than eight", "b", "c")
CALLING = [user("2+2?"), said(None, "", CALL), TOOL, said("Four.")]
REFUSED: dict[str, tuple[str, list[Any], str]] = {
    "refused": (MISTRAL, [*talk("a"), *talk("b", "c")], "alternate"),
    "half-a-surrogate": (CHATML, talk("a", "\ud800"), "Unicode"),
    "closed-think-block": (QWEN3_NO_THINKING, talk("a", f"{THOUGHT}b"), NO_PROMPT),
    "reasoning-field": (CLOSED_THINK_BLOCK, talk("a", "b", reasoning_content="hm"), NO_PROMPT),
    "content-is-cut": (replaced("m.content", "m.content[:8]"), LONGER_THAN_PROBE, REWRITES),
    "content-is-counted": (COUNTED, LONGER_THAN_PROBE, REWRITES),
    "tool-calls-without-an-end": (
        CALL_WITHOUT_END, [*talk("a", "b", **NAMED), *talk("", "c")[1:]], "no end-of-turn",
    ),
    "calls-that-are-not-written": (CHATML, CALLING, EMPTY),
    "nothing-said": (CHATML, [user("a"), said(""), user("b"), said("c")], EMPTY),
    "no-assistant": (CHATML, talk("a"), "no assistant turn: roles user"),
    "none-to-learn": (MISTRAL, talk("a", "b", train=False), "no assistant turn to learn"),
}  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_turn_that_cannot_be_placed_is_a_bad_row_not_a_guess(
    make_tokenizer: MakeTokenizer, template: str, messages: list[Any], reason: str
) -> None:
    (bad,) = render(make_tokenizer(template, bos_token="<s>", eos_token="</s>"), messages)
    assert isinstance(bad, BadRow)
    assert str(bad).startswith("train.jsonl:1: ")
    assert reason in str(bad)


CHATML_PROMPT = (
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n"
    "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, CHATML_PROMPT),
        (CHATML_ALONE, CHATML_PROMPT),
        (MISTRAL, "<s>[INST] What is 2+2? [/INST] Four.</s>[INST] Why? [/INST]"),
        (R1, "<s><|user|>What is 2+2?<|assistant|>Four.</s><|user|>Why?<|assistant|><think>\n"),
    ],
)
def test_a_prompt_ends_where_the_last_answer_would_begin(
    make_tokenizer: MakeTokenizer, template: str, expected: str
) -> None:
    tokenizer = make_tokenizer(template, bos_token="<s>", eos_token="</s>")
    ids = Renderer(tokenizer).prompt_ids(parsed([*TWO_TURNS, *talk("never seen")]))
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_tools_of_a_row_and_a_file_in_the_place_of_the_targets_template_are_used(
    tmp_path: Path, make_tokenizer: MakeTokenizer
) -> None:
    tokenizer, file = make_tokenizer(TOOLS), tmp_path / "mine.jinja"
    (rendered,) = render(tokenizer, parsed(talk("Hi", "Four."), tools=[{"name": "add"}]))
    assert tokenizer.decode(rendered.token_ids).startswith("TOOL add\n<|user|>Hi<|end|>\n")
    file.write_text(GLM)
    (row,) = render(tokenizer, TWICE[:2], chat_template=str(file))
    assert learned(tokenizer, row) == ["\n<think>hm</think>\nFour."]
    with pytest.raises(UsageError, match=r"data\.chat_template: .*none\.jinja cannot be read"):
        render(tokenizer, TWICE, chat_template=str(tmp_path / "none.jinja"))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "has no chat template"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "does not write"),
        ("{{ raise_exception('never') }}", "never"),
        ({"a": CHATML, "b": CHATML}, "is called default, but a, b"),
    ],
)
def test_a_tokenizer_that_cannot_render_is_refused_when_made(
    make_tokenizer: MakeTokenizer, template: Any, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        Renderer(make_tokenizer(template))


# ---------------------------------------------------------------- as it was served

# Reasoning is dropped once the next question comes; an answer without it has an empty block.
QWEN3_FIELD = template("qwen3_field")
# No token ends a turn: the next turn's header does.
GLM = template("glm")
# The last answer's thinking and end differ from those in history; what was thought before a call is
# written until an answer follows. It takes arguments as text alone.
GPT_OSS = template("gpt_oss")
TWICE = [user("2+2?"), said("Four.", "hm"), user("Why?"), said("It is.", "so")]
PLAIN = [user("2+2?"), said("Four."), user("Why?"), said("It is.")]
CLOSED = "{{ '<think></think>' if not enable_thinking }}"
GEMMA4 = replaced("assistant\n{% endif", f"assistant\n{CLOSED}{{% endif")
# The prompt opens a block that is not the empty one of an answer.
BLOCK = "<think>{{ '</think>' if enable_thinking is false else '\n' }}"
NEMOTRON = replaced("assistant\n", f"assistant\n{BLOCK}", REASONING_FIELD)
THINKING = [user("2+2?"), said(None, "use it", CALL), TOOL, said("Four.", "ah")]
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
SHORT = {"template_options": {"enable_thinking": False}}
USED, AH = f"<think>\nuse it\n</think>\n\n{QWEN_CALL}", f"<think>\nah\n</think>\n\nFour.{END}"
SO = f"<think>\nso\n</think>\n\nIt is.{END}"
FINAL = "<|end|><|start|>assistant<|final|>"
SERVED: dict[str, tuple[str, list[Any], dict[str, Any], list[list[str]]]] = {
    "qwen3-thinks-before-each-answer": (
        QWEN3_FIELD, TWICE, {}, [[f"<think>\nhm\n</think>\n\nFour.{END}"], [SO]],
    ),
    "an-empty-block-of-the-prompt-that-history-drops": (
        QWEN3_FIELD, PLAIN, SHORT, [["Four." + END], ["It is." + END]],
    ),
    "an-empty-block-of-the-prompt-that-no-answer-has": (
        GEMMA4, PLAIN, {}, [["Four." + END], ["It is." + END]],
    ),
    "an-answer-that-begins-as-the-dropped-block-does": (
        QWEN3_NO_THINKING, talk("a tag?", "<think> is a tag", "Why?", "It is."), {},
        [["<think> is a tag" + END], ["It is." + END]],
    ),
    "qwen3-calls-a-tool": (QWEN3_FIELD, CALLING, SHORT, [[QWEN_CALL], ["Four." + END]]),
    "qwen3-thinks-and-calls-a-tool": (QWEN3_FIELD, THINKING, {}, [[USED, AH]]),
    "qwen3-rows-are-as-few-as-can-be": (
        QWEN3_FIELD, [*THINKING, user("Why?"), said("It is.", "so")], {}, [[USED, AH], [SO]],
    ),
    "qwen3-learns-the-last-turn-only": (QWEN3_FIELD, TWICE, {"last_turn_only": True}, [[SO]]),
    "glm-calls-a-tool": (
        GLM, CALLING, {},
        [["\n<think></think>\n<tool_call>add\na=2\n</tool_call>", "\n<think></think>\nFour."]],
    ),
    "glm-thinks-before-each-answer": (
        GLM, TWICE, {}, [["\n<think>hm</think>\nFour."], ["\n<think>so</think>\nIt is."]],
    ),
    "gpt-oss-thinks-before-each-answer": (
        GPT_OSS, TWICE, {}, [[f"<|analysis|>hm{FINAL}Four.</s>"], [f"<|analysis|>so{FINAL}It is.</s>"]],
    ),
    "gpt-oss-thinks-and-calls-a-tool": (
        GPT_OSS, [*THINKING, user("Why?"), said("It is.", "so")], {},
        [
            [
                '<|analysis|>use it<|end|><|start|>assistant to=add{"a": 2}<|call|>',
                f"<|analysis|>ah{FINAL}Four.</s>",
            ],
            [f"<|analysis|>so{FINAL}It is.</s>"],
        ],
    ),
    "a-turn-of-weight-0-and-one-not-to-train-are-not-learned": (
        CHATML,
        [user("a"), said("b", weight=0), user("c"), said("d"), user("e"), said("f", train=False)],
        {}, [["d" + END]],
    ),
    "markers-leave-out-turns-of-weight-0-too": (
        MARKED,
        [user("?"), said("a"), user("c"), said("d"), user("e"), said("", weight=0)],
        {}, [["a" + END, "d" + END]],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("template", "messages", "options", "expected"), SERVED.values(), ids=SERVED
)
def test_each_answer_is_learned_as_it_was_served(
    make_tokenizer: MakeTokenizer, template: str, messages: list[Any], options: dict[str, Any],
    expected: list[list[str]],
) -> None:  # fmt: skip
    """After the prompt that a server would have made, letter for letter."""
    tokenizer = make_tokenizer(template)
    rows = render(tokenizer, messages, **options)
    assert [learned(tokenizer, row) for row in rows] == expected
    ask = Renderer(tokenizer, DataOptions(**options)).prompt_ids
    answers = [at for at, m in enumerate(messages) if m["role"] == "assistant"]
    prompts = {tokenizer.decode(ask(parsed(messages[: at + 1]))) for at in answers}
    for row in rows:
        starts = np.flatnonzero(np.diff(row.loss_mask, prepend=False) & row.loss_mask)
        assert {tokenizer.decode(row.token_ids[:start]) for start in starts} <= prompts


UNREASONED = (
    "{:,} answers have no reasoning, and the chat template asks for it: make them anew"
    " (draftcore data regenerate)"
)
WITHOUT = "learn and serve without (data.template_options.enable_thinking=false)"
MARKED_CONTENT = "{% generation %}{{ m.content }}{% endgeneration %}"


@pytest.mark.parametrize(
    ("template", "messages", "notes"),
    [
        (QWEN3_FIELD, TWICE, {SPLIT: 1}),
        (QWEN3_FIELD, TWICE[:2], {}),
        (R1, [user("?"), said("<think>\nhm\n</think>\n\nFour."), *TWICE], {REASONING_LOST: 3}),
        (CHATML, TWICE, {REASONING_LOST: 2}),
        (CHATML, [user("?"), said("Well.", "", CALL), TOOL, said("Four.")], {CALLS_LOST: 1}),
        (QWEN3_FIELD, PLAIN, {f"{UNREASONED}, or {WITHOUT}": 2}),
        (R1, PLAIN, {UNREASONED: 2}),
        (GPT_OSS, PLAIN, {UNREASONED: 2}),
        (NO_END_OF_TURN, PLAIN, {NO_END: 1}),
        (replaced("{{ m.content }}", MARKED_CONTENT), PLAIN, {MARKED_QUESTION: 1}),
        (GLM, TWICE, {SPLIT: 1}),  # which the next turn ends
    ],
)
def test_what_a_template_drops_is_counted(
    make_tokenizer: MakeTokenizer, template: str, messages: list[Any], notes: dict[str, int]
) -> None:
    found: Counter[str] = Counter()
    for row in render(make_tokenizer(template), messages):
        found.update(row.notes)
    assert found == notes


@pytest.mark.parametrize(
    ("template", "messages", "options", "says"),
    [
        (NEMOTRON, PLAIN, {}, WITHOUT),
        (QWEN3_FIELD, TWICE, SHORT, "asks for none: data.template_options.enable_thinking=true"),
        (QWEN3_FIELD, THINKING, SHORT, "asks for none: data.template_options.enable_thinking=true"),
    ],
)
def test_where_reasoning_makes_a_prompt_another_one_the_switch_of_it_is_named(
    make_tokenizer: MakeTokenizer, template: str, messages: list[Any], options: Any, says: str
) -> None:
    (bad,) = render(make_tokenizer(template), messages, **options)
    assert says in bad.reason


def test_an_option_that_the_template_does_not_read_is_refused(
    make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    """Or a run is in another thinking mode than its user means, and nothing says so."""
    file = tmp_path / "marked.jinja"
    file.write_text(replaced("<|im_end|>", "{{ mine }}<|im_end|>", MARKED))
    tokenizer, mine = make_tokenizer({"default": QWEN3_FIELD, "rag": MARKED}), str(file)
    assert render(tokenizer, PLAIN, template_options={"mine": "!"}, chat_template=mine)
    for option, says in {
        "enable_thinkin": r"'enable_thinkin' \(did you mean 'enable_thinking'\?\)\n  it reads enable_th",
        "mine": "does not read 'mine'\n",
        "tools": "does not read 'tools'\n",
    }.items():
        with pytest.raises(UsageError, match=says):
            render(tokenizer, PLAIN, template_options={option: False})


def test_a_template_is_told_the_date_it_is_given_or_today(make_tokenizer: MakeTokenizer) -> None:
    tokenizer, row = make_tokenizer(GPT_OSS), parsed(TWICE[:2])
    for date, text in (("2024-07-26T10:00:00", "2024-07-26"), ("", f"{datetime.now():%Y-}")):
        (rendered,) = Renderer(tokenizer, date=date).render([row])
        assert isinstance(rendered, Rendered)
        assert tokenizer.decode(rendered.token_ids).startswith(f"<s>Current date: {text}")
    assert Renderer(make_tokenizer(CHATML), date="2024-07-26").date == "", "it does not ask"


@pytest.mark.parametrize(
    "masked", [{"loss_mask": [0, 1, 0, 1, 1]}, {"labels": [-100, 6, -100, 8, 9]}]
)
def test_rows_of_tokens_are_kept(chatml: PreTrainedTokenizerFast, masked: dict[str, Any]) -> None:
    row = parse_row("x", {"input_ids": [5, 6, 7, 8, 9], **masked})
    for last_turn_only, expected in ((False, [1, 3, 4]), (True, [3, 4])):
        config = DataOptions(last_turn_only=last_turn_only)
        (rendered,) = Renderer(chatml, config).render([row])
        assert isinstance(rendered, Rendered)
        assert rendered.token_ids.tolist() == [5, 6, 7, 8, 9]
        assert rendered.loss_mask.nonzero()[0].tolist() == expected
    (bad,) = Renderer(chatml).render([parse_row("x", {"input_ids": [9999], "labels": [9999]})])
    assert "not below 313" in str(bad)


# ---------------------------------------------------------------- the format's number

GOLDEN = Path(__file__).with_name("rendering_golden.json")
SPECIALS = ["</s>", "<|user|>", "<|assistant|>", "<|end|>", "<|call|>"]
TOKENS = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]}
WAYS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    **{way: (template, messages, {}) for way, (template, messages, _) in LEARNED.items()},
    **{way: case[:3] for way, case in SERVED.items()},
    "last turn only": (CHATML, TWO_TURNS, {"last_turn_only": True}),
    "rows of tokens": (CHATML, TOKENS, {}),
}


def digest(template: str, row: Any, options: dict[str, Any]) -> str:
    """Return a digest of the tokens, masks and notes of a conversation's rows, and of its prompt."""
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens(SPECIALS, special_tokens=True)
    renderer = Renderer(tokenizer, DataOptions(**options), "2026-01-02T03:04:05")
    given: Any = parse_row("x", row) if row is TOKENS else parsed(row)
    rows = [one for one in renderer.render([given]) if isinstance(one, Rendered)]
    assert rows
    assert all(one.loss_mask.any() for one in rows)
    data: list[Any] = [(one.token_ids.tolist(), one.loss_mask.tolist(), one.notes) for one in rows]
    if row is not TOKENS:
        data.append(renderer.prompt_ids(given))
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_rendered_changes_with_the_format_number_alone(way: str) -> None:
    """A rendered dataset is reused while its key is the same, and `FORMAT` stands in it for the code.

    So where a digest changes, everyone's rendered rows are old.
    """
    golden = json.loads(GOLDEN.read_text())
    rendered = {"format": FORMAT, way: digest(*WAYS[way])}
    says = f"rendering changed: raise FORMAT in draftcore_data/rendering.py and renew {GOLDEN.name} with\n"
    assert rendered == {"format": golden["format"], way: golden["rows"].get(way)}, (
        says + json.dumps({"format": FORMAT, "rows": {w: digest(*WAYS[w]) for w in WAYS}}, indent=2)
    )


# ---------------------------------------------------------------- long conversations

NUMBERED = replaced(
    "<|im_start|>{{", "[{{ loop.index }}]<|im_start|>{{"
)  # no part is as the whole is
AGAIN = WAYS | {"numbered": (NUMBERED, TWO_TURNS, {})}
del AGAIN["rows of tokens"], AGAIN["gpt-oss-thinks-and-calls-a-tool"]  # placed once, but not again


def repeated(messages: list[Any], times: int) -> list[Any]:
    """A conversation so many times after each other, each time in other words."""
    lead = [m for m in messages if m["role"] == "system"]
    rest = [m for m in messages if m["role"] != "system"]
    rest += [said("ok")] * (rest[-1]["role"] != "assistant")
    return lead + [
        {**m, "content": f"{m['content']}{' x' * (at % 3)}"} if m.get("content") else m
        for at in range(times)
        for m in rest
    ]


@pytest.mark.parametrize("way", AGAIN)
def test_the_answers_of_a_long_conversation_are_those_that_are_found_one_by_one(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    template, messages, options = AGAIN[way]
    row = template, repeated(messages, 15), {**options, "max_length": 10**6}
    monkeypatch.setattr(rendering, "LONG", 8)
    in_parts = digest(*row)
    monkeypatch.setattr(rendering, "LONG", 10**9)
    assert in_parts == digest(*row)


@pytest.mark.parametrize(
    ("template", "thought", "longest"),
    [
        (CHATML, "", 10**6), (MARKED, "", 10**6), (QWEN3_FIELD, "", 10**6),  # in parts
        (QWEN3_FIELD, "hm", 200),  # as far as a row may reach
        (NUMBERED, "", 200), (NUMBERED, "last", 10**6),
    ],
)  # fmt: skip
def test_what_is_rendered_of_a_conversation_grows_as_its_turns_do(
    make_tokenizer: MakeTokenizer, monkeypatch: pytest.MonkeyPatch, template: str, thought: str, longest: int
) -> None:  # fmt: skip
    """Not as their square: thousands of turns are no reason to wait for minutes."""
    sizes, render_one = list[int](), chat_template_utils.render_jinja_template

    def counted(**given: Any) -> Any:
        done = render_one(**given)
        sizes[-1] += len(done[0][0])
        return done

    options = DataOptions(max_length=longest, last_turn_only=thought == "last")
    renderer = Renderer(make_tokenizer(template), options)
    monkeypatch.setattr(chat_template_utils, "render_jinja_template", counted)
    rows = list[Any]()
    for turns in (200, 1600):
        sizes.append(0)
        turn = [user("Why?"), said("It is.", thought)]
        rows = list(renderer.render([parsed(repeated(turn, turns // 2))]))
        assert all(isinstance(one, Rendered) for one in rows)
        assert longest == 10**6 or len(rows[-1].token_ids) > longest  # left out, and said so
    assert sizes[1] < 9 * sizes[0]
