"""Reading models: what is found, in which dtype, and how much memory it takes; test_broken_models has what is refused."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from back_ends import cpu_backend
from checkpoints import Checkpoint
from families import FAMILIES
from interpreted import triton_backend
from safetensors.torch import load_file, save_file
from stepping import greedy, make_engine, run_all
from text_tools import make_tokenizer
from tiny_models import edit_weights, make_model
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.auto import tokenization_auto

from titan.bench.loading import load_decoder
from titan.kernels.torch.backend import TorchBackend
from titan.models.decoder import Decoder
from titan.models.files import ModelFiles, resolve_model
from titan.models.loader import resolve_dtype
from titan.models.tokenizer import load_tokenizer
from titan.models.weight_files import weights_dtype


def load(folder: Path | str, dtype: str | torch.dtype = "float32", **options: Any) -> Decoder:
    return load_decoder(str(folder), dtype=dtype, backend=cpu_backend(), **options)


def assert_same_weights(a: Decoder, b: Decoder) -> None:
    ours, others = dict(a.named_parameters()), dict(b.named_parameters())
    assert ours.keys() == others.keys()
    assert all(torch.equal(ours[name], others[name]) for name in ours)


def assert_writes_as(model: Any, folder: Path | str, **options: Any) -> Tensor:
    """An engine of a folder writes greedily what a model of transformers does: all tokens, int64 [tokens]."""
    prompt = [5, 6, 7]
    generated = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    written: Tensor = generated[0]
    engine = make_engine(str(folder), num_kv_blocks=16, **options)
    assert run_all(engine, [prompt], [greedy(12, ignore_eos=True)]) == [written[3:].tolist()]
    return written


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize("chosen", [None, "new.safetensors", "new.safetensors.index.json"])
def test_of_several_weights_those_of_transformers_are_loaded(tmp_path: Path, chosen: str | None, model_impl: str) -> None:
    """The usual names are of a model in one file, of which an index remained when it was in many; or the config has others."""
    make_model(tmp_path, max_shard_size="30KB")
    for path in tmp_path.glob("model-*"):
        path.rename(tmp_path / path.name.replace("model-", "new-"))  # saving a model removes shards of the usual names
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-", "new-"))
    (tmp_path / "new.safetensors.index.json").write_text(index.read_text())
    make_model(tmp_path / "other", seed=1)
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "new.safetensors")
    make_model(tmp_path / "one", seed=2)
    (tmp_path / "one" / "model.safetensors").rename(tmp_path / "model.safetensors")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"transformers_weights": chosen}))
    assert_writes_as(AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path, model_impl=model_impl)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize("place", ["the same in two files", "the index names the last", "of three files that differ"])
def test_a_weight_may_be_in_several_files_where_it_is_clear_which_counts(tmp_path: Path, place: str, model_impl: str) -> None:
    """The last does in transformers, whatever the index says."""
    model = make_model(tmp_path, max_shard_size="30KB")
    index, head = tmp_path / "model.safetensors.index.json", model.lm_head.weight.detach()
    content = json.loads(index.read_text())
    first, last = min(files := content["weight_map"].values()), max(files)
    assert content["weight_map"]["lm_head.weight"] == last
    if place == "the same in two files":
        content["weight_map"]["lm_head.weight"] = first
        index.write_text(json.dumps(content))
    else:
        head = head.flip(0)
    if place == "of three files that differ":
        edit_weights(tmp_path, sorted(set(files))[1], lm_head__weight=head.flip(1))
    edit_weights(tmp_path, first, lm_head__weight=head)
    assert_writes_as(model, tmp_path, model_impl=model_impl)
    assert_writes_as(AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path, model_impl=model_impl)


def test_tied_weights_may_be_stored_twice_and_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    model = make_model(tmp_path, tie_word_embeddings=True)
    once = load(tmp_path, pack=False)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    rotary = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(8)}
    edit_weights(tmp_path, lm_head__weight=model.lm_head.weight.detach().clone(), **rotary)
    assert_same_weights(once, load(tmp_path, pack=False))


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_of_tied_weights_either_may_be_stored(tmp_path: Path, model_impl: str) -> None:
    """`safetensors.torch.save_model` keeps one of those that share memory; transformers takes whichever there is."""
    model = make_model(tmp_path, tie_word_embeddings=True)
    edit_weights(tmp_path, model__embed_tokens__weight=None, lm_head__weight=model.lm_head.weight.detach().clone())
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_writes_as(reloaded, tmp_path, model_impl=model_impl)
    assert torch.equal(reloaded.get_input_embeddings().weight, model.lm_head.weight)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_a_stored_head_that_differs_from_the_embedding_is_not_tied(
    tmp_path: Path, model_impl: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers loads it; the difference is not in the first piece that is read."""
    monkeypatch.setattr("titan.models.decoder_weights.CHUNK_BYTES", 4 * 48 * 7)
    head = make_model(tmp_path, tie_word_embeddings=True).lm_head.weight.detach().clone()
    head[30:] = head[30:].flip(0)
    edit_weights(tmp_path, lm_head__weight=head)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    written = assert_writes_as(model, tmp_path, model_impl=model_impl)
    assert (head[written] != model.get_input_embeddings().weight[written]).any()
    assert ("runs untied" in caplog.text) == (model_impl == "native")


def test_what_to_do_with_pickled_weights_is_said_and_helps(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    advice = f"AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}).save_pretrained(...)"
    with pytest.raises(ValueError, match=re.escape(f"(found pytorch_model.bin); transformers writes them: {advice}")):
        make_engine(str(tmp_path), num_kv_blocks=8)
    AutoModelForCausalLM.from_pretrained(str(tmp_path)).save_pretrained(tmp_path / "new")
    assert_writes_as(model, tmp_path / "new")


@pytest.mark.parametrize("what", ["float64", "names without a prefix"])
def test_weights_that_titans_decoder_does_not_read_and_transformers_does_are_told_so(tmp_path: Path, what: str) -> None:
    model = make_model(tmp_path)
    whole, path = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    changed = {name.removeprefix("model."): each for name, each in whole.items()}
    if what == "float64":
        changed = {name: each.double() for name, each in whole.items()}
    save_file(changed, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="model_impl='transformers'"):
        make_engine(str(tmp_path), num_kv_blocks=8)
    assert_writes_as(model, tmp_path, model_impl="transformers")


def mask(num_slots: int) -> Tensor:
    return torch.ones(1, 1, num_slots, num_slots, dtype=torch.bool).tril()


LEFT_OVER: dict[str, dict[str, Tensor]] = {
    "gpt2": {"transformer__h__0__attn__bias": mask(9), "transformer__h__1__attn__masked_bias": torch.tensor(-1e4)},
    "codegen": {"transformer__h__2__attn__causal_mask": mask(9)},
    "deepseek_v3": {"model__layers__3__mlp__down_proj__weight": torch.ones(2, 2), "model__layers__4__enorm__weight": torch.ones(2)},
}
"""Stored masks, and layers behind those of a model that predict further tokens."""


@pytest.mark.parametrize("name", LEFT_OVER)
def test_masks_and_layers_that_predict_further_tokens_may_be_left_over(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint(FAMILIES[name], tmp_path)
    checkpoint.model.config.num_nextn_predict_layers = 2
    edit_weights(Path(checkpoint.path), **LEFT_OVER[name])
    assert_writes_as(AutoModelForCausalLM.from_pretrained(checkpoint.path), checkpoint.path)


SURPLUS = ("model.layers.5.enorm.weight", "model.layers.2.attn.bias", "model.layers.2.c_attn.bias", "model.h.0.attn.bias")


@pytest.mark.parametrize("surplus", SURPLUS)
def test_what_else_is_left_over_is_refused(tmp_path: Path, surplus: str) -> None:
    checkpoint = Checkpoint(FAMILIES["deepseek_v3"], tmp_path)
    checkpoint.model.config.num_nextn_predict_layers = 2
    edit_weights(Path(checkpoint.path), **{surplus.replace(".", "__"): torch.ones(2)})
    with pytest.raises(ValueError, match=f"unexpected {surplus}"):
        make_engine(checkpoint.path, num_kv_blocks=16)


def test_chunked_reads_give_the_whole_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, "qwen3")
    whole = load(tmp_path, pack=False)
    monkeypatch.setattr("titan.models.decoder_weights.CHUNK_BYTES", 4 * 48 * 7)
    assert_same_weights(whole, load(tmp_path, pack=False))


def test_demo_names_are_folders_of_the_package() -> None:
    assert resolve_model("demo", "target").endswith("titan/demo/target")
    assert resolve_model("demo", "draft").endswith("titan/demo/draft")
    assert resolve_model("some/model", "draft") == "some/model"


def test_the_tokenizer_is_read_if_there_is_one(tmp_path: Path) -> None:
    make_model(tmp_path)
    files = ModelFiles(str(tmp_path))
    assert load_tokenizer(files) is None
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(files)
    assert tokenizer is not None and tokenizer.convert_tokens_to_ids("b") == 1


def test_a_tokenizer_is_not_mistral_commons_even_if_that_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tokenization_auto.TOKENIZER_MAPPING_NAMES, "mistral", "MistralCommonBackend")
    monkeypatch.setattr("transformers.integrations.mistral.tokenizer.is_mistral_common_available", lambda: True)
    theirs = object()
    monkeypatch.setattr("transformers.tokenization_mistral_common.MistralCommonBackend.from_pretrained", lambda *_, **__: theirs)
    make_model(tmp_path, "mistral")
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    assert AutoTokenizer.from_pretrained(tmp_path) is theirs
    tokenizer = load_tokenizer(ModelFiles(str(tmp_path)))
    assert tokenizer is not None and tokenizer.encode("the dog") == make_tokenizer().encode("the dog")


def test_a_tokenizer_of_tekken_alone_is_not_read_without_its_beginning_of_sequence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(tmp_path, "mistral")
    special = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(("<unk>", "<s>", "</s>"))]
    letters = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)]
    config = {"pattern": r"\S+|\s+", "default_vocab_size": 259, "default_num_special_tokens": 3, "version": "v7"}
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": letters, "special_tokens": special}))
    assert AutoTokenizer.from_pretrained(tmp_path, mistral_format=False).encode("a") == [3 + ord("a")], (
        "mistral-common's is [1, 100]"
    )
    assert load_tokenizer(ModelFiles(str(tmp_path))) is None
    assert "has no tokenizer but tekken.json, which is not read: it needs a tokenizer.json beside it" in caplog.text


@pytest.mark.parametrize(("token", "num_others"), [("[INST]", 100_000), ("[HELLO]", 100_000), ("[INST]", 10)])
def test_of_mistrals_large_vocabularies_alone_the_pattern_is_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str, num_others: int
) -> None:
    """Theirs has single digits, and tokenizer.json another one, as other tokenizers have it whose models are of the same type."""
    make_model(tmp_path, "mistral")
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("transformers_version", "_"))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*letters, "12", *(f"unused {i}" for i in range(num_others))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("1", "2")]))
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\S+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=[token]).save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelFiles(str(tmp_path)))
    assert loaded is not None
    is_corrected = token == "[INST]" and num_others == 100_000
    expected = ["1", "2"] if is_corrected else ["12"]
    assert loaded.convert_ids_to_tokens(loaded.encode("12", add_special_tokens=False)) == expected
    monkeypatch.setattr("transformers.__version__", "5.3.0")
    if is_corrected:
        with pytest.raises(ValueError, match=r"cannot be read .*: its pattern may be wrong.* from 5\.5 on: 5\.3\.0 is installed"):
            load_tokenizer(ModelFiles(str(tmp_path)))
    else:
        assert load_tokenizer(ModelFiles(str(tmp_path))) is not None


@pytest.mark.parametrize(("missing", "name"), [("sentencepiece", "tokenizer.model"), ("protobuf", "sentencepiece.bpe.model")])
def test_what_reads_a_tokenizer_of_sentencepiece_is_named_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, name: str
) -> None:
    for package in ("sentencepiece", "protobuf"):
        monkeypatch.setattr(f"transformers.utils.import_utils.is_{package}_available", lambda found=package != missing: found)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / name).write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(
        ValueError, match=rf"{re.escape(name)}\): `pip install sentencepiece protobuf`, with which {re.escape(name)} can be"
    ):
        load_tokenizer(ModelFiles(str(tmp_path)))


@pytest.mark.parametrize("own", [None, "{{ messages }} of the tokenizer"])
def test_a_chat_template_beside_a_tokenizer_counts_where_it_has_none(tmp_path: Path, own: str | None) -> None:
    tokenizer = copy(make_tokenizer())  # others have the same one
    tokenizer.chat_template = own
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages }} of the processor"}')
    loaded = load_tokenizer(ModelFiles(str(tmp_path)))
    assert loaded is not None and loaded.chat_template == (own or "{{ messages }} of the processor")


@pytest.mark.parametrize("has_instructions", [False, True])
def test_auto_dtype_avoids_emulated_half_precision(monkeypatch: pytest.MonkeyPatch, has_instructions: bool) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_instructions)
    expected = torch.bfloat16 if has_instructions else torch.float32
    assert resolve_dtype("auto", torch.bfloat16, cpu_backend()) == expected
    assert resolve_dtype("auto", torch.float32, cpu_backend()) == torch.float32
    assert resolve_dtype("auto", torch.bfloat16, triton_backend()) == torch.bfloat16
    assert resolve_dtype("bfloat16", torch.float32, cpu_backend()) == torch.bfloat16
    assert resolve_dtype(torch.float16, torch.float32, cpu_backend()) == torch.float16


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_auto_dtype_is_that_of_the_weights_if_the_config_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_impl: str, stored: torch.dtype
) -> None:
    """As transformers has it, on a back end that emulates none."""
    monkeypatch.setattr(TorchBackend, "supports", lambda self, dtype: True)
    make_model(tmp_path / "whole").to(stored).save_pretrained(tmp_path, max_shard_size="15KB")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({name: entry for name, entry in json.loads(path.read_text()).items() if "dtype" not in name}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    backend, options = TorchBackend(torch.device("cpu")), {"dtype": "auto", "model_impl": model_impl, "num_kv_blocks": 8}
    engine = make_engine(str(tmp_path), backend=backend, **options)
    assert engine.dtype == engine.kv.tensors["target"].layout.dtype == model.dtype == stored
    assert make_engine(str(tmp_path), backend=backend, **options | {"dtype": "float32"}).dtype == torch.float32


def test_weights_that_are_quantised_and_their_scales_do_not_decide_on_the_dtype(tmp_path: Path) -> None:
    weights = {"up": torch.ones(64, 64, dtype=torch.float8_e4m3fn), "blocks": torch.ones(64, 64, dtype=torch.uint8)}
    weights |= {"up_scale_inv": torch.ones(2, 2), "embedding": torch.ones(9, 64, dtype=torch.bfloat16)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert weights_dtype(ModelFiles(str(tmp_path))) == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float64", "half", torch.int8, torch.float64])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: str | torch.dtype) -> None:
    make_model(tmp_path)
    with pytest.raises(ValueError, match="is not allowed: it must be one of auto, float32, bfloat16, float16"):
        load(tmp_path, dtype)


@pytest.mark.parametrize("draft_tree", ["chain", "dynamic"])
def test_rotations_are_those_of_the_positions_that_are_run(tmp_path: Path, draft_tree: str) -> None:
    """Of the target and of the draft, which drafts up to the last of them."""
    model, prompt = make_model(tmp_path, max_position_embeddings=4096), [3, 4, 5]
    written = model.generate(torch.tensor([prompt]), max_new_tokens=37, do_sample=False, eos_token_id=None)
    engine = make_engine(str(tmp_path), str(tmp_path), max_model_len=40, num_kv_blocks=16, draft_tree=draft_tree)
    for each in (engine._target, engine.drafter.model):
        assert {len(weights.rope_table) for weights in each.layer_weights} == {40}
    assert run_all(engine, [prompt], [greedy(None, ignore_eos=True)]) == [written[0, 3:].tolist()]
    assert engine.metrics().mean_acceptance_length > 3


MEASURE_PEAKS = """
import sys, torch
from titan.kernels.backend import choose_backend
from titan.models.files import ModelFiles
from titan.models.loader import load_model, open_model
backend = choose_backend(torch.device("cpu"))
def load(folder, dtype):
    return load_model(open_model(ModelFiles(folder), implementation), dtype=dtype, backend=backend)
def status(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))
implementation, tiny, folder, *dtypes = sys.argv[1:]
for dtype in dtypes:
    load(tiny, dtype)  # imports and code pages are not the weights'
    found, before = [], status("VmRSS")
    for _ in range(2):  # on a busy machine, what one thread has read waits for another
        open("/proc/self/clear_refs", "w").write("5")  # resets the high-water mark
        model = load(folder, dtype)
        found.append((status("VmHWM") - before, status("VmRSS") - before))
        del model
    print(*min(found))
"""


def measure_memory(implementation: str, tiny: Path, large: Path, *dtypes: str) -> Iterator[tuple[int, int]]:
    """Yield the bytes that loading a model takes at its peak, and those that it keeps, in each of some dtypes."""
    arguments = [sys.executable, "-c", MEASURE_PEAKS, implementation, str(tiny), str(large), *dtypes]
    run = subprocess.run(arguments, check=True, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    for line in run.stdout.splitlines():
        peak, kept = map(int, line.split())
        yield peak, kept


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is read from Linux's /proc")
def test_loading_peaks_at_little_more_than_the_weights(tmp_path: Path) -> None:
    """Of some 100 and 200 MB."""
    make_model(tmp_path / "tiny")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    model = make_model(tmp_path / "large", **sizes, num_hidden_layers=12, vocab_size=8000)
    in_bfloat16, in_float32 = (
        peak for peak, _ in measure_memory("native", tmp_path / "tiny", tmp_path / "large", "bfloat16", "float32")
    )
    assert model.num_parameters() > 50e6
    assert in_bfloat16 <= 1.2 * 2 * model.num_parameters()
    assert in_float32 <= 1.2 * 4 * model.num_parameters()


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_a_model_of_transformers_does_not_change_with_its_files(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although weights are read in place, and some are used as they are stored."""
    monkeypatch.setattr("titan.models.weight_files.MAX_COPIED_BYTES", 0)
    make_model(tmp_path)
    backend = cpu_backend() if name == "cpu" else TorchBackend(torch.device("cpu"))
    engine = make_engine(str(tmp_path), backend=backend, model_impl="transformers")
    expected = run_all(engine, [[3, 4, 5]], [greedy(8, ignore_eos=True)])
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        file.seek(start)
        file.write(bytes(path.stat().st_size - start))
    assert run_all(engine, [[3, 4, 5]], [greedy(8, ignore_eos=True)]) == expected


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is read from Linux's /proc")
def test_loading_experts_through_transformers_peaks_at_the_weights_and_one_layer(tmp_path: Path) -> None:
    """Of some 100 MB in bfloat16, as which their weights stay in memory in float32 as well; a layer is widened at a time."""
    sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True}
    for name, size, num_layers in (("tiny", 64, 1), ("large", 512, 16)):
        config = Qwen3MoeConfig(hidden_size=size, moe_intermediate_size=size, num_hidden_layers=num_layers, **sizes)
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / name, max_shard_size="30MB")
    num_bytes = 2 * model.num_parameters()
    layer = sum(each.nbytes for each in model.model.layers[0].parameters())
    assert num_bytes > 100e6
    for peak, kept in measure_memory("transformers", tmp_path / "tiny", tmp_path / "large", "bfloat16", "float32"):
        assert peak <= 1.2 * num_bytes + 3 * layer  # of 16 bits, and widened
        assert kept <= 1.1 * num_bytes
