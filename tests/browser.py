"""Pages in Chromium without a window: what its console says, and what stands in them after a script of the test's."""
import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@functools.cache
def found() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


needed = pytest.mark.skipif(found() is None, reason="no Chromium here; apt-get install chromium")


def visit(page: str, directory: Path, script: str = "", dark: bool = False, width: int = 800) -> tuple[str, list[str]]:
    """(the document as it stands once loaded, with the test's script run last, the console's lines)."""
    path = directory / "visited.html"
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    done = subprocess.run(
        [found(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--enable-logging=stderr", f"--user-data-dir={directory / 'profile'}",
         f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={width},900", "--dump-dom",
         path.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, re.findall(r"CONSOLE[^\]]*\] (.*)", done.stderr)
