"""Hooks of mkdocs. The navigation is docs/README.md. The pages of benchmarks/ belong to the site. Links to other files
of the repository become text.
"""
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

# Keys in tables are not broken inside a word.
STYLE = ".md-typeset td code { word-break: normal; }\n"
ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[((?:[^]\n]|\n(?!\s*\n))*)\]\(((?![a-z]+:)[^)#\s]+)(#[^)\s]*)?\)")


def on_config(config):
    """Make a section of the navigation for each heading of docs/README.md that has pages below it."""
    text, config.nav, seen = (ROOT / "docs" / "README.md").read_text(encoding="utf-8"), ["README.md"], set()
    for title, body in re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE):
        links = dict.fromkeys(site(f"docs/{link}") for _, _, link, _ in LINK.findall(body))
        pages = [link for link in links if link and link.endswith(".md") and link not in seen]
        seen.update(pages)
        config.nav += [{title: pages}] if pages else []
    measured = [f"benchmarks/{path.name}" for path in sorted((ROOT / "benchmarks").glob("*.md"))]
    config.nav.append({"Benchmarks": [page for page in measured if page not in seen]})
    return config


def on_files(files, config):
    for path in sorted((ROOT / "benchmarks").iterdir()):
        if path.suffix in (".md", ".svg"):
            files.append(File.generated(config, f"benchmarks/{path.name}", abs_src_path=str(path)))
    files.append(File.generated(config, "site.css", content=STYLE))
    return files


def on_page_markdown(markdown, page, config, files):
    here = page.file.src_uri
    folder = posixpath.dirname(here if here.startswith("benchmarks/") else f"docs/{here}")

    def rewritten(found: re.Match) -> str:
        image, text, link, anchor = found.groups()
        target = site(posixpath.normpath(f"{folder}/{link}"))
        if target is None:
            return text
        return f"{image}[{text}]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{anchor or ''})"

    return LINK.sub(rewritten, markdown)


def site(path: str) -> str | None:
    """Return the address of a repository file in the site; None if the site does not have the file."""
    path = posixpath.normpath(path)
    if re.match(r"benchmarks/[\w-]+\.(md|svg)$", path):
        return path
    return path.removeprefix("docs/") if re.match(r"docs/[\w./-]+\.\w+$", path) else None
