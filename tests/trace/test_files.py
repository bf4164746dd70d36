import gzip
from pathlib import Path

import pytest

from chakra_capture.errors import TraceFileError
from chakra_capture.trace.files import read_bytes

TEXT = b'{"nodes": []}' * 100


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t"])
@pytest.mark.parametrize(
    "data",
    [TEXT, gzip.compress(TEXT), gzip.compress(TEXT[:50]) + gzip.compress(TEXT[50:])],
    ids=["plain", "gzip", "two members"],
)
def test_compression_is_told_by_the_first_bytes_whatever_the_name(name: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    assert (read_bytes(path).data, read_bytes(path).cut) == (TEXT, None)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-8"])
def test_byte_order_marks_are_understood(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes('{"name": "加法"}'.encode(encoding))
    assert read_bytes(path).data.decode() == '{"name": "加法"}'


def test_big_endian_utf16_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b"\xfe\xff" + '{"a": 1}'.encode("utf-16-be"))
    assert read_bytes(path).data == b'{"a": 1}'


def test_cut_gzip_gives_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    text = bytes(range(256)) * 2000
    path.write_bytes(gzip.compress(text)[:-600])
    file = read_bytes(path)
    assert file.cut == "truncated gzip"
    assert text.startswith(file.data)
    assert file.data


def test_damaged_gzip_gives_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    data = bytearray(gzip.compress(TEXT))
    data[-8:-4] = b"\0\0\0\0"  # the checksum
    path.write_bytes(data)
    file = read_bytes(path)
    assert file.cut is not None
    assert file.cut.startswith("damaged gzip")


@pytest.mark.parametrize("data", [b"", b" \n", gzip.compress(b""), b"\xef\xbb\xbf"], ids=["", "space", "gzip", "mark"])
def test_empty_file_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(TraceFileError, match="is empty, so it holds no trace"):
        read_bytes(path)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="does not exist"):
        read_bytes(tmp_path / "none")
    with pytest.raises(TraceFileError, match="is a folder"):
        read_bytes(tmp_path)
    with pytest.raises(TraceFileError, match="does not exist"):
        read_bytes(tmp_path / "a" / "b")
