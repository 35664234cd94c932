"""Plain sequential IO past the page cache, which is what a disk can give: a loop of ours, dd, and fio where it is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

BLOCK_BYTES = 16 << 20


def write_blocks(file: int, memory: memoryview) -> None:
    for begin in range(0, len(memory), BLOCK_BYTES):
        block = memory[begin : begin + BLOCK_BYTES]
        if os.pwrite(file, block, begin) != len(block):
            raise OSError("a plain write was cut short")


def read_blocks(file: int, memory: memoryview) -> None:
    for begin in range(0, len(memory), BLOCK_BYTES):
        block = memory[begin : begin + BLOCK_BYTES]
        if os.preadv(file, [block], begin) != len(block):
            raise OSError("a plain read was cut short")


def run_dd(path: Path, num_bytes: int, is_write: bool) -> list[float]:
    """The seconds that dd says; none where there is no dd."""
    if shutil.which("dd") is None:
        return []
    write, read = ("if=/dev/zero", f"of={path}", "oflag=direct"), (f"if={path}", "of=/dev/null", "iflag=direct")
    command = ["dd", *(write if is_write else read), f"bs={BLOCK_BYTES}", f"count={num_bytes // BLOCK_BYTES}"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"})
    found = re.search(r"copied, ([0-9.e-]+) s", run.stderr)
    return [float(found.group(1))] if found else []


def run_fio(path: Path, num_bytes: int, is_write: bool) -> list[float]:
    """The seconds of one fio job with 8 requests of 1 MB in flight; none where there is no fio."""
    if shutil.which("fio") is None:
        return []
    way = "write" if is_write else "read"
    settings = {"name": way, "filename": path, "rw": way, "bs": "1M", "size": num_bytes, "direct": 1, "iodepth": 8}
    options = [f"--{name}={value}" for name, value in settings.items()]
    command = ["fio", "--ioengine=libaio", "--output-format=json", *options]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return [num_bytes / json.loads(run.stdout)["jobs"][0][way]["bw_bytes"]]
