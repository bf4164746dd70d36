"""``query``: SQL over the tables of all ranks, nothing else read, nothing changed, every value shown as it is."""

import json
import os
import re
from pathlib import Path

import polars as pl
import pytest
from commands import Outcome, process, refused, run
from disks import files_end_at

from chakra_capture.trace.schema import COLLECTIVES, COMMUNICATION, EDGES, NODES, STEPS

ESCAPES = "\x1b[31mred\x1b[0m\r\n\x07[bold]x[/bold]\u202e"


def table(described, rows):
    """A table as merge writes it; what a row does not say is null."""
    return pl.DataFrame({name: [row.get(name) for row in rows] for name in described.schema}, schema=described.schema)


def write_rank(merged: Path, rank: int, nodes, *, communication=()):
    folder = merged / f"rank={rank}"
    folder.mkdir(parents=True)
    tables = {"nodes": (NODES, nodes), "edges": (EDGES, []), "steps": (STEPS, [{"step": 5}, {"step": 6}])}
    if communication is not None:
        tables["communication"] = (COMMUNICATION, communication)
    for name, (described, rows) in tables.items():
        table(described, rows).write_parquet(folder / f"{name}.parquet")
    (folder / "link.json").write_text("{}")


def kernel(name, dur):
    return {"kind": "kernel", "name": name, "dur_ns": dur}


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """Three ranks; rank r runs gemm for 100 * (r + 1) ns and copy for 10 ns."""
    folder = tmp_path / "0_merged"
    for rank in range(3):
        nodes = [kernel("gemm", 100 * (rank + 1)), kernel("copy", 10), {"kind": "host_op", "name": "aten::mm"}]
        write_rank(folder, rank, nodes, communication=[{"collective": "all_reduce", "group_ranks": [0, 1, 2]}])
    rows = [{"collective_id": 0, "rank": rank, "wait_ns": wait} for rank, wait in enumerate((30, 20, 0))]
    table(COLLECTIVES, rows).write_parquet(folder / "collectives.parquet")
    return folder


def answer(done: Outcome) -> dict:
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


def rows(merged, sql, *options):
    return answer(run("query", merged, sql, "--json", *options))["rows"]


def test_top_kernels_over_all_ranks(merged):
    sql = """SELECT name, count(*) AS launches, sum(dur_ns) AS ns FROM nodes WHERE kind = 'kernel'
             GROUP BY name ORDER BY ns DESC"""
    # 100 + 200 + 300 and 3 * 10 by hand.
    assert rows(merged, sql) == [{"name": "gemm", "launches": 3, "ns": 600}, {"name": "copy", "launches": 3, "ns": 30}]
    done = run("query", merged, sql)
    assert (done.code, done.err) == (0, "")
    assert [line.split() for line in done.out.splitlines()] == [
        ["name", "launches", "ns"], ["gemm", "3", "600"], ["copy", "3", "30"], ["2", "rows"],
    ]  # fmt: skip


def test_every_table_has_its_columns_and_the_rank(merged):
    for described in (NODES, EDGES, STEPS, COMMUNICATION):
        columns = answer(run("query", merged, f"SELECT * FROM {described.name}", "--json"))["columns"]
        assert [column["name"] for column in columns] == ["rank", *described.schema]
    columns = answer(run("query", merged, "SELECT * FROM collectives", "--json"))["columns"]
    assert [column["name"] for column in columns] == list(COLLECTIVES.schema)


def test_the_waiting_of_each_rank(merged):
    sql = "SELECT rank, sum(wait_ns) AS ns FROM collectives GROUP BY rank ORDER BY ns DESC"
    assert rows(merged, sql) == [{"rank": 0, "ns": 30}, {"rank": 1, "ns": 20}, {"rank": 2, "ns": 0}]


def test_chosen_ranks_alone_are_read(merged):
    (merged / "rank=0" / "nodes.parquet").write_bytes(b"no table")
    sql = "SELECT sum(dur_ns) AS ns FROM nodes"
    assert rows(merged, sql, "--ranks", 1, 2) == [{"ns": 520}]
    assert rows(merged / "rank=2", sql) == [{"ns": 310}]
    assert rows(merged, "SELECT rank FROM collectives ORDER BY rank", "--ranks", 1, 2) == [{"rank": 1}, {"rank": 2}]
    refused(run("query", merged, sql), "rank 0", "Merge this rank again")
    refused(run("query", merged, sql, "--ranks", 7), "rank 7", "not merged")


def test_names_in_the_path_are_no_columns_and_no_patterns(merged, tmp_path):
    odd = tmp_path / "step=77" / "rank=9" / "lr=0.1,[x]*{a}?" / "runs"
    odd.mkdir(parents=True)
    merged.rename(odd / "0_merged")
    sql = "SELECT rank, min(step) AS first, count(*) AS steps FROM steps GROUP BY rank ORDER BY rank"
    assert rows(odd / "0_merged", sql) == [{"rank": rank, "first": 5, "steps": 2} for rank in range(3)]


def test_a_rank_that_is_not_merged_is_named(merged, tmp_path):
    (tmp_path / "0_chakra").mkdir()
    (tmp_path / "0_kineto").mkdir()
    for rank in (0, 1, 2, 3, 4):
        (tmp_path / "0_kineto" / f"rank-{rank}.json").write_text("{}")
    done = run("query", tmp_path, "SELECT count(*) AS n FROM nodes", "--json")
    assert done.code == 0
    assert done.err == (
        "chakra-capture: rank 3-4 is not merged and not in the answer. Merge it with chakra-capture merge.\n"
    )
    report = json.loads(done.out)
    assert (report["ranks"], report["not_merged"], report["rows"]) == ([0, 1, 2], [3, 4], [{"n": 9}])


def test_a_table_that_the_run_lacks_is_said_to_be_absent(merged):
    (merged / "collectives.parquet").unlink()
    refused(run("query", merged, "SELECT * FROM collectives"), "no table collectives", "Merge them again")
    (merged / "rank=1" / "communication.parquet").unlink()
    done = run("query", merged, "SELECT count(*) AS n FROM communication", "--json")
    assert (done.code, done.err) == (0, "chakra-capture: table communication lacks rank 1. Merge it again.\n")
    for rank in (0, 2):
        (merged / f"rank={rank}" / "communication.parquet").unlink()
    refused(run("query", merged, "SELECT * FROM communication"), "no table communication", "earlier version")


def test_tables_of_another_version_are_named(merged):
    path = merged / "rank=2" / "nodes.parquet"
    pl.read_parquet(path).drop("phase").write_parquet(path)
    refused(run("query", merged, "SELECT phase FROM nodes"), "the tables of rank 2", "Merge this rank again")


FILES = ("csv", "parquet", "ipc", "json", "ndjson")
SHAPES = (
    "SELECT * FROM read_{kind}('{file}')",
    "select * from Read_{KIND}('{file}')",
    "SELECT * FROM \"read_{kind}\"('{file}')",
    "SELECT * FROM `READ_{KIND}`('{file}')",
    "SELECT * FROM read_{kind} /* a */ ('{file}')",
    "SELECT * FROM read_{kind} -- a\n ('{file}')",
    "/* SELECT */ SELECT * FROM nodes JOIN read_{kind}('{file}') b ON nodes.name = b.a",
    "SELECT * FROM nodes WHERE name IN (SELECT a FROM read_{kind}('{file}'))",
    "WITH t AS (SELECT * FROM read_{kind}('{file}')) SELECT * FROM t",
    "SELECT name FROM nodes UNION ALL SELECT a FROM read_{kind}('{file}')",
    "SELECT * FROM (SELECT * FROM (SELECT * FROM read_{kind}('{file}')) x) y",
    "SELECT '\\' , a FROM read_{kind}('{file}') -- '",
    "SELECT E'\\'', a FROM read_{kind}('{file}')",
    "SELECT $$ ' $$, a FROM read_{kind}('{file}') -- '",
    "SELECT '/*', a FROM read_{kind}('{file}') -- */",
    "SELECT /* /* */ a */ * FROM read_{kind}('{file}')",
    "FROM read_{kind}('{folder}/*')",
    "SELECT * FROM read_{kind}('https://127.0.0.1:9/a')",
    "SELECT * FROM read_{kind}('s3://bucket/a')",
    "SELECT * FROM '{file}'",
    'SELECT * FROM "{file}"',
    "SELECT * FROM scan_{kind}('{file}')",
    "SELECT read_{kind}('{file}')",
    "SELECT * FROM main.read_{kind}('{file}')",
    "SELECT * FROM TABLE(read_{kind}('{file}'))",
    "SELECT * FROM nodes, LATERAL read_{kind}('{file}') AS b",
    "EXPLAIN SELECT * FROM read_{kind}('{file}')",
    "CREATE TABLE t AS SELECT * FROM read_{kind}('{file}')",
)


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, Path]:
    frame = pl.DataFrame({"a": ["secret"]})
    found = {kind: tmp_path / "secrets" / f"a.{kind}" for kind in FILES}
    found["csv"].parent.mkdir()
    frame.write_csv(found["csv"])
    frame.write_parquet(found["parquet"])
    frame.write_ipc(found["ipc"])
    found["json"].write_text('{"a": "secret"}\n')
    found["ndjson"].write_text('{"a": "secret"}\n')
    return found


def test_no_query_reads_another_file(merged, secrets):
    for kind, file in secrets.items():
        # It would be read: each of these is what polars itself answers.
        context = pl.SQLContext(frames={}, eager=True)
        assert context.execute(f"SELECT * FROM read_{kind}('{file}')").rows() == [("secret",)]
        os.utime(file, ns=(0, 0))
        for shape in SHAPES:
            sql = shape.format(kind=kind, KIND=kind.upper(), file=file, folder=file.parent)
            done = run("query", merged, sql, "--json")
            assert done.out == "", sql
            assert "secret\n" not in refused(done)


def test_a_file_is_refused_before_anyone_looks_whether_it_is_there(merged, tmp_path):
    for shape in (shape for shape in SHAPES if "read_" in shape.lower()):
        sql = shape.format(kind="csv", KIND="CSV", file=tmp_path / "none", folder=tmp_path / "none")
        refused(run("query", merged, sql), "nothing else")


def test_a_source_that_the_words_do_not_give_away_is_refused_by_the_plan(merged, secrets, monkeypatch):
    import chakra_capture.trace.sql as sql

    monkeypatch.setattr(sql, "_FILE_FUNCTIONS", re.compile("never"))
    for kind, file in secrets.items():
        question = f"SELECT a FROM read_{kind}('{file}') UNION ALL SELECT name FROM nodes"
        refused(run("query", merged, question), "nothing else")


@pytest.mark.parametrize(
    ("sql", "part"),
    [
        ("DROP TABLE nodes", "only asks"),
        ("DELETE FROM nodes", "only asks"),
        ("/* SELECT */ CREATE TABLE x AS SELECT * FROM nodes", "only asks"),
        ("COPY nodes TO '/tmp/x.csv'", "only asks"),
        (" ", "only asks"),
        ("SELECT 1; DROP TABLE nodes", "one (and only one) statement"),
        ("SELECT * INTO x FROM nodes", "not supported"),
        ("SELECT nam FROM nodes", 'unable to find column "nam"'),
        ("SELECT nam FROM nodes", "nodes has rank, node_id, window"),
        ("SELECT * FROM node", "relation 'node' was not found. The tables are nodes, edges, steps, communication"),
        ("SELECT * FRM nodes", "sql parser error"),
        ("SELECT sum(name) FROM nodes", "not supported"),
        ("SELECT CAST(name AS INT) FROM nodes", "conversion from"),
        ("SELECT " + "(" * 300 + "1" + ")" * 300, "recursion limit"),
        ("SELECT " + "+".join(["1"] * 3000), "Make it shorter"),
    ],
)
def test_what_is_wrong_with_a_query_is_said_in_one_sentence(merged, sql, part):
    before = {path: path.read_bytes() for path in merged.rglob("*") if path.is_file()}
    refused(run("query", merged, sql), part)
    assert {path: path.read_bytes() for path in merged.rglob("*") if path.is_file()} == before


def test_values_that_json_lacks_are_told_apart_from_null(merged):
    sql = """SELECT 0e0 / 0e0 AS nan, 1e0 / 0e0 AS inf, -1e0 / 0e0 AS neg, NULL AS nothing, x'00ff' AS raw, kind,
             9007199254740993 AS big, true AS yes, DATE '2026-01-02' AS day FROM nodes WHERE rank = 0 LIMIT 1"""
    assert rows(merged, sql) == [
        {"nan": "NaN", "inf": "Infinity", "neg": "-Infinity", "nothing": None, "raw": "00ff", "kind": "kernel",
         "big": 9007199254740993, "yes": True, "day": "2026-01-02"}
    ]  # fmt: skip
    assert rows(merged, "SELECT group_ranks FROM communication LIMIT 1") == [{"group_ranks": [0, 1, 2]}]


def test_names_of_a_trace_do_not_move_the_cursor(tmp_path):
    write_rank(tmp_path / "0_merged", 0, [kernel(ESCAPES, 5)])
    done = run("query", tmp_path / "0_merged", "SELECT name, dur_ns FROM nodes")
    assert done.code == 0
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", done.out)
    assert len(done.out.splitlines()) == 3
    assert "[bold]x[/bold]" in done.out
    assert rows(tmp_path / "0_merged", "SELECT name FROM nodes") == [{"name": ESCAPES}]


def test_a_table_keeps_to_80_columns_and_never_cuts_a_number(tmp_path):
    write_rank(tmp_path / "0_merged", 0, [{**kernel("k" * 300, 10**18 + 1), "ts_ns": 10**18 + 3}])
    done = run("query", tmp_path / "0_merged", "SELECT name, dur_ns, ts_ns, name AS again, name AS third FROM nodes")
    assert max(map(len, done.out.splitlines())) <= 80
    assert str(10**18 + 1) in done.out
    assert str(10**18 + 3) in done.out
    assert "not enough room for the columns third" in done.out


def test_limit(merged):
    done = run("query", merged, "SELECT name FROM nodes", "--limit", 2)
    assert (len(done.out.splitlines()), done.out.splitlines()[-1]) == (4, "the first 2 rows; --limit shows more")
    report = answer(run("query", merged, "SELECT name FROM nodes", "--json", "--limit", 2))
    assert (len(report["rows"]), report["more"]) == (2, True)
    report = answer(run("query", merged, "SELECT name FROM nodes", "--json", "--limit", 9))
    assert (len(report["rows"]), report["more"]) == (9, False)
    assert len(rows(merged, "SELECT a.name FROM nodes a, nodes b")) == 81


def test_files_are_whole_and_lists_are_json_in_csv(merged, tmp_path):
    sql = "SELECT rank, group_ranks FROM communication ORDER BY rank"
    done = run("query", merged, sql, "-o", tmp_path / "a.csv")
    assert (done.code, done.err) == (0, "")
    assert (tmp_path / "a.csv").read_text() == 'rank,group_ranks\n0,"[0, 1, 2]"\n1,"[0, 1, 2]"\n2,"[0, 1, 2]"\n'
    assert run("query", merged, sql, "--csv").out == (tmp_path / "a.csv").read_text()
    done = run("query", merged, sql, "-o", tmp_path / "a.parquet", "--limit", 2)
    assert pl.read_parquet(tmp_path / "a.parquet").rows() == [(0, [0, 1, 2]), (1, [0, 1, 2])]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0_merged", "a.csv", "a.parquet"]


def test_an_answer_never_takes_the_place_of_a_table(merged, tmp_path):
    before = (merged / "rank=0" / "nodes.parquet").read_bytes()
    refused(run("query", merged, "SELECT 1 AS a", "-o", merged / "rank=0" / "nodes.parquet"), "merged tables")
    assert (merged / "rank=0" / "nodes.parquet").read_bytes() == before
    refused(run("query", merged, "SELECT 1 AS a", "-o", tmp_path / "none" / "a.csv"), "cannot be written")
    (tmp_path / "kept.csv").write_text("kept")
    refused(run("query", merged, "SELECT CAST(name AS INT) AS a FROM nodes", "-o", tmp_path / "kept.csv"))
    assert (tmp_path / "kept.csv").read_text() == "kept"
    assert not list(tmp_path.glob("*.part"))


def test_wrong_usage(merged, tmp_path):
    for options in (["-o", tmp_path / "a.xlsx"], ["--json", "--csv"], ["--json", "-o", tmp_path / "a.csv"]):
        done = run("query", merged, "SELECT 1", *options)
        assert (done.code, done.out) == (2, "")
    refused(run("query", tmp_path / "nowhere", "SELECT 1"), "does not exist")
    (tmp_path / "0_merged" / "rank=5").mkdir()
    refused(run("query", tmp_path / "0_merged" / "rank=5", "SELECT 1"), "no finished merge")


@pytest.mark.parametrize("sql", ["SELECT nam FROM nodes", "SELECT GREATEST() AS a FROM nodes"])
def test_a_query_as_a_process_leaves_no_trace_of_polars(merged, sql, monkeypatch):
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    refused(process("query", merged, sql), "cannot")


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("size", [0, 100, 9_000])
def test_a_disk_that_is_full_is_said_and_leaves_no_file(merged: Path, ending: str, size: int) -> None:
    out = merged.parent / f"answer.{ending}"
    numbers = ", ".join(f"a.dur_ns * {at} + b.dur_ns AS c{at}" for at in range(100))
    sql = f"SELECT {numbers} FROM nodes a CROSS JOIN nodes b"
    with files_end_at(size):
        done = run("query", merged, sql, "-o", out)
    assert done.code == 1
    assert done.err == f"chakra-capture: {out} cannot be written: File too large. Name a file elsewhere.\n"
    assert not list(merged.parent.glob("answer*"))
