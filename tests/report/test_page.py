"""The page as a file: what may run in it, what names do to it, and that it is the same each time."""

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from builder import TraceBuilder
from commands import run as command

from chakra_capture.report.content import content
from chakra_capture.report.facts import gather
from chakra_capture.report.page import inert_json, render
from chakra_capture.trace.discovery import find_run
from report.conftest import make_page
from report.pages import read

SOURCES = Path(__file__).parent.parent.parent / "chakra_capture" / "report"
HOSTILE = [
    "</script><script>alert(1)</script>", "</style><img src=x onerror=alert(2)>", "\"quoted\" & 'single'", "a&amp;b",
    "\u202egnp.exe", "two\nlines", "", "__proto__", "constructor", "`code` {} {0} {{ 7*7 }} {% raw %}", "${7*7}",
    "x" * 100_000, "\u2028sep\u2029", "<b>bold</b>",
]  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run whose operators, kernels and annotations all have such names."""
    folder = tmp_path_factory.mktemp("hostile")
    trace = TraceBuilder(rank=0, world_size=1).step(1, 0, 5000)
    for number, name in enumerate(HOSTILE):
        at = 10 + 100 * number
        trace.op(name, at, 50 - number).annotation(f"{name}!", at + 60, 10)
        trace.launched(name, at + 20, 40 - number, number + 1, at=at + 5)
    trace.write_device(folder / "d.json")
    assert command("merge", "--device", folder / "d.json", "-o", folder / "out").code == 0
    return make_page(folder / "out", folder / "report.html")


def test_hostile_names_stay_text(hostile: str) -> None:
    page = read(hostile)
    assert [tag for tag, _ in page.tags if tag in ("img", "b") and tag == "img"] == []
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") or name == "style" for name in attrs)]
    names = {row.texts[0] for row in page.tables["t-operators-all"]}
    for name in ("</script><script>alert(1)</script>", "a&amp;b", "__proto__", "constructor", "${7*7}",
                 "`code` {} {0} {{ 7*7 }} {% raw %}", "<b>bold</b>", "\"quoted\" & 'single'"):  # fmt: skip
        assert name in names


def test_what_could_reorder_or_break_a_line_is_an_escape(hostile: str) -> None:
    page = read(hostile)
    for character in "\u202e\u2028\u2029":
        assert character not in hostile
    names = {row.texts[0] for row in page.tables["t-operators-all"]}
    assert {"\\u{202e}gnp.exe", "two\\nlines", "\\u{2028}sep\\u{2029}"} <= names


def test_a_long_name_is_cut_in_the_middle(hostile: str) -> None:
    assert len(hostile) < 400_000
    longest = max((row.texts[0] for row in read(hostile).tables["t-operators-all"]), key=len)
    assert (len(longest), longest[200]) == (400, "…")


@pytest.mark.parametrize("name", ["plain_loop", "pairs/resnet50_ddp_twin"])
def test_only_the_page_s_own_script_and_style_may_run(name: str, page_of: Callable[[str], str]) -> None:
    page = page_of(name)
    inside = page[page.index("<head>") + len("<head>") :].lstrip()
    policy = re.match(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', inside)
    assert policy is not None, "the policy is the first in head"
    rules = policy[1].replace("&#39;", "'")
    assert rules.startswith("default-src 'none'; ")
    assert "unsafe" not in rules
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    for kind, text in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in rules


def test_the_page_asks_for_nothing_and_sets_no_style_by_attribute(page_of: Callable[[str], str]) -> None:
    for tag, attrs in read(page_of("digits_ddp2_gloo")).tags:
        assert not {"src", "srcset", "action", "style", "onclick", "onload"} & attrs.keys()
        assert tag not in ("link", "img", "iframe", "object", "form")
        assert (attrs.get("href") or "#").startswith("#")


def test_links_lead_to_sections_of_the_page_and_ids_are_unique(page_of: Callable[[str], str]) -> None:
    tags = read(page_of("pairs/resnet50_ddp_twin")).tags
    ids = [str(attrs["id"]) for _, attrs in tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {str(attrs["href"])[1:] for tag, attrs in tags if tag == "a"} <= set(ids)


def test_data_is_inert_json() -> None:
    text = inert_json({"name": "</script>\u2028\u2029<!--"})
    assert not set("<\u2028\u2029") & set(text)
    assert json.loads(text) == {"name": "</script>\u2028\u2029<!--"}


def test_the_script_makes_no_markup_and_runs_no_text() -> None:
    script = (SOURCES / "page.js").read_text()
    for banned in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval",
        "Function",
        "fetch",
        "http",
    ):
        assert banned not in script, banned


def test_the_timeline_has_a_place_and_without_one_is_absent(run_of: Callable[[str], Path]) -> None:
    facts = gather(find_run(run_of("plain_loop")), replay=False, say=lambda _: None)
    made = content(facts, "chakra-capture report")
    without, with_one = (read(render(made, timeline=each)) for each in (None, "<h2 id='timeline-title'>Timeline</h2>"))
    assert "timeline" not in without.sections
    assert [*with_one.sections].index("timeline") == [*with_one.sections].index("steps") + 1
    assert [attrs["href"] for tag, attrs in with_one.tags if tag == "a"][:4] == [
        "#findings", "#step", "#steps", "#timeline"
    ]  # fmt: skip


def test_the_same_run_gives_the_same_bytes(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    run = run_of("digits_ddp2_gloo")
    assert make_page(run, tmp_path / "a.html") == make_page(run, tmp_path / "b.html")


def test_what_a_rank_said_of_its_fault_names_neither_machine_nor_folder(
    run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(run_of("plain_loop"), tmp_path / "run")
    manifest = tmp_path / "run" / "0_run" / "rank-0.json"
    said = {"complete": False, "detail": "node17: cannot write /data/somebody/out.json", "hostname": "node17"}
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **said}))
    text = read(make_page(tmp_path / "run", tmp_path / "a.html", "--no-replay")).sections["quality"]
    assert "incomplete: (host): cannot write …/out.json" in text
    assert "node17" not in text
    assert "somebody" not in text


def test_no_folder_and_no_host_is_told_unless_asked_for(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    run = run_of("plain_loop")
    host = json.loads((run / "0_run" / "rank-0.json").read_text())["hostname"]
    page = make_page(run, tmp_path / "a.html")
    assert str(run.parent) not in page
    assert not re.search(rf"\b{re.escape(host)}\b", read(page).text)
    assert str(run) in make_page(run, tmp_path / "b.html", "--show-paths")
