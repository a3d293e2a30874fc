"""Time one EAGLE-3 training step (forward and backward) at Qwen3-8B shapes on a CUDA device.

    python benchmarks/eagle3_step.py [--batch 1] [--length 2048] [--steps 7]

Random data, every token supervised, bf16 compute over fp32 masters. Prints the median of ten steps
after three, peak memory, and what the matrix products alone would take at the device's measured
bf16 rate, so that the ratio does not depend on the machine.
"""

import argparse

import torch
from draftcore_eagle3.config import DraftConfig
from draftcore_eagle3.model import Eagle3Draft
from draftcore_eagle3.options import Eagle3Options
from timing import bf16_rate, measure

from draftcore.contracts.algorithm import DraftBatch, SampleId

WIDTH, VOCABULARY, DRAFT_VOCABULARY, INNER = 4096, 151_936, 32_000, 12_288


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=7)
    arguments = parser.parse_args()
    draft = build(arguments.steps)
    batch = random_batch(arguments.batch, arguments.length)
    floor = matrix_flops(draft, arguments.batch * arguments.length, arguments.steps) / bf16_rate()
    milliseconds, gibibytes = measure(draft, batch)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(
        f"batch {arguments.batch} x {arguments.length}, {arguments.steps} steps: "
        f"{milliseconds:.1f} ms, peak {gibibytes:.1f} GiB, "
        f"{milliseconds / 1e3 / floor:.2f} x its matrix products"
    )


def build(steps: int) -> Eagle3Draft:
    config = DraftConfig(
        hidden_size=WIDTH,
        vocab_size=VOCABULARY,
        draft_vocab_size=DRAFT_VOCABULARY,
        layers=(1, 17, 32),
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=INNER,
        rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=40_960,
    )
    table = torch.randn(VOCABULARY, WIDTH, dtype=torch.bfloat16, device="cuda") * 0.02
    ids = torch.arange(DRAFT_VOCABULARY, device="cuda")
    with torch.device("cuda"):
        draft = Eagle3Draft(config, Eagle3Options(ttt_length=steps), table, table, ids)
    for parameter in draft.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    return draft.cuda()


def random_batch(batch: int, length: int) -> DraftBatch:
    names = ("hidden.1", "hidden.17", "hidden.32", "last_hidden")
    shape = (batch, length, WIDTH)
    mask = torch.ones(batch, length, dtype=torch.bool, device="cuda")
    mask_rows = mask.clone()
    mask_rows[:, -1] = False
    return DraftBatch(
        ids=tuple(SampleId(str(row), 1) for row in range(batch)),
        token_ids_BT=torch.randint(VOCABULARY, (batch, length), device="cuda"),
        loss_mask_BT=mask_rows,
        attention_mask_BT=mask,
        features={n: torch.randn(shape, dtype=torch.bfloat16, device="cuda") for n in names},
    )


def matrix_flops(draft: Eagle3Draft, rows: int, steps: int) -> float:
    """Operations of the products in docs/performance.md's cost model; a multiply-add counts 2."""
    layer = sum(p.numel() for p in draft.midlayer.parameters())
    per_row = 3 * 2 * steps * (layer + draft.lm_head.weight.numel())
    per_row += 2 * WIDTH * VOCABULARY + 3 * 2 * draft.fc.weight.numel()
    return float(rows * per_row)


if __name__ == "__main__":
    main()
