"""Runs Triton kernels in the interpreter, and on a GPU if there is one, and compiles them for several GPUs."""

import importlib
import re
import subprocess
from pathlib import Path

import pytest
import torch
from triton_calls import Interpreter, call


@pytest.fixture(scope="session")
def interpreter():
    pytest.importorskip("triton", reason="triton is not installed")
    with Interpreter() as interpreter:
        yield interpreter


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def on_triton(request):
    """`on_triton("coupling", "couple", *arguments)` returns the results of a Triton implementation, as a tuple on the
    CPU, and after them the arguments at the places `written`."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs an accelerator")
        return lambda operation, function, *arguments, **options: call(
            operation, function, arguments, "cuda", **options
        )
    interpreter = request.getfixturevalue("interpreter")
    return lambda operation, function, *arguments, **options: interpreter.call(
        operation, function, arguments, **options
    )


@pytest.fixture(params=[80, 90, pytest.param(100, marks=pytest.mark.slow)], ids="sm_{}".format)
def compile_kernel(request, tmp_path):
    """`compile_kernel("coupling", "sample_kernel", signature, constants, num_warps)` compiles a kernel for an A100, an
    H100 or a B200, and asserts that it spills no registers where cuobjdump is there to report it."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

    def compile_kernel(operation, kernel, signature, constants, num_warps=4):
        kernel = getattr(importlib.import_module(f"arimage.kernels.{operation}.triton"), kernel)
        source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
        options = {"num_warps": num_warps, "enable_fp_fusion": False}
        compiled = triton.compile(source, GPUTarget("cuda", request.param, 32), options)
        file = tmp_path / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        if tool.exists():
            usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
            assert re.findall(r"(?:STACK|LOCAL):(\d+)", usage) == ["0", "0"], usage

    return compile_kernel
