"""docs/extend.md runs as it stands."""
import re
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "extend.md"


def test_the_page_of_models_of_ones_own_runs_as_it_stands():
    text, names = PAGE.read_text(encoding="utf-8"), {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(block, names)
    told = re.search(r"```text\n(.*?)```", text, re.DOTALL)[1].splitlines()
    printed = str(names["layout"].explain(names["params"], names["axes"])).splitlines()
    assert told == printed[:len(told)]
