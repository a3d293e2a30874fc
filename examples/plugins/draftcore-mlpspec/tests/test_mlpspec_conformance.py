"""What every plugin and every algorithm must do: both offers."""

from draftcore_mlpspec.algorithm import MlpSpec
from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.workbench import Bench


class TestPlugin(PluginSuite):
    plugin = "draftcore_mlpspec.plugin"


class TestChain(AlgorithmSuite):
    plugin, name = "draftcore_mlpspec.plugin", "mlpspec"


class TestTree(AlgorithmSuite):
    plugin, name = "draftcore_mlpspec.plugin", "mlpspec-tree"

    def test_its_rounds_are_never_shorter_than_the_chains_and_often_longer(
        self, bench: Bench
    ) -> None:
        """With a draft that has learned a little."""
        draft, rounds = bench.build(), []
        bench.train(draft, steps=6)
        chain = MlpSpec(bench.options).drafter(draft, bench.example.spec.load_model())
        for drafter in (chain, bench.drafter(draft)):
            found = bench.decode(draft, bench.example.prompts, drafter)
            rounds.append([len(one.accepted) for one in found])
        assert all(tree <= chain for chain, tree in zip(*rounds, strict=True)), rounds
        assert sum(rounds[1]) < sum(rounds[0]), rounds
