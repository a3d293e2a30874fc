"""The loss mask, compared as text with what a person says the assistant wrote.

Every template here is written by hand after a family of real ones, and every expectation is a
literal: the assistant's words and its end-of-turn token, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftcore.data.conversations import Conversation
from draftcore.data.rendering import Rendered, Renderer, RenderError
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
REASONING_FIELD = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}"
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
# Old ChatML templates know no add_generation_prompt.
HEADER_WITHOUT_PROMPT = CHATML.split("{% if add_generation_prompt")[0]
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


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


TWO_TURNS = [user("What is 2+2?"), assistant("Four."), user("Why?"), assistant("It is the sum.")]


def learned(tokenizer: PreTrainedTokenizerFast, rendered: Rendered) -> list[str]:
    """The text of each unbroken run of masked-in tokens."""
    pairs = zip(rendered.token_ids, rendered.loss_mask, strict=True)
    runs = [[i for i, _ in run] for keep, run in groupby(pairs, key=lambda p: p[1]) if keep]
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        pytest.param(
            CHATML, TWO_TURNS, ["Four.<|im_end|>", "It is the sum.<|im_end|>"], id="chatml"
        ),
        pytest.param(
            CHATML,
            [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hé, 日本!\n")],
            ["Hé, 日本!\n<|im_end|>"],
            id="chatml-system-unicode-newline",
        ),
        pytest.param(
            CHATML,
            [user("Hi"), assistant("say <|im_end|>\nor not"), user("Hi"), assistant("no")],
            ["say <|im_end|>\nor not<|im_end|>", "no<|im_end|>"],
            id="content-with-an-end-of-turn-in-it",
        ),
        pytest.param(
            CHATML,
            [assistant("Welcome!"), user("Hi"), assistant("Yes?")],
            ["Welcome!<|im_end|>", "Yes?<|im_end|>"],
            id="assistant-speaks-first",
        ),
        pytest.param(
            CHATML,
            [user("Hi"), assistant(""), user("Hm"), assistant("ok"), user("bye")],
            ["<|im_end|>", "ok<|im_end|>"],
            id="empty-answer-and-a-last-question",
        ),
        pytest.param(
            LLAMA3, TWO_TURNS, ["Four.<|eot_id|>", "It is the sum.<|eot_id|>"], id="llama3"
        ),
        pytest.param(
            LLAMA3,
            [user("Hi"), assistant("  Four. \n"), user("?"), assistant("\nsum ")],
            ["Four.<|eot_id|>", "sum<|eot_id|>"],
            id="content-is-trimmed",
        ),
        pytest.param(MISTRAL, TWO_TURNS, [" Four.</s>", " It is the sum.</s>"], id="mistral"),
        pytest.param(
            QWEN3_THINKING,
            TWO_TURNS,
            ["Four.<|im_end|>", "<think>\n\n</think>\n\nIt is the sum.<|im_end|>"],
            id="qwen3-writes-an-empty-think-block",
        ),
        pytest.param(
            QWEN3_THINKING,
            [
                user("What is 2+2?"),
                assistant("<think>\nadd\n</think>\n\nFour.\n"),
                user("Why?"),
                assistant("<think>\nhm\n</think>\n\nIt is."),
            ],
            ["Four.\n<|im_end|>", "<think>\nhm\n</think>\n\nIt is.<|im_end|>"],
            id="qwen3-strips-reasoning-from-history",
        ),
        pytest.param(
            QWEN3_NO_THINKING,
            TWO_TURNS,
            ["Four.<|im_end|>", "It is the sum.<|im_end|>"],
            id="the-generation-prompt-has-an-empty-think-block",
        ),
        pytest.param(
            QWEN3_NO_THINKING,
            [user("a tag?"), assistant("<think> is a tag"), user("Why?"), assistant("It is.")],
            ["<think> is a tag<|im_end|>", "It is.<|im_end|>"],
            id="an-answer-that-begins-as-the-dropped-block-does",
        ),
        pytest.param(
            CHATML.replace("m.content }}", "m.content.replace('2', 'two') }}"),
            [user("2?"), assistant("2+2"), user("?"), assistant("2")],
            ["two+two<|im_end|>", "two<|im_end|>"],
            id="content-is-rewritten-in-place",
        ),
        pytest.param(
            R1,
            [user("2+2?"), assistant("<think>\nadd\n</think>\n\nFour.")],
            ["\n\nFour.</s>"],
            id="r1-strips-reasoning-after-its-prompt-opened-it",
        ),
        pytest.param(PHI, TWO_TURNS, ["Four.<|end|>", "It is the sum.<|end|>"], id="phi-final-eos"),
        pytest.param(
            VICUNA, TWO_TURNS, [" Four.</s>", " It is the sum.</s>"], id="header-without-newline"
        ),
        pytest.param(
            VICUNA.split("{% if add_generation_prompt")[0],
            TWO_TURNS,
            [" Four.</s>", " It is the sum.</s>"],
            id="header-with-a-space-and-no-generation-prompt",
        ),
        pytest.param(
            VICUNA.replace("ASSISTANT:{% endif", "ASSISTANT: {% endif"),
            [user("Hi"), assistant("\nFour.")],
            ["\nFour.</s>"],
            id="the-space-at-the-end-of-a-header-is-not-learned",
        ),
        pytest.param(
            CHATML.replace("m.content }}", "m.content.rstrip() }}"),
            [user("Hi"), assistant(" Four. \n"), user("?"), assistant("sum")],
            [" Four.<|im_end|>", "sum<|im_end|>"],
            id="content-is-trimmed-on-the-right",
        ),
        pytest.param(
            HEADER_WITHOUT_PROMPT,
            TWO_TURNS,
            ["Four.<|im_end|>", "It is the sum.<|im_end|>"],
            id="no-generation-prompt",
        ),
        pytest.param(
            MARKED, TWO_TURNS, ["Four.<|im_end|>", "It is the sum.<|im_end|>"], id="marked"
        ),
        pytest.param(
            NO_END_OF_TURN, TWO_TURNS, ["Four.", "It is the sum."], id="no-end-of-turn-token"
        ),
        pytest.param(
            TOOLS,
            [
                user("2+2?"),
                assistant("Well.", tool_calls=[{"name": "add"}]),
                {"role": "tool", "content": "4"},
                assistant("Four."),
            ],
            ["Well.<tool_call>add</tool_call><|end|>", "Four.<|end|>"],
            id="tool-calls-belong-to-the-answer",
        ),
    ],
)
def test_what_is_learned_is_what_the_assistant_wrote(
    make_tokenizer: MakeTokenizer, template: str, messages: list[Any], expected: list[str]
) -> None:
    tokenizer = make_tokenizer(template, bos_token="<s>", eos_token="</s>")
    rendered = Renderer(tokenizer).render(messages)
    assert learned(tokenizer, rendered) == expected
    last_only = Renderer(tokenizer, last_turn_only=True).render(messages)
    assert learned(tokenizer, last_only) == expected[-1:]
    theirs = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert rendered.token_ids == last_only.token_ids == theirs


def test_a_token_over_the_edge_of_the_header_is_not_learned(
    make_tokenizer: MakeTokenizer,
) -> None:
    """The header's newline and the answer's first merge into one token, which is the prompt's."""
    tokenizer = make_tokenizer(CHATML)
    merged = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    assert len(merged) == 1
    rendered = Renderer(tokenizer).render([user("Hi"), assistant("\n\nFour.")])
    assert merged[0] in rendered.token_ids
    assert learned(tokenizer, rendered) == ["\nFour.<|im_end|>"]


def test_offsets_survive_normalizers_and_metaspace(make_tokenizer: MakeTokenizer) -> None:
    """A SentencePiece-like tokenizer prepends and replaces characters before it counts them."""
    words = ["▁Hi", "▁user", "▁assistant", "▁Four.", "▁", "\n", "<unk>"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.add_special_tokens(["[INST]", "[/INST]", "</s>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="</s>",
        chat_template="{% for m in messages %}{% if m.role == 'user' %}"
        "[INST] {{ m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
    )
    rendered = Renderer(tokenizer).render([user("Hi"), assistant("Four."), user("Hi")])
    kept = [i for i, keep in zip(rendered.token_ids, rendered.loss_mask, strict=True) if keep]
    assert tokenizer.convert_ids_to_tokens(kept)[-2:] == ["▁Four.", "</s>"]
    assert "▁Hi" not in tokenizer.convert_ids_to_tokens(kept)


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        pytest.param(MISTRAL, [user("a"), user("b"), assistant("c")], "alternate", id="refused"),
        pytest.param(
            QWEN3_NO_THINKING,
            [user("a"), assistant("<think>\nhm\n</think>\n\nb")],
            "not the generation prompt",
            id="reasoning-against-a-closed-think-block",
        ),
        pytest.param(
            CHATML.replace("m.content }}", "m.content[:8] }}"),
            [user("a"), assistant("longer than eight"), user("b"), assistant("c")],
            "rewrites",
            id="content-is-cut",
        ),
        pytest.param(
            CHATML.replace("m.content }}", "m.content }} ({{ m.content | length }})"),
            [user("a"), assistant("longer than the probe")],
            "rewrites",
            id="what-follows-depends-on-the-content",
        ),
        pytest.param(
            REASONING_FIELD,
            [user("a"), assistant("b", reasoning_content="hm")],
            "not the generation prompt",
            id="a-reasoning-field-against-a-closed-think-block",
        ),
        pytest.param(
            TOOLS.replace("if m.tool_calls", "if m.tool_calls and loop.last"),
            [user("a"), assistant("b", tool_calls=[{"name": "add"}]), assistant("c")],
            "later turns change",
            id="tool-calls-vanish-from-history",
        ),
        pytest.param(
            TOOLS.replace("<|end|>", ""),
            [user("a"), assistant("b", tool_calls=[{"name": "add"}])],
            "no end-of-turn token",
            id="tool-calls-without-an-end",
        ),
        pytest.param(CHATML, [user("a"), assistant("\ud800")], "Unicode", id="half-a-surrogate"),
    ],
)
def test_a_turn_that_cannot_be_placed_is_an_error_not_a_guess(
    make_tokenizer: MakeTokenizer, template: str, messages: list[Any], reason: str
) -> None:
    tokenizer = make_tokenizer(template, bos_token="<s>", eos_token="</s>")
    with pytest.raises(RenderError, match=reason):
        Renderer(tokenizer).render(messages)


def test_an_error_in_one_conversation_leaves_the_others_of_its_chunk(
    make_tokenizer: MakeTokenizer,
) -> None:
    tokenizer = make_tokenizer(MISTRAL, bos_token="<s>", eos_token="</s>")
    rows = [
        Conversation("1", (user("a"), assistant("one"))),
        Conversation("2", (user("a"), user("b"), assistant("two"))),
        Conversation("3", (user("a"), assistant("three"))),
    ]
    first, second, third = Renderer(tokenizer).render_many(rows)
    assert isinstance(first, Rendered)
    assert learned(tokenizer, first) == [" one</s>"]
    assert isinstance(second, RenderError)
    assert isinstance(third, Rendered)
    assert learned(tokenizer, third) == [" three</s>"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            CHATML,
            "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n"
            "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            HEADER_WITHOUT_PROMPT,
            "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n"
            "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (MISTRAL, "<s>[INST] What is 2+2? [/INST] Four.</s>[INST] Why? [/INST]"),
        (R1, "<s><|user|>What is 2+2?<|assistant|>Four.</s><|user|>Why?<|assistant|><think>\n"),
    ],
)
def test_a_prompt_ends_where_the_last_answer_would_begin(
    make_tokenizer: MakeTokenizer, template: str, expected: str
) -> None:
    tokenizer = make_tokenizer(template, bos_token="<s>", eos_token="</s>")
    ids = Renderer(tokenizer).prompt([*TWO_TURNS, user("never seen")])
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_tools_of_a_row_reach_the_template(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(TOOLS)
    layout = Renderer(tokenizer).layout([user("Hi"), assistant("Four.")], [{"name": "add"}])
    assert layout.text == "TOOL add\n<|user|>Hi<|end|>\n<|assistant|>Four.<|end|>\n"


def test_the_identity_follows_template_and_options(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(CHATML)
    identity = Renderer(tokenizer).identity
    assert identity == Renderer(make_tokenizer(CHATML)).identity
    assert identity != Renderer(make_tokenizer(PHI, eos_token="</s>")).identity
    assert identity != Renderer(tokenizer, last_turn_only=True).identity


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "has no chat template"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "does not write"),
        ("{{ raise_exception('never') }}", "never"),
        ({"a": CHATML, "b": CHATML}, "none is the default"),
    ],
)
def test_a_tokenizer_that_cannot_render_is_refused_when_made(
    make_tokenizer: MakeTokenizer, template: Any, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        Renderer(make_tokenizer(template))
