"""Make a language, rows of it, and a target that has learned it: `python -m draftcore_tinylm.make FOLDER`.

A row begins with one of four tokens that says which table gives each token's successor; now and then
another token comes instead. So a model has to remember the first token of a row, and a draft has
something to learn. Rows end with token 0, or after 32 tokens. What a row asks are its first six.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from draftcore_tinylm.model import TinyConfig, TinyLM, save

TABLES, FIRST = 4, 5  # tokens 1..4 name tables; the others are words
LONGEST, ASKED, NOISE = 32, 6, 0.02


def sentences(count: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return rows of the language, which is the same for each seed."""
    words, fixed, chance = range(FIRST, vocab_size), random.Random(0), random.Random(seed)
    tables = [dict(zip(words, fixed.sample(words, len(words)), strict=True)) for _ in range(TABLES)]
    for table in tables:
        table[fixed.choice(words)] = 0
    rows = list[list[int]]()
    while len(rows) < count:
        number = chance.randrange(TABLES)
        row = [1 + number, chance.choice(words)]
        while len(row) < LONGEST and row[-1]:
            word = chance.choice(words) if chance.random() < NOISE else tables[number][row[-1]]
            row.append(word)
        if len(row) > ASKED + 2:
            rows.append(row)
    return rows


def write(rows: list[list[int]], file: Path) -> None:
    """Write rows as JSON lines; all but what they ask is learned."""
    lines = (
        json.dumps({"input_ids": row, "loss_mask": [int(at >= ASKED) for at in range(len(row))]})
        for row in rows
    )
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def train(model: TinyLM, rows: list[list[int]], steps: int, seed: int = 0) -> float:
    """Train on random rows; returns the last step's loss per token."""
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, steps)
    chance, value = random.Random(seed), 0.0
    for _ in range(steps):
        batch = [torch.tensor(row) for row in chance.choices(rows, k=32)]
        tokens_BT = pad_sequence(batch, batch_first=True, padding_value=-1)
        taken, _ = model(tokens_BT.clamp(min=0))
        logits_BTV = model.head(taken["last_hidden"][:, :-1])
        labels_BT = tokens_BT[:, 1:]
        loss = functional.cross_entropy(logits_BTV.mT, labels_BT, ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        value = loss.item()
    return value


def make(folder: Path, steps: int = 200, rows: int = 1000) -> float:
    """Write a trained target, `train.jsonl` and `eval.jsonl` into a folder; returns the target's loss."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = TinyLM(TinyConfig())
        data = sentences(rows, model.config.vocab_size, seed=1)
        loss = train(model, data, steps)
    save(model, folder)
    write(data, folder / "train.jsonl")
    write(sentences(100, model.config.vocab_size, seed=2), folder / "eval.jsonl")
    return loss


if __name__ == "__main__":
    print(f"loss {make(Path(sys.argv[1])):.3f} per token, in {sys.argv[1]}")
