"""Places for files that only some runs write on this machine's disks: a local folder, or any URL that fsspec knows."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from raysim.primitives.files import draft_file, is_disk_full, regular_file, sync, without_password

_LOCAL = ("file://", "local://")


class LocalStore:
    """A folder on this machine. Names have the form "file" or "folder/file"."""

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def names(self, folder: str = "") -> list[str]:
        """What is in the store, or in a folder of it."""
        path = self.path / folder
        return sorted(each.name for each in path.iterdir()) if path.is_dir() else []

    @contextlib.contextmanager
    def new(self, name: str) -> Iterator[Path]:
        """Where to write a file, which then appears as a whole, in place of an older one."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft_file(path) as draft:
            yield draft

    @contextlib.contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """Where to read a file; what was mapped of it stays. Raises OSError, or ValueError for what is no file."""
        yield regular_file(self.path / name)

    def settle(self, *folders: str) -> None:
        """Wait until the names in these folders are on the disk ("": in the store itself)."""
        for folder in folders:
            if (self.path / folder).is_dir():
                sync(self.path / folder)

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it is there."""
        path = self.path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def draft_folder(self) -> Path:
        """On whose disk files are written."""
        return self.path


class RemoteStore:
    """A folder behind a URL. A file is written and read by way of the local folder for temporary files."""

    def __init__(self, url: str):
        import fsspec

        self.url = url.rstrip("/")
        try:
            self._files, self._root = fsspec.url_to_fs(self.url)
            self.names()
        except Exception as error:  # of any library's own kind
            raise ValueError(
                f"{self} cannot be used ({type(error).__name__}: {without_password(str(error))})"
            ) from error

    def __str__(self) -> str:
        return without_password(self.url)

    def names(self, folder: str = "") -> list[str]:
        """See `LocalStore`."""
        with self._named():
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._path(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    @contextlib.contextmanager
    def new(self, name: str) -> Iterator[Path]:
        """See `LocalStore`."""
        with tempfile.TemporaryDirectory(prefix="raysim-") as folder:
            yield (draft := Path(folder) / "draft")
            with self._named():
                self._files.put_file(str(draft), self._path(name))

    @contextlib.contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """See `LocalStore`."""
        with tempfile.TemporaryDirectory(prefix="raysim-") as folder:
            with self._named():
                self._files.get_file(self._path(name), str(Path(folder) / "copy"))
            yield Path(folder) / "copy"

    def settle(self, *folders: str) -> None:
        """A file that was sent is there."""

    def remove(self, name: str) -> None:
        """See `LocalStore`."""
        with self._named(), contextlib.suppress(FileNotFoundError):
            self._files.rm(self._path(name), recursive=True)

    def draft_folder(self) -> Path:
        """See `LocalStore`."""
        return Path(tempfile.gettempdir())

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else str(self._root)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of all kinds as OSError with the store's address."""
        try:
            yield
        except Exception as error:
            if is_disk_full(error):
                raise
            raise OSError(
                f"{self}: {type(error).__name__}: {without_password(str(error))}"
            ) from error


Store: TypeAlias = LocalStore | RemoteStore


def is_remote(where: str | Path) -> bool:
    """Whether this names no folder of this machine."""
    return "://" in str(where) and not str(where).startswith(_LOCAL)


def open_store(where: str | Path) -> Store:
    """The store at an address. Raises ValueError where it cannot be reached."""
    text = str(where)
    if is_remote(text):
        return RemoteStore(text)
    return LocalStore(
        Path(next((text.removeprefix(each) for each in _LOCAL if text.startswith(each)), text))
    )


def split_address(address: str | Path) -> tuple[str, str]:
    """The address of a folder, and the last name in it."""
    text = str(address).rstrip("/")
    if is_remote(text):
        where, _, name = text.rpartition("/")
        return where, name
    path = Path(text)
    return str(path.parent), path.name
