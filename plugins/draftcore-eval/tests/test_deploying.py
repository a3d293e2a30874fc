"""What is said of a server follows from acceptance and sizes, and no server is named that cannot load."""

from __future__ import annotations

from pathlib import Path

import pytest
from draftcore_eval.card import last_names
from draftcore_eval.options import EvalOptions
from draftcore_eval.serving import Size, advice, commands, forecast, gain, table

KV_BYTES = 2 * 32 * 8 * 128 * 2
DENSE, DRAFT = Size(7.5e9, token_bytes=KV_BYTES), Size(0.4e9)
RATES = [0.75, 0.56, 0.42, 0.31, 0.22, 0.16, 0.12]
PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()


def served(target: Size = DENSE, nodes: int = 7, parallel: bool = False, requests: int = 8) -> dict:  # type: ignore[type-arg]
    options = EvalOptions(requests=requests)
    return forecast(RATES, nodes, target, DRAFT, parallel=parallel, context=300, options=options)


def test_the_model_has_the_times_that_were_published() -> None:
    """Llama 3.1 8B on one H100: sglang's documentation, and EAGLE-3's paper (arXiv 2503.01840)."""
    assert 1 / DENSE.seconds("h100", 1, 1, 300) == pytest.approx(158.3, rel=0.02)
    assert served()["speed_up"]["1"][3] == pytest.approx(373.25 / 158.34, rel=0.15)
    assert served(requests=64)["speed_up"]["64"][2] == pytest.approx(1.38, rel=0.15)


def test_the_more_requests_the_fewer_drafts_until_none_pays() -> None:
    best = [served(requests=n)["num_drafts"] for n in (1, 32, 128)]
    assert best == sorted(best, reverse=True)
    assert best[0] > best[-1]
    assert gain(served(requests=1)) > gain(served(requests=128)) > 1
    tiny = served(Size(7e6))
    assert tiny["faster_for"] is None
    assert "slower than none" in advice(tiny)
    _, *rows = table(served(requests=32))
    squeezed = [line.split() for line in PAGE.splitlines()]
    assert all(" ".join(row).split() in squeezed for row in rows), "as docs/serving.md shows them"
    assert advice(served(requests=32)) in PAGE


def test_a_few_requests_to_a_mixture_of_experts_read_more_of_it_with_each_draft() -> None:
    sparse = Size(30e9, experts=0.95, taken=1 / 16, token_bytes=KV_BYTES)
    gains = served(sparse)["speed_up"]
    assert max(gains["1"]) < max(served()["speed_up"]["1"])
    assert max(gains["1"]) < max(gains["32"])


def test_a_block_is_served_as_it_was_trained_and_a_tree_as_it_is() -> None:
    block, tree = served(parallel=True, requests=128), served(nodes=12)
    assert (block["num_drafts"], tree["num_drafts"]) == (7, 12)
    assert (len(block["drafts"]), tree["drafts"]) == (7, [12])
    assert block["speed_up"]["1"][6] > served()["speed_up"]["1"][6], "one forward, not seven"


@pytest.mark.parametrize(
    ("capabilities", "servers"),
    [
        ("served:sglang served:vllm sglang:EAGLE3 vllm:eagle3", ["sglang", "vllm"]),
        ("served:sglang sglang:DFLASH parallel", ["sglang"]),
        ("served:vllm", []),  # by what name it does not say
        ("sglang:EAGLE3", []),  # the disaggregated input alone
        ("served:sglang sglang:module:Worker", []),
    ],
)
def test_commands_are_those_of_servers_that_load_the_draft(
    capabilities: str, servers: list[str]
) -> None:
    found = commands(set(capabilities.split()), "org/target", "draft", 4)
    assert list(found) == servers
    chain = "--speculative-num-steps 4 --speculative-eagle-topk 1 " * ("EAGLE3" in capabilities)
    for server, command in found.items():
        said = {"sglang": f"    {chain}--speculative-num-draft-tokens 5", "vllm": '_tokens": 4}'}
        assert said[server] in command
        assert "org/target" in command


def test_in_a_card_a_path_is_its_last_part_and_what_is_on_the_hub_keeps_its_name() -> None:
    public = ["hf:org/rows?split=train", "hf:rows", "cosine"]
    private = ["/home/me/a.jsonl", "../secret/b/", "hf:/home/me/c", "hf:x/y?data_dir=/home/me/d"]
    assert last_names({"all": [*public, *private]}) == {"all": [*public, "a.jsonl", "b", "c", "d"]}
