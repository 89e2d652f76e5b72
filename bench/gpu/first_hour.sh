#!/usr/bin/env bash
# The first hour on a GPU, in four calls of under seven minutes each:
#
#   bash bench/gpu/first_hour.sh a               versions; the tests of every kernel; matrix products and sampling
#   bash bench/gpu/first_hour.sh b               attention against the bandwidth and others; whole engines of 8 B parameters
#   bash bench/gpu/first_hour.sh c               compute-sanitizer over small tests; contexts in parts; tiles for heads of 128
#   BASE=FOLDER bash bench/gpu/first_hour.sh d   an older checkout and this one by turns, and their ratios
#   bash bench/gpu/first_hour.sh a --tiny        a rehearsal in Triton's interpreter; so do the others
#
# Nothing is installed or downloaded. A call prints what it finds at once, leaves JSON and its log in OUT (default: first_hour),
# goes on behind what fails or is not there, and ends within LIMIT seconds (default: 400) with what it has. PYTHON is the
# interpreter. Whole engines have BATCHES requests (default: 1 8 32; in a rehearsal 1 2 3): what they record before they serve
# follows from the largest. d compares SECTIONS (default: end_to_end_8b; attention is another); its BASE may lack the demo, 34 MB:
# git archive COMMIT | tar x -C BASE --exclude=titan/demo. The status is 1 if a part failed, and 2 if a call cannot be made.
#
# With ten minutes of a device in all, b finds what a has compiled:
#
#   LIMIT=320 bash bench/gpu/first_hour.sh a; LIMIT=250 bash bench/gpu/first_hour.sh b
set -uo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
call=${1:-} tiny=${2:-} PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-400} SECTIONS=${SECTIONS:-end_to_end_8b}
mkdir -p "${OUT:=first_hour}" && OUT=$(cd "$OUT" && pwd) || exit 2
if [[ $call != [abcd] || ($tiny != "" && $tiny != --tiny) ]]; then
    echo "usage: [OUT=FOLDER] [LIMIT=SECONDS] [PYTHON=FILE] [BASE=FOLDER] first_hour.sh a|b|c|d [--tiny]"
    exit 2
fi
if [[ $call == d && ! -d ${BASE:-}/titan ]]; then
    echo "d compares with an older checkout: BASE=${BASE:-} must be its folder"
    exit 2
fi
[[ $call == d ]] && BASE=$(cd "$BASE" && pwd)
[[ $PYTHON == */* ]] && PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON")
[[ $tiny ]] && export TRITON_INTERPRET=1 BATCHES=${BATCHES:-1 2 3}
BATCHES=${BATCHES:-1 8 32}
others=${PYTHONPATH:+:$PYTHONPATH} # packages that the machine lacks, such as FlashInfer
export PYTHONUNBUFFERED=1 PYTHONPATH=$ROOT$others
# later calls and trees find compiled kernels there; beside OUT, since OUT is what is copied from the machine
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/titan-triton}
cd "$ROOT" || exit 2
failed=()

left() { # seconds of this call, of so many parts that are to come
    echo $(((LIMIT - SECONDS) / ${1:-1}))
}

part() { # name, seconds at most, command: run it; Ctrl-C lets it publish what it has
    local name=$1 seconds=$2 status=0
    shift 2
    if ((seconds < 10)); then
        echo "== $name: no time is left" >&2
        failed+=("$name")
        return
    fi
    echo "== $name, at most $seconds s" >&2
    timeout --signal=INT --kill-after=15 "$seconds" "$@" || status=$?
    ((status == 0)) || failed+=("$name (status $status)")
    echo "== $name: status $status, after $SECONDS s of this call" >&2
}

check() { # name, tree, seconds at most, options of gpu_check: its rows as they come, then its tables without the tests that passed
    local name=$1 tree=$2 seconds=$3 planned tables
    shift 3
    planned=$((seconds > 40 ? seconds - 25 : seconds)) # the last task may take longer than is planned for it
    tables=$(mktemp)
    if ! cd "$tree"; then
        failed+=("$name (no folder $tree)")
        return
    fi
    PYTHONPATH=$tree$others part "$name" "$seconds" \
        "$PYTHON" -m titan.bench.gpu_check $tiny --seconds "$planned" --json "$OUT/$name.json" "$@" >"$tables"
    cd "$ROOT" || exit 2
    grep -v '^| tests/.*| ok ' "$tables"
    rm "$tables"
}

versions() {
    "$PYTHON" - <<'END'
import os
import platform
import shutil
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

print("python", platform.python_version())
needed = dict.fromkeys(("torch", "triton", "transformers", "numpy", "psutil", "tqdm"), "nothing runs without it")
needed |= dict.fromkeys(("pytest", "hypothesis"), "the tests are left out, in a and in c")
needed |= {"scipy": "a few tests are left out", "flashinfer-python": "attention is not compared with it"}
for name, loss in needed.items():
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "is missing:", loss)
header = Path(sysconfig.get_path("include"), "Python.h")
compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
for name, found in {"C compiler": compiler, "Python.h": header if header.exists() else None}.items():
    print(name, found or "is missing: Triton launches nothing without it")
END
    nvidia-smi || echo "there is no nvidia-smi"
    command -v compute-sanitizer || echo "there is no compute-sanitizer: c leaves it out"
    git -C "$ROOT" log -1 --format='commit %H' 2>/dev/null || echo "no checkout of git: the commit is not known"
}

sanitize() { # illegal accesses and the like; without PyTorch's cache, memory behind an allocation is nobody's
    local tool=(compute-sanitizer --tool memcheck --error-exitcode 9) select="(test_short_weights or [triton) and not real_vocabulary"
    if ! command -v compute-sanitizer >/dev/null; then
        echo "== memcheck: there is no compute-sanitizer"
        [[ $tiny ]] || return
        tool=() # the tests alone are rehearsed
    fi
    [[ $tiny ]] && select="[triton and test_copies"
    part memcheck "$(left 3)" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 ${tool[@]+"${tool[@]}"} \
        "$PYTHON" -m pytest -v --no-header -p no:cacheprovider -W default \
        -m "not cuda" -k "$select or test_output_is_that_of_the_twin and not [triton" tests/kernels/test_tree_attention.py \
        tests/kernels/test_short_weights.py tests/kernels/test_conformance_{cache,trees,sampling,layers}.py
}

run_call() {
    case $call in
    a)
        export PYTHON ROOT
        part versions 60 bash -c "$(declare -f versions); versions"
        check a "$ROOT" "$(left)" --only tests products sampling
        ;;
    b) check b "$ROOT" "$(left)" --only attention end_to_end_8b --batches $BATCHES ;;
    c)
        sanitize
        check splits "$ROOT" "$(left 3)" --only splits
        local rows=(32 16 128 64)
        for i in "${!rows[@]}"; do
            part "tiles-${rows[i]}" "$(left $((${#rows[@]} - i)))" "$PYTHON" -m titan.bench.tune $tiny \
                --head-dims 128 --block-m "${rows[i]}" --json "$OUT/tiles-${rows[i]}.json"
        done
        ;;
    d)
        local options=(--only $SECTIONS --batches $BATCHES) of_base=(--only $SECTIONS) base
        grep -qs '"--batches"' "$BASE/bench/gpu_check.py" && of_base=("${options[@]}") # older ones do not know it
        for turn in 1 2; do # the first turn compiles what the second one finds
            base=$OUT/base-$turn.json
            rm -f "$base" # of an earlier call
            check "base-$turn" "$BASE" "$(left $((4 - turn)))" "${of_base[@]}"
            [[ -f $base ]] && options+=(--base "$base")
            check "here-$turn" "$ROOT" "$(left $((3 - turn)))" "${options[@]}"
        done
        ;;
    esac
    if ((${#failed[@]})); then
        echo "== failed, or out of time: ${failed[*]}"
        return 1
    fi
    echo "== all parts of $call are done, in $SECONDS s"
}

run_call 2>&1 | tee "$OUT/$call.log"
exit "${PIPESTATUS[0]}"
