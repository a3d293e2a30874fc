"""What a person sees of a run: lines in a file, a bar with all that belongs to it on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from draftcore.progress import Progress

STEPS = """
from draftcore.progress import Progress

with Progress(400, every=10) as progress:
    for step in range(1, 31):
        rates = {f"acceptance_rate_{k}": 0.5 for k in range(7)}
        figures = {"loss": 22.0, "epoch": 1, "tokens": 60, "seconds": 0.2, **rates}
        progress.show(step, {"eagle3": figures, "dflash": {**figures, "memory_bytes": 2**34}})
"""


def test_a_line_has_means_of_its_steps_by_position_and_the_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A loss that is a sum over positions is told as their mean; ten come after nine."""
    by_position = {f"acceptance_rate_{k}": k / 10 for k in range(11)}
    with Progress(6, every=2) as progress:
        for step in range(1, 5):
            losses = {"loss": 12.0 * step, "loss_0": 7.0 * step, "loss_1": 5.0 * step, "lr": 0.1}
            more = {"accuracy": 0.25, "epoch": 1 + step // 4, "tokens": 50 * step, "seconds": 0.5}
            progress.show(step, {"": {**losses, **by_position, **more}})
    rates = "acceptance rate 0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1"
    line = rf"training {{}}/6  mean loss {{}}  accuracy 0.25  {rates}  epoch {{}}  {{}} tokens/s"
    line += r"  [\d:]+ left\n"
    wanted = line.format(2, 9, 1, 150) + line.format(4, 21, 2, 350)
    assert re.fullmatch(wanted, capsys.readouterr().err)


def test_80_columns_show_bar_count_time_left_and_every_draft() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", STEPS], stdout=theirs, stderr=theirs, check=True, env=env)
    os.close(theirs)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", os.read(ours, 1 << 16).decode())
    os.close(ours)
    *_, bar, eagle3, dflash, speed = filter(None, text.replace("\r", "\n").split("\n"))
    assert re.fullmatch(r"training [━╸╺ ]+ +30/400 \d:\d\d:\d\d *", bar)
    assert eagle3.startswith("eagle3 loss 22  acceptance rate 0.5 0.5")
    assert dflash.startswith("dflash loss 22  acceptance rate 0.5 0.5")
    assert speed.strip() == "epoch 1  300 tokens/s  16.0 GiB"
