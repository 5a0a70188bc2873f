"""Run an FTP server for tests of stores behind URLs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its modules of the standard library
    from pyftpdlib.authorizers import DummyAuthorizer
    from pyftpdlib.handlers import FTPHandler
    from pyftpdlib.servers import FTPServer


@contextmanager
def serve_ftp(folder: Path) -> Iterator[str]:
    """Create `folder`, serve it by FTP, and yield its URL."""
    authorizer = DummyAuthorizer()
    folder.mkdir()
    authorizer.add_user("me", "secret", str(folder), perm="elradfmwMT")

    class Handler(FTPHandler):  # type: ignore[misc]
        """A separate class for each server, because `authorizer` is a class attribute."""

    Handler.authorizer = authorizer
    server = FTPServer(("127.0.0.1", 0), Handler)
    is_ended = threading.Event()

    def serve() -> None:
        while not is_ended.is_set():
            server.serve_forever(timeout=0.05, blocking=False)

    thread = threading.Thread(target=serve)
    thread.start()
    port = server.socket.getsockname()[1]
    try:
        yield f"ftp://me:secret@127.0.0.1:{port}"
    finally:
        is_ended.set()
        thread.join()
        server.close_all()
