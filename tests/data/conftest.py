"""A small byte-level BPE tokenizer, made on the spot, to put chat templates on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = (
    "<|im_start|> <|im_end|> <|endoftext|> <s> </s> [INST] [/INST] <|begin_of_text|> <|user|> <|end|>"
    " <|start_header_id|> <|end_header_id|> <|eot_id|> <|assistant|> <|call|>"
)
CORPUS = ("Hello there, what is the sum?", "The answer is four.\n\nWhy?", "user\n assistant\n\n")

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


@pytest.fixture(scope="session")
def backend() -> Tokenizer:
    """Byte-level BPE that trims offsets, as GPT-2's and Llama 3's do, and merges whitespace."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        min_frequency=1,
        special_tokens=SPECIAL.split(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


@pytest.fixture
def make_tokenizer(backend: Tokenizer) -> MakeTokenizer:
    def make(template: str | None = CHATML, **specials: Any) -> PreTrainedTokenizerFast:
        copy = Tokenizer.from_str(backend.to_str())
        return PreTrainedTokenizerFast(tokenizer_object=copy, chat_template=template, **specials)

    return make


@pytest.fixture
def chatml(make_tokenizer: MakeTokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer(CHATML)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as JSON lines (a string stands for a raw line) and returns the path."""

    def write(*rows: Any, name: str = "train.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
        return str(tmp_path / name)

    return write
