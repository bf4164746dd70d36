"""The page: one file that opens anywhere, asks nothing of a network and lets nothing run but its own script."""

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from chakra_capture.report.content import Content
from chakra_capture.report.escape import finalizer

SCHEMA_VERSION = 1


def render(
    content: Content,
    *,
    timeline: str | None = None,
    data: Mapping[str, object] | None = None,
    show_paths: bool = False,
) -> str:
    """Write the page.

    Args:
        timeline: markup of the section "Timeline", escaped already; None: there is no such section.
        data: more of what the page's script reads.
        show_paths: leave the folders in paths.
    """
    environment = Environment(
        loader=PackageLoader("chakra_capture.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined, finalize=finalizer(show_paths=show_paths), keep_trailing_newline=True,
    )  # fmt: skip
    style, script = _source("style.css"), _source("page.js")
    return environment.get_template("page.html").render(
        content=content,
        policy=_policy(style, script),
        style=Markup(style),
        script=Markup(script),
        data=inert_json({"schema_version": SCHEMA_VERSION, **(data or {})}),
        timeline=None if timeline is None else Markup(timeline),
    )


def inert_json(content: Mapping[str, object]) -> Markup:
    """JSON that ends no script element and no line, to stand in one that the browser does not run."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for character in "<\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _source(name: str) -> str:
    """One of our own files; line ends as the browser reads them, or the hash would not be that of the text."""
    return files("chakra_capture.report").joinpath(name).read_text("utf-8").replace("\r\n", "\n").strip("\n")


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(f"\n{text}\n".encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
