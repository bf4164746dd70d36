"""Data for et_replay beside a host trace: ranges of integer tensors, index data of some operators, generated kernels.

Torch finds the folder for it by cutting ``.json`` off the name it was given, and finds none under any other name
(torch 2.13). So it is given a link with such a name, in a folder that is ours, to the file it shall write.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chakra_capture.errors import RecordingError
from chakra_capture.layout import part_path, resources_path

VARIABLE = "ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_"
_LINK_NAME = "trace.json"
# Where the values of an integer tensor decide which memory is touched; with others their range is enough.
_OPERATORS = (
    "aten::embedding",
    "aten::embedding_dense_backward",
    "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
    "aten::index",
    "aten::index_select",
    "aten::index_put_",
    "aten::index_add_",
    "aten::gather",
    "aten::scatter_add_",
    "aten::nll_loss_forward",
)


class ReplayData:
    """The folder of one host trace, from registration to publication."""

    def __init__(self, final: Path) -> None:
        self._final = resources_path(final)
        self._folder = part_path(self._final)

    @property
    def path(self) -> Path:
        """What to give to torch in place of the reserved file."""
        return self._folder / _LINK_NAME

    def prepare(self, target: Path) -> None:
        """Make the folder, with a link in it to what torch shall write.

        Raises:
            RecordingError: it cannot be made.
        """
        try:
            self._folder.mkdir()
            self.path.symlink_to(target)
        except OSError as fault:
            raise RecordingError(
                f"{self._folder} cannot be made: {fault.strerror or fault}; chakra_profile.replay_data needs a folder "
                "and a symbolic link beside the host trace. Remove what is in the way, or set it to false."
            ) from fault

    @staticmethod
    @contextmanager
    def variables() -> Iterator[None]:
        """Set what torch reads when an observer is registered, unless the job has set it."""
        wanted = {VARIABLE + "RANGE": "1", VARIABLE + "DATA": ",".join(_OPERATORS)}
        added = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]

    def publish(self) -> Path | None:
        """Give the data its final name; None if there is none."""
        made = resources_path(self.path)
        found = None
        if made.is_dir() and any(made.iterdir()):
            made.replace(self._final)
            found = self._final
        self.discard()
        return found

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
