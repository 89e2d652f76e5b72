"""All Triton kernels as compiled for an H100 or H200, at the sizes of shipped models.

`make test` compiles attention for each kind of layer, with the largest tiles of each size of heads; `make test-all` in all sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from sm90 import NUM_BYTES_OF_SHARED_MEMORY, Build, compile_launches

from titan.kernels.triton.tuning import FLOAT32_CONFIGS, FLOAT32_LARGE_CONFIGS, LARGE, SAFE_CONFIGS, SM90, TABLE, TileConfig

NUM_REGISTERS = 65536  # of a multiprocessor

OTHERS = """
from itertools import product
from types import SimpleNamespace
import torch
from titan.core.random import Purpose
from titan.core.trees import allocate_nodes
from titan.kernels.interfaces import Candidates, TokenPlaces
from titan.kernels.triton.draft_chain import Choice, DraftChains
from titan.kernels.triton.gate import gelu_mul, silu_mul
from titan.kernels.triton.kv_writes import write_kv
from titan.kernels.triton.norm import rms_norm
from titan.kernels.triton.pass_inputs import BlockTables
from titan.kernels.triton.rope_kv import rope_and_write_kv
from titan.kernels.triton.row_distribution import normalized_probs, row_distributions, write_probs
from titan.kernels.triton.sample_rows import sample_rows
from titan.kernels.triton.short_weights import NUM_PROGRAMS, TILINGS, packed_size, short_linear
from titan.kernels.triton.top_tokens import row_argmax, top_candidates
from titan.kernels.triton.tree_rejection import reject_trees
from titan.kernels.triton.tree_select import select_trees
from titan.kernels.triton.tree_walk import VerifiedTrees, walk_matches

def zeros(*shape, dtype):
    return torch.zeros(shape, dtype=dtype)

half, single = torch.bfloat16, torch.float32
slots = torch.zeros(7, dtype=torch.int64)
sizes = ((9, 3, 64, half), (32, 8, 128, half), (32, 8, 128, single))
for (num_heads, num_kv_heads, head_dim, dtype), is_quantised in product(sizes, (False, True)):
    kv_layer = zeros(2, num_kv_heads, 4, 16, head_dim, dtype=dtype)
    if is_quantised:
        kv_layer = zeros(2, num_kv_heads, 4, 16 * (head_dim + 4), dtype=torch.int8)
    keys = zeros(7, num_kv_heads, head_dim, dtype=dtype)
    write_kv(kv_layer, slots, keys, keys)
    for qk_norm in (None, zeros(num_heads + num_kv_heads, head_dim, dtype=dtype)):
        rope_and_write_kv(
            zeros(7, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
            TokenPlaces(zeros(64, 2, head_dim, dtype=dtype), slots, slots), kv_layer, qk_norm, eps=1e-6,
        )
write_kv(zeros(1, 1, 4, 16, 576, dtype=half), slots, zeros(7, 1, 576, dtype=half), None)  # latents
for hidden_size, dtype in ((768, half), (4096, half), (16384, half), (16384, single)):
    x, weight = zeros(7, hidden_size, dtype=dtype), zeros(hidden_size, dtype=dtype)
    rms_norm(x, weight, 1e-6)
    rms_norm(x, weight, 1e-6, x.clone())
for intermediate_size, dtype in ((2048, half), (14336, half), (14336, single)):
    silu_mul(zeros(7, 2 * intermediate_size, dtype=dtype))
    gelu_mul(zeros(7, 2 * intermediate_size, dtype=dtype))
arrivals = zeros(NUM_PROGRAMS, dtype=torch.int32)
for num_rows, (num_outputs, num_inputs) in product(TILINGS, ((3072, 2048), (28672, 4096), (300, 900))):  # the last not in tiles
    packed = zeros(num_outputs, packed_size(num_inputs), dtype=torch.int8)
    short_linear(zeros(num_rows, num_inputs, dtype=half), packed, None, arrivals)
short_linear(zeros(1, num_inputs, dtype=half), packed, zeros(num_outputs, dtype=half), arrivals)

start_loc = torch.zeros(3, dtype=torch.int32)
for num_rows, max_nodes in ((8, 6), (7, 1), (6, 16)):  # which differ from step to step
    floats, ints, longs = (torch.zeros(num_rows, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.int64))
    trees = VerifiedTrees.of(longs[2:].clone(), ints[2:].clone(), start_loc, max_nodes=max_nodes)
    walk_matches(trees, longs)
    for vocab_size, dtype in ((32000, single), (128256, half)):  # of Llama 2 and Llama 3
        logits, draft_probs = torch.zeros(num_rows, vocab_size, dtype=dtype), torch.zeros(3, vocab_size)
        distributions = row_distributions(logits, temperature=floats, top_k=ints, top_p=floats, min_p=floats)
        normalized_probs(distributions)
        write_probs(distributions, longs)
        row_argmax(logits)
        top_candidates(logits, 4, floats)
        sample_rows(distributions, longs, longs)
        reject_trees(trees, longs[:2].clone(), distributions, draft_probs, ints, longs, longs)

requests, nodes = start_loc[1:].clone(), allocate_nodes(7, start_loc.device)
for num_candidates in (*range(1, 33), 33, 45, 63, 100, 427, 510, 512):  # chains, trees along one, beams of 6 to 63 nodes
    candidates = torch.zeros(2, num_candidates, dtype=torch.int64)
    found = Candidates(None, None, None, True, candidates, candidates.float(), candidates, candidates)
    select_trees(found, requests, requests, nodes)

backend, kv = SimpleNamespace(device=start_loc.device), SimpleNamespace(block_size=16)
for num_blocks in (64, 513):
    tables = BlockTables(1024, num_blocks, backend.device)
    chains = DraftChains(backend, None, kv, [1, 2, 15, 1024], 7, tables, None)
    for num_requests, is_sampled, num_tokens in product((1, 2, 15, 1024), (False, True), (1001, 128256)):
        chains._lay_out_depth(num_requests, Choice(1, is_sampled, num_tokens))
"""

KERNELS = {
    "_rope_and_write_kv_kernel": (12, 64),
    "_write_kv_kernel": (7, 40),
    "_norm_kernel": (8, 96),
    "_gate_kernel": (6, 64),
    "_short_linear_kernel": (7, 255),  # of two warps: what would be more lies on the stack
    "_walk_kernel": (1, 40),
    "_sum_up_chunks_kernel": (2, 64),
    "_cut_rows_kernel": (2, 128),
    "_probs_kernel": (4, 64),
    "_chunk_tops_kernel": (4, 96),
    "_row_tops_kernel": (4, 96),
    "_sample_kernel": (2, 128),
    "_first_residuals_kernel": (2, 64),
    "_reject_kernel": (2, 128),
    "_select_kernel": (2, 128),
    "_lay_out_depth_kernel": (4, 96),
}
"""How often each is built, and the most registers it may use: the compiler of Triton 3.6 takes up to 40 % more than that of 3.7."""
ATTENTION_KERNELS = {"_attention_kernel", "_plan_kernel", "_nearest_ancestors_kernel", "_merge_kernel"}
MAX_SHARED_BYTES = {"_rope_and_write_kv_kernel": 64, "_write_kv_kernel": 64, "_norm_kernel": 1024, "_gate_kernel": 0}
"""Of the kernels of layers: for the sum or the largest number of a row only; the others take up to 48 KiB."""


def test_every_size_of_layers_sampling_and_trees_is_built_once_and_leaves_room_for_other_programs(builds: list[Build]) -> None:
    others = [build for build in builds if build.name not in ATTENTION_KERNELS]
    assert Counter(build.name for build in others) == {name: number for name, (number, _) in KERNELS.items()}
    assert all(build.has_mma for build in others if build.name == "_short_linear_kernel"), "products are those of the hardware"
    assert [build for build in others if build.stack_bytes or build.registers > KERNELS[build.name][1]] == []
    assert all(32 * build.num_warps * build.registers <= NUM_REGISTERS for build in others)
    assert all(2 * 32 * build.num_warps * build.registers <= NUM_REGISTERS for build in others if build.name == "_cut_rows_kernel")
    assert [build for build in others if build.shared_bytes > MAX_SHARED_BYTES.get(build.name, 48 * 1024)] == []


# Tree attention.

RESERVED = 1024  # bytes of shared memory, for each program
GROUP = 4  # query heads per KV head in the launches below

ATTENTION = """
import torch
from titan.core.attention import AttentionSpec, Chunk
from titan.kernels.triton.attention_plan import DeviceLayout
from titan.kernels.triton.attention_planner import TreeAttentionPlan
from titan.kernels.triton.tree_attention import tree_attention

def zeros(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)

def launch(
    head_dim, dtype, short_query_len, max_query_len, window=None, softcap=None, block_size=16, num_requests=4, is_quantised=False,
    num_heads=32, num_kv_heads=8, value_dim=None, num_planes=2, has_sinks=False,
):
    num_tokens = 2048
    layout = DeviceLayout(
        block_size,
        query_start_loc=zeros(num_requests + 1),
        seq_lens=zeros(num_requests),
        block_table=zeros(num_requests, 64),
        positions=zeros(num_tokens, dtype=torch.int64),
        visible_lens=zeros(num_tokens),
        tree_starts=zeros(num_requests),
        ancestor_bits=zeros(num_tokens, dtype=torch.int64),
        short_query_len=short_query_len,
        max_query_len=max_query_len,
    )
    plan = TreeAttentionPlan(layout)
    q = zeros(num_tokens, 48, head_dim, dtype=dtype)[:, :num_heads]
    kv_layer = zeros(num_planes, num_kv_heads, 16, block_size, head_dim, dtype=dtype)
    if is_quantised:
        kv_layer = zeros(num_planes, num_kv_heads, 16, block_size * (head_dim + 4), dtype=torch.int8)
    sinks = zeros(num_heads, dtype=torch.float32) if has_sinks else None
    tree_attention(q, kv_layer, plan, AttentionSpec(0.1, window, softcap, value_dim), sinks)
"""
DTYPES = {2: torch.bfloat16, 4: torch.float32}
OPTIONS = "window=40, softcap=30.0, block_size=32, num_requests=128"
SINKS = "window=128, has_sinks=True, num_requests=1024"
NARROW = "window=Chunk(8192), has_sinks=True, value_dim=128"
LATENT = "value_dim=512, num_planes=1, num_heads=4, num_kv_heads=1"


@dataclass(frozen=True)
class Launch:
    """A launch, and the tiles it must be made of: those of short queries, then those of chunks if there are any."""

    head_dim: int
    dtype: torch.dtype
    configs: Sequence[TileConfig]
    options: str = ""
    slot_numbers: int | None = None  # keys and values together; None: twice head_dim

    @property
    def line(self) -> str:
        short_query_len = self.configs[0].block_m // GROUP
        max_query_len = 512 if len(self.configs) > 1 else short_query_len
        return f"launch({self.head_dim}, {self.dtype}, {short_query_len}, {max_query_len}, {self.options})"


def launches_of_each_kind() -> list[Launch]:
    """Trees in small tiles and chunks in the largest; of each kind of layer, float32 among them."""
    smallest, small, *_, large = TABLE[SM90, 128, 2]
    return [
        Launch(128, torch.bfloat16, (smallest, large)),
        Launch(128, torch.float16, (small, large), OPTIONS),
        Launch(128, torch.float32, FLOAT32_CONFIGS * 2, "window=40"),
        Launch(64, torch.bfloat16, TABLE[SM90, 64, 2][1::2], SINKS),
        Launch(192, torch.bfloat16, TABLE[SM90, 256, 2][1::2], NARROW, 192 + 128),
        Launch(576, torch.bfloat16, TABLE[SM90, LARGE, 2], LATENT, 576),
    ]


def launches_of_all_sizes() -> list[Launch]:
    """Trees in all sizes of tiles and chunks in the largest, for the table, and for what it does not know."""
    made = []
    for (capability, head_dim, element_size), configs in TABLE.items():
        assert capability == SM90
        made += [Launch(head_dim, DTYPES[element_size], (config,)) for config in configs[:-1]]
        made.append(Launch(head_dim, DTYPES[element_size], (configs[-1], configs[-1])))
    small, large = TABLE[SM90, 128, 2][1], TABLE[SM90, 128, 2][-1]
    made.append(Launch(128, torch.bfloat16, (large,), OPTIONS))
    made.append(Launch(96, torch.bfloat16, (small, large)))
    made += [Launch(32, torch.bfloat16, (config,)) for config in SAFE_CONFIGS]
    made += [Launch(head_dim, torch.float32, FLOAT32_CONFIGS * 2, "window=40") for head_dim in (64, 256)]
    made.append(Launch(576, torch.float32, FLOAT32_LARGE_CONFIGS, LATENT, 576))
    return made


QUANTISED = [
    Launch(head_dim, torch.bfloat16, (TABLE[SM90, head_dim, 2][1], TABLE[SM90, head_dim, 2][-1]), "is_quantised=True")
    for head_dim in (64, 128)
]


@pytest.fixture(scope="module")
def builds() -> list[Build]:
    """One process for all, which takes seconds to start. The last two are on a device that the table does not know."""
    lines = [launch.line for launch in (*launches_of_each_kind(), *QUANTISED)]
    lines += ["import titan.kernels.triton.tuning as tuning", "tuning.TABLE.clear()"]
    lines += [f"launch({head_dim}, torch.bfloat16, 16, 16)" for head_dim in (128, 256)]
    return compile_launches(OTHERS + ATTENTION + "\n".join(lines))


@pytest.fixture(scope="module")
def builds_of_all_sizes() -> list[Build]:
    return compile_launches(ATTENTION + "\n".join(launch.line for launch in launches_of_all_sizes()))


@pytest.mark.long_where("of all sizes")
@pytest.mark.parametrize(
    ("launches", "fixture"),
    [(launches_of_each_kind(), "builds"), (launches_of_all_sizes(), "builds_of_all_sizes")],
    ids=["of each kind", "of all sizes"],
)
def test_every_configuration_fits_as_the_table_says_with_its_buffers_and_tensor_cores(
    launches: list[Launch], fixture: str, request: pytest.FixtureRequest
) -> None:
    builds: list[Build] = request.getfixturevalue(fixture)
    expected = [(launch, config, i == 0) for launch in launches for i, config in enumerate(launch.configs)]
    compiled = [build for build in builds if build.name == "_attention_kernel"][: len(expected)]
    for build, (launch, config, is_short) in zip(compiled, expected, strict=True):
        assert (build.constants["TREE"], build.constants["HEAD_DIM"]) == (str(is_short), str(launch.head_dim))
        assert (build.constants["BLOCK_M"], build.constants["BLOCK_N"]) == (str(config.block_m), str(config.block_n))
        assert (build.num_warps, build.num_stages) == (config.num_warps, config.num_stages)
        # float32 runs in so few registers that the assembler may give up two of them for room that it has no use for
        assert build.stack_bytes <= (8 if launch.dtype == torch.float32 else 0), f"{build} spills registers"
        running = config.programs_per_multiprocessor
        assert running * build.registers * 32 * build.num_warps <= NUM_REGISTERS, build
        assert running * (build.shared_bytes + RESERVED) <= NUM_BYTES_OF_SHARED_MEMORY + RESERVED, build
        # loads of block ids and of what they point to take two stages each: a depth that only the compiled code shows
        num_slots = (config.num_stages - 1) // 2 * config.block_n
        slot_numbers = launch.slot_numbers or 2 * launch.head_dim
        assert build.shared_bytes >= num_slots * slot_numbers * launch.dtype.itemsize, build
        # products of a warp group where there are 64 rows for it; float32 is multiplied exactly, without tensor cores
        is_half = launch.dtype.itemsize == 2
        assert (build.has_wgmma, build.has_mma) == (is_half and config.block_m >= 64, is_half and config.block_m < 64), build
        hot, masked = build.minus_infinities  # most slots, verified trees' as well, are seen by all rows, and need no mask
        assert hot == 0 < masked, build


def test_quantised_blocks_are_read_as_bytes_and_multiplied_by_tensor_cores(builds: list[Build]) -> None:
    first = sum(len(launch.configs) for launch in launches_of_each_kind())
    compiled = [build for build in builds if build.name == "_attention_kernel"][first : first + 2 * len(QUANTISED)]
    for build, (launch, config) in zip(compiled, [(each, config) for each in QUANTISED for config in each.configs], strict=True):
        assert (build.constants["HEAD_DIM"], build.constants["BLOCK_M"]) == (str(launch.head_dim), str(config.block_m))
        assert build.has_wgmma or build.has_mma, build
        num_bytes = 2 * ((config.num_stages - 1) // 2) * config.block_n * launch.head_dim
        assert build.stack_bytes <= 8 and num_bytes <= build.shared_bytes <= NUM_BYTES_OF_SHARED_MEMORY - RESERVED, build
        assert build.minus_infinities[0] == 0, build


def test_safe_configurations_fit_devices_with_little_shared_memory(builds: list[Build]) -> None:
    largest = [build for build in builds if build.name == "_attention_kernel"][-2:]
    assert [build.constants["HEAD_DIM"] for build in largest] == ["128", "256"]
    for build in largest:
        assert build.constants["BLOCK_M"] == str(SAFE_CONFIGS[-1].block_m)
        assert build.stack_bytes == 0 and build.shared_bytes <= 99 * 1024


def test_planner_and_merge_stay_in_registers(builds: list[Build]) -> None:
    """The assembler may give up a few bytes of a planner for room that it has no use for; a real spill is far larger."""
    helpers = [build for build in builds if build.name in ATTENTION_KERNELS - {"_attention_kernel"}]
    assert {build.name for build in helpers} == ATTENTION_KERNELS - {"_attention_kernel"}
    assert {build.constants["BLOCK_R"] for build in helpers if build.name == "_plan_kernel"} == {"16", "128", "1024"}
    for build in helpers:
        assert build.stack_bytes <= (16 if build.name == "_plan_kernel" else 0) and build.registers <= 128, build
