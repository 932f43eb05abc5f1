#!/usr/bin/env bash
# accelerate's FSDP plugin in processes on CPUs divides nothing: every process holds all weights, as in DDP.
#
# Packages: accelerate 1.15.0, torch 2.14.1 (CPU, gloo), numpy 2.4.6; Python 3.11.
# Guess: Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)) divides the weights over the two
# processes, since torch's fully_shard does so over gloo; or it raises, since it wants an accelerator.
# Really: neither, for both versions of FSDP: distributed_type is MULTI_CPU, prepare returns DistributedDataParallel, no
# weight is a DTensor, and each process has all of them. The plugin is dropped without a word about it. torch's own
# fully_shard over the same two processes halves them.
# Where it hurts: a test of sharded training without a GPU passes and has tested DDP: that a state is gathered before it is
# saved, that norms are those of all parts, that weights are summoned for sampling. Apply fully_shard yourself there.
#
# Set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels to skip the CUDA libraries. Exit code 1: it behaves otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 accelerate==1.15.0 numpy==2.4.6
cat > "$folder/divide.py" <<'PYTHON'
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

for version in (1, 2):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    prepared = accelerator.prepare(nn.Linear(64, 64))
    accelerator.print(f"FSDP {version}: {accelerator.distributed_type}, {type(prepared).__name__}")
    assert isinstance(prepared, DistributedDataParallel)
    assert not any(isinstance(weight, DTensor) for weight in prepared.parameters())

layer = nn.Linear(64, 64)
fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
held = sum(weight.to_local().numel() for weight in layer.parameters())
accelerator.print(f"fully_shard: {held} of {64 * 65} numbers in this process")
assert held == 64 * 65 // 2
accelerator.end_training()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/divide.py"
