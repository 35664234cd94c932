"""``evicpress doctor``: what is missing on this machine, and whether a server does what it should."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_evicpress.cli.operator.finding import Finding
from sglang_evicpress.cli.operator.self_test import self_test
from sglang_evicpress.cli.operator.server import Server, connected_parser
from sglang_evicpress.cli.output import print_result
from sglang_evicpress.cli.parser import Parser
from sglang_evicpress.cli.replay.units import show_bytes
from sglang_evicpress.config import check_ssd_folder
from sglang_evicpress.tiers.host.memory import read_memory

PACKAGES = ("sglang", "torch", "flashinfer-python", "triton", "sglang-evicpress")
PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN = "evicpress"
PROBE_BYTES = 64 << 20
HOOK_CHECK = "sglang_evicpress.patches.hook_check"
HOOK_CHECK_S = 180.0

_EPILOG = """Without --url it looks at this machine: packages, the plugin, hook points of the installed SGLang,
memory, and the folder of --ssd-dir. With --url it also tests the server: a prompt is cached, compressed,
moved to host memory and used again, in a namespace of its own.

Exit status: 0 all good, 1 something is wrong, 2 bad input.
"""


def make_parser() -> Parser:
    parser = connected_parser("doctor", "Say what is missing, and how to get it.", _EPILOG)
    parser.set_defaults(url=None)
    parser.add_argument("--ssd-dir", metavar="DIR", help="folder for --kv-ssd-dir, whose speed is measured")
    return parser


def doctor(argv: Sequence[str]) -> int:
    """Run ``evicpress doctor`` and give its exit status. Raises ValueError."""
    args = make_parser().parse_args(argv)
    findings = [*versions(), *plugin(), *hook_points(), memory()]
    if args.ssd_dir is not None:
        findings.append(ssd(args.ssd_dir))
    if args.url is not None:
        findings += self_test(Server.of(args))
    print_result(args, findings, (line for finding in findings for line in finding.lines()))
    return int(any(finding.state == "FAILED" for finding in findings))


def versions() -> Iterator[Finding]:
    """The packages that count."""
    for name in PACKAGES:
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            is_needed = name in ("sglang", "torch", "sglang-evicpress")
            yield Finding(name, "FAILED" if is_needed else "note", "not installed", f"pip install {name}")


def plugin() -> Iterator[Finding]:
    """The entry point by which SGLang finds us, and the variable that may leave it out."""
    found = [point for point in importlib.metadata.entry_points(group=PLUGIN_GROUP) if point.name == PLUGIN]
    if not found:
        yield Finding("plugin", "FAILED", "SGLang does not know it", "install sglang-evicpress with pip, not by a path")
        return
    chosen = os.environ.get("SGLANG_PLUGINS")
    if chosen is not None and PLUGIN not in chosen.split(","):
        yield Finding("plugin", "FAILED", f"SGLANG_PLUGINS is {chosen!r}", f"add {PLUGIN} to it, or unset it")
    else:
        yield Finding("plugin", "ok", found[0].value)


def hook_points() -> Iterator[Finding]:
    """What we hook, in the installed SGLang. In a process of its own: importing SGLang takes seconds, and may crash."""
    command = [sys.executable, "-m", HOOK_CHECK]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=HOOK_CHECK_S, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("hook points", "FAILED", f"SGLang was not imported within {HOOK_CHECK_S:g} s")
        return
    said = (done.stdout.strip() or done.stderr.strip() or "nothing was said").splitlines()[-1]
    yield Finding("hook points", "FAILED" if done.returncode else "ok", said)


def memory() -> Finding:
    """Memory for the host tier."""
    found = read_memory()
    return Finding("memory", "ok", f"{show_bytes(found.free)} of {show_bytes(found.total)} free, by the cgroup's limit")


def ssd(folder: str) -> Finding:
    """Writes and reads a file in the folder of an SSD tier, past the page cache where the system allows it."""
    try:
        check_ssd_folder(folder)
    except ValueError as error:
        return Finding("SSD folder", "FAILED", str(error))
    there = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if free < 2 * PROBE_BYTES:
        return Finding(
            "SSD folder", "FAILED", f"{show_bytes(free)} free in {there}", "make room, or take another folder"
        )
    data = os.urandom(1 << 20) * (PROBE_BYTES >> 20)
    with tempfile.TemporaryFile(dir=there) as file:
        begin_s = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        write_s = time.perf_counter() - begin_s
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin_s = time.perf_counter()
        is_same = file.read() == data
        read_s = time.perf_counter() - begin_s
    if not is_same:
        return Finding("SSD folder", "FAILED", f"{there} gives back other bytes than were written")
    speed = f"writes {show_bytes(PROBE_BYTES / write_s)}/s, reads {show_bytes(PROBE_BYTES / read_s)}/s"
    return Finding("SSD folder", "ok", f"{there}: {show_bytes(free)} free, {speed}")
