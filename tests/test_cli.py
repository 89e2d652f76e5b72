"""The command line's `generate`: trees, and the options that shape them; and `info`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from back_ends import BEST
from text_tools import make_tokenizer
from tiny_models import make_model
from zoo import Zoo

from titan import LLM, RequestOutput, SamplingParams, __version__
from titan.cli import BENCHES, COMMANDS, main
from titan.core.options import ModelOptions, SpeculationOptions
from titan.kernels.cpu.kinds import CPU_KERNELS
from titan.kernels.cpu.library import LoadedLibrary, load_library
from titan.kernels.cpu.runner import TRAITS
from titan.models.decoder import Decoder
from titan.models.loader import load_model

ESCAPE = "\x1b["
ROOT = Path(__file__).parents[1]


@pytest.fixture
def models(zoo: Zoo) -> list[str]:
    return ["--model", zoo.path("llama+text"), "--draft-model", zoo.path("llama~+text"), "--dtype", "float32", "--device", "cpu"]


def generate(*args: str) -> int:
    drafting = ["--speculation", "fixed"] if "--draft-model" in args else []
    return main(["generate", "the dog", "--max-tokens", "12", "--ignore-eos", *drafting, *args])


def generate_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert generate("--json", *args) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize("sampling", [["--temperature", "0.8", "--draft-sampling", "sampled"], []], ids=["sampled", "greedy"])
def test_the_trees_of_a_run_and_of_nothing_else(
    models: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sampling: list[str]
) -> None:
    runs = MagicMock(side_effect=LLM.stream)
    monkeypatch.setattr(LLM, "stream", lambda *args: runs(*args))
    result = generate_json(capsys, *models, *sampling, "--show-tree", "--compare")
    assert [run.args[2].use_speculative for run in runs.call_args_list] == [True, False]
    trees = result["trees"]
    assert len(trees) == result["metrics"]["num_sequence_steps"]
    assert [len(tree["parents"]) for tree in trees] == [len(tree["token_ids"]) for tree in trees]
    emitted = [[tree["token_ids"][node] for node in tree["path"]] + [tree["final_token_id"]] for tree in trees]
    assert [token for tokens in emitted for token in tokens] == result["token_ids"]
    assert [tree["root_token_id"] for tree in trees[1:]] == [tokens[-1] for tokens in emitted[:-1]]
    plain = generate_json(capsys, *models, *sampling)
    assert "trees" not in plain and "speed_up" not in plain and plain["token_ids"] == result["token_ids"]


@pytest.mark.parametrize(
    ("shape", "parents"),
    [
        (["--draft-tree=-1,-1,0"], [-1, 0, -1]),  # the same shape with the path of first children first
        (["--draft-tree", "[-1, 0, -1]"], [-1, 0, -1]),  # as the refusal of another suggests
        (["--draft-tree", "chain"], [-1, 0, 1, 2, 3, 4]),
    ],
)
def test_a_shape_is_a_name_or_parents(
    models: list[str], capsys: pytest.CaptureFixture[str], shape: list[str], parents: list[int]
) -> None:
    assert generate_json(capsys, *models, *shape, "--show-tree")["trees"][0]["parents"] == parents


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--show-tree"], "--show-tree needs a draft: give --draft-model\n"),
        (["--compare"], "--compare needs a draft"),
        (["--compare", "--draft-model", "ngram", "--speculation", "off"], "--compare needs a draft: give no --speculation off\n"),
        (["--speculation", "fixed"], "--speculation needs a draft: give --draft-model\n"),
        (["--compare", "--speculation", "off"], "--compare needs a draft: give --draft-model and no --speculation off\n"),
        (["--draft-tree", "chain"], "--draft-tree needs a draft"),
        (["--draft-weight-bits", "none"], "--draft-weight-bits needs a draft"),
        (["--draft-weight-bits", "8", "--draft-model", "ngram"], "--draft-weight-bits needs a draft model, which 'ngram' is not\n"),
        (["--draft-dtype", "float32", "--draft-model", "ngram"], "--draft-dtype needs a draft model"),
        (["--max-draft-tokens", "3", "--draft-model", "none"], "--max-draft-tokens needs a draft"),
        (["--draft-tree", "star", "--draft-model", "ngram"], "draft_tree='star' is not allowed: it must be 'auto', 'dynamic', "),
    ],
)
def test_what_cannot_be_is_one_line(
    models: list[str], capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert generate(*models[:2], *options) == 2  # without a draft
    captured = capsys.readouterr()
    assert captured.err.startswith("titan: ") and message in captured.err and captured.out == ""


@pytest.mark.parametrize("command", [["generate", "the dog"], ["info"]])
def test_an_option_that_a_command_has_not_is_named_with_those_that_it_has(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--no-such", "3"])
    error = capsys.readouterr().err
    assert error.startswith(f"usage: titan {command[0]} ") and "--model-impl" in error
    assert error.endswith(f"titan {command[0]}: error: unrecognized arguments: --no-such 3\n")


def test_runs_with_and_without_speculation_may_have_the_same_options(models: list[str]) -> None:
    for speculation in ("off", "fixed", "adaptive"):
        assert generate(*models, "--max-draft-tokens", "3", "--speculation", speculation) == 0


def test_sampling_defaults_of_the_model_which_are_not_used_here_may_be_anything(tmp_path: Path) -> None:
    make_model(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"top_p": 0}')
    assert generate("--model", str(tmp_path), "--device", "cpu") == 0


@pytest.mark.parametrize("options", [[], ["--json"], ["--compare"]])
@pytest.mark.parametrize("method", ["generate", "stream"])  # the runs that warm up, and those that are shown
def test_a_generation_that_is_aborted_is_a_failure(
    models: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], method: str
) -> None:
    loaded: list[Decoder] = []
    run = getattr(LLM, method)

    def load(*args: Any, **kwargs: Any) -> Decoder:
        loaded.append(load_model(*args, **kwargs))
        return loaded[-1]

    def break_and_run(*args: Any, **kwargs: Any) -> Any:
        loaded[0].embedding.fill_(torch.nan)
        return run(*args, **kwargs)

    monkeypatch.setattr("titan.engine.load_model", load)
    monkeypatch.setattr(LLM, method, break_and_run)
    assert generate(*models, *options) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("titan: ") and "finite" in captured.err and captured.err.count("\n") == 1
    assert captured.out == ("the dog\n" if method == "stream" and "--json" not in options else "")


@pytest.mark.parametrize(
    ("error", "line"),
    [(RuntimeError("a\nb"), "a b"), (MemoryError(), "MemoryError"), (RecursionError("too deep"), "too deep")],
)
def test_an_error_of_the_machine_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    monkeypatch.setattr("titan.commands.generate.LLM", MagicMock(side_effect=error))
    assert generate() == 1 and capsys.readouterr().err == f"titan: {line}\n"


@pytest.mark.parametrize(
    ("is_terminal", "no_color", "is_colored"), [(False, "", False), (True, None, True), (True, "", True), (True, "1", False)]
)
def test_trees_are_shown_after_the_text_and_before_the_speed_with_colours_on_a_terminal_that_wants_them(
    models: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
    no_color: str | None,
    is_colored: bool,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    assert generate(*models, "--show-tree", "--compare") == 0
    out = capsys.readouterr().out
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert steps and steps[0].endswith(" of 6 draft tokens accepted")
    assert out.startswith("the dog")
    assert out.index("+ accepted, - rejected") < out.index("\nstep 1:") < out.index("tokens/s") < out.index("same text; speed-up")
    num_drafted = sum(int(line.split()[-4]) for line in steps)
    assert f", {num_drafted / len(steps):.2f} draft tokens per step, " in out
    assert out.count("> '") + out.count('> "') == len(steps)
    assert (ESCAPE in out) == is_colored


def test_a_folder_without_a_tokenizer_takes_another_ones(zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    bare, options = ["--model", zoo.path("llama"), "--device", "cpu"], ["--dtype", "float32"]
    assert generate(*bare, *options) == 2
    assert "the model has no tokenizer: allowed are token ids, or text with tokenizer=..." in capsys.readouterr().err
    result = generate_json(capsys, *bare, *options, "--tokenizer", zoo.path("llama+text"))
    assert result["text"] == generate_json(capsys, "--model", zoo.path("llama+text"), *options)["text"] != ""


def test_a_drafter_that_found_nothing_has_an_empty_tree(zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    result = generate_json(capsys, "--model", zoo.path("llama+text"), "--draft-model", "ngram", "--show-tree")
    assert result["trees"][0]["token_ids"] == result["trees"][0]["path"] == []


def info(capsys: pytest.CaptureFixture[str], *options: str, status: int = 0) -> dict[str, str]:
    assert main(["info", "--json", *options]) == status
    facts: dict[str, str] = json.loads(capsys.readouterr().out)
    assert main(["info", *options]) == status
    lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    changing = {"free memory": facts["free memory"]} if "free memory" in facts else {}
    assert {name: value.strip() for name, value in lines} | changing == facts
    return facts


def test_info_says_what_runs_here_and_why_nothing_is_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(CPU_KERNELS, raising=False)
    facts = info(capsys)
    assert (facts["titan"], facts["torch"]) == (__version__, torch.__version__)
    loaded = load_library(BEST)
    assert facts["device"] == f"cpu, {torch.get_num_threads()} threads"  # which is 1
    assert loaded.description in facts["kernels"]
    compiled = "PyTorch" if loaded.library is None else "compiled C++"
    assert [facts[f"layers, {dtype}"] for dtype in ("float32", "bfloat16", "float16")] == [compiled, compiled, "PyTorch"]

    monkeypatch.setenv(CPU_KERNELS, "torch")
    facts = info(capsys)
    assert facts["kernels"] == facts["layers, float32"] == "PyTorch", "as was asked for"

    monkeypatch.delenv(CPU_KERNELS)
    monkeypatch.setattr("titan.kernels.backend.load_library", lambda kind: LoadedLibrary(None, "not compiled: no compiler"))
    assert info(capsys)["kernels"] == "PyTorch, which is several times slower; the C++ was not compiled: no compiler"


def test_info_outlives_a_card_that_is_too_old(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = {"is_available": True, "device_count": 1, "current_device": 0, "get_device_name": "Tesla T4"}
    for name, value in (cuda | {"get_device_capability": (7, 5)}).items():
        monkeypatch.setattr(torch.cuda, name, MagicMock(return_value=value))
    facts = info(capsys)
    assert (facts["device"], facts["kernels"]) == ("Tesla T4", "Triton")
    assert facts["layers, float32"].startswith("none: device='cuda:0' is a Tesla T4 of compute capability 7.5")


def test_info_tells_from_the_config_alone_whether_a_model_runs_and_in_how_much_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CPU_KERNELS, "auto")
    if (loaded := load_library(BEST)).library is None:
        pytest.skip(loaded.description)
    model = make_model(tmp_path, "qwen2", tie_word_embeddings=True, max_position_embeddings=4096)
    (tmp_path / "model.safetensors").unlink()
    facts = info(capsys, "--model", str(tmp_path), "--dtype", "half")
    assert f"Qwen2ForCausalLM, {model.num_parameters():,} weights in float32" in facts["model"]
    assert facts["runs"].startswith("yes, natively in float16: operation by operation in PyTorch, for ")
    assert facts["runs"].endswith(" has no float16")
    assert f"({2 * model.num_parameters():,} bytes) in float16" in facts["weights"]
    sizes = {name: size for name, size in facts.items() if name.startswith("KV")}
    assert sizes == {  # K and V, layers, heads, head_dim, float16
        "KV, 1 token": f"{2 * 2 * 2 * 16 * 2} bytes",
        "KV, 2,048 tokens": "512.0 KiB (524,288 bytes)",
        "KV, 4,096 tokens (all)": "1.0 MiB (1,048,576 bytes)",
    }
    assert info(capsys, "--model", str(tmp_path))["runs"] == "yes, natively in float32: compiled C++ in every layer"
    monkeypatch.setattr("titan.kernels.cpu.backend.OP_TRAITS", TRAITS - {"tied_embedding"})
    assert info(capsys, "--model", str(tmp_path))["runs"].endswith("for compiled C++ has no tied_embedding")

    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_act": "gelu"}))
    facts = info(capsys, "--model", str(tmp_path), "--model-impl", "native", status=1)
    assert facts["runs"].startswith("no: model ") and "hidden_act='gelu' is not supported" in facts["runs"]
    config.rename(tmp_path / "adapter_config.json")
    refused = {("--model", str(tmp_path)): "LoRA", ("--model", str(tmp_path / "none")): "does not exist", ("--model", ""): "''"}
    refused |= {("--model-impl", "native"): "--model-impl='native' needs --model"}
    refused |= {("--trust-remote-code",): "--trust-remote-code needs --model"}
    refused |= {("--revision", "main"): "--revision='main' needs --model", ("--dtype", "half"): "--dtype='half' needs --model"}
    for options, why in refused.items():
        assert main(["info", *options]) == 2 and why in capsys.readouterr().err


SMALL = {"vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "options", "runs", "layers"),
    [
        ({"model_type": "llama"}, [], "natively", "Titan's own decoder"),
        ({"model_type": "llama"}, ["--model-impl", "transformers"], "transformers", "because model_impl='transformers'"),
        (
            {"model_type": "phimoe", "num_key_value_heads": 2},
            [],
            "transformers",
            "on Titan's paged attention, because architectures names PhimoeForCausalLM;",
        ),
        ({"model_type": "falcon"}, [], "gathered", "with an attention of their own, on keys and values gathered for it"),
    ],
)
def test_info_says_whose_layers_run_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], options: list[str], runs: str, layers: str
) -> None:
    name = f"{config['model_type'].title()}ForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps(SMALL | config | {"architectures": [name]}))
    facts = info(capsys, "--model", str(tmp_path), *options)
    assert facts["runs"].startswith(f"yes, {runs} in float32: ") and layers in facts["layers"]
    assert name.lower() in facts["model"].lower() and "KV, 1 token" in facts
    assert facts["model"].endswith("weights in a dtype that the config does not name, here float32")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "passes over other rows round differently in float32;"),
        (["--dtype", "bfloat16"], "passes over other rows round differently in bfloat16 (--dtype float32 gives the same text);"),
        (
            ["--temperature", "1", "--draft-sampling", "sampled"],
            "sampled drafts keep the distribution of the tokens, not the tokens of a seed;",
        ),
    ],
)
def test_compare_says_where_and_why_texts_differ(
    models: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], why: str
) -> None:
    stream = LLM.stream

    def other_sixth_token(llm: LLM, prompt: str, params: SamplingParams) -> Iterator[RequestOutput]:
        for output in stream(llm, prompt, params):
            if not params.use_speculative:
                token_ids = output.outputs[0].token_ids
                token_ids[5:6] = [129 - token_ids[5]] if len(token_ids) > 5 else []
            yield output

    monkeypatch.setattr(LLM, "stream", other_sixth_token)
    place = generate_json(capsys, *models, *options, "--compare")["first_difference"]
    assert place <= 5 if "sampled" in options else place == 5
    assert generate(*models, *options, "--compare") == 0
    assert f"different text from token {place + 1} on, because {why}" in capsys.readouterr().out.splitlines()[-1]


def test_a_prompt_may_be_a_message(models: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}a {{ m.content }}{% endfor %} and")
    chatty = [*models, "--tokenizer", str(tmp_path), "--chat"]
    assert generate_json(capsys, *chatty)["prompt"] == "a the dog and"
    assert generate(*chatty) == 0 and not capsys.readouterr().out.startswith("the dog")
    assert generate(*models, "--chat") == 2 and "--chat cannot be used: messages need a chat template" in capsys.readouterr().err


def test_a_prompt_may_come_from_the_standard_input(
    models: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("the\ndog\n"))
    assert main(["generate", "-", "--json", "--max-tokens", "2", *models]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "the\ndog"
    monkeypatch.setattr(sys, "stdin", StringIO())
    assert main(["generate", "-", *models]) == 2 and "prompt='' has no tokens" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "-", *models]) == 2 and "standard input" in capsys.readouterr().err


def test_it_says_that_nothing_was_drafted_and_what_is_wrong(
    models: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generate(*models[:2], "--draft-model", "ngram", *models[4:], "--max-tokens", "1") == 0
    assert capsys.readouterr().out.endswith("tokens/s, nothing was drafted\n")
    assert generate(*models[:2], *models[4:]) == 0 and "drafted" not in capsys.readouterr().out
    monkeypatch.setattr("titan.commands.generate.faults", lambda metrics: [f"the draft {metrics.draft!r} failed 7 times"])
    assert generate(*models) == 0
    *_, summary, fault = capsys.readouterr().out.splitlines()
    assert "draft tokens per step" in summary and fault.endswith(" failed 7 times")


def test_a_prompt_may_look_like_an_option(models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *models, "--json", "--max-tokens", "2", "--", "--chat"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "--chat"
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "--", "--chat", "--json"])
    assert "unrecognized arguments: --json" in capsys.readouterr().err


def test_an_interrupt_while_a_command_is_imported_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan.cli.import_module", MagicMock(side_effect=KeyboardInterrupt))
    for command in ("generate", "info", "bench"):
        assert main([command, "load"]) == 130 and capsys.readouterr().err == "\ntitan: interrupted\n"


def test_help_lists_commands_and_benches(capsys: pytest.CaptureFixture[str]) -> None:
    for options, listed in ((["--help"], COMMANDS), (["bench", "--help"], BENCHES), (["bench"], BENCHES)):
        with suppress(SystemExit):
            assert main(options) == (0 if "--help" in options else 2)
        out = capsys.readouterr().out
        assert all(f"\n  {name} " in out for name in listed)
    assert main(["bench", "parst"]) == 2 and "there is no benchmark 'parst'; allowed: throughput," in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generat"])
    assert "invalid choice: 'generat'" in capsys.readouterr().err


def test_what_a_command_line_does_not_say_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    made = MagicMock(side_effect=RuntimeError)
    monkeypatch.setattr("titan.commands.generate.LLM", made)
    own = {"max_batch_size": 1, "enable_prefix_caching": False, "generation_config": "vllm"}
    given = {"draft_weight_bits": None, "warm_up": False, "max_model_len": 99}
    for options, passed in (([], {}), (["--draft-weight-bits", "none", "--no-warm-up", "--max-model-len", "99"], given)):
        assert main(["generate", "the dog", *options]) == 1 and made.call_args.kwargs == own | passed


def test_defaults_in_the_help_are_those_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    groups = (ModelOptions, SpeculationOptions, SamplingParams)
    defaults = {each.name: each.default for group in groups for each in fields(group) if each.default is not None}
    defaults |= {"temperature": 0.0, "seed": 0, "max_tokens": 256}  # other than the library's: a first try is to be repeatable
    shown: dict[str, str] = {}
    for text in " ".join(capsys.readouterr().out.split()).split(" --")[1:]:
        if (found := re.search(r"\(default: (.*?)\)", text)) is not None:
            shown[re.split(r"[ =]", text)[0].replace("-", "_")] = found[1]
    assert shown.keys() >= {"speculation", "max_draft_tokens", "top_k", "dtype", "model_impl", "device"}
    assert all(defaults[name] == type(defaults[name])(value) for name, value in shown.items() if name in defaults)


PRINTING = """
import os, sys
from titan.cli import main

def run(output, is_open=True):
    if (child := os.fork()) == 0:
        os.dup2(output, 1) if is_open else (os.close(1), setattr(sys, "stdout", None))
        sys.exit(main(["bench", "--help"]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

reader, writer = os.pipe()
os.close(reader)
run(writer)
run(writer, is_open=False)
run(os.open("/dev/full", os.O_WRONLY))
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_reader_that_leaves_and_a_full_disk_are_no_tracebacks() -> None:
    """Nor is an output that is closed. Of a command that imports nothing."""
    run = subprocess.run([sys.executable, "-c", PRINTING], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (run.stdout, run.stderr) == ("141\n0\n1\n", "titan: [Errno 28] No space left on device\n")


def test_characters_that_the_encoding_of_the_output_lacks_are_escaped(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    written = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(written, encoding="ascii", write_through=True))
    assert main(["generate", "dog é", "--max-tokens", "1", *models]) == 0
    assert written.getvalue().startswith(rb"dog \xe9")
