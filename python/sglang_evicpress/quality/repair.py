"""Checks a profile store without changing it, and saves what can be read of a damaged one."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from sglang_evicpress.quality.log_format import (
    HEADER,
    Live,
    StoreDamaged,
    StoreError,
    foreign_end,
    live_of,
    name_of,
    profile_of,
    read_line,
    whole_lines,
)
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.quality.store import lock, real_path, replace


@dataclass(frozen=True, slots=True)
class RepairReport:
    """Profiles in the file now, lines that could not be read, where the damaged file is kept, and what was wrong with
    it: None and nothing when nothing was changed."""

    num_kept: int
    num_lost: int
    bad_copy: Path | None
    problem: str = ""


def read_all(path: Path) -> list[tuple[str, Profile]]:
    """Every profile in the file with the identity (in hex) of its model, the oldest put first; changes nothing.

    Raises StoreDamaged, StoreError, and ValueError when there is no such file.
    """
    path = _existing(path)
    live, _ = live_of(path, _data(path))
    return [(name.identity, profile_of(path, line)) for name, line in live.items()]


def check(path: Path) -> int:
    """Number of profiles in the file, of all models. Raises as ``read_all`` does."""
    return len(read_all(path))


def repair(path: Path) -> RepairReport:
    """Put a new file with all profiles that can be read in the place of a damaged one, which becomes NAME.bad.

    Raises StoreError while a server has the file open or it cannot be written, and ValueError when there is no such
    file.
    """
    path = _existing(path)
    try:
        fd = lock(path, alone=True)
    except OSError as error:
        raise StoreError(f"profile store {path} cannot be repaired ({error.strerror})") from error
    try:
        try:
            return RepairReport(check(path), 0, None)
        except StoreDamaged as error:
            problem = error.why
        data = _data(path)
        live, num_lost = _salvage(data)
        bad_copy = _free_name(path)
        shutil.copyfile(path, bad_copy)
        replace(path, live.values())
        return RepairReport(len(live), num_lost, bad_copy, problem)
    except OSError as error:
        raise StoreError(f"profile store {path} cannot be repaired ({error.strerror})") from error
    finally:
        os.close(fd)


def _salvage(data: bytes) -> tuple[Live, int]:
    """Every line that is whole, and how many are not; what a damaged line replaced is taken for valid again."""
    live: Live = {}
    num_lost = 0
    lines = whole_lines(data)
    if (end := foreign_end(data)) is not None:
        lines.append(end)
    for line in lines:
        try:
            found = read_line(line)
            if found == HEADER:
                continue
            name = name_of(found)
            Profile.from_json(found["profile"])
        except ValueError:
            num_lost += 1
            continue
        live.pop(name, None)
        live[name] = line
    return live, num_lost


def _existing(path: Path) -> Path:
    path = real_path(path)
    if not path.exists():
        raise ValueError(f"profile store {path} does not exist: expected a file that --kv-profiles made")
    return path


def _data(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"profile store {path} cannot be read ({error.strerror})") from error


def _free_name(path: Path) -> Path:
    number = 0
    while (name := path.with_name(f"{path.name}.bad{number or ''}")).exists():
        number += 1
    return name
