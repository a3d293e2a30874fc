"""What a person sees of a run: lines in a file, a bar and all that belongs to it on a terminal."""

import os
import pty
import re
import subprocess
import sys
import termios

import pytest

from draftcore.progress import Progress

TWO_DRAFTS = """
from draftcore.progress import Progress
with Progress(400, every=10) as progress:
    for step in range(1, 31):
        rates = {f"acceptance_rate_{k}": 0.5 for k in range(7)}
        m = {"loss": 22, "epoch": 1, "tokens": 60, "seconds": 0.2, "memory_bytes": 2**34, **rates}
        progress.show(step, {"eagle3": m, "dflash": m})
"""


def test_a_line_has_means_of_its_steps_by_position_and_the_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A loss that is a sum over positions is told as their mean; ten come after nine."""
    rates = {f"acceptance_rate_{k}": k / 10 for k in range(11)}
    with Progress(6, every=2) as progress:
        for step in range(1, 5):
            m = {"loss": 12.0 * step, "loss_0": 7.0 * step, "loss_1": 5.0 * step, **rates}
            m |= {"lr": 0.1, "epoch": 1 + step // 4, "tokens": 50 * step, "seconds": 0.5}
            progress.show(step, {"": m})
    line = r"training {}/6  mean loss {}  acceptance rate 0 0.1 0.2 .* 0.9 1  epoch {}  {} tokens/s"
    wanted = rf"{line}  [\d:]+ left\n".format
    lines = wanted(2, 9, 1, 150) + wanted(4, 21, 2, 350)
    assert re.fullmatch(
        rf"{lines}\n?", capsys.readouterr().err
    )  # rich before 14.3 adds an empty one


def test_80_columns_show_bar_count_time_left_and_every_draft() -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    env = {**os.environ, "TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", TWO_DRAFTS], stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", os.read(ours, 1 << 16).decode())
    os.close(ours)
    *_, bar, eagle3, dflash, speed = [row for row in re.split(r"[\r\n]+", text) if row]
    assert re.fullmatch(r"training [━╸╺ ]+ +30/400 \d:\d\d:\d\d *", bar), done
    rates = "loss 22  acceptance rate 0.5 0.5 0.5 0.5 0.5 0.5 0.5"
    assert (eagle3.strip(), dflash.strip()) == (f"eagle3 {rates}", f"dflash {rates}")
    assert speed.strip() == "epoch 1  300 tokens/s  16.0 GiB"
