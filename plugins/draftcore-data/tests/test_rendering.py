"""The loss mask, compared as text with what a person says the assistant wrote.

Every template here is written by hand after a family of real ones, and every expectation is a
literal: the assistant's words and its end-of-turn token, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import pytest
from draftcore_data.conversations import BadRow, Conversation, Rendered
from draftcore_data.options import DataOptions
from draftcore_data.rendering import Renderer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftcore.errors import UsageError

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Reasoning is kept in the turns after the last question, where even an empty block is written.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set reasoning = '' %}{% set content = m.content %}"
    "{% if '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ reasoning }}\n</think>\n\n{% endif %}{{ content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ block }}{% endif %}"
)
QWEN3_THINKING = QWEN3.replace("{{ block }}", "")
QWEN3_NO_THINKING = QWEN3.replace("{{ block }}", "<think>\n\n</think>\n\n")
# The generation prompt opens a think block; the text of an answer has it stripped off.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
    "{% else %}<|assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} "
    "{% else %}ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
# Old templates know no add_generation_prompt.
CHATML_ALONE, VICUNA_ALONE = (one.split("{% if add_gen")[0] for one in (CHATML, VICUNA))
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_END_OF_TURN = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
TOOLS = (
    "{% for t in tools or [] %}TOOL {{ t.name }}\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].name }}</tool_call>{% endif %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def talk(*said: str, **fields: Any) -> list[dict[str, Any]]:
    """A conversation that the user begins; the fields are those of the last turn."""
    roles = ("user", "assistant") * len(said)
    turns = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return [*turns[:-1], {**turns[-1], **fields}]


TWO_TURNS = talk("What is 2+2?", "Four.", "Why?", "It is the sum.")
CALL = {"tool_calls": [{"name": "add"}]}


def render(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Any], *tools: Any, **options: Any
) -> Any:
    row = Conversation("train.jsonl:1", tuple(messages), tools)
    (result,) = Renderer(tokenizer, DataOptions(**options)).render([row])
    return result


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
        replaced("ASSISTANT:{% endif", "ASSISTANT: {% endif", VICUNA),
        talk("Hi", "\nFour."),
        ["\nFour.</s>"],
    ),
    "empty-think-block-in-the-prompt": (QWEN3_NO_THINKING, TWO_TURNS, ending(END, *BOTH)),
    "empty-think-block-in-an-answer": (
        QWEN3_THINKING,
        TWO_TURNS,
        ending(END, "Four.", f"{NONE}It is the sum."),
    ),
    "an-answer-that-begins-as-the-dropped-block-does": (
        QWEN3_NO_THINKING,
        talk("a tag?", "<think> is a tag", "Why?", "It is."),
        ending(END, "<think> is a tag", "It is."),
    ),
    "reasoning-that-the-prompt-opened": (R1, talk("?", f"{THOUGHT}Four."), ["\n\nFour.</s>"]),
    "system-unicode-and-an-end-of-turn-in-content": (
        CHATML,
        [SYSTEM, *talk("Hi", f"Hé, 日本!\n{END}", "Hi", "no")],
        ending(END, f"Hé, 日本!\n{END}", "no"),
    ),
    # The header's newline and the answer's first merge into one token, which is the prompt's.
    "token-over-the-edge": (CHATML, talk("Hi", "\n\nFour."), ["\nFour.<|im_end|>"]),
    "assistant-first-user-last": (
        CHATML,
        talk("", "Hm!", "Hi", "no", "?")[1:],
        ["Hm!" + END, "no" + END],
    ),
    "llama3-trims-content": (
        LLAMA3,
        talk("Hi", "  Four. \n", "?", "\nsum "),
        ending("<|eot_id|>", "Four.", "sum"),
    ),
    "content-is-trimmed-on-the-right": (
        replaced("m.content }}", "m.content.rstrip() }}"),
        talk("Hi", " Four. \n", "?", "sum"),
        ending(END, " Four.", "sum"),
    ),
    "content-is-rewritten-in-place": (
        replaced("m.content }}", "m.content.replace('2', 'two') }}"),
        talk("2?", "2+2", "?", "2"),
        ending(END, "two+two", "two"),
    ),
    "tool-calls-belong-to-the-answer": (
        TOOLS,
        [*talk("2+2?", "Well.", **CALL), TOOL, *talk("", "Four.")[1:]],
        ending("<|end|>", "Well.<tool_call>add</tool_call>", "Four."),
    ),
}


@pytest.mark.parametrize(("template", "messages", "expected"), LEARNED.values(), ids=LEARNED)
def test_what_is_learned_is_what_the_assistant_wrote(
    make_tokenizer: MakeTokenizer, template: str, messages: list[Any], expected: list[str]
) -> None:
    tokenizer = make_tokenizer(template, bos_token="<s>", eos_token="</s>")
    theirs = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    for last_turn_only, wanted in ((False, expected), (True, expected[-1:])):
        rendered = render(tokenizer, messages, last_turn_only=last_turn_only)
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
    (kept,) = learned(tokenizer, render(tokenizer, talk("Hi", "Four.", "Hi")))
    assert "Four." in kept
    assert kept.endswith("</s>")
    assert "Hi" not in kept


REASONING_FIELD = replaced("{{ m.content", "<think>{{ m.reasoning_content }}</think>{{ m.content")
CLOSED_THINK_BLOCK = replaced("assistant\n", "assistant\n<think></think>", REASONING_FIELD)
REWRITES, NO_PROMPT = "rewrites its content", "not the generation prompt"
LONGER_THAN_PROBE = talk("a", "longer than eight", "b", "c")
TWO_ANSWERS = [*talk("a", "b", **CALL), *talk("", "c")[1:]]
REFUSED: dict[str, tuple[str, list[Any], str]] = {
    "refused": (MISTRAL, [*talk("a"), *talk("b", "c")], "alternate"),
    "half-a-surrogate": (CHATML, talk("a", "\ud800"), "Unicode"),
    "closed-think-block": (QWEN3_NO_THINKING, talk("a", f"{THOUGHT}b"), NO_PROMPT),
    "reasoning-field": (CLOSED_THINK_BLOCK, talk("a", "b", reasoning_content="hm"), NO_PROMPT),
    "content-is-cut": (replaced("m.content", "m.content[:8]"), LONGER_THAN_PROBE, REWRITES),
    "content-is-counted": (
        replaced("m.content }}", "m.content }} ({{ m.content | length }})"),
        LONGER_THAN_PROBE,
        REWRITES,
    ),
    "tool-calls-without-an-end": (
        replaced("<|end|>", "{% if m.tool_calls %}?{% else %}<|end|>{% endif %}", TOOLS),
        TWO_ANSWERS,
        "no end-of-turn",
    ),
    "no-assistant": (CHATML, talk("a"), "no assistant turn: roles user"),
    "none-to-learn": (MISTRAL, talk("a", "b", train=False), "no assistant turn to learn"),
}


@pytest.mark.parametrize(("template", "messages", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_turn_that_cannot_be_placed_is_a_bad_row_not_a_guess(
    make_tokenizer: MakeTokenizer, template: str, messages: list[Any], reason: str
) -> None:
    bad = render(make_tokenizer(template, bos_token="<s>", eos_token="</s>"), messages)
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
    ids = Renderer(tokenizer).prompt_ids(Conversation("x", (*TWO_TURNS, *talk("never seen"))))
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_tools_of_a_row_reach_the_template(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(TOOLS)
    rendered = render(tokenizer, talk("Hi", "Four."), {"name": "add"})
    assert tokenizer.decode(rendered.token_ids).startswith("TOOL add\n<|user|>Hi<|end|>\n")


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
