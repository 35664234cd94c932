"""``evicpress fsck``: what it prints and its exit status; what it finds is tested with the tier."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_evicpress.cli.main import main


def _damage(folder: Path) -> None:
    (folder / "segment-000001.kv").write_bytes(b"k" * 8192)
    (folder / "segment-000001.head").write_bytes(b"not a record")


def test_a_folder_without_entries_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fsck", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "clean"


def test_findings_are_status_1_until_they_are_repaired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _damage(tmp_path)
    for _ in range(2):  # looking changes nothing
        assert main(["fsck", str(tmp_path)]) == 1
        assert "run again with --repair" in capsys.readouterr().out.splitlines()[-1]
    assert main(["fsck", "--repair", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "repaired"
    assert main(["fsck", str(tmp_path)]) == 0


def test_a_folder_in_use_or_none_at_all_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fsck", str(tmp_path / "none")]) == 2
    assert "none is not a folder" in capsys.readouterr().err
    fd = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert main(["fsck", str(tmp_path)]) == 2
    os.close(fd)
    error = capsys.readouterr().err
    assert error.startswith("evicpress: error: ")
    assert str(tmp_path) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("words", [["fsck"], ["fsck", "a", "b"], ["fsck", "a", "--fix"]])
def test_bad_usage_is_one_line_and_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("evicpress: error: ")
    assert output.err.count("\n") == 1


def test_help_explains_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fsck", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert [part for part in ("DIR", "--repair", "Exit status: 0 all good") if part not in text] == []


def test_it_needs_neither_torch_nor_sglang(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom sglang_evicpress.cli.main import main\n"
        f"assert main(['fsck', {str(tmp_path)!r}]) == 0\n"
        "print(sorted({'torch', 'sglang', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
