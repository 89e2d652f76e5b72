"""Folders, files and hub repositories that are no models, or damaged ones: the command line says in one line what is wrong."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects
from text_tools import make_tokenizer
from tiny_models import edit_weights, make_model
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from titan import LLM
from titan.bench.load import parse_arguments
from titan.cli import main
from titan.core.dtypes import RUN_DTYPES
from titan.kernels.torch.backend import TorchBackend
from titan.models.files import ModelFiles
from titan.models.loader import load_model, open_model

Damage = Callable[[Path], object]
INDEX = "model.safetensors.index.json"
READ = "a model is a folder or hub id with config.json and weights in safetensors"
CONFIG = "has a config.json that cannot be used: "
SIZE = "is not allowed: it must be an integer from 1 to 16777216"
NATIVE = f"{CONFIG}model_impl='native' is not allowed for this model: it must be 'auto' or 'transformers', since "
UNUSABLE = "has a checkpoint that cannot be used: "
UNFIT = f"{UNUSABLE}the weights do not fit LlamaForCausalLM: "
NOT_FINITE = "has numbers that are not finite in float32: NaN and infinities are not allowed"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in one file, and beside it another in shards."""
    folder = tmp_path_factory.mktemp("whole")
    for name, size in (("one", "1GB"), ("shards", "30KB")):
        make_model(folder / name, max_shard_size=size)
        make_tokenizer().save_pretrained(folder / name)
    return folder


def write(file: str, content: str) -> Damage:
    return lambda folder: (folder / file).write_text(content, encoding="utf-8")


def edit(file: str, **changes: Any) -> Damage:
    """Change entries of a JSON file."""
    return lambda folder: (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))


def config(**changes: Any) -> Damage:
    return edit("config.json", **changes)


def weights(**changes: Tensor | None) -> Damage:
    return partial(edit_weights, **changes)


def only(file: str, content: str) -> Damage:
    """Leave nothing but a file."""

    def damage(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        write(file, content)(folder)

    return damage


QUANTISATION = f"{CONFIG}quantization_config='gptq' is not allowed: it must be an object with quant_method, or null"
ADAPTER = "is an adapter (LoRA) of 'some/base', not a model: merge it into that one, and give the merged model"
BROKEN: dict[str, tuple[Damage, str]] = {
    "no config": (only("notes.txt", ""), f"has no config.json (found notes.txt): {READ}"),
    "GGUF": (only("a-Q4.gguf", ""), f"has weights in GGUF (a-Q4.gguf), which is not supported: {READ}"),
    "adapter": (only("adapter_config.json", '{"base_model_name_or_path": "some/base"}'), ADAPTER),
    "half a config": (write("config.json", "{"), "has a config.json that is not JSON: ..."),
    "binary config": (lambda folder: (folder / "config.json").write_bytes(b"\xff"), "has a config.json that is not JSON: ..."),
    "config of a list": (write("config.json", "[]"), "has a config.json that is not a JSON object"),
    "architecture": (config(architectures=["GPT2"]), f"{NATIVE}architectures names GPT2; supported are LlamaForCausalLM, ..."),
    "no architecture": (config(architectures=None), f"{NATIVE}architectures names no architecture; supported are ..."),
    "architectures": (config(architectures=5), f"{CONFIG}architectures=5 is not allowed: it must be a list of names"),
    "model type": (config(model_type="bert"), f"{NATIVE}model_type='bert' does not fit LlamaForCausalLM: it must be 'llama'"),
    "quantized": (
        config(quantization_config={"quant_method": "gptq"}),
        f"{NATIVE}quantization_config says that the weights are quantized (gptq), which is not supported: use float32, ...",
    ),
    "activation": (config(hidden_act="gelu"), f"{NATIVE}hidden_act='gelu' is not supported: it must be one of silu, ..."),
    "later tokens": (config(is_causal=False), f"{NATIVE}is_causal=False is not supported: it must be true"),
    "no KV heads": (config(num_key_value_heads=0), f"{CONFIG}num_key_value_heads=0 {SIZE}"),
    "text for a size": (config(hidden_size="48"), f"{CONFIG}hidden_size='48' {SIZE}"),
    "null for a size": (config(num_hidden_layers=None), f"{CONFIG}...num_hidden_layers..."),  # in the words of transformers
    "part of a head": (config(head_dim=2.5), f"{CONFIG}head_dim=2.5 {SIZE}"),
    "heads": (config(num_key_value_heads=3), f"{CONFIG}num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    "odd head": (config(head_dim=3), f"{CONFIG}head_dim=3 is odd: rotary embeddings need an even one"),
    "dtype": (config(dtype="int8"), f"{CONFIG}dtype='int8' is not supported; allowed: 'float32', 'bfloat16', 'float16'"),
    "text for a quantisation": (config(quantization_config="gptq"), QUANTISATION),
    "eps": (config(rms_norm_eps=-1.0), f"{CONFIG}rms_norm_eps=-1.0 is not allowed: it must be a number in [0, 1)"),
    "truth": (config(mlp_bias="no"), f"{CONFIG}...mlp_bias"),  # in the words of transformers
    "theta": (
        config(rope_parameters={"rope_type": "default", "rope_theta": "1e4"}),
        f"{CONFIG}rope_theta='1e4' is not allowed: it must be a number in (0, inf)",
    ),
    "rope type": (config(rope_parameters={"rope_type": "spiral"}), f"{NATIVE}rope type 'spiral' is not supported: ... default, "),
    "rope without a factor": (config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), f"{CONFIG}...factor"),
    "part of a rotation": (config(partial_rotary_factor=0.5), f"{NATIVE}partial_rotary_factor=0.5 is not supported: it must be 1"),
    "end token": (
        edit("generation_config.json", eos_token_id="a"),
        "has a generation_config.json that cannot be used: eos_token_id='a' is not allowed: it must be a token id, a list ...",
    ),
    "tokenizer": (write("tokenizer.json", '{"a'), "has a tokenizer.json that is not JSON: ..."),
    "tokenizer of a list": (write("tokenizer.json", "[]"), "has a tokenizer.json that is not a JSON object"),
    "tokenizer of no parts": (write("tokenizer.json", "{}"), "has a tokenizer that cannot be read (tokenizer.json, ..."),
    "tokenizer of nothing": (
        edit("tokenizer.json", model={"type": "BPE", "vocab": {}, "merges": []}),
        "has a tokenizer without a vocabulary (tokenizer.json, ...): it knows special tokens only",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "a.bin"),
        f"has no weight file model.safetensors: weights must be in model.safetensors or in the files of {INDEX}, ... (found a.bin)",
    ),
    "weights of another kind": (
        config(transformers_weights="a.bin"),
        "has a config.json with transformers_weights='a.bin', which is not allowed: it must be the name of a .safetensors or ...",
    ),
    "weights elsewhere": (
        config(transformers_weights="../one/model.safetensors"),
        "has a config.json with transformers_weights='../one/model.safetensors', which is not allowed: it must be the name of ...",
    ),
    "weights cut short": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\x00" * 20),
        "has a damaged weight file model.safetensors: ...",
    ),
    "a clone without its weights": (
        write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:4665d3\nsize 1234567\n"),
        "has a damaged weight file model.safetensors: it is a pointer of Git LFS, and `git lfs pull` gets the file",
    ),
    "another name": (
        weights(lm_head__weight=None, gate__weight=torch.ones(1)),
        f"{UNFIT}missing lm_head.weight; unexpected gate.weight; of another shape none",
    ),
    "names without a prefix": (
        weights(model__norm__weight=None, norm__weight=torch.ones(48)),
        f"{UNFIT}missing model.norm.weight; unexpected norm.weight; of another shape none; "
        "model_impl='transformers' takes names without 'model.' as well",
    ),
    "many missing": (config(num_hidden_layers=4), f"{UNFIT}missing ... and 13 more; unexpected none; ..."),
    "shape": (weights(model__norm__weight=torch.ones(7)), f"{UNFIT}... of another shape model.norm.weight ([7], not [48])"),
    "integers": (
        weights(model__norm__weight=torch.ones(48, dtype=torch.int8)),
        f"{UNUSABLE}weight 'model.norm.weight' has dtype I8, which is not supported: it must be one of F32, BF16, F16; "
        "integers and float8 need a quantization_config, which says what they stand for",
    ),
    "float8": (
        weights(model__norm__weight=torch.ones(48).to(torch.float8_e4m3fn)),
        "... has dtype F8_E4M3, which is not supported: it must be one of F32, BF16, F16; integers and float8 need a ...",
    ),
    "NaN": (weights(model__norm__weight=torch.full((48,), torch.nan)), f"{UNUSABLE}weight 'model.norm.weight' {NOT_FINITE}"),
    "infinity": (
        weights(lm_head__weight=torch.ones(131, 48).index_fill(0, torch.tensor(130), -torch.inf)),
        f"{UNUSABLE}weight 'lm_head.weight' {NOT_FINITE}",
    ),
    "a number for a shard": (
        edit(f"../shards/{INDEX}", weight_map={"lm_head.weight": 7}),
        f"has a {INDEX} with weight_map['lm_head.weight']=7, which is not allowed: it must be the name of a .safetensors file ...",
    ),
    "no map of shards": (
        edit(f"../shards/{INDEX}", weight_map=None),
        f"has a {INDEX} with weight_map=None, which is not allowed: it must be an object of weights and their files",
    ),
    "a weight in two shards": (
        lambda folder: edit_weights(
            folder.parent / "shards",
            max((folder / "../shards").glob("model-*")).name,
            model__embed_tokens__weight=torch.ones(131, 48),
        ),
        "has the weight 'model.embed_tokens.weight' in several files, with other numbers in model-000...safetensors: allowed ...",
    ),
    "a shard is missing": (
        lambda folder: min((folder / "../shards").glob("model-*")).unlink(),
        "has no weight file model-00001-of-...",
    ),
}


NATIVE_ONLY = {
    "architecture",
    "no architecture",
    "model type",
    "quantized",
    "activation",
    "later tokens",
    "rope type",
    "part of a rotation",
}
"""What is refused with model_impl="native" alone: else such models go to transformers."""

CODE = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
SAME = ("another name", "many missing", "shape", "NaN", "no weights", "weights cut short")
"""What is said of weights whoever runs the model."""
TRANSFORMERS: dict[str, tuple[Damage, str]] = {name: BROKEN[name] for name in SAME} | {
    "integers": (
        weights(model__norm__weight=torch.ones(48, dtype=torch.int8)),
        f"{UNUSABLE}weight 'model.norm.weight' has dtype int8: integers and float8 need a quantization_config, ...",
    ),
    "float8": (
        weights(lm_head__weight=torch.full((131, 48), torch.nan).to(torch.float8_e4m3fn)),
        f"{UNUSABLE}weight 'lm_head.weight' has dtype F8_E4M3, which is not supported: ...; integers and float8 need a ...",
    ),
    "heads": (config(num_attention_heads=5), f"{CONFIG}...(48)...(5)..."),  # in the words of transformers
    "shared heads": (config(num_key_value_heads=3), f"{CONFIG}num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    "no layers": (config(num_hidden_layers=0), f"{CONFIG}num_hidden_layers=0 {SIZE}"),
    "dtype": (config(dtype="float64"), f"{CONFIG}dtype='float64' is not supported; allowed: 'float32', 'bfloat16', 'float16'"),
    "no dtype": (config(dtype="bogus"), f"{CONFIG}dtype='bogus' is not supported; allowed: 'float32', 'bfloat16', 'float16'"),
    "text for a quantisation": (config(quantization_config="gptq"), QUANTISATION),
    "later tokens": (config(is_causal=False), f"{CONFIG}LlamaAttention has attention that is not causal, ..."),
    "activation": (config(hidden_act="boo"), f"{CONFIG}hidden_act='boo' is not supported; allowed: 'gelu', ..."),
    "rope type": (
        config(rope_parameters={"rope_type": "spiral"}),
        f"{CONFIG}rope_type='spiral' is not supported; allowed: 'default', 'linear', ...",
    ),
}
"""Of models that transformers runs."""

CONFIG_ALONE: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": ({"model_type": "llamma"}, "model_type='llamma' is unknown to transformers ...: allowed are its causal ..."),
    "no type": ({}, "model_type=None is unknown to transformers ..."),
    "code": (
        {"model_type": "mine", "auto_map": CODE},
        "model_type='mine' is unknown to transformers ..., and auto_map={... names code of the checkpoint: allowed with "
        "trust_remote_code=True",
    ),
    "no language model": ({"model_type": "vit"}, "model_type='vit' is none of transformers' causal language models, nor ..."),
    "images without a language model's config": ({"model_type": "idefics"}, "...nor of its ... whose config has one of a ..."),
    "a language model beside sound": ({"model_type": "qwen2_audio"}, "model_type='qwen2_audio' is none of transformers' ..."),
    "a head inside another model": (
        {"model_type": "blip-2"},
        "the head of Blip2ForConditionalGeneration does not run apart from its decoder, which is not supported: ...",
    ),
    "a head that is no module of the model": (
        {"model_type": "blip"},
        "the decoder of BlipForConditionalGeneration does not turn a token into hidden states, which is not supported: ...",
    ),
    "encoder-decoder": ({"model_type": "t5"}, "model_type='t5' is an encoder-decoder, which is not supported"),
    "ALiBi": ({"model_type": "bloom"}, "model_type='bloom' has ALiBi, which is not supported: it must take position ids"),
    "later tokens of a prompt": (
        {"model_type": "paligemma"},
        "model_type='paligemma' has attention that is not causal within a prompt, which is not supported",
    ),
    "state space": (
        {"model_type": "mamba", "num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 9},
        "...keeps another state than keys and values, which is not supported...",
    ),
    "linear attention": ({"model_type": "qwen3_next"}, "layer type 'linear_attention' keeps another state than keys and values..."),
    "windows of nothing": ({"model_type": "mixtral", "sliding_window": 0}, f"sliding_window=0 {SIZE}"),
    "no heads, by which transformers divides": (
        {"model_type": "gemma2", "num_attention_heads": 0},
        f"num_attention_heads=0 {SIZE}",
    ),
    "no heads inside": ({"model_type": "gemma3", "text_config": {"num_attention_heads": 0}}, f"num_attention_heads=0 {SIZE}"),
    "no layers, by another name": ({"model_type": "gpt2", "n_layer": 0}, f"n_layer=0 {SIZE}"),
    "an activation, by another name": (
        {"model_type": "gpt2", "activation_function": "boo"},
        "activation_function='boo' is not ...",
    ),
    "a rope type of some layers": (
        {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "spiral", "rope_theta": 1e4}}},
        "rope_type='spiral' is not supported; allowed: 'default', ...",
    ),
    "a dtype inside": ({"model_type": "gemma3", "text_config": {"dtype": "float64"}}, "dtype='float64' is not supported; ..."),
    "quantiser": (
        {"model_type": "llama", "quantization_config": {"quant_method": "quanto"}},
        "quantization_config has quant_method='quanto', which cannot be loaded here: transformers reads no quantised ...",
    ),
    "unknown quantiser": (
        {"model_type": "llama", "quantization_config": {"quant_method": "magic"}},
        "quantization_config has quant_method='magic', which cannot be loaded here: Unknown quantization type...'torchao'...",
    ),
}
"""Configs without weights: none are looked for."""


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_broken_model_of_transformers_is_refused_by_what_is_wrong(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    shutil.copytree(whole / "one", tmp_path, dirs_exist_ok=True)
    damage, message = TRANSFORMERS[name]
    damage(tmp_path)
    assert_refused(capsys, str(tmp_path), f"model {str(tmp_path)!r} {message}", "--model-impl", "transformers")


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 64}
    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=4, **sizes)
    MixtralForCausalLM(config).save_pretrained(folder := tmp_path_factory.mktemp("experts"))
    return folder


def expert(i: int, name: str) -> str:
    return f"model.layers.1.block_sparse_moe.experts.{i}.{name}.weight"


EXPERTS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "one weight missing": ({expert(2, "w1"): None}, f"missing {expert(2, 'w1')}; unexpected none; of another shape none"),
    "another number": (  # stacked in order, they would be as many as they should be
        {expert(2, "w1"): None, expert(4, "w1"): torch.ones(24, 16)},
        f"missing {expert(2, 'w1')}; unexpected none; of another shape none",
    ),
    "shape": (
        {expert(3, "w2"): torch.ones(16, 23)},
        f"missing none; unexpected none; of another shape {expert(3, 'w2')} ([16, 23], not [16, 24])",
    ),
    "a whole expert surplus": (
        {expert(4, "w1"): torch.ones(24, 16), expert(4, "w2"): torch.ones(16, 24), expert(4, "w3"): torch.ones(24, 16)},
        "missing none; unexpected none; of another shape model.layers.1.mlp.experts.down_proj ([5, 16, 24], not [4, 16, 24]), ",
    ),
}
"""What is wrong with the weights of experts, which transformers stacks without a look at their numbers."""


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_that_differ_from_one_another_are_refused_by_name(with_experts: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(with_experts, tmp_path, dirs_exist_ok=True)
    changes, message = EXPERTS[name]
    weights(**{each.replace(".", "__"): weight for each, weight in changes.items()})(tmp_path)
    with pytest.raises(ValueError, match=re.escape(f"the weights do not fit MixtralForCausalLM: {message}")):
        load_model(open_model(ModelFiles(str(tmp_path))), dtype="float32", backend=TorchBackend(torch.device("cpu")))


@pytest.mark.parametrize("name", CONFIG_ALONE)
def test_what_cannot_run_is_refused_by_its_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    content, message = CONFIG_ALONE[name]
    write("config.json", json.dumps(content))(tmp_path)
    assert_refused(capsys, str(tmp_path), f"model {str(tmp_path)!r} {CONFIG}{message}")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_by_what_is_wrong(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    damage, message = BROKEN[name]
    damage(tmp_path / "one")
    folder = tmp_path / ("shards" if "shard" in name else "one")
    options = ("--model-impl", "native") if name in NATIVE_ONLY else ()
    assert_refused(capsys, str(folder), f"model {str(folder)!r} {message}", *options)


def assert_refused(capsys: pytest.CaptureFixture[str], model: str, message: str, *options: str) -> None:
    """The command line ends with 2 and this line; "..." stands for anything."""
    assert main(["generate", "the", "--model", model, "--dtype", "float32", *options]) == 2
    out, err = capsys.readouterr()
    [line] = [line for line in err.splitlines() if line.startswith("titan: ")]
    start, *rest = f"titan: {message}".split("...")
    assert out == "" and line.startswith(start) and err.endswith(f"{line}\n")
    assert all(part in line[len(start) :] for part in rest) if rest else line == start


def test_a_file_is_no_folder(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (gguf := tmp_path / "a.gguf").touch()
    folder = whole / "one"
    file = str(folder / "model.safetensors")
    assert_refused(capsys, str(gguf), f"model {str(gguf)!r} is a GGUF file, which is not supported: {READ}")
    assert_refused(capsys, file, f"model {file!r} is a file: give its folder, {str(folder)!r}, with config.json in it")


def test_code_of_a_checkpoint_is_neither_run_nor_asked_about(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", asked := Mock(return_value="y"))
    shutil.copytree(whole / "one", folder := tmp_path / "one")
    write("custom.py", f"open({str(tmp_path / 'was run')!r}, 'w')\nclass Custom: pass")(folder)
    edit("tokenizer_config.json", tokenizer_class="Custom", auto_map={"AutoTokenizer": ["custom.Custom", None]})(folder)
    config(auto_map={"AutoConfig": "custom.Custom", "AutoModelForCausalLM": "custom.Custom"})(folder)
    message = f"model {str(folder)!r} has a tokenizer_config.json with auto_map=...custom.Custom...: code of checkpoints is run "
    message += "only with trust_remote_code=True"
    assert_refused(capsys, str(folder), message)
    assert not asked.called and not (tmp_path / "was run").exists()


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "a/b/c", "a\0b/c/d", ""])
def test_a_name_that_is_no_hub_id_must_be_a_folder(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert_refused(capsys, name, f"model {name!r} does not exist: it must be 'demo', a folder or a Hugging Face hub id")


class Hub:
    """A hub with copies of models, whose branches have a new commit whenever one looks.

    ``files`` are those that were downloaded, ``revisions`` those asked for, ``commits`` those that branches were found at.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.repositories, self.cache = folder / "hub", folder / "cache"
        self.files: list[str] = []
        self.revisions: list[str | None] = []
        self.commits: list[str] = []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)
        monkeypatch.setattr(huggingface_hub, "list_repo_files", self.list_files)

    def list_files(self, name: str, revision: str | None = None) -> list[str]:
        return files_below(self.repositories / name)

    def download(self, name: str, *, revision: str | None, cache_dir: str | None, **patterns: Any) -> str:
        self.revisions.append(revision)
        if revision is None or revision not in self.commits:
            self.commits.append(revision := f"{len(self.commits):040x}")
        folder = Path(cache_dir or self.cache, name, revision)
        for file in filter_repo_objects(self.list_files(name), **patterns):
            if not (folder / file).exists():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.repositories / name / file, folder / file)
                self.files.append(file)
        return str(folder)


def files_below(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def hub(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    for name, copied in (("some/model", "shards"), ("some/draft", "one")):
        shutil.copytree(whole / copied, folder := tmp_path / "hub" / name)
        for file in (*UNREAD, "qwen.tiktoken", TEMPLATE):
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).touch()
    return Hub(tmp_path, monkeypatch)


SMALL = {"config.json", "generation_config.json"}
TEMPLATE = "additional_chat_templates/tools.jinja"
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "qwen.tiktoken", TEMPLATE}
UNREAD = (
    *("consolidated.safetensors", "pytorch_model.bin", "model-Q4.gguf", "stray.safetensors", "README.md"),
    *("original/params.json", "original/tokenizer.model", "onnx/merges.txt", "onnx/qwen.tiktoken"),
)


def test_of_a_hub_id_what_is_read_is_downloaded_once_and_of_one_commit(hub: Hub, tmp_path: Path) -> None:
    arguments = ["generate", "the", "--model", "some/model", "--draft-model", "some/draft", "--max-tokens", "1"]
    assert main([*arguments, "--revision", "v1"]) == 0
    shards = [path.name for path in (hub.repositories / "some/model").glob("model-*.safetensors")]
    target, draft = [*SMALL, *TOKENIZER, INDEX, *shards], [*SMALL, *TOKENIZER, "model.safetensors"]
    assert len(shards) > 3 and sorted(hub.files) == sorted([*target, *draft])
    of_target, of_draft = hub.commits
    asked = {"v1": 1, of_target: 2, None: 1, of_draft: 2}
    assert Counter(hub.revisions) == asked, "for config, tokenizer and weights; the draft's is its main branch"
    LLM("some/model", device="cpu", download_dir=str(tmp_path / "elsewhere"), num_kv_blocks=8)
    assert set(files_below(tmp_path / "elsewhere/some/model" / hub.commits[2])) == set(target) and len(hub.commits) == 3


def test_each_name_may_have_a_revision_of_its_own(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 8}
    llm = LLM("some/model@v1", "some/draft@refs/pr/1", tokenizer="some/draft@v2", revision="v1", **options)
    llm.swap_draft("some/draft@v3")
    assert set(hub.revisions) - set(hub.commits) == {"v1", "refs/pr/1", "v2", "v3"} and llm.metrics().draft == "some/draft@v3"
    for name, why in (("some/model@v1", "contradicts revision='v2'"), ("some/model@", "not allowed"), ("demo@v1", "not allowed")):
        with pytest.raises(ValueError, match=f"model '{name}' .*{why}"):
            LLM(name, revision="v2", **options)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(hub.repositories / "some/draft", "here@v1")
    asked = len(hub.revisions)
    assert LLM("here@v1", "./here@v1", **options).metrics().draft == "./here@v1" and len(hub.revisions) == asked
    for name, why in (("./here@v2", "'./here@v2' does not exist"), ("hub@v1", "revision='v1' contradicts model 'hub', which is a")):
        with pytest.raises(ValueError, match=why):
            LLM(name, **options)


def test_a_bench_downloads_a_revision_and_takes_its_folder(hub: Hub) -> None:
    args = parse_arguments(["--model", "some/draft", "--revision", "v1", "--scenario", "fair"])
    [commit] = hub.commits
    assert args.model == str(hub.cache / "some/draft" / commit)
    assert hub.revisions[0] == "v1" and set(hub.files) == SMALL | TOKENIZER | {"model.safetensors"}


@pytest.mark.parametrize("broken", ["some/model", "some/draft"])
def test_nothing_large_is_downloaded_before_both_configs_were_read(
    hub: Hub, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    config(quantization_config={"quant_method": "magic"})(hub.repositories / broken)
    options = ["--draft-model", "some/draft"]
    assert_refused(capsys, "some/model", f"{'draft_model=' if 'draft' in broken else 'model'}... quant_method='magic'...", *options)
    assert {name for name in hub.files if "safetensors" in name} == {INDEX}


def test_repositories_of_something_else_are_refused_by_name_without_downloading_it(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (hub.repositories / "some/draft/config.json").unlink()
    message = f"model 'some/draft' has weights in GGUF (model-Q4.gguf), which is not supported: {READ}"
    assert_refused(capsys, "some/draft", message)
    write("adapter_config.json", '{"base_model_name_or_path": "some/base"}')(hub.repositories / "some/draft")
    assert_refused(capsys, "some/draft", f"model 'some/draft' {ADAPTER}")
    monkeypatch.setattr(huggingface_hub, "list_repo_files", Mock(side_effect=OSError))
    assert_refused(capsys, "some/draft", f"model 'some/draft' {ADAPTER}")
    assert not any("safetensors" in name for name in hub.files)


NOT_FOUND = Mock(headers={}, status_code=404)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError("gated", response=NOT_FOUND), "is gated: ask for access on its hub page, then run `hf auth login`"),
        (RepositoryNotFoundError("none", response=NOT_FOUND), "does not exist: it must be 'demo', ... `hf auth login`"),
        (RevisionNotFoundError("none", response=NOT_FOUND), "has no revision='v9': it must be a branch, tag or commit"),
        (LocalEntryNotFoundError("off\nline"), "is no folder, and it cannot be had from the Hugging Face hub: off line"),
        (TypeError("odd"), "is no folder, and it cannot be had from the Hugging Face hub: TypeError: odd"),
    ],
)
def test_hub_errors_name_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, message: str
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=error))
    assert_refused(capsys, "some/model", f"model 'some/model' {message}", "--revision", "v9")


@pytest.mark.parametrize(
    ("stored", "number", "refused", "read"),
    [
        ("float32", 1e5, "float16", "float32"),
        ("bfloat16", 65536.0, "float16", "float32"),  # beyond it by less than bfloat16 tells apart
        ("bfloat16", math.inf, "float32", None),
        ("float16", -math.inf, "bfloat16", None),
    ],
)
def test_numbers_beyond_a_dtype_are_refused_in_that_dtype_only(
    whole: Path, tmp_path: Path, stored: str, number: float, refused: str, read: str | None
) -> None:
    shutil.copytree(whole / "one", tmp_path, dirs_exist_ok=True)
    weights(model__norm__weight=torch.full((48,), number, dtype=RUN_DTYPES[stored]))(tmp_path)
    backend = TorchBackend(torch.device("cpu"))
    if read is not None:
        load_model(open_model(ModelFiles(str(tmp_path))), dtype=read, backend=backend)
    with pytest.raises(ValueError, match=rf"'model\.norm\.weight' has numbers that are not finite in {refused}"):
        load_model(open_model(ModelFiles(str(tmp_path))), dtype=refused, backend=backend)
