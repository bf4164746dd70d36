"""What is replaced on an object of somebody else's, and what becomes of it."""

import copy
import inspect
import pickle
from typing import Any

import pytest

from chakra_capture.recording.patches import Patch


class Owner:
    def __init__(self, name: str) -> None:
        self.name = name

    def says(self, word: str = "hello") -> str:
        """Greet."""
        return f"{self.name} says {word}"


def instead(original: Any, *args: Any, **kwargs: Any) -> str:
    return f"({original(*args, **kwargs)})"


def test_a_method_is_replaced_until_it_is_undone_and_leaves_nothing_on_its_object():
    owner = Owner("a")
    patch = Patch(owner, "says", instead)
    assert (owner.says("x"), owner.says(word="y")) == ("(a says x)", "(a says y)")
    assert (owner.says.__doc__, str(inspect.signature(owner.says))) == ("Greet.", "(word: str = 'hello') -> str")

    patch.undo()
    assert patch.is_undone
    assert vars(owner) == {"name": "a"}


def test_what_the_object_itself_had_comes_back():
    owner = Owner("a")
    owner.says = own = lambda: "own"
    patch = Patch(owner, "says", instead)
    assert owner.says() == "(own)"

    patch.undo()
    assert owner.says is own


def test_what_somebody_has_put_around_it_stays_and_calls_the_original():
    owner = Owner("a")
    patch = Patch(owner, "says", instead)
    ours = owner.says
    owner.says = lambda: f"[{ours()}]"
    patch.undo()

    assert owner.says() == "[a says hello]"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda owner: pickle.loads(pickle.dumps(owner))])
def test_a_copy_has_a_method_of_its_own(copied):
    owner = Owner("a")
    patch = Patch(owner, "says", instead)
    other = copied(owner)
    patch.undo()
    other.name = "b"

    assert other.says() == "b says hello"
    assert owner.says() == "a says hello"


def test_a_deep_copy_keeps_what_the_object_itself_had():
    owner = Owner("a")
    owner.says = own = lambda: "own"
    patch = Patch(owner, "says", instead)
    assert copy.deepcopy(owner).says is own
    patch.undo()
