"""A server as a child: it comes up, says what went wrong, and goes away with all its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_evicpress.benchmark import server as server_module
from sglang_evicpress.benchmark.interrupts import raising_interrupts, uninterrupted
from sglang_evicpress.benchmark.server import NoAnswerInTime, Server, ServerError, free_port

# Listens, and has a child in a process group of its own that only SIGKILL ends.
SERVER = """
import json, os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

ignore = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)"
stubborn = ignore + "; print('child', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stubborn], process_group=0)

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/slow":
            time.sleep(2)
        found = {"/health": b"", "/json": b'{"a": 1}', "/env": os.environ.get("SAID", "").encode(),
                 "/folder": os.getcwd().encode()}
        self.send_response(200 if self.path in found else 404)
        self.end_headers()
        self.wfile.write(found.get(self.path, b'{"why": "no such path"}'))

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STOP_S", 0.3)


def make(where: Path, source: str = SERVER, **options: object) -> Server:
    port = free_port()
    return Server([sys.executable, "-c", source, str(port)], port=port, log=where / "logs" / "a.log", **options)  # type: ignore[arg-type]


def processes(word: str) -> list[str]:
    """The command lines with the word, of processes that run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            text = (entry / "cmdline").read_bytes().decode("utf-8", "replace") if entry.name.isdigit() else ""
            if word in text and "\nState:\tZ" not in (entry / "status").read_text():
                found.append(text)
        except OSError:
            continue
    return found


def test_no_process_is_left_when_a_server_stops(tmp_path: Path) -> None:
    mark = f"# {tmp_path}"
    source = SERVER.replace('time.sleep(600)"', f'time.sleep(600)  {mark}"') + mark
    with make(tmp_path, source) as server:
        assert server.is_alive()
        assert server.start_s > 0
        while "child" not in server.log.read_text():  # only now it ignores SIGINT
            time.sleep(0.02)
        assert len(processes(mark)) == 2
    assert not server.is_alive()
    assert processes(mark) == []


@pytest.mark.parametrize(("folder", "core"), [("rust_tree_core", "rust"), ("cpp_radix_tree", "python")])
def test_the_core_of_the_radix_tree_is_the_one_that_is_loaded(tmp_path: Path, folder: str, core: str) -> None:
    module = tmp_path / "sglang/srt/mem_cache" / folder / "mem_cache.so"
    module.parent.mkdir(parents=True)
    module.write_bytes(bytes(4096))
    loads = f"import mmap; file = open({str(module)!r}); loaded = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)"
    with make(tmp_path, f"{loads}\n{SERVER}") as server:
        assert server.tree_core == core


def test_a_server_is_asked(tmp_path: Path) -> None:
    with make(tmp_path, env={**os.environ, "SAID": "hello"}, folder=tmp_path) as server:
        assert server.get("/json") == {"a": 1}
        assert server.get("/env") == "hello"
        assert server.get("/folder") == str(tmp_path)
        assert server.post("/echo") == {}
        assert server.post("/echo", [1]) == [1]
        assert server.request("GET", "/nothing") == (404, {"why": "no such path"})
        with pytest.raises(ServerError, match="GET /nothing answered 404: {'why': 'no such path'}; its log is"):
            server.get("/nothing")


def test_an_answer_that_takes_too_long_is_told_apart(tmp_path: Path) -> None:
    with (
        make(tmp_path) as server,
        pytest.raises(NoAnswerInTime, match=r"GET /slow got no answer within 0\.1 s; its log is"),
    ):
        server.request("GET", "/slow", timeout_s=0.1)


def test_a_server_that_dies_says_why(tmp_path: Path) -> None:
    server = make(tmp_path, "import sys; print('line 1'); sys.exit('no weights')")
    with pytest.raises(ServerError) as raised:
        server.start()
    assert str(raised.value) == (
        f"the server ended while it started; its log is {tmp_path}/logs/a.log, which ends with:\nline 1\nno weights"
    )
    assert not server.is_alive()


def test_a_server_that_never_answers_is_stopped(tmp_path: Path) -> None:
    source = f"import time; time.sleep(600)  # {tmp_path}"
    with pytest.raises(ServerError, match="did not answer within 0.3 s of its start; its log is .*, which is empty"):
        make(tmp_path, source, timeout_s=0.3).start()
    assert processes(source) == []


def test_a_request_to_a_stopped_server_is_an_error(tmp_path: Path) -> None:
    with make(tmp_path) as server:
        pass
    with pytest.raises(ServerError, match="GET /json got no answer: .*refused"):
        server.get("/json")


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_up", [False, True])
def test_no_process_is_left_after_an_interrupt(tmp_path: Path, sign: signal.Signals, is_up: bool) -> None:
    mark = f"# {tmp_path}"
    source = SERVER + mark if is_up else f"print('started', flush=True); import time; time.sleep(600)  {mark}"
    program = f"""
import signal, sys, time
from pathlib import Path
from sglang_evicpress.benchmark import server
from sglang_evicpress.benchmark.interrupts import raising_interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
server.STOP_S = 0.3
port = server.free_port()
command = [sys.executable, "-c", {source!r}, str(port)]
try:
    with raising_interrupts(), server.Server(command, port=port, log=Path("a.log")):
        print("up", flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    sys.exit(130)
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    if is_up:
        assert process.stdout.readline() == "up\n"
    else:
        log = tmp_path / "a.log"
        while not log.exists() or not log.read_text():
            time.sleep(0.02)
    assert processes(mark)
    process.send_signal(sign)
    assert process.wait(30) == 130
    process.stdout.close()
    assert processes(mark) == []


def test_an_interrupt_waits_for_the_end_of_a_block_and_is_raised_then() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), raising_interrupts():
        with uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            steps.append("inside")
        steps.append("after")
    assert steps == ["inside"]


def test_what_is_ignored_stays_ignored() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raising_interrupts(), uninterrupted():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)
