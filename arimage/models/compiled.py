"""`torch.compile` for components of which a pipeline calls only a part."""

from torch import nn
from torch._dynamo import OptimizedModule


def compiled_like(component: nn.Module, part: nn.Module) -> nn.Module:
    """Compile `part`, a sub-module of `component`, as `component` was compiled.

    The image tokens of a language model come from its decoder and some rows of its head. A pipeline calls the decoder
    and never the whole component, so the result of `torch.compile(component)` itself would not run.

    Raises:
        ValueError: if `component.compile()` was called, which keeps no record of its options.
    """
    if isinstance(component, OptimizedModule):
        return component.dynamo_ctx(part)
    if component._compiled_call_impl is not None and part._compiled_call_impl is None:
        raise ValueError(
            f"compile() of the whole {type(component).__name__} has no effect, since only its {type(part).__name__} "
            "is called: assign torch.compile(component) to the pipeline, or call compile() of that part"
        )
    return part
