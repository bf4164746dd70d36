"""Environments of other tools that read what we write, apart from ours: made when first asked for, kept by a hash."""

import hashlib
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(client: str) -> Path:
    """Return the folder of programs of an environment with what ``<client>.txt`` lists, and with our packages.

    Ours are seen from there, so that torch is not installed once more; theirs are not seen from ours.
    """
    wanted = Path(__file__).with_name(f"{client}.txt")
    here = sysconfig.get_path("purelib")
    name = hashlib.sha256(wanted.read_bytes() + here.encode() + sys.version.encode()).hexdigest()[:12]
    folder = ROOT / ".clients" / f"{client}-{name}"
    programs, mark = folder / "bin", folder / "installed"
    if not mark.exists():
        venv.create(folder, clear=True, with_pip=True)
        inside = next((folder / "lib").glob("python*/site-packages"))
        (inside / "ours.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        install = [programs / "python", "-m", "pip", "install", "--quiet", "-r", wanted]
        subprocess.run(install, check=True, timeout=600)
        mark.touch()
    return programs
