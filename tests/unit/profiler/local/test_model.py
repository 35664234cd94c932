"""Answers over other survivors in each layer and head, against the same model with a mask over all of its KV."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from evicbench.testbed.tasks import make_context
from evicbench.testbed.vocabulary import MODEL_DIR, load_vocabulary
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from sglang_evicpress.profiler.local.model import LocalModel, Survivors

CONTEXTS = [[1, *range(20, 67)], [1, *range(90, 137)]]
QUESTIONS = [[[5, 30], [7, 31, 44, 9]], [[12, 100, 3]]]
NEW_TOKENS = 5
_NUMBERS = itertools.count()


class Masked:
    """The model over exact KV, where a mask per layer and head hides what did not survive."""

    def __init__(self, model: Path) -> None:
        name = f"masked-{next(_NUMBERS)}"
        AttentionInterface.register(name, self._attend)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=name)
        self._model = loaded.eval()
        self._hidden: list[Tensor] = []  # per layer bool [kv_heads, context tokens]
        self._num_context = 0

    def _attend(self, module, query, key, value, attention_mask, scaling, **_):
        heads = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(heads, 1) for each in (key, value))
        logits = query @ key.transpose(-1, -2) * scaling
        n = key.shape[2]
        logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        if self._hidden:
            hidden = self._hidden[module.layer_idx].repeat_interleave(heads, 0)
            # What the context computed of itself is exact; only what follows sees survivors alone.
            logits[0, :, self._num_context :, : self._num_context] = logits[
                0, :, self._num_context :, : self._num_context
            ].masked_fill(hidden[:, None], -torch.inf)
        return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    @torch.inference_mode()
    def logprobs(self, context: Sequence[int], kept: Sequence[Tensor], rest: Sequence[int]) -> Tensor:
        """[tokens of rest, vocabulary] behind each of ``rest``; ``kept`` is bool [kv_heads, n] by layer."""
        self._hidden, self._num_context = [~each for each in kept], len(context)
        output = self._model(input_ids=torch.tensor([[*context, *rest]]), use_cache=False)
        return output.logits[0, len(context) :].log_softmax(-1)

    def greedy(self, context: Sequence[int], kept: Sequence[Tensor], question: Sequence[int], ends: set[int]):
        answer, values = list[int](), list[float]()
        while len(answer) < NEW_TOKENS and not ends & set(answer[-1:]):
            best = self.logprobs(context, kept, [*question, *answer])[-1].max(-1)
            answer.append(int(best.indices))
            values.append(float(best.values))
        return answer, values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights wide enough that one other survivor changes the answer; the tokenizer is the testbed's."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, num_key_value_heads=2, head_dim=16, eos_token_id=2, **sizes)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((MODEL_DIR / name).read_bytes())
    return path


@pytest.fixture(scope="module")
def local(folder: Path) -> LocalModel:
    return LocalModel(folder, window=8)


@pytest.fixture(scope="module")
def masked(folder: Path) -> Masked:
    return Masked(folder)


def drawn(counts: Sequence[Sequence[int]], num_tokens: int, seed: int) -> tuple[Survivors, list[Tensor]]:
    """Survivors with so many tokens by layer and head, and the same as masks."""
    generator = torch.Generator().manual_seed(seed)
    indices, is_kept, masks = list[Tensor](), list[Tensor](), list[Tensor]()
    for heads in counts:
        chosen = [torch.randperm(num_tokens, generator=generator)[:count].sort().values for count in heads]
        widest = max(heads)
        indices.append(torch.stack([torch.nn.functional.pad(each, (0, widest - len(each))) for each in chosen]))
        is_kept.append(torch.arange(widest) < torch.tensor(heads)[:, None])
        masks.append(
            torch.stack([torch.zeros(num_tokens, dtype=torch.bool).index_fill(0, each, True) for each in chosen])
        )
    is_even = all(len(set(heads)) == 1 for heads in counts)
    return Survivors(indices, None if is_even else is_kept), masks


@pytest.mark.parametrize(
    "counts",
    [
        ([48, 48], [48, 48], [48, 48]),
        ([9, 9], [9, 9], [9, 9]),
        ([40, 40], [3, 3], [17, 17]),
        ([40, 11], [3, 3], [1, 17]),
    ],
    ids=["all", "even", "by layer", "by head"],
)
def test_answers_are_those_of_a_mask_per_layer(local: LocalModel, masked: Masked, counts) -> None:
    contexts = local.prefill(CONTEXTS)
    pairs = [drawn(counts, len(tokens), seed) for seed, tokens in enumerate(CONTEXTS)]
    answers = local.generate(contexts, [survivors for survivors, _ in pairs], QUESTIONS, NEW_TOKENS)
    scored = local.score(
        contexts, [survivors for survivors, _ in pairs], QUESTIONS, [[a.token_ids for a in row] for row in answers]
    )
    assert [len(row) for row in answers] == [2, 1]
    for tokens, (_, kept), asked, row, likelihoods in zip(CONTEXTS, pairs, QUESTIONS, answers, scored, strict=True):
        for question, answer, likelihood in zip(asked, row, likelihoods, strict=True):
            ids, values = masked.greedy(tokens, kept, question, {2})
            assert list(answer.token_ids) == ids
            assert answer.logprobs == pytest.approx(values, abs=1e-4)
            assert likelihood.logprobs == pytest.approx(values, abs=1e-4)


def test_other_survivors_give_other_answers(local: LocalModel) -> None:
    contexts = local.prefill(CONTEXTS[:1])
    one, other = (drawn(([5, 5], [5, 5], [5, 5]), 48, seed)[0] for seed in (1, 2))
    first, second = (local.generate(contexts, [each], QUESTIONS[:1], NEW_TOKENS) for each in (one, other))
    assert first != second


def test_the_window_has_the_last_queries_of_the_prefill(local: LocalModel) -> None:
    (context,) = local.prefill(CONTEXTS[:1])
    window = context.node.window
    assert window is not None
    assert window.positions.tolist() == list(range(40, 48))
    assert window.queries.shape == (3, 8, 4, 16)
    assert context.node.scale == pytest.approx(16**-0.5)
    longer = local.prefill([[*CONTEXTS[0], 77]])[0].node.window
    assert longer is not None
    assert torch.allclose(longer.queries[:, :7], window.queries[:, 1:], atol=1e-5)


def test_an_answer_ends_at_the_end_token_and_its_text_leaves_that_out() -> None:
    model = LocalModel(MODEL_DIR)
    context = make_context("needle", 96, random.Random(1))
    tokens = model.tokens("chat", context.text)
    assert tokens == load_vocabulary().encode(" ".join(context.tokens))
    (kv,) = model.prefill([tokens])
    whole = Survivors([torch.arange(len(tokens)).expand(2, -1)] * 3)
    asked = model.tokens("text", f"<q> {context.questions[0].text}")
    ((answer,),) = model.generate([kv], [whole], [[asked]], 14)
    assert (answer.token_ids[-1], answer.text) == (2, context.questions[0].answer)
    assert len(answer.token_ids) == 5 == len(answer.logprobs)


def test_contexts_of_two_lengths_are_refused(local: LocalModel) -> None:
    with pytest.raises(ValueError, match=r"contexts have \[1, 2\] tokens: expected one length"):
        local.prefill([[1], [1, 2]])


def test_a_question_without_a_token_is_refused(local: LocalModel) -> None:
    contexts = local.prefill(CONTEXTS[:1])
    with pytest.raises(ValueError, match="a question has no token"):
        local.generate(contexts, [drawn(([5, 5],) * 3, 48, 1)[0]], [[[]]], NEW_TOKENS)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing has no config.json: expected the folder of a model"):
        LocalModel(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"cannot be loaded \(.*\): expected one of transformers"):
        LocalModel(tmp_path)


def test_weights_that_were_cut_off_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"cannot be loaded \(.*\): expected one of transformers"):
        LocalModel(copy)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_chunk_size", 8192),
        ("attn_temperature_tuning", True),
        ("layer_types", ["full_attention", "chunked_attention", "full_attention"]),
    ],
)
def test_attention_that_masks_or_scales_by_itself_is_refused(
    folder: Path, tmp_path: Path, name: str, value: object
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(ValueError, match=f"the model has {name} .*: expected plain causal attention"):
        LocalModel(copy)


def test_a_device_that_is_not_there_is_refused(folder: Path) -> None:
    for device in ("cuda:99", "abacus"):
        with pytest.raises(ValueError, match=f"device '{device}' is not there: expected cpu"):
            LocalModel(folder, device=device)


def test_attention_that_is_not_plain_is_refused(local: LocalModel) -> None:
    attention = local._attention
    with pytest.raises(ValueError, match="has sliding_window: expected plain causal attention"):
        attention(torch.nn.Module(), torch.ones(1, 1, 2, 4), *[torch.ones(1, 1, 2, 4)] * 2, None, sliding_window=4)
