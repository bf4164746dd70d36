"""Writing tables; what the disk refuses at any byte is said as the system says it."""

import errno
from pathlib import Path

import polars as pl
import pytest
from disks import files_end_at

from chakra_capture.merge.output import write_table


def test_a_disk_that_is_full_at_any_byte_of_a_table_is_an_error_of_the_system_and_leaves_no_file(
    tmp_path: Path,
) -> None:
    # Wide, so that more than one buffer of it describes its columns: polars does not say why that could not be written.
    table = pl.LazyFrame({f"column {at}": [(at * row) ** 9 % 10**9 for row in range(40)] for at in range(60)})
    path = tmp_path / "nodes.parquet"
    write_table(path, table)
    size = path.stat().st_size
    path.unlink()
    for limit in [*range(0, size, size // 20), size - 1]:
        with files_end_at(limit), pytest.raises(OSError) as fault:
            write_table(path, table)
        assert fault.value.errno == errno.EFBIG, limit
        assert list(tmp_path.iterdir()) == []
    with files_end_at(size):
        write_table(path, table)
    assert pl.read_parquet(path).equals(table.collect())
