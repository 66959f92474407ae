"""`python -m relight.sim`: what is asked for wrongly is refused, and says why."""

import pytest

from relight.sim.__main__ import main


@pytest.mark.parametrize(
    ("words", "option", "mode"),
    [
        ("--replay x.txt --with fallback", "--with", "--replay"),
        ("--mutation no-barrier --with hosts", "--with", "--mutations"),
        ("--exhaustive 2 --with flips", "--with", "--exhaustive"),
        ("--seed 1 --first 5", "--first", "--seed"),
        ("--seed 0 --processes 2", "--processes", "--seed"),
        ("--seeds 10 --shrink", "--shrink", "--seeds"),
        ("--seeds 10 --fine", "--fine", "--seeds"),
        ("--seeds 10 --shapes two-end", "--shapes", "--seeds"),
        ("--seed 1 --relearns", "--relearns", "--seed"),
        ("--mutation no-barrier --steps 3", "--steps", "--mutations"),
        ("--rewrite x.txt --mutation no-barrier", "--mutation", "--rewrite"),
    ],
)
def test_what_would_be_ignored_is_refused(
    words: str, option: str, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
        ("--first 5", "one of these is required: --seed, "),
        ("--seeds 10 --with fallbacks", "there are hosts, supply, fallback, flips, writes"),
        ("--seed 1 --mutation no-such", "there is none of the name no-such"),
        (
            "--exhaustive 2 --shapes three",
            "there are one, one-end, two-early, two-end, late-private, surprise, unexpected, late-change",
        ),
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
