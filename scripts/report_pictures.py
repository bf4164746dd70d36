"""Draw the pictures of the report that the README shows, from the project's own samples, in both themes.

Usage: report_pictures.py [SAMPLE]; needs chromium. The default sample is digits_ddp2_gloo.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "pictures"
WIDTH, HEIGHT = 1280, 1040


def main(arguments: list[str]) -> int:
    sample = arguments[0] if arguments else "digits_ddp2_gloo"
    chromium = shutil.which("chromium")
    if chromium is None:
        print("chromium is not here: apt-get install chromium", file=sys.stderr)
        return 1
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run, page = Path(folder) / sample, Path(folder) / "report.html"
        shutil.copytree(ROOT / "traces" / sample, run)
        command = [sys.executable, "-m", "chakra_capture", "report", str(run), "-o", str(page)]
        subprocess.run(command, cwd=ROOT, check=True)
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for theme in ("light", "dark"):
                view = browser.new_page(
                    viewport={"width": WIDTH, "height": HEIGHT},
                    color_scheme="light" if theme == "light" else "dark",
                )
                view.goto(page.as_uri())
                view.screenshot(path=PICTURES / f"report-{theme}.png")
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
