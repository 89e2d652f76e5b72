"""What only a process of its own shows: what imports bring along, and how it ends while an engine serves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from zoo import Zoo

WATCHDOG_S = 60
"""A process that is forked, and takes so long to end, hangs."""

OWN_PROCESS = """
import atexit, os, signal, sys, threading

def ask_too_late():
    try:
        llm.generate([[5, 6]], use_tqdm=False)
    except RuntimeError as error:
        os.write(1, str(error).encode())

atexit.register(ask_too_late)  # before all others, so that it is called last

import titan.cli
print({"torch"} & sys.modules.keys(), end=" ")
import titan.models.loader
print({"triton", "transformers", "huggingface_hub"} & sys.modules.keys(), flush=True)

import torch
from titan import LLM, SamplingParams
from titan.models import decoder_weights as weights

outputs, devices, start = [], [], threading.Barrier(2)

class WatchedDecoder(weights.Decoder):
    def register_parameter(self, name, parameter):
        devices.append(torch.nn.Linear(2, 2).weight.device.type)
        super().register_parameter(name, parameter)

def load():
    llm = LLM("demo", "demo", device="cpu", num_kv_blocks=32, speculation="fixed")
    params = SamplingParams(temperature=0, max_tokens=8)
    outputs.append(llm.generate("def f(", params, use_tqdm=False)[0].outputs[0].token_ids)

def load_at_once():
    start.wait()
    load()

weights.Decoder = WatchedDecoder
threads = [threading.Thread(target=load_at_once) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
load()
print(set(devices), torch.nn.Linear(2, 2).weight.device.type, outputs[0] == outputs[1] == outputs[2] != [], flush=True)

is_stepping, has_ended = threading.Event(), threading.Event()

def wait(plan, acceptance):
    is_stepping.set()
    has_ended.wait()

def ask(max_tokens):
    llm.generate([[5, 6]], SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False), use_tqdm=False)

llm = LLM(sys.argv[1], dtype="float32", device="cpu", num_kv_blocks=64, warm_up=False)
llm.engine.observers.append(wait)
thread = threading.Thread(target=ask, args=[1])
thread.start()
is_stepping.wait()
if (child := os.fork()) == 0:
    signal.alarm(int(sys.argv[2]))
    atexit.unregister(ask_too_late)
    sys.exit()
_, status = os.waitpid(child, 0)
has_ended.set()
thread.join()
print(os.waitstatus_to_exitcode(status), flush=True)
llm.engine.observers.remove(wait)

has_begun, matrix = threading.Event(), torch.ones(1000, 1000)

def observe(plan, acceptance):
    os.write(1, b"begun ")
    has_begun.set()
    for _ in range(10):
        matrix @ matrix  # during which other threads run
    os.write(1, b"done ")

def answer():
    ask(400)
    os.write(1, b"answered ")

llm.engine.observers.append(observe)
for _ in range(2):
    threading.Thread(target=answer, daemon=True).start()
has_begun.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a platform without fork")
def test_imports_are_light_models_load_in_threads_and_a_process_ends_between_steps(zoo: Zoo) -> None:
    """One process for all, as imports take most of the time; nor do loading in threads and a fork change what torch does."""
    command = [sys.executable, "-c", OWN_PROCESS, zoo.path("llama+text"), str(WATCHDOG_S)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * WATCHDOG_S, check=False)
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    imported, loaded, status_of_fork, last = ended.stdout.split("\n", 3)
    assert imported == "set() set()", "of the command line, and of the loader"
    assert loaded == "{'cpu'} cpu True"
    assert status_of_fork == "0", "a process that is forked beside a step can end"
    *steps, refusal = last.split(" ", 2 * last.count("begun"))
    assert steps == ["begun", "done"] * (len(steps) // 2) and steps
    assert "while its process ends" in refusal and "answered" not in refusal
