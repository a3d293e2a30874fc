"""Targets that are known by their config, and planning for a target of which nothing else is here.

Each file of the folder `recipes` holds a model's config, where its values are from, and what acceptance
others published of drafts for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import try_to_load_from_cache
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence, Split
from transformers import PreTrainedTokenizerFast

CHARACTERS = 4  # a token, where the tokenizer is not here: what English text has, about
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Published:
    """An acceptance length that others published: of which algorithm, on what, how, and where."""

    algorithm: str
    length: float
    on: str
    how: str
    source: str

    def __str__(self) -> str:
        return f"{self.algorithm} {self.length:g} on {self.on} ({self.how}; {self.source})"


@dataclass(frozen=True)
class Recipe:
    """A known target: its id, the values of its config and their source."""

    name: str
    model: str
    source: str
    config: Mapping[str, Any]
    published: tuple[Published, ...]


def recipes() -> dict[str, Recipe]:
    """Return the known targets by their short name."""
    known = dict[str, Recipe]()
    folder = resources.files("draftcore_tools") / "recipes"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        name, data = file.name.removesuffix(".json"), json.loads(file.read_text(encoding="utf-8"))
        published = tuple(Published(**one) for one in data.pop("expected"))
        known[name] = Recipe(name, published=published, **data)
    return known


def recipe_of(model: str) -> Recipe | None:
    """Return the known target of this id or short name."""
    wanted = model.casefold()
    alike = (r for r in recipes().values() if wanted in (r.name, r.model.casefold()))
    return next(alike, None)


@contextmanager
def config_and_tokenizer(model: str, recipe: Recipe | None) -> Iterator[tuple[str, Any]]:
    """Yield where a target's config lies, and what stands for its tokenizer; None if that is there, too.

    The config of a known target that the Hub's cache lacks is written to a folder, which goes away.
    """
    if recipe is None or Path(model).exists():
        yield model, None
    elif all(is_cached(recipe.model, file) for file in ("config.json", "tokenizer_config.json")):
        yield recipe.model, None
    else:
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(recipe.config))
            yield folder, stand_in()


def is_cached(model: str, file: str) -> bool:
    return isinstance(try_to_load_from_cache(model, file), str)


def stand_in() -> Any:
    """Return a tokenizer that takes so many CHARACTERS for a token, which is the first one's."""
    tokenizer = Tokenizer(WordLevel({chr(code): code for code in range(256)}, unk_token="?"))
    parts = Split(Regex(rf"[\s\S]{{1,{CHARACTERS}}}"), "isolated")
    rest = Split(Regex(r"(?<=^[\s\S])[\s\S]+"), "removed")
    tokenizer.pre_tokenizer = Sequence([parts, rest])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
