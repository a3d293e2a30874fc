"""Reading traces: how long kernels of two streams ran at once."""

import json

import pytest
from draftcore_sdk.streams import busy_streams


def traced(tmp_path, *kernels, **other):
    """A trace of kernels (stream, begin, duration), in microseconds, and of what is none."""
    events = [
        {"ph": "X", "cat": "kernel", "ts": at, "dur": us, "args": {"device": 0, "stream": stream}}
        for stream, at, us in kernels
    ]
    events += [{"ph": "X", "cat": "cpu_op", "ts": 0, "dur": 9e9}, {"ph": "M", "name": "process"}]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    return busy_streams(file)


def test_what_two_streams_do_at_once_is_counted_once(tmp_path):
    """Kernels of one stream that touch are one stretch of work."""
    busy = traced(tmp_path, (7, 0, 1000), (7, 1000, 1000), (13, 500, 700), (13, 5000, 300))
    assert busy.streams == {(0, 7): 2.0, (0, 13): 1.0}
    assert busy.at_once == pytest.approx(0.7)
    assert busy.share == pytest.approx(0.7)


def test_a_third_stream_adds_nothing_to_what_two_do(tmp_path):
    busy = traced(tmp_path, (1, 0, 1000), (2, 0, 1000), (3, 400, 200), (3, 2000, 50))
    assert busy.at_once == pytest.approx(1.0)


def test_work_that_takes_turns_does_not_overlap(tmp_path):
    assert traced(tmp_path, (7, 0, 500), (13, 500, 500), (7, 1000, 500)).at_once == 0
    assert traced(tmp_path, (7, 0, 500)).share == 0
    assert traced(tmp_path).streams == {}
