"""A folder that is made for a look at it, and is not left behind."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def there_for_now(folder: Path) -> Iterator[None]:
    """Make a folder, with those above it, and remove at the end those that were not there before.

    Raises:
        OSError: it cannot be made.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in missing:
            with suppress(OSError):  # not made, or in use by now
                path.rmdir()
