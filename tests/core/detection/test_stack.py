"""Stacks as faulthandler writes them, and what is said of them."""

from relight.core.detection.stack import Frame, describe_place, main_frames

ALL = """\
Thread 0x00007f7d7f1ff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007fd0786b7b80 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", line 12 in all_reduce
  File "/home/me/src/relight/training/collectives/group.py", line 90 in allreduce
  File "/job/my train.py", line 88 in <lambda>
  File "/job/my train.py", line 7 in <module>
  File "<frozen runpy>", line 88 in _run_code
"""


def test_the_main_thread_is_the_one_that_took_the_signal() -> None:
    frames = main_frames(ALL)
    assert frames[0] == Frame("/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", 12, "all_reduce")
    assert [frame.line for frame in frames] == [12, 90, 88, 7, 88]


def test_the_place_is_told_in_terms_of_the_script() -> None:
    assert describe_place(ALL) == "my train.py, line 88 in <lambda> (in all_reduce of c10d.py, line 12)"
    own = (
        'Stack (most recent call first):\n  File "/job/train.py", line 3 in wait\n  File "/job/train.py", line 9 in f\n'
    )
    assert describe_place(own) == "train.py, line 3 in wait"
    library = 'Stack (most recent call first):\n  File "/usr/lib/python3.11/ssl.py", line 3 in read\n'
    assert describe_place(library) == "ssl.py, line 3 in read"


def test_nonsense_says_nothing() -> None:
    for text in ("", "\x00" * 100, "Thread 0x1 (most recent call first):\n  File", '  File "x", line 1 in y', "\n" * 9):
        assert describe_place(text) == ""
