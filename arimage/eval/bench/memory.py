"""Peak memory of the GPU, or of the process on Linux."""

import os
from pathlib import Path

import torch


CLEAR_REFS = Path("/proc/self/clear_refs")


def reset_peak_memory(device: torch.device) -> None:
    """Start measuring a new peak, see `peak_memory`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access(CLEAR_REFS, os.W_OK):
        # Linux: reset the process's peak of resident memory.
        CLEAR_REFS.write_text("5")


def peak_memory(device: torch.device) -> list[float]:
    """The peak since the last reset in MiB; an empty list where the system does not report it."""
    if device.type == "cuda":
        return [torch.cuda.max_memory_allocated(device) / 2**20]
    if not os.access(CLEAR_REFS, os.W_OK):
        return []
    status = Path("/proc/self/status").read_text()
    return [int(line.split()[1]) / 2**10 for line in status.splitlines() if line.startswith("VmHWM")]
