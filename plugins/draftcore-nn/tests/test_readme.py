"""The algorithm that the README shows is whole: it passes the conformance suite as it stands there."""

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from draftcore_sdk.algorithms import AlgorithmSuite

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
FOLDER = TemporaryDirectory()
FILE = Path(FOLDER.name, "echo.py")
(CODE,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
FILE.write_text(CODE, encoding="utf-8")
sys.path.append(FOLDER.name)


class TestTheExample(AlgorithmSuite):
    plugin = "echo"
    loose = str(FILE)
