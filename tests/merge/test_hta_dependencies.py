"""What another tool, Holistic Trace Analysis (HTA), says waits for what: each of its edges follows from ours.

The numbers were printed by scripts/hta_dependencies.py from HTA's critical-path graph of the whole trace
(traceinsight 0.6.1, TraceAnalysis.critical_path_analysis with an empty annotation): every edge of type SYNC_DEPENDENCY
and KERNEL_KERNEL_DELAY, as correlation ids. HTA keeps one wait per kernel, and takes queries of events for waits.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
from builder import merge_files
from handed import DATA, require
from reach import Reach

from chakra_capture.trace.discovery import WindowFiles


@dataclass(frozen=True)
class Dependencies:
    """Pairs "waited for > waiting": a call for an activity, an activity for another one, the next one on a stream."""

    call: str
    work: str
    stream: str


HTA = {
    "hta_event_sync": Dependencies(
        call="""
            1511>1512 1526>1536 1526>1537 1526>1549
        """,
        work="",
        stream="",
    ),
    "hta_event_sync_multi_stream": Dependencies(
        call="""
            27>54 27>1424 57>1410 57>1424 1413>1424
        """,
        work="""
            27>1411
        """,
        stream="""
            55>57 1411>1413
        """,
    ),
    "hta_alexnet_critical_path": Dependencies(
        call="""
            14>15 25>26 40>41 51>52 62>63 73>74 84>85 95>96 106>107 117>118 132>133 143>144 158>159
            169>170 184>185 195>196 218>225 5190>5503 5190>5511 5498>5503 5498>5511 5606>5894
            5606>5909 5889>5894 5889>5909
        """,
        work="""
            5144>5181 5178>5188 5190>5213 5560>5597 5594>5604 5606>5629
        """,
        stream="""
            5112>5117 5117>5123 5213>5219 5219>5232 5248>5250 5254>5260 5260>5266 5283>5285
            5285>5289 5289>5295 5295>5301 5318>5320 5320>5324 5324>5330 5330>5336 5336>5349
            5424>5426 5426>5432 5432>5455 5455>5469 5469>5471 5471>5477 5495>5496 5496>5498
            5532>5537 5537>5543 5597>5604 5604>5606 5629>5635 5635>5648 5648>5664 5664>5666
            5666>5670 5670>5676 5676>5682 5682>5699 5699>5701 5701>5705 5705>5711 5711>5717
            5717>5734 5734>5736 5736>5740 5740>5746 5746>5752 5752>5765 5765>5779 5779>5801
            5801>5819 5819>5821 5821>5827 5827>5850 5850>5864 5864>5866 5866>5872 5872>5886
            5886>5887 5887>5889
        """,
    ),
    "hta_simple_add_critical_path": Dependencies(
        call="""
            14>15 25>26 40>41 51>52 62>63 73>74 84>85 95>96 106>107 117>118 132>133 143>144 158>159
            169>170 184>185 195>196 218>225 5190>5503 5190>5511 5498>5503 5498>5511 5606>5894
            5606>5909 5889>5894 5889>5909
        """,
        work="",
        stream="""
            5112>5117 5117>5123 5213>5219 5248>5250 5283>5285 5285>5289 5318>5320 5320>5324
            5424>5426 5426>5432 5432>5455 5455>5469 5469>5471 5471>5477 5495>5496 5496>5498
            5532>5537 5537>5543 5597>5604 5604>5606 5629>5635 5664>5666 5666>5670 5670>5676
            5676>5682 5699>5701 5701>5705 5705>5711 5711>5717 5717>5734 5734>5736 5736>5740
            5740>5746 5746>5752 5819>5821 5821>5827 5864>5866 5866>5872 5872>5886 5886>5887
            5887>5889
        """,
    ),
}


def pairs(text: str) -> list[tuple[int, int]]:
    return [(int(source), int(target)) for source, target in (pair.split(">") for pair in text.split())]


@pytest.mark.parametrize("name", HTA)
def test_every_dependency_that_hta_finds_is_implied(name: str, tmp_path: Path) -> None:
    path = require(DATA / "device_only" / f"{name}.json.gz")
    reach = Reach(merge_files(tmp_path, WindowFiles(None, path)))
    wanted = [(*pair, "end") for pair in pairs(HTA[name].call)]
    wanted += [(*pair, "start") for pair in pairs(HTA[name].work) + pairs(HTA[name].stream)]
    assert [each for each in wanted if not reach.holds(*each)] == []
