"""Makes pages of the site as it is built: the start from the README, benchmarks from their results."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add benchmarks and decisions to the navigation: they come and go without a change here."""
    assert config.nav is not None
    results = [path.name for path in sorted(RESULTS.glob("*.md")) if path.name != "README.md"]
    config.nav.append(
        {"Benchmarks": ["benchmarks/README.md", *({_title(name): f"benchmarks/{name}"} for name in results)]}
    )
    decisions = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    config.nav.append({"Decisions": ["decisions/index.md", *(f"decisions/{path.name}" for path in decisions)]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    readme = (ROOT / "README.md").read_text()
    readme = readme.replace("](docs/", "](").replace("](benchmarks/results/", "](benchmarks/")
    files.append(File.generated(config, "index.md", content=readme))
    for path in RESULTS.glob("*.md"):
        files.append(File.generated(config, f"benchmarks/{path.name}", content=path.read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links at the pages of results, which lie beside the others in the site; their data is left out."""
    markdown = re.sub(r"\]\((\.\./)+benchmarks/results/", _to_results(page), markdown)
    return re.sub(r"benchmarks/\w+\.json\)", "benchmarks/README.md)", markdown)


def _to_results(page: Page) -> str:
    return "](" + "../" * page.file.src_uri.count("/") + "benchmarks/"


def _title(name: str) -> str:
    return name.removesuffix(".md").replace("_", " ")
