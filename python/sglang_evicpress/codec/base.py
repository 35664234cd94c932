"""Protocol of codecs: the KV of one layer in fewer bytes, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class NotFiniteError(ValueError):
    """The rows hold NaN or Inf: no codec stores them."""


class DoesNotFitError(ValueError):
    """The rows would take more bytes than the codec has for so many: it stores other rows, not these."""


class StoredFormError(ValueError):
    """The bytes are not what this codec writes for so many slots."""


class Codec(Protocol):
    """Stores the K and V rows of one layer, each ``[slots, channels]`` of one dtype, in a run of bytes that says by
    itself how it is to be read. Every method may run on any thread."""

    name: str

    def num_bytes(self, num_slots: int, num_channels: int, dtype: torch.dtype) -> int:
        """Bytes of one layer."""
        ...

    def encode(self, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``num_bytes`` bytes to ``out``, uint8. Raises NotFiniteError for rows with NaN or Inf, and
        DoesNotFitError where a codec that stores most rows cannot store these."""
        ...

    def decode(
        self, stored: torch.Tensor, num_slots: int, begin: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write rows [begin, begin + len(keys)) of a layer of ``num_slots`` that is ``stored``, uint8, to ``keys`` and
        ``values``. Raises StoredFormError unless the bytes are this codec's."""
        ...
