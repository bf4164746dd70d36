"""Damaged text: what is whole is kept, what is lost is counted, in time that grows with the file only."""

import json
import time
from decimal import Decimal
from typing import Any

import pytest

from chakra_capture.trace.salvage import EVENTS, NODES, ArrayShape, Salvage, elements


def salvaged(text: str | bytes, shape: ArrayShape = EVENTS) -> tuple[list[Any], Salvage]:
    salvage = Salvage()
    data = text.encode() if isinstance(text, str) else text
    found = [json.loads(e, parse_float=Decimal) for e in elements(data, shape, salvage)]
    return found, salvage


def test_whole_array_needs_no_repair() -> None:
    found, salvage = salvaged('{"traceEvents": [{"ph": "X", "ts": 1.500}, {"ph": "M"}]}')
    assert found == [{"ph": "X", "ts": Decimal("1.500")}, {"ph": "M"}]
    assert not salvage


def test_cut_file_keeps_the_whole_elements_and_says_where_it_ends() -> None:
    text = '{"traceEvents": [\n{"ph": "X"},\n{"ph": "X", "na'
    found, salvage = salvaged(text)
    assert found == [{"ph": "X"}]
    assert salvage.elements_lost == 1
    assert salvage.notes == [f"truncated at byte {len(text)}, inside the element that begins at byte 31"]


def test_cut_between_elements_loses_none() -> None:
    found, salvage = salvaged('{"traceEvents": [{"ph": "X"},')
    assert (found, salvage.elements_lost) == ([{"ph": "X"}], 0)
    assert salvage.notes == ["truncated at byte 29"]


def test_byte_positions_count_bytes_not_characters() -> None:
    text = '{"traceEvents": [\n{"name": "模型"},\n{"name": "模'
    _, salvage = salvaged(text)
    assert salvage.notes == [
        f"truncated at byte {len(text.encode())}, inside the element that begins at byte {text.encode().rindex(b'{')}"
    ]


def test_damaged_element_is_skipped_and_the_next_one_found() -> None:
    found, salvage = salvaged('{"traceEvents": [\n{"ph": "X", "name": "a"b"},\n{"ph": "X", "name": "c"}\n]}')
    assert found == [{"ph": "X", "name": "c"}]
    assert (salvage.elements_lost, salvage.notes) == (1, ["damaged element skipped"])


def test_repeated_damage_is_counted_in_one_note() -> None:
    _, salvage = salvaged('{"traceEvents": [' + ',\n{"ph": "X" "x"}' * 3 + ',\n{"ph": "M"}]}')
    assert salvage.notes == ["damaged element skipped (3 times)"]
    assert salvage.elements_lost == 3


def test_trailing_comma_control_characters_and_nan_are_read() -> None:
    found, _ = salvaged('{"traceEvents": [{"ph": "X", "name": "a\x01\nb", "args": {"v": NaN, "w": -Infinity}},\n]}')
    assert found == [{"ph": "X", "name": "a\x01\nb", "args": {"v": "NaN", "w": "-Infinity"}}]


def test_bytes_that_are_no_utf8_are_replaced_and_said() -> None:
    found, salvage = salvaged(b'{"traceEvents": [{"ph": "X", "name": "a\xff"}]}')
    assert found[0]["name"] == "a�"
    assert salvage.notes == ["invalid UTF-8 replaced"]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("\\ud800x", "�x"),
        ("\\\\ud800", "\\ud800"),
        ("\\ud83d\\ude00", "😀"),
        ("\\ude00\\ud83d", "��"),
        ("\\\\\\udfff", "\\�"),
    ],
)
def test_half_surrogates_are_replaced_and_pairs_kept(written: str, name: str) -> None:
    found, _ = salvaged(f'{{"traceEvents": [{{"ph": "X", "name": "{written}"}}]}}')
    assert found == [{"ph": "X", "name": name}]


@pytest.mark.parametrize("number", ["1" * 5000, str(2**70), "1e400"])
def test_numbers_keep_their_text(number: str) -> None:
    data = f'{{"traceEvents": [{{"ph": "X", "args": {{"v": {number}}}}}, {{'.encode()
    (element,) = elements(data, EVENTS, Salvage())
    assert Decimal(json.loads(element, parse_int=str, parse_float=str)["args"]["v"]) == Decimal(number)


def test_elements_that_are_no_objects_are_passed_over() -> None:
    assert salvaged('{"traceEvents": [1, "x", null, [2], {"ph": "X"}]')[0] == [{"ph": "X"}]


def test_text_without_the_array_gives_nothing() -> None:
    assert salvaged("nothing here")[0] == []
    assert salvaged('{"a": 1}')[0] == []


def test_nodes_resume_after_a_damaged_one() -> None:
    text = '{"nodes": [\n{"id": 1, "name": "a"b"},\n{"id": 2, "name": "rf"}]}'
    assert salvaged(text, NODES)[0] == [{"id": 2, "name": "rf"}]


BAD = {
    "damaged elements after a wide character": '{"traceEvents": [{"name": "é"}' + ',\n{"ph": "X" "x"}' * 100_000,
    "elements that open and never close": '{"traceEvents": [' + ',{"name":[0' * 200_000,
    "deep levels around a long tail": '{"traceEvents": [' + ',\n{"name":[0' * 400 + ",1" * 500_000,
    "quotes without end": '{"traceEvents": [' + ',\n{"name": "' * 200_000,
    "brackets": '{"traceEvents": [' + "[" * 2_000_000,
    "garbage": '{"traceEvents": [' + "}{:," * 500_000,
    "spaces": '{"traceEvents": [' + " " * 2_000_000,
}


@pytest.mark.parametrize("what", BAD)
def test_hostile_text_takes_time_in_proportion_to_its_size(what: str) -> None:
    began = time.process_time()
    salvaged(BAD[what])
    assert time.process_time() - began < 6


@pytest.mark.parametrize("size", [*range(4060, 4110), 40_000, 300_000])
def test_long_elements_are_whole_wherever_the_reading_window_ends(size: int) -> None:
    content = {"ph": "X", "name": "x" * (size - 60), "v": "é\n\\u", "n": 12.5, "t": True, "z": [1, None, {"a": -3}]}
    text = '{"traceEvents": [' + json.dumps(content) + ', {"ph": "M"}, {"cut'
    found, salvage = salvaged(text)
    assert found == [{**content, "n": Decimal("12.5")}, {"ph": "M"}]
    assert salvage.elements_lost == 1
