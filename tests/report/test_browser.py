"""The page in a browser: it opens from a file without a network, fits, and needs its script for nothing."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from requires import requires

from report.conftest import make_page, write_phases

pytestmark = requires("chromium")
RESNET = "pairs/resnet50_ddp_twin"
MATRIX = [RESNET, "digits_ddp2_gloo", "plain_loop", "device_only/vllm_decode_cuda_graph", "host_only/pt2_schema_1.1.1"]
# Labels within one drawing that lie on each other, and labels that leave it.
OVERLAPS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll("svg.stack, svg.series")) {
    const texts = Array.from(svg.querySelectorAll("text")).filter(t => getComputedStyle(t).display !== "none");
    const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
    boxes.forEach(([name, a], n) => {
      const within = texts[n].closest("svg").parentNode.closest("svg") ? texts[n].closest("svg") : svg;
      const edge = within.getBoundingClientRect();
      if (a.right > edge.right + 1 || a.left < edge.left - 1) found.push(["leaves", name]);
      boxes.slice(n + 1).forEach(([other, b]) => {
        if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom) found.push([name, other]);
      });
    });
  }
  return found;
}"""


@dataclass
class Opened:
    """A page in a browser, and what it said and asked for."""

    page: Any
    said: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # A container has no user namespaces for the sandbox; the page is our own.
        running = driver.chromium.launch(executable_path=which("chromium"), args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Open a page's text; afterwards nothing may have been said, and one file asked for."""
    opened: list[tuple[Any, Opened]] = []

    def open_one(text: str, *, strict: bool = True, **options: Any) -> Opened:
        file = tmp_path / f"page-{len(opened)}.html"
        file.write_text(text)
        context = browser.new_context(offline=True, **{"viewport": {"width": 1280, "height": 900}, **options})
        one = Opened(context.new_page())
        one.page.on("console", lambda message: one.said.append(message.text))
        one.page.on("pageerror", lambda error: one.said.append(str(error)))
        one.page.on("request", lambda request: one.requests.append(request.url))
        one.page.goto(file.as_uri())
        opened.append((context, one))
        one.strict = strict  # type: ignore[attr-defined]
        return one

    yield open_one
    for context, one in opened:
        context.close()
        if one.strict:  # type: ignore[attr-defined]
            assert (one.said, len(one.requests)) == ([], 1)


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize("width", [760, 1280, 1440])
def test_it_opens_and_fits(name: str, width: int, page_of: Callable[[str], str], open_page: Any) -> None:
    one = open_page(page_of(name), viewport={"width": width, "height": 900})
    assert one.page.evaluate("document.documentElement.scrollWidth") <= width
    assert one.page.evaluate(OVERLAPS) == []


def test_a_long_run_s_line_is_drawn(tmp_path: Path, open_page: Any) -> None:
    one = open_page(make_page(write_phases(tmp_path / "run", 3000, lambda n: 10.0 + n % 7), tmp_path / "r.html"))
    box = one.page.locator("svg.series path.line").bounding_box()
    assert box["width"] > 900
    assert one.page.evaluate(OVERLAPS) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_are_drawn(scheme: str, page_of: Callable[[str], str], open_page: Any, tmp_path: Path) -> None:
    one = open_page(page_of(RESNET), color_scheme=scheme)
    ground = one.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(244, 246, 249)", "dark": "rgb(13, 17, 23)"}[scheme]
    shot = one.page.screenshot(full_page=True)
    (tmp_path / f"{scheme}.png").write_bytes(shot)  # to be looked at
    assert len(shot) > 50_000


def test_the_theme_can_be_chosen(page_of: Callable[[str], str], open_page: Any) -> None:
    one = open_page(page_of("plain_loop"), color_scheme="light")
    grounds = []
    for _ in range(3):
        one.page.click("#theme")
        grounds.append(one.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(244, 246, 249)", "rgb(13, 17, 23)", "rgb(244, 246, 249)"]


def test_nothing_that_is_put_in_runs(page_of: Callable[[str], str], open_page: Any) -> None:
    one = open_page(page_of("plain_loop"), strict=False)
    dialogs: list[str] = []
    one.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    refused = one.page.evaluate(
        """() => new Promise(done => {
          const refused = [];
          document.addEventListener("securitypolicyviolation", event => refused.push(event.effectiveDirective));
          const script = document.createElement("script");
          script.textContent = "alert(1)";
          document.body.append(script);
          const box = document.createElement("div");
          box.innerHTML = "<img src='x.png' onerror='alert(2)'><p style='color:red'>x</p>";
          document.body.append(box);
          setTimeout(() => done(refused), 300);
        })"""
    )
    assert dialogs == []
    assert {"script-src-elem", "img-src", "style-src-attr"} <= set(refused)


def test_hostile_names_open_no_dialog(open_page: Any, tmp_path: Path) -> None:
    from builder import TraceBuilder
    from commands import run as command

    trace = TraceBuilder(rank=0, world_size=1).step(1, 0, 100)
    name = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"
    trace.op(name, 10, 50).launched(name, 20, 30, 1, at=15).write_device(tmp_path / "d.json")
    assert command("merge", "--device", tmp_path / "d.json", "-o", tmp_path / "out").code == 0
    one = open_page(make_page(tmp_path / "out", tmp_path / "r.html"))
    texts = one.page.locator("#t-operators td.name").all_inner_texts()
    assert name in texts


def test_without_its_script_everything_is_there(page_of: Callable[[str], str], open_page: Any) -> None:
    with_script, without = (open_page(page_of(RESNET), java_script_enabled=on) for on in (True, False))
    assert without.page.locator("#theme").is_hidden()
    assert without.page.locator("svg.stack").count() == with_script.page.locator("svg.stack").count() > 5
    assert without.page.locator("td").all_inner_texts() == with_script.page.locator("td").all_inner_texts()


def test_a_table_sorts_and_is_searched(page_of: Callable[[str], str], open_page: Any) -> None:
    page = open_page(page_of(RESNET)).page
    page.locator("details.long summary").first.click()
    head = page.locator("#t-kernels-all th", has_text="count")
    head.get_by_role("button").click()
    values = [float(text.replace(",", "")) for text in page.locator("#t-kernels-all td:nth-child(5)").all_inner_texts()]
    assert values == sorted(values, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    field = page.locator("input[type=search]").first
    field.fill("nccl")
    shown = page.locator("#t-kernels-all tbody tr:visible")
    assert shown.count() == page.locator("#t-kernels-all tbody tr", has_text=re.compile("nccl", re.IGNORECASE)).count()
    assert shown.count() > 0


def test_the_keyboard_reaches_every_control_in_order(page_of: Callable[[str], str], open_page: Any) -> None:
    page = open_page(page_of("plain_loop")).page
    seen = []
    for _ in range(80):
        page.keyboard.press("Tab")
        now = page.evaluate(
            "(e => e === document.body ? null : e.tagName + ':' + e.textContent)(document.activeElement)"
        )
        if now is None:
            break
        seen.append(now)
    links = [text for text in seen if text.startswith("A:")]
    assert links[:3] == ["A:Findings", "A:Step", "A:Steps"]
    assert "BUTTON:Theme: system" in seen
    assert "SUMMARY:What the words mean" in seen
    assert seen.index("BUTTON:Theme: system") > seen.index(links[-1])


def test_one_heading_and_named_sections(page_of: Callable[[str], str], open_page: Any) -> None:
    page = open_page(page_of(RESNET)).page
    assert page.locator("h1").count() == 1
    for landmark in ("header", "nav", "main", "footer"):
        assert page.locator(landmark).count() == 1
    nameless = page.evaluate(
        """() => Array.from(document.querySelectorAll("svg[role=img]")).filter(s => !s.getAttribute("aria-label"))
             .concat(Array.from(document.querySelectorAll("th")).filter(h => !h.textContent.trim())).length"""
    )
    assert nameless == 0
    small = page.evaluate(
        """() => Array.from(document.querySelectorAll("nav a, button, summary, input"))
             .filter(e => e.getBoundingClientRect().height && e.getBoundingClientRect().height < 23.5)
             .map(e => e.textContent)"""
    )
    assert small == []


@pytest.mark.parametrize("name", MATRIX)
def test_it_prints_on_ten_pages_at_most(name: str, page_of: Callable[[str], str], open_page: Any) -> None:
    one = open_page(page_of(name), color_scheme="dark")
    printed = one.page.pdf(format="A4")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 10
    one.page.emulate_media(media="print")
    assert one.page.locator("nav").is_hidden()
    assert one.page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
