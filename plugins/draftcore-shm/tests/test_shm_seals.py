"""The copy that takes a seal on its way: the bytes of any tensor, and the digest of just them."""

from collections.abc import Callable

import pytest
import torch
import xxhash
from draftcore_file.base import PIECE, bytes_of
from draftcore_shm.seals import copy_sealed
from torch import Tensor

TENSORS: dict[str, Callable[[], Tensor]] = {
    "longer than a piece": lambda: torch.arange(PIECE // 4 * 3 + 7),
    "strided": lambda: torch.arange(60.0).view(6, 10)[::2, 1::3],
    "negated without a copy": lambda: torch.imag(torch.tensor([1 + 2j, 3 - 4j]).conj()),
    "of no dimension": lambda: torch.tensor(3.5, dtype=torch.bfloat16),
    "empty": lambda: torch.empty(0, 4),
    "with a gradient": lambda: torch.ones(5, requires_grad=True),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_a_sealed_copy_has_the_bytes_of_a_contiguous_one(tensor: Callable[[], Tensor]) -> None:
    source = tensor()
    expected = bytes(bytes_of(source.detach().resolve_neg().contiguous()))
    room, digest = memoryview(bytearray(source.nbytes)), xxhash.xxh3_64()
    copy_sealed(room, source, digest)
    assert bytes(room) == expected
    assert digest.intdigest() == xxhash.xxh3_64_intdigest(expected)
