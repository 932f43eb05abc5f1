"""The kernels of a step fit an H100: what the compiler makes of them, without a GPU."""

import pytest

import arimage.kernels


if not arimage.kernels._TRITON:
    pytest.skip("triton is not installed", allow_module_level=True)

import step_kernels


def faults(name: str, result: step_kernels.Compiled) -> list[str]:
    """What is wrong with a kernel."""
    multiplies = result.products != "" and not name.endswith(("heads", "norm"))
    reads_weights = multiplies and "attention" not in name
    # Tensor cores would round float32.
    precise = "MAR" in name
    wrong = {
        "registers": result.registers > (255 if "64" in name else 200),
        "spilled": result.spilled > 0,
        # The next kernel must fit next to this one.
        "programs": result.programs < 2,
        "products": multiplies and (result.products == "fma") != precise,
        # Gains may be copied in smaller parts.
        "copies": multiplies and (16 not in result.copies or not {4, 16}.issuperset(result.copies)),
        "read only": result.read_only > 0,
        "prefetches": reads_weights != (result.prefetches > 0),
        "early": result.early != 0,
        "launches next": not result.launches_next,
    }
    return [f"{name}: {column} in {result}" for column, fault in wrong.items() if fault]


def test_a_kernel_brings_its_weights_before_it_waits():
    assert faults("out, 16 rows", step_kernels.linear(16, 256, 256, residual=True)) == []


@pytest.mark.slow
def test_all_kernels_of_a_step_fit_an_h100():
    found = [
        fault for kernel in (*step_kernels.kernels(), *step_kernels.modulated_kernels()) for fault in faults(*kernel)
    ]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_they_compile_for_an_a100_without_spills(monkeypatch):
    monkeypatch.setattr(step_kernels, "capability", 80)
    # It has no float8.
    found = *step_kernels.kernels((64,), ("i8",)), *step_kernels.modulated_kernels((64,))
    assert [name for name, result in found if result.spilled or result.prefetches] == []
