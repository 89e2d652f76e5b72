"""Drafts of another vocabulary: which tokens are matched, what is fed and proposed, and that the output is the target's."""

from __future__ import annotations

from itertools import cycle, product
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from back_ends import CODED, make_back_end
from proposals import SHAPES, paths_of, record
from stepping import AMPLE, SCARCE, greedy, make_engine, run_all, submit
from text_tools import make_byte_tokenizer, make_letter_tokenizer, make_piece_tokenizer, make_tokenizer
from tiny_models import make_model
from transformers import PreTrainedModel
from zoo import Zoo, random_prompts

from titan import LLM, SamplingParams
from titan.cli import main
from titan.diagnosis import faults
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.registry import _FACTORIES, open_draft_model, register
from titan.draft.token_meanings import TokenMeaning, token_meanings
from titan.draft.vocabulary import VocabularyMap

TARGET_SIZE, DRAFT_SIZE = 340, 330  # of the models: tokenizers have fewer
SHARED = 260  # ids of the target below this are bytes and special tokens, and the draft has nearly all of them
PROMPTS = [*random_prompts(6, seed=3, max_len=40, vocab_size=SHARED), *random_prompts(2, seed=4, vocab_size=TARGET_SIZE)]


class Pair(NamedTuple):
    """A target whose tokens are bytes, and drafts whose tokens are pieces."""

    target: str
    drafts: dict[str, str]
    models: dict[str, PreTrainedModel]


def bytes_and_pieces() -> VocabularyMap:
    return VocabularyMap.of(make_byte_tokenizer(), make_piece_tokenizer(), TARGET_SIZE, DRAFT_SIZE, torch.device("cpu"))


def original_ids(vocabulary: VocabularyMap, token_ids: list[int]) -> list[int]:
    """What the draft is fed, by its checkpoint's ids."""
    ids: list[int] = vocabulary.order.token_ids[vocabulary.to_draft(token_ids)].tolist()
    return ids


@pytest.fixture(scope="session")  # as the zoo, whose target it changes
def pair(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The draft "alike" has the target's weights as far as it has its tokens; "tied" has its embedding as its head, in bfloat16.

    "gathered" attends by itself, and prefers what the target often writes.
    """
    target = zoo.model("bytes")
    target.lm_head.weight.data[SHARED:] *= 1.1  # written now and then
    target.save_pretrained(zoo.path("bytes"))
    make_byte_tokenizer().save_pretrained(zoo.path("bytes"))
    folder = tmp_path_factory.mktemp("pieces")
    models = {
        "alike": make_model(folder / "alike", vocab_size=DRAFT_SIZE),
        "tied": make_model(folder / "tied", vocab_size=DRAFT_SIZE, seed=6, num_hidden_layers=1, tie_word_embeddings=True),
        "gathered": make_model(folder / "gathered", "gptj", vocab_size=DRAFT_SIZE, rotary_dim=8, num_hidden_layers=1),
    }
    state, vocabulary = models["alike"].state_dict(), bytes_and_pieces()
    for name, value in target.state_dict().items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            state[name][vocabulary.order.token_ids[: vocabulary.num_shared]] = value[vocabulary.target_ids[:-1]]
        else:
            state[name].copy_(value)
    for prompt in PROMPTS:
        for token_id in set(zoo.greedy("bytes", prompt, 18, ignore_eos=True)) & {*vocabulary.target_ids[:-1].tolist()}:
            place = vocabulary.target_ids.tolist().index(token_id)
            models["gathered"].lm_head.bias.data[vocabulary.order.token_ids[place]] += 1
    for parameter in models["tied"].parameters():
        parameter.data = parameter.bfloat16().float()
    for name, model in models.items():
        model.save_pretrained(folder / name)
        make_piece_tokenizer().save_pretrained(folder / name)
    return Pair(zoo.path("bytes"), {name: str(folder / name) for name in models}, models)


def test_tokens_are_matched_by_what_they_stand_for() -> None:
    target, draft, vocabulary = make_byte_tokenizer(), make_piece_tokenizer(), bytes_and_pieces()
    names = target.convert_ids_to_tokens(vocabulary.target_ids[:-1].tolist())
    pieces = draft.convert_ids_to_tokens(vocabulary.order.token_ids[: len(names)].tolist())
    pairs = dict(zip(names, pieces, strict=True))
    matched = {"Ġthe": "▁the", "Ġ": "▁", "A": "A", "Ċ": "<0x0A>", "è": "<0xE8>", "</s>": "</s>"}
    assert {name: pairs.get(name) for name in matched} == matched
    assert "the" in target.get_vocab() and "the" not in pairs and "<unk>" not in pieces
    assert not {"<0x41>", "<0x20>"} & set(pieces), "the tokenizer writes no byte where it has the character"
    assert len(names) == len(set(names)) == len(set(pieces)) == vocabulary.num_shared
    meanings = {tokenizer: token_meanings(tokenizer) for tokenizer in (target, draft)}
    contents = [(target, "åŃ", "字"), (target, "ðŁĺĢ", "😀"), (draft, "語", "語"), (draft, "▁c", " c")]
    for tokenizer, name, text in contents:
        content, is_special = meanings[tokenizer][tokenizer.convert_tokens_to_ids(name)]
        assert text.encode().startswith(content) and (name == "åŃ" or content == text.encode()) and not is_special
    assert vocabulary.share == len(names) / len(target) and sorted(vocabulary.order.token_ids.tolist()) == [*range(DRAFT_SIZE)]


def test_shared_tokens_write_the_same_text_in_any_order() -> None:
    target, draft, vocabulary, random = make_byte_tokenizer(), make_piece_tokenizer(), bytes_and_pieces(), Random(1)
    texts = [target.decode([token_id]) for token_id in vocabulary.target_ids[:-1].tolist()]
    places = [place for place, text in enumerate(texts) if "\N{REPLACEMENT CHARACTER}" not in text]
    pieces = draft.convert_ids_to_tokens(vocabulary.order.token_ids[: vocabulary.num_shared].tolist())
    of_bytes = [pieces.index(f"<0x{byte:02X}>") for byte in "語".encode()]
    for _ in range(200):
        chosen = [*random.choices(places, k=5), *of_bytes, *random.choices(places, k=5)]
        chosen.insert(0, texts.index("a"))  # a space at the beginning would be stripped
        written = target.decode(vocabulary.target_ids[chosen].tolist())
        assert draft.decode(vocabulary.order.token_ids[chosen].tolist()) == written
        assert "語" in written


def test_the_draft_is_fed_the_end_of_a_token_that_it_lacks() -> None:
    target, draft, vocabulary = make_byte_tokenizer(), make_piece_tokenizer(), bytes_and_pieces()
    names = [*target.get_vocab()]
    fed = original_ids(vocabulary, target.convert_tokens_to_ids(names))
    fed_names = dict(zip(names, draft.convert_ids_to_tokens(fed), strict=True))
    expected = {"the": "he", "Ġother": "r", "Ġthe": "▁the", "Ġju": "u", "Ð°": "<0xB0>", "<pad>": "<pad>"}
    assert {name: fed_names[name] for name in expected} == expected
    for name, piece in fed_names.items():
        text = target.decode([target.convert_tokens_to_ids(name)])
        end = bytes.fromhex(piece[3:5]) if piece.startswith("<0x") else piece.replace("▁", " ").encode()
        assert text.encode().endswith(end) or "\N{REPLACEMENT CHARACTER}" in text
    padding = [len(target), TARGET_SIZE - 1]
    assert draft.convert_ids_to_tokens(original_ids(vocabulary, padding)) == ["</s>", "</s>"]


def test_special_tokens_are_matched_by_name_then_by_role() -> None:
    def tokenizer(letters: str, **special: str) -> Any:
        made = make_letter_tokenizer(letters, "bytes")
        made.add_special_tokens(special)
        return made

    target = tokenizer("abc", bos_token="<begin>", eos_token="<end>", pad_token="<mask>")
    draft = tokenizer("cbxy", bos_token="<s>", eos_token="<s>", unk_token="<unk>")
    vocabulary = VocabularyMap.of(target, draft, 6, 6, torch.device("cpu"))
    assert vocabulary.target_ids.tolist() == [2, 1, target.eos_token_id, -1], "one token has one meaning: it ends a text"
    assert original_ids(vocabulary, [0, 1, 2, 3, 4, 5]) == [
        {"b": 1, "c": 0, "<end>": 4}.get(name, draft.unk_token_id) for name in target.convert_ids_to_tokens([*range(6)])
    ]
    added = make_tokenizer()
    assert token_meanings(added)[1] == TokenMeaning(b"<s>", is_special=True)
    assert TokenMeaning(b"<s>") not in token_meanings(make_byte_tokenizer()).values()


@pytest.mark.long_where("tied-torch")
@pytest.mark.parametrize(
    ("draft", "back_end", "shape", "min_p"),
    [
        *product(["alike"], ["torch"], ["chain", "dynamic"], [0.1]),
        *product(["alike"], ["cpu"], ["auto", "parents"], [0.1]),
        *product(["tied"], ["torch"], ["auto", "parents"], [0.1]),
        *product(["tied"], ["cpu"], ["chain", "dynamic"], [0.1]),
        *product(["alike", "tied"], ["cpu"], ["chain", "parents"], [0.0]),
        ("gathered", "cpu", "parents", 0.1),
    ],
)
def test_q_is_the_drafts_distribution_over_the_shared_tokens_renormalised(
    pair: Pair, draft: str, back_end: str, shape: str, min_p: float
) -> None:
    """As transformers computes it from the draft's checkpoint; in a cut distribution, which samples pass by pass, too."""
    engine = make_engine(
        pair.target, pair.drafts[draft], backend=make_back_end(back_end), draft_sampling="sampled", **AMPLE | SHAPES[shape]
    )
    rows, vocabulary = record(engine), engine.drafter.vocabulary  # type: ignore[attr-defined]
    params = [
        SamplingParams(temperature=1.3, min_p=min_p * (i % 2), seed=i, max_tokens=6, ignore_eos=True) for i in range(len(PROMPTS))
    ]
    run_all(engine, PROMPTS, params)
    drafted = [(context, tree) for context, _, tree in rows if tree.num_nodes]
    shared, renamed = vocabulary.order.token_ids[: vocabulary.num_shared], vocabulary.target_ids[:-1]
    assert len(drafted) > 15 and engine.drafter.model.logits(torch.zeros(1, 48)).shape == (1, len(shared))  # type: ignore[attr-defined]
    lacking = [(context, tree) for context, tree in drafted if int(vocabulary.to_draft(context)[-1]) >= vocabulary.num_shared]
    assert lacking or draft != "alike", "the draft is fed a token that it does not propose"
    for context, tree in [*drafted[::7], *lacking[:3]]:
        assert tree.draft_probs is not None
        for probs, node in zip(tree.draft_probs, tree.topology.inner.tolist(), strict=True):
            fed = original_ids(vocabulary, [*context, *(() if node < 0 else paths_of(tree)[node])])
            with torch.no_grad():
                logits = pair.models[draft](torch.tensor([fed])).logits[0, -1, shared]
            q = (logits / 1.3).softmax(-1)
            is_cut = context[: len(PROMPTS[0])] != PROMPTS[0] and (probs[renamed] == 0).any()
            q = q.where(q >= 0.1 * q.max(), 0) if is_cut else q
            assert torch.allclose(probs, torch.zeros(TARGET_SIZE).index_copy(0, renamed, q / q.sum()), atol=2e-5)
            outside = np.setdiff1d(np.arange(TARGET_SIZE), renamed.numpy())
            assert len(outside) > 50 and (probs[outside] == 0).all()


@pytest.mark.parametrize(("draft", "back_end"), [("alike", "torch"), ("tied", "cpu"), ("gathered", "cpu")])
def test_a_review_is_of_the_shared_tokens(pair: Pair, draft: str, back_end: str) -> None:
    """What the draft would have proposed after each token is the most likely of those that both have."""
    engine = make_engine(pair.target, pair.drafts[draft], backend=make_back_end(back_end), **AMPLE)
    requests = submit(engine, PROMPTS, [greedy(40, ignore_eos=True, use_speculative=False)] * len(PROMPTS))
    for _ in range(14):
        engine.step()
    with torch.inference_mode():
        reviews = engine.drafter.review(requests).reviews  # type: ignore[attr-defined]
    vocabulary = engine.drafter.vocabulary  # type: ignore[attr-defined]
    shared, renamed = vocabulary.order.token_ids[: vocabulary.num_shared], vocabulary.target_ids[:-1]
    found = list[bool]()
    for request, each in zip(requests, reviews, strict=True):
        with torch.no_grad():
            logits = pair.models[draft](torch.tensor([original_ids(vocabulary, request.token_ids)])).logits[0, :, shared]
        first = request.num_prompt_tokens
        expected = renamed[logits[first - 1 : -1].argmax(-1)].tolist()
        assert list(each.is_right) == [one == other for one, other in zip(expected, request.token_ids[first:], strict=True)]
        found += each.is_right
    assert len(found) == 14 * len(PROMPTS) and 0 < sum(found) < len(found)


CASES = [("torch", "auto", "alike"), ("torch", "parents", "alike"), ("cpu", "auto", "gathered")]
CASES += [("cpu", shape, "alike") for shape in SHAPES if shape not in ("auto_16", "dynamic_63")]


@pytest.mark.long_where("torch-parents")
@pytest.mark.parametrize(("back_end", "shape", "draft"), CASES)
def test_greedy_output_is_that_of_transformers(zoo: Zoo, pair: Pair, back_end: str, shape: str, draft: str) -> None:
    """With prompts that hold tokens the draft lacks, chunks, and preemption."""
    engine = make_engine(pair.target, pair.drafts[draft], backend=make_back_end(back_end), **SCARCE | SHAPES[shape])
    outputs = run_all(engine, PROMPTS, [greedy(18, ignore_eos=True)] * len(PROMPTS))
    assert outputs == [zoo.greedy("bytes", prompt, 18, ignore_eos=True) for prompt in PROMPTS]
    assert max(token for output in outputs for token in output) >= SHARED
    metrics = engine.metrics()
    assert metrics.mean_acceptance_length > {"alike": 1.3, "gathered": 1.02}[draft]
    assert metrics.draft_vocabulary == bytes_and_pieces().share
    assert engine.counters.num_preemptions > 0


def test_greedy_output_is_that_of_transformers_with_triton(zoo: Zoo, pair: Pair) -> None:
    options = AMPLE | {"draft_tree": "auto", "max_draft_tokens": 3, "max_batch_size": 2}
    engine = make_engine(pair.target, pair.drafts["alike"], backend=make_back_end("triton"), **options)
    assert run_all(engine, PROMPTS[:1], [greedy(5, ignore_eos=True)]) == [zoo.greedy("bytes", PROMPTS[0], 5, ignore_eos=True)]
    assert sum(engine.metrics().accepted_per_depth) > 1


@pytest.mark.long_where("adaptive")
@pytest.mark.parametrize("speculation", ["fixed", "adaptive"])
def test_drafts_may_be_swapped_across_vocabularies_in_flight(zoo: Zoo, pair: Pair, speculation: str) -> None:
    shares = []
    drafts = cycle([pair.drafts["alike"], pair.target, "ngram", pair.drafts["tied"], None])

    def swap(step: int) -> None:
        if step % 3 == 2:
            engine.swap_draft(next(drafts))
            shares.append(engine.metrics().draft_vocabulary)

    engine = make_engine(pair.target, pair.drafts["tied"], speculation=speculation, **SCARCE | {"draft_tree": "auto"})
    outputs = run_all(engine, PROMPTS, [greedy(18, ignore_eos=True)] * len(PROMPTS), before_step=swap)
    assert outputs == [zoo.greedy("bytes", prompt, 18, ignore_eos=True) for prompt in PROMPTS]
    assert engine.counters.num_preemptions > 0 and {None, 1.0, bytes_and_pieces().share} == {*shares}


@pytest.mark.parametrize("back_end", CODED[:1] or ["cpu"])
def test_a_drafter_of_another_class_is_loaded_as_a_draft_model_is(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, back_end: str
) -> None:
    class Mine(DraftModelDrafter):
        """As its base class."""

    monkeypatch.setattr("titan.draft.registry._FACTORIES", dict(_FACTORIES))
    register("mine", lambda context: open_draft_model(pair.drafts["alike"], context, Mine)())
    found = []
    for draft in ("mine", pair.drafts["alike"]):
        engine = make_engine(pair.target, draft, backend=make_back_end(back_end), **AMPLE | {"draft_weight_bits": "auto"})
        run_all(engine, PROMPTS, [greedy(18, ignore_eos=True)] * len(PROMPTS))
        metrics = engine.metrics()
        figures = metrics.draft_vocabulary, metrics.draft_weight_bits, metrics.proposed_per_depth, metrics.accepted_per_depth
        found.append((type(engine.drafter), *figures))
    assert found[0] == (Mine, *found[1][1:]) and found[1][0] is DraftModelDrafter
    assert found[0][1:3] == (bytes_and_pieces().share, 8 if CODED else None)


def test_vocabularies_that_nobody_compared_have_no_share(zoo: Zoo, pair: Pair) -> None:
    engine = make_engine(zoo.path("llama"), zoo.path("llama~"), **AMPLE)  # without tokenizers
    assert engine.metrics().draft_vocabulary is None
    engine = make_engine(pair.target, pair.target, **AMPLE)
    assert isinstance(engine.drafter, DraftModelDrafter) and engine.metrics().draft_vocabulary == 1
    engine.swap_draft(DraftModelDrafter("made by hand", engine.drafter.model, engine.draft_context()))
    assert engine.metrics().draft_vocabulary is None


def test_siblings_and_text(pair: Pair) -> None:
    """Completions of one prompt, from text to text, are those without a draft."""
    params = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=12, ignore_eos=True)
    texts: list[list[str]] = []
    for draft in (None, pair.drafts["alike"]):
        llm = LLM(pair.target, draft, device="cpu", dtype="float32", num_kv_blocks=64, draft_sampling="greedy")
        [output] = llm.generate(["the quick brown fox"], params, use_tqdm=False)
        texts.append([completion.text for completion in output.outputs])
    assert texts[0] == texts[1] and len({*texts[0]}) == 3


def test_the_share_in_common_is_shown(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", pair.target, "--draft-model", pair.drafts["tied"], "--device", "cpu", "--dtype", "float32"]
    share = f"vocabulary has {bytes_and_pieces().share:.1%} of the target's tokens"
    assert main(["generate", "the fox", *options, "--max-tokens", "4", "--ignore-eos"]) == 0
    assert any(line.endswith(share) for line in capsys.readouterr().out.splitlines())
    engine = make_engine(pair.target, pair.drafts["tied"], **AMPLE)
    run_all(engine, PROMPTS, [greedy(18, ignore_eos=True)] * len(PROMPTS))
    assert any(share in fault for fault in faults(engine.metrics()))
