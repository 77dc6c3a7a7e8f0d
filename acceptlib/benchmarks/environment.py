"""Where a figure was measured: machine, versions and commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Final

import torch

OTHERS: Final = ("transformers", "vllm", "flashinfer-python")
"""What figures compare with."""


def environment(device: torch.device) -> dict[str, Any]:
    """Return machine, versions and commit; versions of other libraries where they are installed."""
    versions = {name: _version(name) for name in ("acceptlib", "torch", "triton")}
    versions |= {name: version for name in OTHERS if (version := _version(name)) is not None}
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
        versions |= {"cuda": torch.version.cuda, "driver": driver[0] if driver else None}
    else:
        machine = f"{_processor()}, {torch.get_num_threads()} of {os.cpu_count()} cores"
    return {"machine": machine, "python": platform.python_version(), **versions, "commit": _commit()}


def _commit() -> str | None:
    """Return this code's commit, with `-dirty` if the package differs from it; None outside a clone."""
    package = str(Path(__file__).parent.parent)
    # An installed package may lie inside the clone of something else, whose commit says nothing about it.
    if not _output("git", "-C", package, "ls-files", "__init__.py"):
        return None
    changed = _output("git", "-C", package, "status", "--porcelain", "--", ".")
    return _output("git", "-C", package, "rev-parse", "HEAD") + "-dirty" * bool(changed)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed commands
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def _processor() -> str:
    """Return the model of the CPU; Linux tells it in a file, other systems through `platform`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
