"""Identity of the served model: all that its KV depends on besides the tokens, its adapters left out."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from sglang_evicpress.quality.profile import FORMS_VERSION
from sglang_evicpress.tiers.entry.identity import fingerprint
from sglang_evicpress.tiers.entry.weights_digest import DIGEST_BYTES, named_tensors, weights_digest

logger = logging.getLogger(__name__)

UNREADABLE = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
"""What reading a tensor raises: on a full GPU, of a kind without bytes, or of a quantisation nobody has seen."""


@dataclass(eq=False, repr=False)
class ModelIdentity:
    """Identity of the model that ``runner`` serves: another for other weights, settings, KV dtype, layout or rank.

    The weights are read at the first question and at the first one after ``forget_weights``. While they cannot be
    read, a random number stands for them, so that nothing is found that was kept under another identity, and nothing
    kept under this one is found later. The ranks of ``group`` (None: one rank) must ask in the same order; whether the
    weights changed, they then see alike. ``geometry``: digest of what a press was given of the model's queries, if
    anything; ``selection``: settings other than the usual by which a form of a node keeps other tokens.
    """

    runner: Any
    model_config: Any
    pool: Any
    page_size: int
    ranks: tuple[int, int]
    group: Any = None
    geometry: str = ""
    selection: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_released: Callable[[], bool] = lambda: False
        self._weights = ""
        self._is_known = False
        self._is_fresh = False
        self._tokenizer: tuple[Any, str] | None = None

    def forget_weights(self) -> None:
        """The weights may have changed."""
        self._is_known = self._is_fresh = False

    def of_model(self) -> bytes:
        """16 bytes for the KV of this rank. Nothing of it depends on where files lie."""
        return fingerprint(
            {
                "config": _config_of(self.model_config),
                "weights": self.weights(),
                "kv_dtype": str(self.pool.dtype),
                "layers": [self.pool.start_layer, self.pool.layer_num],
                "page_size": self.page_size,
                "rank": list(self.ranks),
            }
        )

    def of_profiles(self, tokenizer: Any) -> bytes:
        """16 bytes for what is measured of the model: others for another tokenizer, version of the forms, or selection
        of what they keep; rank 0's on every rank."""
        identity = fingerprint(
            {
                "config": _config_of(self.model_config),
                "weights": self.weights(),
                "kv_dtype": str(self.pool.dtype),
                "tokenizer": self._digest_of_tokenizer(tokenizer),
                "forms": FORMS_VERSION,
                **({"geometry": self.geometry} if self.geometry else {}),
                **({"selection": dict(self.selection)} if self.selection else {}),
            }
        )
        return agreed(identity, self.group)

    def weights(self) -> str:
        """Digest of the weights of all ranks, in hex, or a random number marked as such."""
        if not self._is_known:
            digests = gathered((self._read(), secrets.token_bytes(DIGEST_BYTES)), self.group)
            self._is_known = all(digest is not None for digest, _ in digests)
            if self._is_known:
                self._weights = hashlib.sha256(b"".join(digest or b"" for digest, _ in digests)).hexdigest()
            elif not self._is_fresh:
                self._weights = f"unknown {digests[0][1].hex()}"
            self._is_fresh = True
        return self._weights

    def _read(self) -> bytes | None:
        """Digest of this rank's weights; None when it cannot be taken."""
        if self.is_released():
            return None
        try:
            return weights_digest(named_tensors(self.runner.model))
        except UNREADABLE as error:  # the model can be served all the same
            logger.warning(
                "evicpress: the weights cannot be read, so what is kept of them is not found again: %s: %s",
                type(error).__name__,
                error,
            )
            return None

    def _digest_of_tokenizer(self, tokenizer: Any) -> str:
        if self._tokenizer is None or self._tokenizer[0] is not tokenizer:
            self._tokenizer = tokenizer, _tokenizer_digest(tokenizer)
        return self._tokenizer[1]


def adapter_digest(manager: Any, lora_id: str) -> bytes | None:
    """16 bytes for what a loaded LoRA adapter computes: its tensors as they were read, its scale, and the modules that
    the server applies adapters to. None when they cannot be read: nothing is known of its KV then."""
    try:
        adapter = manager.loras[lora_id]
        parts = [(f"layer {index}", layer.weights) for index, layer in enumerate(adapter.layers)]
        parts += [("embedding", adapter.embedding_layers), ("added", adapter.added_tokens_embeddings)]
        tensors = weights_digest(
            (f"{part} {name}", tensor) for part, weights in parts for name, tensor in sorted(weights.items())
        )
        return fingerprint(
            {
                "tensors": tensors.hex(),
                "rank": adapter.config.r,
                "scaling": adapter.scaling,
                "modules": sorted(manager.target_modules),
                "shares_outer": bool(manager.experts_shared_outer_loras),
            }
        )
    except UNREADABLE as error:
        logger.warning(
            "evicpress: LoRA adapter %s cannot be read, so its KV stays off the SSD: %s: %s",
            lora_id,
            type(error).__name__,
            error,
        )
        return None


def agreed(value: bytes, group: Any) -> bytes:
    """Value of rank 0 of ``group``; ``value`` itself when there is one rank (None)."""
    if group is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, 0), group=group)
    return values[0]


def gathered(value: tuple[bytes | None, bytes], group: dist.ProcessGroup | None) -> list[tuple[bytes | None, bytes]]:
    """Values of all ranks of ``group``, in the order of the ranks; ``value`` alone when there is one rank (None)."""
    if group is None:
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _config_of(model_config: Any) -> dict[str, str]:
    config = model_config.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    return {name: repr(value) for name, value in config.items()}


def _tokenizer_digest(tokenizer: Any) -> str:
    """Digest of a tokenizer: of all its rules if it can list them, else of its vocabulary; requests may need none."""
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        text = backend.to_str()
    else:
        text = repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()
