"""Codes of 8 bits."""

from sglang_evicpress.codec.groups import GroupCodec

CODEC = GroupCodec(8)
