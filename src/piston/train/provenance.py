"""Where a run's numbers come from: versions, hardware, git commit and command, as written next to it in run.json."""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import piston
from piston.config.schema import RunConfig
from piston.config.serialize import to_dict

PACKAGES = ("torch", "numpy", "av", "pillow", "pyarrow", "safetensors", "sentencepiece", "tokenizers")


def run_json(run: RunConfig) -> str:
    """The text of run.json: the resolved configuration under "run", and what it ran on."""
    return json.dumps({"run": to_dict(run), **provenance()}, indent=2)


def provenance() -> dict[str, Any]:
    return {
        "command": sys.argv,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": _git(Path(piston.__file__).parent),
        "versions": {"piston": piston.__version__, "python": platform.python_version()}
        | {name: version(name) for name in PACKAGES},
        "hardware": {
            "host": platform.node(),
            "system": platform.platform(),
            "cpu": _cpu(),
            "cpu_cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "cuda": torch.version.cuda,
        },
    }


def _git(directory: Path) -> dict[str, Any] | None:
    """Commit of the source, and whether it was changed since; None where git does not track it."""

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        ask("ls-files", "--error-unmatch", "__init__.py")
        return {"commit": ask("rev-parse", "HEAD"), "modified": bool(ask("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
