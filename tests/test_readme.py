"""The README's tree names every file of the house, and nothing that is gone."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
WHOLE_ROOMS = {"demo", "planning", "serve", "assets"}  # described as one line


def test_the_tree_is_the_house() -> None:
    tree = (ROOT / "README.md").read_text().split("## The house")[1].split("```")[1]
    named = set(re.findall(r"(\w+\.py)\b", tree))
    files = {
        path.name
        for path in (ROOT / "src" / "piston").rglob("*.py")
        if path.name != "__init__.py" and path.parent.name not in WHOLE_ROOMS
    }
    assert files <= named, f"not in the README's tree: {sorted(files - named)}"
    everywhere = {path.name for path in (ROOT / "src").rglob("*.py")}
    assert named <= everywhere, f"in the README's tree but gone: {sorted(named - everywhere)}"


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"
