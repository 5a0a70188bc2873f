"""Store files in a folder on this machine, or at any URL that fsspec supports."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from raysim.primitives.files import (
    draft_file,
    is_disk_full,
    regular_file,
    sync,
    without_password,
)

_LOCAL_PREFIXES = ("file://", "local://")
_TEMPORARY_PREFIX = "raysim-"


class LocalStore:
    """A folder on this machine.

    The name of a file is its path in the store, such as "file" or "folder/file".
    """

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files and folders directly in a folder, sorted, without the path.

        folder: a folder of the store; "" is the store itself. A missing folder gives an empty list.
        """
        path = self.path / folder
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def files(self) -> list[str]:
        """Return the names ("folder/file") of all files in the store and in its folders."""
        paths = [path for path in self.path.rglob("*") if path.is_file()]
        return sorted(path.relative_to(self.path).as_posix() for path in paths)

    @contextlib.contextmanager
    def new(self, name: str) -> Iterator[Path]:
        """Yield the path for writing a file; afterwards the complete file replaces an older one."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft_file(path) as draft:
            yield draft

    @contextlib.contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """Yield the path for reading a file; a memory map of the file stays valid afterwards.

        Raise `RefusedError` if it is missing or not a regular file.
        """
        yield regular_file(self.path / name)

    def settle(self, *folders: str) -> None:
        """Wait until all changes of file names in some folders are on the disk.

        folders: folders of the store; "" is the store itself.
        """
        for folder in folders:
            if (self.path / folder).is_dir():
                sync(self.path / folder)

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it exists."""
        path = self.path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def draft_folder(self) -> Path:
        """Return the local folder for the draft of a new file: the folder of the store."""
        return self.path


class RemoteStore:
    """A folder at a URL, whose files are read and written as local copies.

    A copy is downloaded before a file is read, and uploaded after a file was written. Files have
    names such as "file" or "folder/file".
    """

    def __init__(self, url: str):
        import fsspec

        self.url = url.rstrip("/")
        try:
            self._files, self._root = fsspec.url_to_fs(self.url)
            self.names()
        except Exception as error:  # each library has its own errors
            reason = f"{type(error).__name__}: {without_password(str(error))}"
            raise ValueError(f"{self} cannot be used ({reason}). Check the URL.") from error

    def __str__(self) -> str:
        return without_password(self.url)

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files and folders directly in a folder, sorted, without the path.

        folder: a folder of the store; "" is the store itself. A missing folder gives an empty list.
        """
        with self._errors_with_address(folder):
            self._files.invalidate_cache()
            try:
                paths = self._files.ls(self._path(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def files(self) -> list[str]:
        """Return the names ("folder/file") of all files in the store and in its folders."""
        with self._errors_with_address(""):
            self._files.invalidate_cache()
            start = len(self._root.rstrip("/")) + 1
            return sorted(path[start:] for path in self._files.find(self._root))

    @contextlib.contextmanager
    def new(self, name: str) -> Iterator[Path]:
        """Yield a local path for writing a file; afterwards the file is sent to the store."""
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY_PREFIX) as folder:
            draft = Path(folder) / "draft"
            yield draft
            with self._errors_with_address(name):
                self._files.invalidate_cache()  # another process may have made the folder
                self._files.put_file(str(draft), self._path(name))

    @contextlib.contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """Fetch a copy of a file and yield its path for reading; remove the copy afterwards.

        Raise `OSError` if the file cannot be fetched.
        """
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY_PREFIX) as folder:
            copy = Path(folder) / "copy"
            with self._errors_with_address(name):
                self._files.get_file(self._path(name), str(copy))
            yield copy

    def settle(self, *folders: str) -> None:
        """Do nothing, because a sent file is already stored."""

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it exists."""
        path = self._path(name)
        with self._errors_with_address(name), contextlib.suppress(FileNotFoundError):
            self._files.invalidate_cache()
            # Some file systems, such as FTP, cannot remove a file as if it were a folder.
            if self._files.isdir(path):
                self._files.rm(path, recursive=True)
            elif self._files.exists(path):
                self._files.rm_file(path)

    def draft_folder(self) -> Path:
        """Return the local folder for the draft of a new file: the system's temporary folder."""
        return Path(tempfile.gettempdir())

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else str(self._root)

    @contextlib.contextmanager
    def _errors_with_address(self, name: str) -> Iterator[None]:
        """Raise `OSError` with the file's address in place of an error inside `with`.

        The error of a full disk is raised unchanged.
        """
        try:
            yield
        except Exception as error:
            if is_disk_full(error):
                raise
            reason = f"{type(error).__name__}: {without_password(str(error))}"
            address = f"{self}/{name}" if name else str(self)
            raise OSError(f"{address}: {reason}") from error


Store: TypeAlias = LocalStore | RemoteStore


def is_remote(address: str | Path) -> bool:
    """Return True if an address is a URL outside this machine."""
    return "://" in str(address) and not str(address).startswith(_LOCAL_PREFIXES)


def open_store(address: str | Path) -> Store:
    """Return the store at an address. Raise `ValueError` if it cannot be reached."""
    text = str(address)
    if is_remote(text):
        return RemoteStore(text)
    return LocalStore(Path(local_path(text)))


def local_path(address: str) -> str:
    """Return the path "/a/b" for the URL "file:///a/b"; return other addresses unchanged."""
    for prefix in _LOCAL_PREFIXES:
        if address.startswith(prefix):
            return address.removeprefix(prefix)
    return address


def is_url(address: str | Path) -> bool:
    """Return True if an address is a URL, even if its folder is on this machine (file://)."""
    return "://" in str(address)


def fetch_files(store: Store, folder: Path, is_needed: Callable[[str], bool]) -> list[str]:
    """Copy files of a store into a folder on this machine; return their names, sorted.

    is_needed: function that returns True if a file is needed. Its argument is the file's name in
    the store, such as "folder/file".
    """
    names = list(filter(is_needed, store.files()))
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with store.local(name) as copy, draft_file(path) as draft:
            shutil.copyfile(copy, draft)
    return names


def temporary_copy(url: str, is_needed: Callable[[str], bool]) -> Path:
    """Return a folder on this machine with copies of the needed files of a URL.

    The folder's name is the last part of the URL. Copies are removed when this process ends. A
    local folder is returned without a copy, and is not removed.
    is_needed: receives the file's name in the store, such as "folder/file".
    """
    store = open_store(url)
    if isinstance(store, LocalStore):
        return store.path
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    folder = temporary / split_address(url)[1]
    folder.mkdir()
    fetch_files(store, folder, is_needed)
    return folder


def split_address(address: str | Path) -> tuple[str, str]:
    """Split an address into the address of the parent folder and the last part of the path."""
    text = str(address).rstrip("/")
    if is_url(text):
        folder, _, name = text.rpartition("/")
        return folder, name
    path = Path(text)
    return str(path.parent), path.name
