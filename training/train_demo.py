"""Train the demo pair: a small code model and the draft distilled from it.

The corpus is the Python standard library that this interpreter carries (test suites and code-page tables left out), so nothing is
downloaded. The target is a wide, shallow Llama; the draft is one thin layer with the same vocabulary, trained on the target's own
distributions (forward KL), mostly over text that the target wrote itself, because that is the text it will have to predict. (Two
layers agree hardly more, 56 % against 55 % held out, and their passes take half as long again.)

    python training/train_demo.py --output titan/demo

Takes about an hour on two CPU cores. With glibc, ``MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592``
in the environment keeps large buffers mapped and saves a quarter of that. Prints and stores in the model cards: held-out loss
and perplexity of both models and the agreement of the draft with the target (share of positions with the same most likely
token).
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup_lr_rate

from titan import LLM, SamplingParams
from titan.bench.prompts import is_held_out, source_files

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
SEQUENCE_LENGTH = 512
MAX_POSITIONS = 2048
TARGET_LR, DRAFT_LR = 3e-3, 6e-3
WRITTEN_SHARE = 0.75
"""Share of the draft's training windows that come from the target's own text."""
WRITTEN_LENGTH = 256


@dataclass(frozen=True)
class Corpus:
    """Token streams (int64) of the training files and of the held-out files."""

    train: Tensor
    held_out: Tensor
    num_train_files: int
    num_held_out_files: int
    num_characters: int


@dataclass(frozen=True)
class Quality:
    """Held-out figures of the pair."""

    target_loss: float  # nats per token
    draft_loss: float  # nats per token
    agreement: float  # share of positions where both models' most likely tokens are equal
    generated_agreement: float  # the same over text written by the target at temperature 0


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of ``VOCAB_SIZE`` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False, model_max_length=MAX_POSITIONS
    )


def load_corpus(tokenizer_folder: Path | None) -> tuple[Corpus, PreTrainedTokenizerFast]:
    """Read the standard library and encode both splits, with a tokenizer trained on the training files or a given one."""
    train_texts: list[str] = []
    held_out_texts: list[str] = []
    for path in source_files():
        text = path.read_text(encoding="utf-8", errors="ignore")
        (held_out_texts if is_held_out(path) else train_texts).append(text)
    if tokenizer_folder is None:
        tokenizer = train_tokenizer(train_texts)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)

    def encode(texts: list[str]) -> Tensor:
        ids: list[int] = []
        for encoding in tokenizer.backend_tokenizer.encode_batch(texts):
            ids += [*encoding.ids, tokenizer.eos_token_id]
        return torch.tensor(ids)

    corpus = Corpus(
        train=encode(train_texts),
        held_out=encode(held_out_texts),
        num_train_files=len(train_texts),
        num_held_out_files=len(held_out_texts),
        num_characters=sum(map(len, train_texts)),
    )
    return corpus, tokenizer


def demo_config(eos_token_id: int, *, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> LlamaConfig:
    """A Llama with the vocabulary and the positions of the pair, and tied embeddings."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=None,
    )


TARGET_SIZES = {"hidden": 640, "ffn": 2048, "layers": 3, "heads": 10, "kv_heads": 2}
"""Few wide layers: a step is bound by reading weights, which is what verification amortises."""
DRAFT_SIZES = {"hidden": 256, "ffn": 768, "layers": 1, "heads": 4, "kv_heads": 4}
"""One thin layer: a draft pass costs little more than its handful of operations."""


def sample_batch(stream: Tensor, batch_size: int, generator: torch.Generator) -> Tensor:
    """Draw random windows of ``SEQUENCE_LENGTH + 1`` tokens: int64 [batch_size, SEQUENCE_LENGTH + 1]."""
    starts = torch.randint(len(stream) - SEQUENCE_LENGTH - 1, (batch_size, 1), generator=generator)
    return stream[starts + torch.arange(SEQUENCE_LENGTH + 1)]


def forward(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return float32 logits [batch, length, vocab] with the matrix products in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def fit(name: str, model: nn.Module, num_steps: int, lr: float, loss_of_batch: Callable[[], Tensor]) -> None:
    """Minimise a loss: Muon for the matrices inside the layers, AdamW for embeddings and norms; warm-up, then cosine to 5 %.

    Prints the mean loss of the last 25 steps with the time left.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [
        get_cosine_with_min_lr_schedule_with_warmup_lr_rate(optimizer, max(1, num_steps // 25), num_steps, min_lr_rate=0.05)
        for optimizer in optimizers
    ]
    start, losses = time.perf_counter(), list[float]()
    for step in range(1, num_steps + 1):
        loss = loss_of_batch()
        loss.backward()
        nn.utils.clip_grad_norm_(matrices + others, 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % 25 == 0:
            left = (time.perf_counter() - start) / step * (num_steps - step)
            print(f"{name} step {step}/{num_steps} loss {sum(losses[-25:]) / 25:.4f} left {left / 60:.1f} min", flush=True)
    model.eval()


def train_target(corpus: Corpus, config: LlamaConfig, num_steps: int, batch_size: int, seed: int) -> LlamaForCausalLM:
    """Train the target by next-token cross entropy."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)

    def loss_of_batch() -> Tensor:
        ids = sample_batch(corpus.train, batch_size, generator)
        return F.cross_entropy(forward(model, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    fit("target", model, num_steps, TARGET_LR, loss_of_batch)
    return model


@dataclass(frozen=True)
class Written:
    """A prompt from the corpus and what the target made of it."""

    prompt_ids: list[int]
    token_ids: list[int]


def write_text(target_folder: Path, stream: Tensor, num_sequences: int, greedy_share: float, seed: int) -> list[Written]:
    """Let the target continue random pieces of ``stream``, ``greedy_share`` of them at temperature 0, the others at 0.8."""
    llm = LLM(
        str(target_folder),
        max_batch_size=128,
        max_num_batched_tokens=8192,
        max_model_len=SEQUENCE_LENGTH,
        enable_prefix_caching=False,
    )
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 96, (num_sequences,), generator=generator).tolist()
    starts = torch.randint(len(stream) - SEQUENCE_LENGTH, (num_sequences,), generator=generator).tolist()
    prompts = [stream[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]
    params = [
        SamplingParams(temperature=0 if i < greedy_share * num_sequences else 0.8, seed=seed + i, max_tokens=WRITTEN_LENGTH)
        for i in range(num_sequences)
    ]
    outputs = llm.generate(prompts, params)
    return [Written(prompt, output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]


def distil_draft(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    corpus: Corpus,
    written: list[Written],
    num_steps: int,
    batch_size: int,
    seed: int,
) -> None:
    """Train the draft on the target's distributions (forward KL), on the target's text and on the corpus."""
    generator = torch.Generator().manual_seed(seed + 1)
    order = torch.randperm(len(written), generator=generator).tolist()
    written_stream = torch.tensor([token_id for i in order for token_id in written[i].prompt_ids + written[i].token_ids])
    num_written = round(batch_size * WRITTEN_SHARE)

    def loss_of_batch() -> Tensor:
        parts = [
            sample_batch(written_stream, num_written, generator),
            sample_batch(corpus.train, batch_size - num_written, generator),
        ]
        ids = torch.cat(parts)[:, :-1]
        with torch.no_grad():
            target_logprobs = forward(target, ids).log_softmax(-1)
        draft_logprobs = forward(draft, ids).log_softmax(-1)
        return F.kl_div(draft_logprobs.flatten(0, 1), target_logprobs.flatten(0, 1), log_target=True, reduction="batchmean")

    fit("draft", draft, num_steps, DRAFT_LR, loss_of_batch)


@torch.inference_mode()
def evaluate(target: LlamaForCausalLM, draft: LlamaForCausalLM, corpus: Corpus, written: list[Written]) -> Quality:
    """Measure both models, as stored (bfloat16), on the held-out files, and the draft on ``written``, the target's greedy text."""
    target, draft = target.bfloat16(), draft.bfloat16()
    num_windows = (len(corpus.held_out) - 1) // SEQUENCE_LENGTH
    inputs = corpus.held_out[: num_windows * SEQUENCE_LENGTH].view(num_windows, SEQUENCE_LENGTH)
    labels = corpus.held_out[1 : num_windows * SEQUENCE_LENGTH + 1].view(num_windows, SEQUENCE_LENGTH)
    losses = torch.zeros(2, dtype=torch.float64)
    equal = 0
    for ids, label in zip(inputs.split(16), labels.split(16), strict=True):
        logits = [model(input_ids=ids, use_cache=False).logits.float() for model in (target, draft)]
        losses += torch.tensor([F.cross_entropy(x.flatten(0, 1), label.flatten(), reduction="sum").item() for x in logits])
        equal += int((logits[0].argmax(-1) == logits[1].argmax(-1)).sum())
    losses /= labels.numel()
    num_predicted = num_tokens = 0
    for text in written:
        ids = torch.tensor([text.prompt_ids + text.token_ids])
        best = draft(input_ids=ids[:, :-1], use_cache=False).logits[0].argmax(-1)
        num_predicted += int((best == ids[0, 1:])[len(text.prompt_ids) - 1 :].sum())
        num_tokens += len(text.token_ids)
    return Quality(
        target_loss=losses[0].item(),
        draft_loss=losses[1].item(),
        agreement=equal / labels.numel(),
        generated_agreement=num_predicted / num_tokens,
    )


CARD = """---
license: psf-2.0
language: code
---
# Titan demo {role}

{description}

It exists so that Titan runs with no download. It is far too small to be of use as a code model.

| | |
|---|---|
| architecture | Llama, {config.num_hidden_layers} layer(s), hidden {config.hidden_size}, ffn {config.intermediate_size}, \
{config.num_attention_heads} heads, {config.num_key_value_heads} KV heads, tied embeddings |
| parameters | {parameters:,} |
| vocabulary | {config.vocab_size} tokens, byte-level BPE trained on the same files |
| trained on | {corpus.num_train_files} files of the Python {python} standard library, {corpus.num_characters:,} characters, \
{tokens:,} tokens |
| training | {steps} steps of {batch} x {length} tokens |
| held out | {corpus.num_held_out_files} files, {held_out_tokens:,} tokens, chosen by a hash of the file name |
| held-out loss | {loss:.3f} nats per token (perplexity {perplexity:.2f}) |
| draft agreement, held out | same most likely token at {quality.agreement:.1%} of positions |
| draft agreement, generated | the same at {quality.generated_agreement:.1%} of positions in text that the target writes at \
temperature 0 |
| trained context | {length} tokens; positions up to {config.max_position_embeddings} are accepted |

Made by `python training/train_demo.py`. The training text is under the Python Software Foundation License.
"""


DESCRIPTIONS = {
    "target": "A small language model of Python source code.",
    "draft": "The draft of the demo target, distilled from it by forward KL on the corpus and on the target's own text.",
}


def save(
    model: LlamaForCausalLM,
    role: str,
    output: Path,
    tokenizer: PreTrainedTokenizerFast,
    quality: Quality,
    corpus: Corpus,
    steps: int,
    batch: int,
) -> None:
    """Write config, bfloat16 safetensors, tokenizer and model card of the "target" or "draft" to a folder of that name."""
    config, folder = model.config, output / role
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    loss = quality.target_loss if role == "target" else quality.draft_loss
    (folder / "README.md").write_text(
        CARD.format(
            role=role,
            description=DESCRIPTIONS[role],
            config=config,
            corpus=corpus,
            quality=quality,
            parameters=sum(p.numel() for p in model.parameters()),
            python=platform.python_version(),
            tokens=len(corpus.train),
            steps=steps,
            batch=batch,
            length=SEQUENCE_LENGTH,
            held_out_tokens=len(corpus.held_out),
            loss=loss,
            perplexity=math.exp(loss),
        )
    )


def main() -> None:
    """Train the pair and store it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder that gets target/ and draft/")
    parser.add_argument("--target-steps", type=int, default=1000)
    parser.add_argument("--draft-steps", type=int, default=1300)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step")
    parser.add_argument("--written-sequences", type=int, default=6000, help="sequences the target writes for its draft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=Path, help="a target made before: only the draft is trained")
    parser.add_argument("--draft", type=Path, help="a draft made before, to go on from (with --target)")
    parser.add_argument("--greedy-share", type=float, default=0.8, help="share of the written sequences at temperature 0")
    args = parser.parse_args()

    corpus, tokenizer = load_corpus(args.target)
    print(f"{corpus.num_train_files} files, {len(corpus.train):,} training tokens, {len(corpus.held_out):,} held out", flush=True)
    target_folder = args.target
    if target_folder is None:
        target_folder = args.output / "target"
        target = train_target(
            corpus, demo_config(tokenizer.eos_token_id, **TARGET_SIZES), args.target_steps, args.batch_size, args.seed
        )
        target.bfloat16().save_pretrained(target_folder)
        tokenizer.save_pretrained(target_folder)
    target = LlamaForCausalLM.from_pretrained(target_folder, dtype=torch.float32)  # as stored, rounded to bfloat16
    written = write_text(target_folder, corpus.train, args.written_sequences, args.greedy_share, seed=args.seed)
    torch.manual_seed(args.seed + 1)
    if args.draft is None:
        draft = LlamaForCausalLM(demo_config(tokenizer.eos_token_id, **DRAFT_SIZES))
    else:
        draft = LlamaForCausalLM.from_pretrained(args.draft, dtype=torch.float32)
    distil_draft(draft, target, corpus, written, args.draft_steps, args.batch_size, args.seed)
    quality = evaluate(target, draft, corpus, write_text(target_folder, corpus.held_out, 128, greedy_share=1.0, seed=args.seed + 1))
    print(
        f"held-out perplexity: target {math.exp(quality.target_loss):.2f}, draft {math.exp(quality.draft_loss):.2f}; "
        f"draft agreement {quality.agreement:.1%} held out, {quality.generated_agreement:.1%} on the target's greedy text"
    )
    save(target, "target", args.output, tokenizer, quality, corpus, args.target_steps, args.batch_size)
    save(draft, "draft", args.output, tokenizer, quality, corpus, args.draft_steps, args.batch_size)


if __name__ == "__main__":
    main()
