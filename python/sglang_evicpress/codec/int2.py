"""Codes of 2 bits."""

from sglang_evicpress.codec.groups import GroupCodec

CODEC = GroupCodec(2)
