"""Everything this dist knows of sglang's insides: the only module that imports sglang.

sglang has no interface for what capture needs, so each name used here may move with any release.
Hence the range of versions that was tested, and a self-test of every signature before the first
use: a name that moved is an error that says which, never a wrong tensor.
"""

from __future__ import annotations
