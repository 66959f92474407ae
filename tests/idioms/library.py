"""The scripts that there are, and the number of ranks that each wants."""

from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
RANKS = 3  # of a script that says nothing; a line `# ranks: 4` says so


def names() -> list[str]:
    """The names of all scripts."""
    return sorted(path.stem for path in SCRIPTS.glob("*.py"))


def path_of(name: str) -> Path:
    """The path of a script, by its name, with or without folder and ending; of another one by its absolute path."""
    path = Path(name) if Path(name).is_absolute() else SCRIPTS / f"{Path(name).stem}.py"
    if not path.exists():
        raise SystemExit(f"no such script: {path}")
    return path


def ranks_of(name: str) -> int:
    """Return the number of ranks that it wants."""
    for line in path_of(name).read_text().splitlines():
        if line.startswith("# ranks: "):
            return int(line.split()[2])
    return RANKS
