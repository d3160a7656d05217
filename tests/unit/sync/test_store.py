"""Stores: whole writes, resumed reads, deadlines, the swapped pointer. s3:// and gs:// need an account: not here."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from delivery import RUN, Engine, Faulty, Model, World

from headrace.errors import SyncError
from headrace.sync.backends import FileBackend
from headrace.sync.lease import Leases, leased
from headrace.sync.publisher import DeltaPublisher
from headrace.sync.receiver import Receiver
from headrace.sync.store import Store, object_key

_names = itertools.count()


@pytest.fixture(params=["file", "path", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    urls = {"file": f"file://{tmp_path}", "path": str(tmp_path), "memory": f"memory://store-{next(_names)}"}
    return Store(urls[request.param], wait=lambda s: None)


def test_put_get_list_delete(store: Store) -> None:
    key = store.put_object(b"0123456789", "pack")
    assert key == object_key(b"0123456789", "pack")
    assert store.get(key) == store.get_object(key) == store.find(key) == b"0123456789"
    assert store.get_range(key, 3, 4) == b"3456"
    assert store.exists(key)
    store.put("head.json", b"")
    assert store.get("head.json") == b""
    assert store.exists("head.json")
    assert [(s.key, s.size) for s in store.list("objects")] == [(key, 10)]
    assert [s.key for s in store.list("")] == ["head.json", key]
    store.delete(key)
    store.delete(key)
    assert not store.exists(key)
    assert store.find(key) is None
    assert store.list("objects") == store.list("nothing") == []


def test_replacing_is_seen(store: Store) -> None:
    for text in (b"a", b"bcd", b""):
        store.put("head.json", text)
        assert store.get("head.json") == text


def test_what_is_absent_or_short_says_so(store: Store) -> None:
    with pytest.raises(SyncError, match=r"reading head.json at byte 0.*try 5 of 5"):
        store.get("head.json")
    store.put("head.json", b"0123")
    with pytest.raises(SyncError, match=r"it ends at byte 4, 6 are needed"):
        store.get_range("head.json", 2, 4)
    with pytest.raises(SyncError, match="larger than the 3 bytes"):
        store.get("head.json", max_bytes=3)
    with pytest.raises(SyncError, match="larger than the 3 bytes"):
        store.find("head.json", max_bytes=3)


def test_swap_replaces_only_what_was_expected(store: Store) -> None:
    assert not store.swap("head.json", b"x", b"y")
    assert store.swap("head.json", None, b"1")
    assert not store.swap("head.json", None, b"2")
    assert not store.swap("head.json", b"0", b"2")
    assert store.swap("head.json", b"1", b"2")
    assert store.get("head.json") == b"2"


def test_swap_has_one_winner(store: Store) -> None:
    """Ten threads count to 100 together; a lost update would end lower."""
    store.put("head.json", b"0")

    def count() -> None:
        done = 0
        while done < 10:
            now = store.get("head.json")
            done += store.swap("head.json", now, str(int(now) + 1).encode())

    threads = [threading.Thread(target=count) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get("head.json") == b"100"


def test_swap_without_a_lock_looks_again(tmp_path: Path) -> None:
    """On object stores another writer may come in between; who was overwritten is told."""

    class Unlocked(Faulty):
        def lock(self) -> contextlib.AbstractContextManager[bool]:
            return contextlib.nullcontext(False)

    unlocked = Unlocked(FileBackend(tmp_path, durable=False))
    store = Store("objects-only", backend=unlocked)
    assert store.swap("head.json", None, b"mine")
    later = iter([b"mine", b"theirs"])

    def overwritten(key: str, blocks: Iterator[bytes]) -> Iterator[bytes]:
        yield next(later)

    unlocked.blocks = overwritten
    assert not store.swap("head.json", b"mine", b"next")


def test_lock_of_a_stopped_holder_has_a_deadline(tmp_path: Path) -> None:
    holder, waiter = FileBackend(tmp_path), FileBackend(tmp_path, lock_s=0.0)
    with holder.lock(), pytest.raises(SyncError, match="held by another process"), waiter.lock():
        pass
    with waiter.lock() as exclusive:
        assert exclusive


def test_files_appear_whole_and_leave_nothing_behind(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    (tmp_path / "objects").mkdir()
    target = tmp_path / "objects" / "dir.json"
    target.mkdir()
    with pytest.raises(SyncError, match=r"writing objects/dir\.json \(3 bytes\)"):
        Store(str(tmp_path), wait=lambda s: None).put("objects/dir.json", b"abc")
    assert os.listdir(tmp_path / "objects") == ["dir.json"]
    store.put("objects/x.json", b"abc")
    assert sorted(os.listdir(tmp_path / "objects")) == ["dir.json", "x.json"]


def test_orphans_of_dead_writers_can_be_collected(tmp_path: Path) -> None:
    world = World(tmp_path)
    (tmp_path / "objects" / "partial-123-0").write_bytes(b"half")
    world.compactor().collect(grace_s=0, skew_s=-1)
    assert not (tmp_path / "objects" / "partial-123-0").exists()


@pytest.mark.parametrize("url", ["nonsense://x", "s3://bucket/x", "gs://bucket/x"])
def test_stores_that_cannot_be_opened_say_why(url: str) -> None:
    try:
        store = Store(url)
    except SyncError as exc:
        assert url in str(exc)  # noqa: PT017 - with the package installed there is nothing to raise
    else:
        assert store.url == url


def test_leases_name_objects(store: Store) -> None:
    one, two = (object_key(text, "pack") for text in (b"1", b"2"))
    lease = Leases(store, replica="r0", lease_s=100)
    lease.hold([one])
    lease.hold([two])
    now_s = store.now_s()
    assert leased(store, now_s=now_s, skew_s=0) == {two}
    assert leased(store, now_s=now_s + 150, skew_s=60) == {two}
    assert leased(store, now_s=now_s + 150, skew_s=0) == set()
    assert store.list("leases") == []
    lease.release()
    with pytest.raises(SyncError, match=re.escape("'../x'")):
        Leases(store, replica="../x")


class Server:
    """Files of a folder over HTTP, with ranges; `drop` breaks connections."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[tuple[str, str | None]] = []
        self.ranges = True
        self.drop: Callable[[str], int | None] = lambda path: None
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                server.requests.append((self.path, wanted))
                path = folder / self.path.lstrip("/")
                if not path.is_file():
                    self.send_error(404)
                    return
                data = path.read_bytes()
                found = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "") if server.ranges else None
                if found:
                    start, stop = int(found[1]), min(int(found[2] or len(data)) + 1, len(data))
                    if start >= len(data):
                        self.send_error(416)
                        return
                    self.send_response(206)
                    self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
                    data = data[start:stop]
                else:
                    self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                cut = server.drop(self.path)
                self.wfile.write(data if cut is None else data[:cut])

            def log_message(self, *args: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()


@pytest.mark.parametrize("ranges", [True, False])
def test_web_server_is_read(server: Server, tmp_path: Path, ranges: bool) -> None:
    server.ranges = ranges
    key = Store(str(tmp_path)).put_object(bytes(range(200)), "pack")
    store = Store(server.url, wait=lambda s: None)
    assert store.get_object(key) == bytes(range(200))
    assert store.get_range(key, 50, 100) == bytes(range(50, 150))
    assert store.exists(key)
    assert not store.exists("objects/none.pack")
    assert store.find("head.json") is None
    with pytest.raises(SyncError, match="ends at byte 200"):
        store.get_range(key, 150, 100)


@pytest.mark.parametrize("ranges", [True, False])
def test_broken_web_connections_resume(server: Server, tmp_path: Path, ranges: bool) -> None:
    server.ranges = ranges
    data = os.urandom(100_000)
    key = Store(str(tmp_path)).put_object(data, "pack")
    cuts = iter([60_000, 90_000, 95_000] if not ranges else [60_000, 0, 0, 30_000])
    server.drop = lambda path: next(cuts, None)
    store = Store(server.url, wait=lambda s: None)
    assert store.get_object(key) == data
    assert [wanted for _, wanted in server.requests][:2] == [None, "bytes=60000-"]
    server.drop = lambda path: 0
    with pytest.raises(SyncError, match=r"connection ended after 0 of \d+ bytes.*try 5 of 5"):
        store.get_object(key)


def test_web_server_is_read_only(server: Server) -> None:
    store = Store(server.url)
    for call in (
        lambda: store.put("x", b""),
        lambda: store.delete("x"),
        lambda: store.swap("x", None, b""),
        lambda: store.now_s(),
    ):
        with pytest.raises(SyncError, match="is read-only"):
            call()
    with pytest.raises(SyncError, match="cannot be listed"):
        store.list("")


def test_nobody_listens(server: Server) -> None:
    url = server.url
    server.close()
    with pytest.raises(SyncError, match=r"Connection refused.*try 5 of 5"):
        Store(url, wait=lambda s: None).get("head.json")
    server.close = lambda: None  # type: ignore[method-assign]


def test_a_web_server_that_falls_silent(tmp_path: Path, server: Server) -> None:
    """The socket's own time limit ends an attempt; `tries` ends the reading."""
    key = Store(str(tmp_path)).put_object(b"x", "pack")
    gate = threading.Event()
    server.drop = lambda path: (gate.wait(30), 0)[1]
    try:
        with pytest.raises(SyncError, match=r"timed out.*try 2 of 2"):
            Store(server.url, wait=lambda s: None, attempt_s=0.05, tries=2).get(key)
    finally:
        gate.set()


def test_delivery_over_http(tmp_path: Path, server: Server) -> None:
    world = World(tmp_path)
    engine, _ = world.receiver()
    receiver = Receiver(Store(server.url, wait=lambda s: None), engine, run_id=RUN)
    assert receiver.sync() is not None
    for _ in range(3):
        new = world.publish()
        assert receiver.sync() is not None
        assert engine.holds(new)


def test_delivery_through_memory() -> None:
    store = Store(f"memory://run-{next(_names)}")
    model = Model()
    publisher = DeltaPublisher(store, run_id=RUN)
    publisher.start(model.served(), version=0)
    engine = Engine(model.served())
    receiver = Receiver(store, engine, run_id=RUN, leases=Leases(store, replica="r0"))
    for version in range(1, 4):
        receiver.sync()
        publisher.publish(model.train(), version=version)
    receiver.sync()
    assert engine.holds(model.served())
