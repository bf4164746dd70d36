"""Compile ``chakra_capture/export/et_def.proto`` to ``_et_def.py``; needs grpcio-tools, which nothing else does."""

import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "chakra_capture" / "export"
PROTO = "et_def.proto"


def compiled(folder: Path = FOLDER) -> bytes:
    """The FileDescriptorSet that protoc makes of the schema in ``folder``."""
    with tempfile.TemporaryDirectory() as made:
        out = Path(made, "set")
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", f"--descriptor_set_out={out}", PROTO]
        subprocess.run(command, check=True)
        return out.read_bytes()


def module(descriptors: bytes) -> str:
    """Text of the module that holds it."""
    digits = descriptors.hex()
    lines = "\n".join(f'    "{digits[at : at + 100]}"' for at in range(0, len(digits), 100))
    return (
        '"""Descriptors of et_def.proto, made by scripts/make_et_schema.py."""\n\n'
        f"DESCRIPTORS = bytes.fromhex(\n{lines}\n)\n"
    )


if __name__ == "__main__":
    (FOLDER / "_et_def.py").write_text(module(compiled()), encoding="utf-8")
