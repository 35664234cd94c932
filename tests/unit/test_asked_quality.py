"""The quality that requests ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_evicpress.asked_quality import asks_exact, check_quality, least_quality
from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.core import Tier
from sglang_evicpress.tenants import Tenant, read_tenants


@pytest.mark.parametrize("params", [None, {}, {"kv_quality": None}, {"other": 1}, 5, "kv_quality", ["kv_quality"]])
def test_nothing_is_asked_for_without_the_field(params: object) -> None:
    check_quality(params)
    assert not asks_exact(params)


def test_exact_is_asked_for() -> None:
    check_quality({"kv_quality": "exact", "other": 1})
    assert asks_exact({"kv_quality": "exact", "other": 1})


@pytest.mark.parametrize(("value", "least"), [("exact", 1.0), (1, 1.0), (1.0, 1.0), (0.97, 0.97), (None, 0.0)])
def test_a_least_quality_is_asked_for(value: object, least: float) -> None:
    check_quality({"kv_quality": value})
    assert least_quality({"kv_quality": value}) == least
    assert asks_exact({"kv_quality": value}) == (least == 1.0)


def test_tenants_are_read_by_name() -> None:
    given = {"acme": {"cache_salt": "a", "kv_quality": 0.9}, "law": {"cache_salt": "b", "kv_quality": "exact"}}
    assert read_tenants(given) == (Tenant("acme", "a", 0.9), Tenant("law", "b", 1.0))
    assert read_tenants({}) == ()


def test_a_tenant_may_have_limits_and_no_floor() -> None:
    (tenant,) = read_tenants({"trial": {"cache_salt": "t", "gpu_gb": 0.5, "ssd_gb": 0, "kv_quality": None}})
    assert tenant == Tenant("trial", "t", 0.0, {Tier.GPU: 500_000_000, Tier.SSD: 0})


def test_salts_and_credentials_are_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text('{"acme": {"cache_salt": "SECRET", "gpu_gb": 4}}')
    store = {
        "external_backend": "file",
        "external_config": '{"file_storage_path": "/tmp/kv", "password": "SECRET"}',
        "host_gb": 1.0,
    }
    config = EvicPressConfig.from_flags("evicpress", None, tenants=str(path), **store)
    assert config.tenants is not None and "SECRET" not in f"{config} {config!r}"
    for value in ({"acme": "SECRET"}, ["SECRET"], "SECRET"):
        with pytest.raises(ValueError, match=r"^tenant.* is a (str|list): expected") as raised:
            read_tenants(value)
        assert "SECRET" not in str(raised.value)
