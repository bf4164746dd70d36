"""Handed traces, merged once for all tests of a process."""

from functools import cache

import pytest
from commands import run as command
from handed import DATA, require


@pytest.fixture(scope="session")
def merged(tmp_path_factory):
    """Merge a handed trace once; returns its folder of ranks."""

    @cache
    def folder(name):
        out = tmp_path_factory.mktemp("merged")
        source = DATA / name
        if name.startswith("device_only"):
            done = command("merge", "--device", require(source.with_name(source.name + ".json.gz")), "-o", out)
        else:
            done = command("merge", require(source), "--force", "-o", out)
        assert done.code == 0, done
        return out

    return folder
