"""What this plugin offers: one draft, decoded in two ways."""

from __future__ import annotations

from collections.abc import Sequence

from draftcore import hookimpl
from draftcore.contracts.offers import Offer


@hookimpl
def describe() -> Sequence[Offer]:
    both = frozenset({"layout:serving", "cross_entropy"})
    package, served = "draftcore_mlpspec", frozenset({"served:vllm"})
    options, chain = f"{package}.options:MlpSpecOptions", f"{package}.algorithm:MlpSpec"
    tree_options, tree = f"{package}.options:MlpSpecTreeOptions", f"{package}.algorithm:MlpSpecTree"
    untied = {"tied": False, "scale_input": False, "inner_size": 32}
    wide = {**untied, "branches": [2, 2, 2]}
    return [
        Offer("algorithm", "mlpspec", both | served, options, chain, examples=[untied]),
        Offer("algorithm", "mlpspec-tree", both, tree_options, tree, examples=[wide]),
    ]
