"""Lets PyTorch, inductor and Triton believe that there is an H100, on which nothing runs. They keep references to what
they import: import this before all of them."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "total_memory": 80 << 30,
    "multi_processor_count": 132,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "regs_per_multiprocessor": 65536,
    "warp_size": 32,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "L2_cache_size": 50 << 20,
    "clock_rate": 1980000,
    "memory_clock_rate": 2619000,
    "memory_bus_width": 5120,
    "gcnArchName": "",
    "uuid": "0",
    "is_integrated": 0,
}


class Driver:
    """Triton's driver of a GPU that is not there."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {
            "max_shared_mem": H100["shared_memory_per_block_optin"],
            "multiprocessor_count": H100["multi_processor_count"],
        }
    )
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))
    get_device_interface = staticmethod(lambda: torch.cuda)
    is_active = staticmethod(lambda: True)


@contextmanager
def available():
    """The H100 is there. Elsewhere nothing sees it: models would initialise it when they are built."""
    torch.cuda.is_available = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_available = lambda: False


def _pretend() -> None:
    pretended: Any = Driver()
    driver.set_active(pretended)
    properties = SimpleNamespace(**H100)
    answers = {
        "device_count": 1,
        "current_device": 0,
        "_lazy_init": None,
        "synchronize": None,
        "set_device": None,
        "set_rng_state": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "get_device_name": properties.name,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "current_stream": SimpleNamespace(cuda_stream=0),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, _answer=answer, **settings: _answer)
    torch.cuda.is_available = lambda: False
    torch.cuda.get_rng_state = lambda *args: torch.zeros(16, dtype=torch.uint8, device="cpu")
    torch.cuda.graphs.is_current_stream_capturing = lambda: False
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch._C._cuda_exchangeDevice = torch._C._cuda_maybeExchangeDevice = lambda device: 0
    torch._C._ensureCUDADeviceGuardSet()
    from torch._inductor import config
    from torch._inductor.fx_passes import fuse_attention, pad_mm
    from torch._subclasses import fake_tensor
    from transformers.integrations import sdpa_attention  # noqa: F401

    # They would run operators.
    fuse_attention._sfdp_init = pad_mm._pad_mm_init = lambda *args, **settings: None
    fake_tensor.init_gpu_context = lambda device: None
    config.joint_graph_constant_folding = False
    config.force_disable_caches = True
    config.compile_threads = 1
    F.scaled_dot_product_attention = attention


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    return operator(query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale)[0]


_pretend()
