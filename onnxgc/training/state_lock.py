"""A lock that allows one run at a time on a state file."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onnxgc.errors import TrainingError

if sys.platform != "win32":
    import fcntl


@contextmanager
def held_alone(state: str | os.PathLike[str]) -> Iterator[None]:
    """Locks a state for one run by a lock file next to it; the lock ends with the process.

    Without a folder, or on file systems and platforms without such locks, there is no lock.

    Raises:
        TrainingError: another run has the lock.
    """
    path = Path(state).resolve()
    lock = path.with_name(f".{path.name}.lock")
    descriptor = _locked(lock, os.fspath(state))
    try:
        yield
    finally:
        if descriptor is not None:
            # Before the release, so that a run that has opened it meanwhile sees that it is gone.
            with suppress(OSError):
                os.unlink(lock)
            os.close(descriptor)


def _locked(lock: Path, state: str) -> int | None:
    if sys.platform == "win32":
        return None
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                return None
            raise TrainingError(
                f"another run uses the state '{state}'; wait for it to end, or choose another state file"
            ) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor
        os.close(descriptor)
