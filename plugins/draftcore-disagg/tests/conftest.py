"""What the tests of queue, producer and batches share lies in `queueing`, which they import."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
