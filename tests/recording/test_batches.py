"""How many samples a batch holds; where its shape does not say, nobody guesses."""

from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from phases import phase_lines

from chakra_capture import capture
from chakra_capture.recording.batches import batch_size
from recording.recorded import settings

Pair = namedtuple("Pair", "inputs targets")
IMAGES, LABELS = torch.zeros(8, 3, 4, 4), torch.zeros(8)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (IMAGES, 8),
        (np.zeros((5, 2)), 5),
        ([IMAGES, LABELS], 8),
        ((IMAGES, LABELS, ["name"] * 8), 8),
        (Pair(IMAGES, LABELS), 8),
        ({"image": IMAGES, "label": LABELS, "path": ["a"] * 8}, 8),
        (UserDict(input_ids=torch.zeros(4, 9), labels=torch.zeros(4)), 4),
        ([{"image": IMAGES[0]}, {"image": IMAGES[1]}], 2),
        ([IMAGES, torch.tensor(0.5)], 8),
        # Nobody knows: sizes differ, samples in a tuple of tuples, nothing with a shape.
        ([IMAGES, torch.zeros(4)], None),
        (((IMAGES[0], IMAGES[1]), (LABELS[0], LABELS[1])), None),
        (torch.tensor(1.0), None),
        ([], None),
        ("text", None),
        (None, None),
        ([1, 2, 3], None),
    ],
)
def test_samples_of_a_batch(batch, size):
    assert batch_size(batch) == size


class Hostile:
    @property
    def shape(self):
        raise RuntimeError("no")


def test_a_batch_that_cannot_be_looked_at_harms_nobody(tmp_path):
    with capture(settings(tmp_path, start=9, end=9)) as session:
        seen = [step for step, _ in session.steps([Hostile(), Hostile()])]
    assert seen == [0, 1]
    assert [step.get("batch_size", 0) for step in phase_lines.steps(tmp_path)] == [0, 0]


def test_the_first_step_says_how_large_its_batch_is_and_the_next_one_after_a_second_does(tmp_path):
    with capture(settings(tmp_path, start=9, end=9)) as session:
        for step, _ in session.steps([IMAGES, IMAGES, IMAGES[:2], IMAGES]):
            if step == 1:
                session._phases.steps._file.next_ns = 0  # a second has passed
    assert [step.get("batch_size") for step in phase_lines.steps(tmp_path)] == [8, None, 2, None]
