"""`python -m relight.sim`: what is asked for wrongly is refused, and says why."""

import pytest

from relight.sim.__main__ import main


@pytest.mark.parametrize(
    "words",
    [
        "--replay x.txt --with ladder",
        "--mutations --with hosts",
        "--exhaustive 3 --with flips",
        "--seed 1 --first 5",
        "--seed 0 --processes 2",
        "--seeds 10 --shrink",
        "--seeds 10 --fine",
        "--mutations --steps 3",
        "--rewrite x.txt --mutation no-barrier",
    ],
)
def test_what_would_be_ignored_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    mode, option = (word for word in words.split() if word.startswith("--"))
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"error: {option} goes with " in said
    assert f"not with {mode}" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "required"),
        ("--seeds 10 --seconds 5", "not allowed with"),
        ("--seeds 10 --with ladders", "there are hosts, ladder, flips"),
        ("--seed 1 --mutation no-such", "there is none of that name"),
        ("--exhaustive 1", "at least 2 ranks"),
        ("--exhaustive 3 --actions nap", "there are "),
        ("--replay no/such/file.txt", "No such file"),
    ],
)
def test_what_makes_no_sense_is_refused(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
