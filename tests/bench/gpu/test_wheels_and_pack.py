"""Packing for a bare GPU machine: wheel names, what is left out, the size limit, models without weights."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest
from evicbench.gpu.models import LLAMA_8B, QWEN_14B, write_model
from evicbench.gpu.pack import MIB, PackError, check_limit, contents, tracked_files, write_archive, write_plugin
from evicbench.gpu.wheels import STUBS, WHEELS, fetch, file_pattern, unpack, write_stubs


def test_a_wheel_is_found_however_its_name_is_spelled(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("Some_Thing.x-1.0-py3-none-any.whl", "other-2.0.post1-cp312-any.whl")]
    for file in files:
        file.touch()
    assert fetch(tmp_path, ["some-thing-x==1.0", "other==2.0.post1"]) == files


def test_another_version_is_not_taken_for_it() -> None:
    assert not file_pattern("other==2.0").fullmatch("other-2.0.post1-cp312-any.whl")
    assert not file_pattern("some==1.0").fullmatch("some-thing-1.0-py3-none-any.whl")


def test_a_wheel_without_a_version_is_refused() -> None:
    with pytest.raises(ValueError, match="NAME==VERSION, got 'some'"):
        file_pattern("some")


def test_every_wheel_is_pinned_once() -> None:
    names = [file_pattern(wheel).pattern for wheel in WHEELS]
    assert len(set(names)) == len(names)


def test_what_a_server_never_loads_is_left_out(tmp_path: Path) -> None:
    names = {
        "sgl_kernel/sm90/common_ops.abi3.so": True,
        "sgl_kernel/flash_ops.abi3.so": False,
        "sgl_kernel/sm100/common_ops.abi3.so": False,
        "sglang/srt/hardware_backend/npu/x.py": True,
        "flashinfer/data/csrc/batch_prefill.jinja": True,
        "flashinfer/data/include/flashinfer/page.cuh": True,
        "sglang-1.data/scripts/sglang": False,
    }
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    site = tmp_path / "site"
    assert unpack(wheel, site) == sum(not is_kept for is_kept in names.values())
    unpacked = {str(file.relative_to(site)) for file in site.rglob("*") if file.is_file()}
    assert unpacked == {name for name, is_kept in names.items() if is_kept}


def test_stubs_are_python(tmp_path: Path) -> None:
    write_stubs(tmp_path)
    for name in STUBS:
        compile((tmp_path / name).read_text(), name, "exec")


def test_a_folder_over_the_limit_is_refused(tmp_path: Path) -> None:
    for name, num_bytes in (("small", 1), ("large", MIB)):
        (tmp_path / name).write_bytes(bytes(num_bytes))
    sizes = contents(tmp_path)
    assert list(sizes.items()) == [("large", MIB), ("small", 1)]
    check_limit(sizes, 1.1)
    with pytest.raises(PackError, match=r"1\.0 MiB are over the limit of 1 MiB"):
        check_limit(sizes, 1.0)


def test_an_archive_keeps_links_and_says_nothing_of_its_maker(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    for name in ("one.tar.xz", "two.tar.xz"):
        write_archive(tmp_path / name, tmp_path, ["real", "link"])
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "two.tar.xz").read_bytes()
    with tarfile.open(tmp_path / "one.tar.xz") as tar:
        members = tar.getmembers()
    assert [member.issym() for member in members] == [False, True]
    assert {(member.uname, member.uid, member.mtime) for member in members} == {("", 0, 1_700_000_000)}


def test_the_source_has_what_a_gpu_phase_imports() -> None:
    names = set(tracked_files())
    assert {
        "python/sglang_evicpress/plugin.py",
        "python/sglang_evicpress/kernels",
        "kernels/compact.py",
        "patches/attention/physical_lengths.py",
        "bench/evicbench/gpu/server.py",
        "bench/evicbench/correctness/exactness.py",
        "bench/evicbench/testbed/model/model.safetensors",
        "pyproject.toml",
    } <= names
    assert not any(name.startswith("bench/results/") for name in names)


def test_sglang_finds_the_plugin_by_what_is_packed(tmp_path: Path) -> None:
    write_plugin(tmp_path)
    (entry_points,) = tmp_path.glob("sglang_evicpress-*.dist-info/entry_points.txt")
    assert "[sglang.srt.plugins]\nevicpress = sglang_evicpress.plugin:load\n" in entry_points.read_text()


@pytest.mark.parametrize("model", (LLAMA_8B, QWEN_14B), ids=lambda model: model.name)
def test_a_model_folder_is_read_by_transformers(model, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(write_model(model, tmp_path / "model"))
    for name in ("num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size"):
        assert getattr(config, name) == model.config[name]
    assert (config.rope_scaling or {}).get("factor") == model.config.get("rope_scaling", {}).get("factor")
