"""What is learned of conversations that a template writes otherwise in history than when it answers.

The templates are written by hand after families of real ones: Qwen3, GLM-4.5, gpt-oss, DeepSeek R1.
Each expected row is what the model said in it, as it was served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from draftcore_data.conversations import BadRow, Rendered, parse_row
from draftcore_data.options import DataOptions
from draftcore_data.rendering import CALLS_LOST, REASONING_LOST, SPLIT, Renderer
from draftcore_sdk.targets import CHATML
from transformers import PreTrainedTokenizerFast

from draftcore.errors import UsageError

LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
# Reasoning is dropped once the next question comes; an answer without it has an empty block.
QWEN3 = (
    LAST_QUESTION + "{% for m in messages %}{% if m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# No token ends a turn: the next turn's header does.
GLM = (
    LAST_QUESTION + "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    "<think>{% if loop.index0 > ns.last %}{{ m.reasoning_content }}{% endif %}</think>"
    "{% if m.content %}{{ '\n' + m.content }}{% endif %}{% for call in m.tool_calls or [] %}"
    "{{ '\n<tool_call>' + call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}{{ '\n' + key }}={{ value }}{% endfor %}"
    "{{ '\n</tool_call>' }}{% endfor %}{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# The last answer's thinking and end differ from those in history; what was thought before a call is
# written until an answer follows. It takes arguments as text alone.
GPT_OSS = (
    "{% set ns = namespace(final=-1) %}{% for m in messages %}"
    "{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.final = loop.index0 %}{% endif %}"
    "{% endfor %}<s>Current date: {{ strftime_now('%Y-%m-%d') }}"
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.role != 'assistant' %}<|message|>{{ m.content }}<|end|>"
    "{% elif m.tool_calls %}{% if m.thinking and loop.index0 > ns.final %}<|analysis|>"
    "{{ m.thinking }}<|end|><|start|>assistant{% endif %} to="
    "{{ m.tool_calls[0].function.name + m.tool_calls[0].function.arguments }}<|call|>"
    "{% elif loop.last and not add_generation_prompt %}{% if m.thinking %}<|analysis|>"
    "{{ m.thinking }}<|end|><|start|>assistant{% endif %}<|final|>{{ m.content }}</s>"
    "{% else %}<|final|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Thinking is cut out of every answer that is written, the last one too.
R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
    "{% else %}<|assistant|>{{ m.content.split('</think>')[-1] }}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
CALL = {"function": {"name": "add", "arguments": '{"a": 2}'}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str | None, thought: str = "", *calls: Any, **more: Any) -> dict[str, Any]:
    turn = {"role": "assistant", "content": text, "reasoning": thought, "tool_calls": [*calls]}
    return {**{key: value for key, value in turn.items() if value or key == "content"}, **more}


TWICE = [user("2+2?"), said("Four.", "hm"), user("Why?"), said("It is.", "so")]
TOOL = {"role": "tool", "content": "4"}
CALLING = [user("2+2?"), said(None, "", CALL), TOOL, said("Four.")]
THINKING = [user("2+2?"), said(None, "use it", CALL), TOOL, said("Four.", "ah")]
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
EMPTY, END = "<think>\n\n</think>\n\n", "<|im_end|>"
SHORT = {"template_options": {"enable_thinking": False}}
SERVED: dict[str, tuple[str, list[Any], dict[str, Any], list[list[str]]]] = {
    "qwen3-thinks-before-each-answer": (
        QWEN3,
        TWICE,
        {},
        [[f"<think>\nhm\n</think>\n\nFour.{END}"], [f"<think>\nso\n</think>\n\nIt is.{END}"]],
    ),
    "qwen3-without-thinking-is-one-row": (
        QWEN3,
        [user("2+2?"), said("Four."), user("Why?"), said("It is.")],
        SHORT,
        [["Four." + END, "It is." + END]],
    ),
    "qwen3-calls-a-tool": (QWEN3, CALLING, SHORT, [[QWEN_CALL], ["Four." + END]]),
    "qwen3-thinks-and-calls-a-tool": (
        QWEN3,
        THINKING,
        {},
        [[f"<think>\nuse it\n</think>\n\n{QWEN_CALL}", f"<think>\nah\n</think>\n\nFour.{END}"]],
    ),
    "qwen3-rows-are-as-few-as-can-be": (
        QWEN3,
        [*THINKING, user("Why?"), said("It is.", "so")],
        {},
        [
            [f"<think>\nuse it\n</think>\n\n{QWEN_CALL}", f"<think>\nah\n</think>\n\nFour.{END}"],
            [f"<think>\nso\n</think>\n\nIt is.{END}"],
        ],
    ),
    "qwen3-learns-the-last-turn-only": (
        QWEN3,
        TWICE,
        {"last_turn_only": True},
        [[f"<think>\nso\n</think>\n\nIt is.{END}"]],
    ),
    "glm-calls-a-tool": (
        GLM,
        CALLING,
        {},
        [["\n<think></think>\n<tool_call>add\na=2\n</tool_call>", "\n<think></think>\nFour."]],
    ),
    "glm-thinks-before-each-answer": (
        GLM,
        TWICE,
        {},
        [["\n<think>hm</think>\nFour."], ["\n<think>so</think>\nIt is."]],
    ),
    "gpt-oss-thinks-before-each-answer": (
        GPT_OSS,
        TWICE,
        {},
        [
            ["<|analysis|>hm<|end|><|start|>assistant<|final|>Four.</s>"],
            ["<|analysis|>so<|end|><|start|>assistant<|final|>It is.</s>"],
        ],
    ),
    "gpt-oss-thinks-and-calls-a-tool": (
        GPT_OSS,
        [*THINKING, user("Why?"), said("It is.", "so")],
        {},
        [
            [
                '<|analysis|>use it<|end|><|start|>assistant to=add{"a": 2}<|call|>',
                "<|analysis|>ah<|end|><|start|>assistant<|final|>Four.</s>",
            ],
            ["<|analysis|>so<|end|><|start|>assistant<|final|>It is.</s>"],
        ],
    ),
    "a-turn-of-weight-0-and-one-not-to-train-are-not-learned": (
        CHATML,
        [user("a"), said("b", weight=0), user("c"), said("d"), user("e"), said("f", train=False)],
        {},
        [["d" + END]],
    ),
    "markers-leave-out-turns-of-weight-0-too": (
        CHATML.replace("{{ message['content'] }}<|im_end|>", "{% generation %}{{ message.content }}"
                       "<|im_end|>{% endgeneration %}"),
        [{**user("a"), "role": "assistant"}, user("c"), said("d"), user("e"), said("", weight=0)],
        {},
        [["a" + END, "d" + END]],
    ),
}  # fmt: skip


def parsed(messages: Any) -> Any:
    return parse_row("train.jsonl:1", {"messages": messages})


def render(tokenizer: PreTrainedTokenizerFast, messages: Any, **options: Any) -> list[Any]:
    return list(Renderer(tokenizer, DataOptions(**options)).render([parsed(messages)]))


def learned(tokenizer: PreTrainedTokenizerFast, row: Any) -> list[str]:
    assert isinstance(row, Rendered), row
    pairs = zip(row.token_ids.tolist(), row.loss_mask, strict=True)
    runs = [[i for i, _ in run] for keep, run in groupby(pairs, key=lambda p: p[1]) if keep]
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize(
    ("template", "messages", "options", "expected"), SERVED.values(), ids=SERVED
)
def test_each_answer_is_learned_as_it_was_served(
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
    template: str,
    messages: list[Any],
    options: dict[str, Any],
    expected: list[list[str]],
) -> None:
    """After the prompt that a server would have made, letter for letter."""
    tokenizer = make_tokenizer(template)
    rows = render(tokenizer, messages, **options)
    assert [learned(tokenizer, row) for row in rows] == expected
    prompt = Renderer(tokenizer, DataOptions(**options)).prompt_ids(parsed(messages))
    whole = tokenizer.decode(rows[-1].token_ids)
    assert whole.startswith(tokenizer.decode(prompt))


@pytest.mark.parametrize(
    ("template", "messages", "notes"),
    [
        (QWEN3, TWICE, {SPLIT: 1}),
        (QWEN3, TWICE[:2], {}),
        (R1, [user("?"), said("<think>\nhm\n</think>\n\nFour."), *TWICE], {REASONING_LOST: 3}),
        (CHATML, TWICE, {REASONING_LOST: 2}),
        (CHATML, [user("?"), said("Well.", "", CALL), TOOL, said("Four.")], {CALLS_LOST: 1}),
    ],
)
def test_what_a_template_drops_is_counted(
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
    template: str,
    messages: list[Any],
    notes: dict[str, int],
) -> None:
    found: Counter[str] = Counter()
    for row in render(make_tokenizer(template), messages):
        found.update(row.notes)
    assert found == notes


@pytest.mark.parametrize("messages", [CALLING, [user("a"), said(""), user("b"), said("c")]])
def test_an_answer_of_which_nothing_is_written_is_refused(
    chatml: PreTrainedTokenizerFast, messages: list[Any]
) -> None:
    (bad,) = render(chatml, messages)
    assert bad == BadRow("train.jsonl:1", "an answer is empty in the rendered text", "message 2")


def test_a_template_is_told_the_date_it_is_given_and_today_without_one(
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> None:
    tokenizer, row = make_tokenizer(GPT_OSS), parsed(TWICE[:2])
    for date, text in (("2024-07-26T10:00:00", "2024-07-26"), ("", f"{datetime.now():%Y-}")):
        (rendered,) = Renderer(tokenizer, date=date).render([row])
        assert isinstance(rendered, Rendered)
        assert tokenizer.decode(rendered.token_ids).startswith(f"<s>Current date: {text}")
    assert Renderer(make_tokenizer(CHATML), date="2024-07-26").date == "", "it does not ask"


def test_a_file_takes_the_place_of_the_targets_template(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(GLM)
    (row,) = render(chatml, TWICE[:2], chat_template=str(file))
    assert learned(chatml, row) == ["\n<think>hm</think>\nFour."]
    with pytest.raises(UsageError, match=r"data\.chat_template: .*none\.jinja cannot be read"):
        render(chatml, TWICE, chat_template=str(tmp_path / "none.jinja"))


@pytest.mark.parametrize(
    "masked", [{"loss_mask": [0, 1, 0, 1, 1]}, {"labels": [-100, 9, -100, 9, 9]}]
)
def test_rows_of_tokens_are_taken_as_they_are(
    chatml: PreTrainedTokenizerFast, masked: dict[str, Any]
) -> None:
    row = parse_row("x", {"input_ids": [5, 6, 7, 8, 9], **masked})
    for last_turn_only, expected in ((False, [1, 3, 4]), (True, [3, 4])):
        config = DataOptions(last_turn_only=last_turn_only)
        (rendered,) = Renderer(chatml, config).render([row])
        assert isinstance(rendered, Rendered)
        assert rendered.token_ids.tolist() == [5, 6, 7, 8, 9]
        assert rendered.loss_mask.nonzero()[0].tolist() == expected
    (bad,) = Renderer(chatml).render([parse_row("x", {"input_ids": [9999], "labels": [1]})])
    assert "not below 313" in str(bad)
