"""The shape of a DFlash2 draft: the backbone's, the convolutions' and the selector's."""

from __future__ import annotations

from dataclasses import dataclass

from draftcore_dflash.config import DraftConfig

from draftcore.errors import UsageError


@dataclass(frozen=True)
class DFlash2Config(DraftConfig):
    """A DFlash draft's shape, with that of what DFlash2 adds."""

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conv_group_size < 1 or self.hidden_size % self.conv_group_size:
            raise UsageError(
                f"conv_group_size {self.conv_group_size} does not divide the draft's width "
                f"{self.hidden_size}\n  set conv_group_size to a divisor of it"
            )
        for name, most, what in (
            ("conv_kernel_size", self.block_size, "rows of a block"),
            ("selector_top_k", self.vocab_size, "tokens of the target"),
        ):
            if not 1 <= (asked := getattr(self, name)) <= most:
                raise UsageError(
                    f"{name} is {asked}, and there are {most} {what}\n  set {name} to 1 to {most}"
                )
