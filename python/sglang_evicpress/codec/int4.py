"""Codes of 4 bits."""

from sglang_evicpress.codec.groups import GroupCodec

CODEC = GroupCodec(4)
