"""Writes integrations/REFUSED.md, the settings that integrations refuse, from the tables that they refuse by. With
--check, says whether it is current.

    python docs/refused_page.py [--check]
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from made_page import write_or_check

from relight.integrations.trainers.refused import lightning, torchtitan, transformers, trl
from relight.integrations.trainers.refused.table import Refusal

PAGE = Path(__file__).parent / "integrations" / "REFUSED.md"
SECTIONS: dict[str, Iterable[Refusal]] = {
    "Hugging Face Trainer": transformers.TABLE,
    "TRL": trl.TABLE,
    "Lightning": lightning.TABLE,
    "torchtitan": torchtitan.TABLE,
}
INTRODUCTION = """\
<!-- Written by docs/refused_page.py from src/relight/integrations/trainers/refused; change it there, and run it. -->
# What integrations refuse

After this page you know which settings of a framework cannot be made to survive failures, and what to write instead.
Each ends the job with a message that names it, before the first step unless the last column says another moment.
`make test-integrations` checks that the settings are refused, and runs scripts made of settings that are not.
"""


def render() -> str:
    """The text of the page."""
    return "\n".join([INTRODUCTION, *(section(title, rows) for title, rows in SECTIONS.items())])


def section(title: str, rows: Iterable[Refusal]) -> str:
    """One table."""
    lines = [f"## {title}", "", "| setting | why | instead | when |", "|---|---|---|---|"]
    lines += [f"| {row.setting} | {row.why} | {row.instead} | {row.when} |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(sys.argv[1:], PAGE, render()))
