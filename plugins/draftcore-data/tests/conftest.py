"""Servers that answer as a test wants, the command line, a tiny target, and a tokenizer for templates."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from draftcore_sdk.targets import CHATML, tiny_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from draftcore.cli import main

sys.path.insert(0, str(Path(__file__).parent))

from talking import Behaviour, Cli, Jsonl, MakeTokenizer, Serve, Server, echo, write_rows

SPECIAL = (
    "<|im_start|> <|im_end|> <|endoftext|> <s> </s> [INST] [/INST] <|begin_of_text|> <|user|> <|end|>"
    " <|start_header_id|> <|end_header_id|> <|eot_id|> <|assistant|> <|call|>"
)
CORPUS = ("Hello there, what is the sum?", "The answer is four.\n\nWhy?", "user\n assistant\n\n")


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Server] = []

    def start(behave: Behaviour = echo) -> Server:
        servers.append(server := Server(behave))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def cli() -> Cli:
    """Run the command line in this process, and expect an exit status."""

    def run(*arguments: object, status: int = 0) -> Result:
        result = CliRunner().invoke(main, list(map(str, arguments)))
        assert result.exit_code == status, result.output
        return result

    return run


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target whose next token is a clear choice."""
    return tiny_target(tmp_path_factory.mktemp("target"), std=0.5)


@pytest.fixture(scope="session")
def backend() -> Tokenizer:
    """Byte-level BPE that trims offsets, as GPT-2's and Llama 3's do, and merges whitespace."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, min_frequency=1, special_tokens=SPECIAL.split(), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
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
def jsonl(tmp_path: Path) -> Jsonl:
    """Writes rows as JSON lines (a string stands for a raw line) and returns the path."""
    return lambda *rows, name="train.jsonl": str(write_rows(tmp_path / name, *rows))
