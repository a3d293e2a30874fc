"""Time one DFlash or Domino training step (forward and backward) at Qwen3-8B shapes on CUDA.

    python benchmarks/block_step.py [--algorithm domino] [--batch 2] [--length 768] [--anchors 256]

Five draft layers, blocks of 16, random data, every token supervised, bf16 compute over fp32 masters.
Prints the median of ten steps after three, peak memory, and what the matrix products alone would
take at the device's measured bf16 rate, so that the ratio does not depend on the machine.
"""

import argparse

import torch
from draftcore_dflash.config import DraftConfig
from draftcore_dflash.model import Backbone, DFlashDraft
from draftcore_dflash.options import DFlashOptions
from draftcore_domino.config import DominoConfig
from draftcore_domino.model import DominoDraft
from draftcore_domino.options import DominoOptions
from timing import bf16_rate, measure

from draftcore.contracts.algorithm import DraftBatch, SampleId

WIDTH, VOCABULARY, INNER, BLOCK, DEPTH = 4096, 151_936, 12_288, 16, 5
LAYERS = (1, 9, 17, 25, 33)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", choices=("dflash", "domino"), default="domino")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=768)
    parser.add_argument("--anchors", type=int, default=256)
    given = parser.parse_args()
    draft = build(given.algorithm, given.anchors)
    batch = random_batch(given.batch, given.length)
    floor = matrix_flops(draft, given.batch, given.length, given.anchors) / bf16_rate()
    milliseconds, gibibytes = measure(draft, batch)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(
        f"{given.algorithm}, batch {given.batch} x {given.length}, {given.anchors} anchors: "
        f"{milliseconds:.1f} ms, peak {gibibytes:.1f} GiB, "
        f"{milliseconds / 1e3 / floor:.2f} x its matrix products"
    )


def build(algorithm: str, anchors: int) -> Backbone:
    shape = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40_960,
        "rope": {"rope_type": "default", "rope_theta": 1e6},
        "layers": LAYERS,
        "num_target_layers": 36,
        "block_size": BLOCK,
        "mask_token_id": 151_669,
        "layer_types": ("full_attention",) * DEPTH,
    }
    table = torch.randn(VOCABULARY, WIDTH, dtype=torch.bfloat16, device="cuda") * 0.02
    given, tables = {"num_anchors": anchors}, (table, table.clone())
    with torch.device("cuda"):
        draft: Backbone = (
            DominoDraft(DominoConfig(**shape), DominoOptions(**given), *tables)
            if algorithm == "domino"
            else DFlashDraft(DraftConfig(**shape), DFlashOptions(**given), *tables)
        )
    for parameter in draft.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    return draft.cuda()


def random_batch(batch: int, length: int) -> DraftBatch:
    mask = torch.ones(batch, length, dtype=torch.bool, device="cuda")
    shape = (batch, length, WIDTH)
    names = [f"hidden.{layer}" for layer in LAYERS]
    return DraftBatch(
        ids=tuple(SampleId(str(row), 1) for row in range(batch)),
        token_ids_BT=torch.randint(VOCABULARY, (batch, length), device="cuda"),
        loss_mask_BT=mask,
        attention_mask_BT=mask,
        features={n: torch.randn(shape, dtype=torch.bfloat16, device="cuda") for n in names},
    )


def matrix_flops(draft: Backbone, batch: int, length: int, anchors: int) -> float:
    """Operations of the products in docs/performance.md's cost model; a multiply-add counts 2.

    Backward is twice forward for a weight that learns and once for the frozen head.
    """
    rows, context = batch * anchors * BLOCK, batch * length
    layer = sum(p.numel() for p in draft.layers[0].parameters())
    attention = draft.layers[0].self_attn
    keys_values = attention.k_proj.weight.numel() + attention.v_proj.weight.numel()
    body = 3 * 2 * DEPTH * (rows * layer + context * keys_values)
    body += 3 * 2 * context * draft.fc.weight.numel()
    head = 2 * 2 * rows * WIDTH * VOCABULARY
    if isinstance(draft, DominoDraft):
        head += 3 * 2 * rows * draft.up.weight.numel()
    return float(body + head)


if __name__ == "__main__":
    main()
