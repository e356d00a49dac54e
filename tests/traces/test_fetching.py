"""Downloads arrive whole, are continued, and are refused where they are another file. Against a local
server.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from hisparsim_traces import TraceError
from hisparsim_traces.catalogue import Entry, catalogue, find
from hisparsim_traces.cli import app
from hisparsim_traces.fetching import fetch
from hisparsim_traces.formats import FORMATS

CONTENT = bytes(range(256)) * 4000


class Handler(BaseHTTPRequestHandler):
    """Serves CONTENT; cuts the connection after `cut` bytes for the first `cuts` answers."""

    cut: ClassVar[int] = 0
    cuts: ClassVar[int] = 0
    ranges: ClassVar[bool] = True
    seen: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        Handler.seen.append(self.headers.get("Range"))
        if self.path.endswith("gone"):
            self.send_error(404)
            return
        start = 0
        wanted = self.headers.get("Range")
        if wanted and Handler.ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(CONTENT):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(CONTENT)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        else:
            self.send_response(200)
        body = CONTENT[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if Handler.cuts:
            Handler.cuts -= 1
            self.wfile.write(body[: Handler.cut])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Handler.cut, Handler.cuts, Handler.ranges, Handler.seen = 0, 0, True, []
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


def entry(url: str | None, sha256: str | None = hashlib.sha256(CONTENT).hexdigest()) -> Entry:
    return Entry(
        "t", "A trace", "mooncake", "MIT", None, "https://example.org", url, sha256, "Its authors", ""
    )


def test_a_file_arrives_with_its_licence(server: str, tmp_path: Path) -> None:
    fetched = fetch(entry(f"{server}/a.jsonl"), tmp_path / "new")
    assert fetched.path.read_bytes() == CONTENT
    assert fetched.attempts == 1
    assert "Licence: MIT" in (tmp_path / "new" / "a.jsonl.LICENCE.txt").read_text()
    assert fetch(entry(f"{server}/a.jsonl"), tmp_path / "new").attempts == 0  # it is already there
    assert not list((tmp_path / "new").glob("*.part"))


def test_a_cut_connection_is_continued_where_it_broke_off(server: str, tmp_path: Path) -> None:
    Handler.cut, Handler.cuts = 300_000, 2
    fetched = fetch(entry(f"{server}/a.jsonl"), tmp_path)
    assert fetched.path.read_bytes() == CONTENT
    assert fetched.attempts == 3
    assert Handler.seen == [None, "bytes=300000-", "bytes=600000-"]


def test_a_later_call_continues_an_unfinished_file(server: str, tmp_path: Path) -> None:
    Handler.cut, Handler.cuts = 300_000, 1
    with pytest.raises(TraceError, match=r"in 1 attempts .*run again to continue"):
        fetch(entry(f"{server}/a.jsonl"), tmp_path, attempts=1)
    fetched = fetch(entry(f"{server}/a.jsonl"), tmp_path)
    assert fetched.resumed_bytes == 300_000
    assert fetched.path.read_bytes() == CONTENT


def test_a_server_without_ranges_starts_over(server: str, tmp_path: Path) -> None:
    Handler.cut, Handler.cuts, Handler.ranges = 300_000, 1, False
    assert fetch(entry(f"{server}/a.jsonl"), tmp_path).path.read_bytes() == CONTENT


def test_a_part_that_is_whole_or_too_long_is_handled(server: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.part").write_bytes(CONTENT)
    assert fetch(entry(f"{server}/a.jsonl"), tmp_path).path.read_bytes() == CONTENT
    (tmp_path / "b.jsonl.part").write_bytes(CONTENT + b"more")
    assert fetch(entry(f"{server}/b.jsonl"), tmp_path).path.read_bytes() == CONTENT


def test_another_file_is_refused_and_removed(server: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"not 0000\.\.\.: it is another file"):
        fetch(entry(f"{server}/a.jsonl", "0000"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unknown_hashes_need_a_word(server: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="--unpinned"):
        fetch(entry(f"{server}/a.jsonl", None), tmp_path)
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert fetch(entry(f"{server}/a.jsonl", None), tmp_path, unpinned=True).sha256 == digest
    with pytest.raises(TraceError, match="hexadecimal"):
        fetch(entry(f"{server}/a.jsonl", None), tmp_path, sha256="xyz")


def test_refusals_name_the_address_and_the_code(server: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="refused with 404"):
        fetch(entry(f"{server}/gone"), tmp_path)
    with pytest.raises(TraceError, match=r"cannot be fetched as one file: see https://example\.org"):
        fetch(entry(None), tmp_path)
    with pytest.raises(TraceError, match="could not be fetched"):
        fetch(entry("http://127.0.0.1:1/a"), tmp_path, attempts=2)


def test_the_catalogue_names_licence_place_and_a_known_format() -> None:
    entries = catalogue()
    assert len(entries) >= 20
    for one in entries.values():
        assert one.licence and one.page.startswith("https://") and one.attribution and one.note
        assert one.format is None or one.format in FORMATS
        assert one.url is None or one.url.startswith("https://")
        assert one.sha256 is None or (len(one.sha256) == 64 and one.url is not None)
    assert {one.format for one in entries.values()} >= {
        "mooncake",
        "azure2024",
        "burstgpt",
        "bailian",
        "weka",
    }
    assert sum(one.sha256 is not None for one in entries.values()) >= 15
    assert len({one.url for one in entries.values() if one.url}) == sum(
        one.url is not None for one in entries.values()
    )
    with pytest.raises(TraceError, match="one of mooncake-conversation"):
        find("sharegpt")


def test_the_command_fetches_an_entry_and_says_its_licence(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hisparsim_traces.catalogue.find", lambda name: entry(f"{server}/a.jsonl"))
    Handler.cut, Handler.cuts = 300_000, 1
    result = CliRunner().invoke(app, ["fetch", "t", "--to", str(tmp_path)])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "path": str(tmp_path / "a.jsonl"),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "size_bytes": len(CONTENT),
    }
    assert "A trace - MIT - Its authors" in result.stderr
    refused = CliRunner().invoke(app, ["fetch", "t", "--to", str(tmp_path / "b"), "--sha256", "00"])
    assert refused.exit_code == 2
    assert "it is another file" in refused.stderr and not list((tmp_path / "b").iterdir())
