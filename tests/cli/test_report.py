"""``chakra-capture report`` as a command: what it prints, replaces and refuses."""

import json
import os
import shutil
from pathlib import Path

import pytest
from commands import run

TRACES = Path(__file__).parent.parent.parent / "traces"


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    shutil.copytree(TRACES / "plain_loop", tmp_path / "run")
    return tmp_path / "run"


def test_it_says_where_the_page_is_and_how_large(sample: Path, tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    done = run("report", sample, "-o", page, "--no-replay")
    size = f"{page.stat().st_size / 1000:.1f} kB"
    assert (done.code, done.out, done.err) == (0, f"{page} ({size}): open it in a browser.\n", "")
    as_json = run("report", sample, "-o", page, "--no-replay", "--json")
    assert json.loads(as_json.out) == {"schema_version": 1, "file": str(page), "num_bytes": page.stat().st_size}


def test_the_page_is_report_html_in_the_current_folder(
    sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("report", sample, "--no-replay").code == 0
    assert (tmp_path / "report.html").is_file()


def test_a_report_that_is_there_is_replaced_whole(sample: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    page.write_text("old")
    assert run("report", sample, "-o", page, "--no-replay").code == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir() if ".part" in path.name] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "{folder}/r.html", "--ranks", "7"], "has no rank 7; it has 0. Name some of them."),
        (["-o", "{folder}"], "is a folder. Name a file, such as"),
        (["-o", "{folder}/missing/r.html"], "is no folder, so"),
    ],
)
def test_what_cannot_be_done_is_said(sample: Path, tmp_path: Path, options: list[str], message: str) -> None:
    done = run("report", sample, *[text.format(folder=tmp_path) for text in options])
    assert (done.code, done.out) == (1, "")
    assert message in done.err


def test_what_is_no_plain_file_is_not_replaced(sample: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = run("report", sample, "-o", pipe)
    assert (done.code, pipe.is_fifo()) == (1, True)
    assert "is no plain file and is not replaced" in done.err


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    done = run("report", tmp_path, "-o", tmp_path / "r.html")
    assert (done.code, (tmp_path / "r.html").exists()) == (1, False)
