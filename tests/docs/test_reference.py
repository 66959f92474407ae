"""The reference is complete: every public name, option, event and command is on a page, and the pages are current."""

import importlib
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

import relight
from relight.core.protocol.fault import Action, Point
from relight.watch.events import Event

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

cli_page: Any = importlib.import_module("cli_page")  # docs/ is no package
messages_page: Any = importlib.import_module("messages_page")


def read(*pages: str) -> str:
    return "\n".join((DOCS / page).read_text() for page in pages)


@pytest.mark.parametrize("script", ["cli_page.py", "messages_page.py", "refused_page.py"])
def test_a_page_made_from_code_is_current(script: str) -> None:
    """If it is not: run the script without --check, and read the difference."""
    result = subprocess.run(
        [sys.executable, DOCS / script, "--check"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_public_name_has_a_reference() -> None:
    page = read("API.md")
    public = {*vars(relight)["__all__"], *dir(relight)}
    missing = [name for name in public if not name.startswith("__") and f"::: relight.{name}\n" not in page + "\n"]
    assert not missing, f"docs/API.md lacks {missing}"


def test_every_command_and_option_is_explained() -> None:
    page = read("CLI.md")
    for command, parser in cli_page.find_commands(cli_page.make_parser()):
        assert f"\n## {command}\n" in page
        for action in cli_page.options(parser):
            assert action.help or not action.option_strings, f"`{command}`: {action.option_strings} has no help text"
            for name in cli_page.names(action):
                assert f"`{name}" in page, f"docs/CLI.md lacks {name} of `{command}`"


def test_every_summary_is_explained() -> None:
    assert all(text for _, text in cli_page.summaries())


@pytest.mark.parametrize("section", tuple(messages_page.sections()), ids=lambda section: str(section[0]))
def test_every_message_is_explained(section: Any) -> None:
    title, path, messages = section
    page = read("MESSAGES.md").partition(f"\n## {title}\n\nDefined in `{path}`.\n")[2].partition("\n## ")[0]
    assert messages
    for message in messages:
        assert f"| `{message.__name__}` |" in page
        assert vars(message).get("__doc__"), f"{message.__name__} has no docstring"
        assert not str(vars(message)["__doc__"]).startswith(f"{message.__name__}("), (
            f"{message.__name__}: a dataclass's"
        )


def test_no_module_of_the_core_defines_messages_that_the_page_lacks() -> None:
    """Every member of the unions that the machines take and return is a message of some section."""
    shown = {message for _, _, messages in messages_page.sections() for message in messages}
    unions = {
        "relight.core.protocol.events": "Event",
        "relight.core.protocol.commands": "Command",
        "relight.core.worker.events": "Event",
        "relight.core.worker.actions": "Action",
    }
    for module, union in unions.items():
        missing = set(typing.get_args(vars(importlib.import_module(module))[union])) - shown
        assert not missing, f"docs/MESSAGES.md lacks {missing}"


def test_every_event_for_programs_is_explained() -> None:
    page = read("WATCHING.md")
    missing = [tag for event in typing.get_args(Event) if f"`{(tag := event.__struct_config__.tag)}`" not in page]
    assert not missing, f"docs/WATCHING.md lacks {missing}"


def test_the_glossary_is_a_table_of_unique_terms() -> None:
    rows = [line.split("|")[1:-1] for line in read("GLOSSARY.md").splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row != [" term ", " means "]]
    terms = [term.strip() for row in rows for term in row[0].split(",")]
    assert len(terms) > 40
    assert len(set(terms)) == len(terms), sorted({term for term in terms if terms.count(term) > 1})
    assert all(len(row) == 2 and row[1].strip() for row in rows)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    missing = [path.name for path in DOCS.glob("*.md") if f" {path.name}\n" not in navigation]
    assert not missing, f"mkdocs.yml lacks {missing}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


def test_the_types_are_shipped() -> None:
    package = Path(relight.__file__).parent
    assert (package / "py.typed").is_file()
    assert (package / "__init__.pyi").is_file()


def test_the_citation_names_the_version() -> None:
    assert f"version: {relight.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_decision_is_in_the_index() -> None:
    index = read("decisions/index.md")
    for path in sorted((DOCS / "decisions").glob("0*.md")):
        number, title = path.read_text().splitlines()[0].removeprefix("# ").split(". ", 1)
        assert f"| {number} | [{title}]({path.name}) |" in index


def test_every_page_says_first_what_its_reader_can_do_after_it() -> None:
    for path in (*DOCS.glob("*.md"), *(DOCS / "integrations").glob("*.md"), DOCS / "decisions" / "index.md"):
        paragraphs = [text for text in path.read_text().split("\n\n") if not text.startswith(("#", "<!--"))]
        assert paragraphs[0].startswith("After this page "), path.name


def test_every_fault_is_explained() -> None:
    page = read("CLI.md")
    missing = [word.value for word in (*Action, *Point) if f"| `{word.value}` |" not in page]
    assert not missing, f"docs/CLI.md lacks {missing}; their words belong into chaos/plan.py"


def test_the_stub_has_every_public_name() -> None:
    stub = (Path(relight.__file__).parent / "__init__.pyi").read_text()
    missing = [name for name in dir(relight) if not name.startswith("__") and f" as {name}\n" not in stub]
    assert not missing, f"relight/__init__.pyi lacks {missing}"


def test_every_file_that_a_page_names_exists() -> None:
    """Paths are written from the root of the repository, or from src/relight."""
    for page in (*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for path in re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|md|json))`", page.read_text()):
            if path.split("/")[0] in ("transport",):  # gloo's
                continue
            assert (ROOT / path).exists() or (ROOT / "src" / "relight" / path).exists(), f"{page.name} names {path}"
