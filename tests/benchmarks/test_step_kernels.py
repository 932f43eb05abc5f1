"""The kernels of a step fit an H100: what the compiler makes of them, without a GPU."""

import pytest

from arimage.kernels.operation import DEVICES


if not DEVICES:
    pytest.skip("triton is not installed", allow_module_level=True)

import step_kernels


def faults(name: str, result: step_kernels.Compiled) -> list[str]:
    """What is wrong with a kernel."""
    multiplies = result.products != "" and not name.endswith(("heads", "norm"))
    # Tensor cores would round float32.
    precise = "MAR" in name or "float32" in name
    wrong = {
        "registers": result.registers > (255 if "64" in name or "given mask" in name else 200),
        "spilled": result.spilled > 0,
        "programs": result.programs < 1,
        # Attention reads keys that its program has written.
        "ordered": "attention" in name and not result.ordered,
        "products": multiplies and (result.products == "fma") != precise,
        # Gains may be copied in smaller parts, and so may what is multiplied in float32.
        "copies": multiplies and not precise and (16 not in result.copies or not {4, 8, 16}.issuperset(result.copies)),
    }
    return [f"{name}: {column} in {result}" for column, fault in wrong.items() if fault]


def test_a_kernel_fits_an_h100():
    assert faults("out, 16 rows", step_kernels.linear(16, 1024, 256, residual=True)) == []


@pytest.mark.slow
def test_all_kernels_of_a_step_fit_an_h100():
    found = [
        fault
        for kernel in (*step_kernels.kernels(), *step_kernels.language_kernels(), *step_kernels.modulated_kernels())
        for fault in faults(*kernel)
    ]
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("settings", [{"parts": 2, "block_width": 128}, {"parts": 8, "block_width": 512}], ids=str)
def test_kernels_with_settings_of_a_table_compile(monkeypatch, capability, settings):
    monkeypatch.setattr(step_kernels, "capability", capability)
    parts = settings["parts"]
    found = [
        step_kernels.linear(16, 4096, 11008, norm=True, gated=True, **settings, block_out=16, stages=2),
        step_kernels.qkv(
            16, 4096, 32, 128, key_heads=8, halves=True, **settings, block_pairs=8, num_warps=8, stages=2
        ),
        step_kernels.attention(32, 128, key_heads=8, parts=parts, block_keys=32 if parts == 2 else 16, stages=2),
    ]
    assert all(result.products in ("mma", "wgmma") and 16 in result.copies for result in found)
