"""Compiles the kernels of a step for an H100 without a GPU, and prints what became of them: registers, spilled bytes,
shared memory, how many programs an SM holds, and how weights are loaded.

python benchmarks/step_kernels.py
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from arimage.kernels.step.attention.triton import KEYS, QUERIES, WIDTH, attention_kernel, stages
from arimage.kernels.step.embedding.triton import embedding_kernel
from arimage.kernels.step.gate.triton import BLOCK, gate_kernel
from arimage.kernels.step.head_norms.triton import HEADS, head_norms_kernel
from arimage.kernels.step.keys.triton import HEADS as KEYS_HEADS
from arimage.kernels.step.keys.triton import keys_kernel
from arimage.kernels.step.linear.triton import linear_kernel, tile
from arimage.kernels.step.modulated.triton import DTYPES as TRITON
from arimage.kernels.step.modulated.triton import modulated_kernel, tiles
from arimage.kernels.step.modulated_norm.triton import WARPS as NORM_WARPS
from arimage.kernels.step.modulated_norm.triton import modulated_norm_kernel
from arimage.kernels.step.modulations.triton import modulations_kernel
from arimage.kernels.step.norm_and_add.triton import WARPS as SUM_WARPS
from arimage.kernels.step.norm_and_add.triton import norm_and_add_kernel
from arimage.kernels.step.programs import BLOCK_WIDTH, LEAST_ROWS, NORM_ROWS, TILE_ROWS, WARPS, gained_kernel
from arimage.kernels.step.qkv.triton import PAIRS, qkv_kernel
from arimage.kernels.step.rows.triton import rows_kernel


BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
# Of an SM of an H100: 32-bit registers, bytes of shared memory, and threads.
REGISTERS, SHARED, THREADS = 65536, 232448, 2048


class Compiled(NamedTuple):
    """What became of a kernel.

    Attributes:
        registers, spilled, shared: per thread, bytes per thread, and bytes per program.
        programs: how many an SM holds at a time.
        products: the instruction: "wgmma", "mma", "fma", or "" without any.
        copies: asynchronous copies to shared memory, by their bytes.
        vectors, scalars: other loads, of vectors and of single numbers.
        ordered: whether all loads are coherent, and none follows a write without a barrier between them.
    """

    registers: int
    spilled: int
    shared: int
    programs: int
    products: str
    copies: dict[int, int]
    vectors: int
    scalars: int
    ordered: bool


NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
# What the kernels are compiled for.
capability = 90


def compiled(kernel, types: dict[str, Any], constants: dict[str, Any], warps: int = WARPS) -> Compiled:
    """`types` of the arguments that are given, a tuple for several tensors; those that are in neither are None.
    Tensors, sizes and strides are multiples of 16. `num_warps` may be among the `constants`."""
    warps = constants.get("num_warps", warps)
    named = {name: constants[name] for name in kernel.arg_names if name in constants}
    constants = dict.fromkeys(name for name in kernel.arg_names if name not in types) | named
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {
        path: [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        for path in ([(i, j) for j in range(len(signature[name]))] if type(signature[name]) is tuple else [(i,)])
        if signature[name][0][0] == "*" or (name in types and name.endswith(("size", "stride")))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(result.asm["cubin"])
        command = [BIN / "cuobjdump", "-res-usage", cubin]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def number(name: str) -> int:
        found = re.search(rf"{name}:(\d+)", usage)
        assert found is not None, usage
        return int(found[1])

    ptx, registers, shared = result.asm["ptx"], number("REG"), result.metadata.shared
    loads, vectors = (len(re.findall(rf"ld\.global\S*{part}", ptx)) for part in (r"\s", r"\.v\d\S*\s"))
    return Compiled(
        registers,
        number("STACK") + number("LOCAL"),
        shared,
        min(REGISTERS // (registers * 32 * warps), SHARED // (shared + 1024), THREADS // (32 * warps)),
        next(
            (name for name, part in (("wgmma", "wgmma.mma"), ("mma", "mma.sync"), ("fma", "fma.")) if part in ptx), ""
        ),
        {n: c for n in (4, 8, 16) if (c := len(re.findall(rf"cp\.async\.c[ag]\.shared\.global.*?0x{n:x}, ", ptx)))},
        vectors,
        loads - vectors,
        ".nc." not in ptx
        and re.search(r"st\.global(?:(?!bar\.sync).)*?(?:ld\.global|cp\.async\.c)", ptx, re.S) is None,
    )


# What a product takes of the norm before it: the gain, or what `gained` has computed.
NORM = {True: {"gain_ptr": "*bf16"}, False: {"factor_ptr": "*fp32"}}


def gained(width: int) -> Compiled:
    types = dict.fromkeys(("x_ptr", "gain_ptr", "out_ptr"), "*bf16") | {"factor_ptr": "*fp32", "eps": "fp32"}
    return compiled(gained_kernel, types, {"width": width, "block_width": BLOCK_WIDTH, "parts": WARPS})


def linear(
    rows: int,
    width: int,
    size: int,
    *,
    norm=False,
    gated=False,
    residual=False,
    weight="bf16",
    head=False,
    **settings: int,
) -> Compiled:
    """With `settings` as in the table of `benchmarks/tune_step.py`; those of others likewise."""
    types = {"x_ptr": "*bf16", "weight_ptr": f"*{weight}", "out_ptr": "*bf16"}
    types |= {"rows": "i32", "size": "i32", "eps": "fp32"}
    types |= NORM[rows <= NORM_ROWS] if norm else {}
    types |= {"up_ptr": types["weight_ptr"]} if gated else {}
    types |= {"residual_ptr": "*bf16"} if residual else {}
    types |= {"bias_ptr": "*bf16", "index_ptr": "*i64"} if head else {}
    if weight != "bf16":
        types |= {"scale_ptr": "*fp32"} | ({"up_scale_ptr": "*fp32"} if gated else {})
    constants = {"width": width, "block_rows": rows, "block_width": BLOCK_WIDTH, "parts": WARPS, "gelu": head}
    return compiled(linear_kernel, types, constants | tile(rows, size, gated) | settings)


def qkv(
    rows: int, width: int, heads: int, head_dim: int, *, key_heads=0, biased=False, halves=False, **settings: int
) -> Compiled:
    """Without `halves` as of one weight and of as many heads of keys; else of three weights and `key_heads`, which
    are not turned yet if there are none."""
    weights = [f"{name}_weight_ptr" for name in ("query", "key", "value")]
    biases = [f"{name}_bias_ptr" for name in ("query", "key", "value")] if biased else []
    types = dict.fromkeys(("x_ptr", *weights, *biases, "query_ptr"), "*bf16")
    types |= NORM[rows <= NORM_ROWS] | {"eps": "fp32"}
    if key_heads or not halves:
        types |= dict.fromkeys(("keys_ptr", "values_ptr"), "*bf16") | {"table_ptr": "*fp32"}
        types |= {"index_ptr": "*i64", "position_ptr": "*i64"}
    types |= dict.fromkeys(("rows", "count", "rotated", "queries", "positions", "places"), "i32")
    constants = {"width": width, "heads": heads, "key_heads": key_heads or heads, "head_dim": head_dim}
    constants |= {"turned": head_dim, "halves": halves, "block_rows": rows}
    constants |= {"block_pairs": PAIRS, "block_width": BLOCK_WIDTH, "parts": WARPS}
    constants |= {"stages": tile(rows, PAIRS, True)["stages"]}
    return compiled(qkv_kernel, types, constants | settings)


def attention(
    heads: int,
    head_dim: int,
    *,
    key_heads=0,
    told=False,
    rotates=False,
    normed=False,
    turns=True,
    ended=False,
    unit=False,
    text=False,
    **settings: int,
) -> Compiled:
    """`normed` heads are rotated by halves, if they are; those of one length, `unit`, as pairs. Those that ask a
    `text` are made of float32."""
    types = dict.fromkeys(("query_ptr", "keys_ptr", "values_ptr", "out_ptr"), "*bf16")
    types |= {"seen_ptr": "*u8"} | dict.fromkeys(("scale", "length", "eps"), "fp32")
    types |= {} if unit or text else {"slot_ptr": "*i64"}
    types |= {"log_gain_ptr": "*bf16"} if unit else {}
    names = ("weight_ptr", "bias_ptr", "norm_weight_ptr", "norm_bias_ptr")
    types |= dict.fromkeys(names, "*bf16") | {"query_ptr": "*fp32"} if text else {}
    types |= {"visible_ptr": "*u8"} if told else {}
    types |= dict.fromkeys(("count", "rotated", "queries", "places", "prompt", "prefix_end"), "i32")
    types |= dict.fromkeys(("first", "slots", "positions", "columns"), "i32")
    types |= dict.fromkeys(("row_stride", "head_stride"), "i32")
    types |= {"table_ptr": "*fp32", "position_ptr": "*i64"} if rotates or (normed and turns) else {}
    types |= {"table_ptr": "*fp32"} if unit and turns else {}
    types |= {"end_ptr": "*i64"} if ended else {}
    names = ("query_gain_ptr", "query_bias_ptr", "key_gain_ptr", "key_bias_ptr") if normed else ()
    types |= dict.fromkeys(names, "*bf16") | ({"index_ptr": "*i64"} if normed else {})
    constants = {"heads": heads, "key_heads": key_heads or heads, "head_dim": head_dim, "block_prompt": 1}
    constants |= {"stride": (3 if rotates or unit else 1) * heads * head_dim, "turned": head_dim, "halves": normed}
    constants |= {"place_stride": (2 * heads if text else 1) * head_dim, "block_width": WIDTH}
    constants["block_dim"] = triton.next_power_of_2(head_dim)
    constants |= dict.fromkeys(("query_gain_stride", "key_gain_stride"), head_dim if normed else 0)
    constants |= {"block_queries": QUERIES, "block_keys": KEYS, "parts": WARPS}
    constants |= {"stages": stages(head_dim)}
    return compiled(attention_kernel, types, constants | settings)


def embedding(width: int) -> Compiled:
    types = dict.fromkeys(("weight_ptr", "hidden_ptr"), "*bf16")
    types |= dict.fromkeys(("token_ptr", "position_ptr", "places_ptr", "last_ptr", "index_ptr"), "*i64")
    types |= {"count": "i32", "nowhere": "i32"}
    return compiled(embedding_kernel, types, {"width": width, "block": triton.next_power_of_2(width)})


def gate() -> Compiled:
    types: dict[str, Any] = dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), "*bf16")
    types |= dict.fromkeys(("size", "gate_stride", "up_stride"), "i32")
    return compiled(gate_kernel, types, {"block": BLOCK})


def keys(heads: int, head_dim: int) -> Compiled:
    types = dict.fromkeys(("key_ptr", "value_ptr", "keys_ptr", "values_ptr"), "*bf16") | {"table_ptr": "*fp32"}
    types |= {"position_ptr": "*i64", "index_ptr": "*i64"}
    types |= dict.fromkeys(("count", "rotated", "queries", "positions", "places"), "i32")
    constants = dict.fromkeys(("key_stride", "value_stride"), 3 * heads * head_dim)
    constants |= {"key_heads": heads, "head_dim": head_dim, "turned": head_dim, "halves": False}
    return compiled(keys_kernel, types, constants | {"block_heads": KEYS_HEADS})


def norm_and_add(width: int) -> Compiled:
    types = dict.fromkeys(("x_ptr", "gain_ptr", "residual_ptr", "out_ptr"), "*bf16") | {"eps": "fp32"}
    constants = {"width": width, "block": triton.next_power_of_2(width)}
    return compiled(norm_and_add_kernel, types, constants, SUM_WARPS)


def opened_rows(width: int) -> Compiled:
    """With row ends."""
    types = dict.fromkeys(("embedded_ptr", "row_end_ptr", "hidden_ptr"), "*bf16")
    names = ("token", "position", "places", "first", "end_places", "seen", "index", "rotation", "ends", "heads")
    types |= dict.fromkeys([f"{name}_ptr" for name in names], "*i64")
    types |= dict.fromkeys(("count", "batch", "nowhere", "columns", "last"), "i32")
    constants = {"room": 1, "width": width, "block": triton.next_power_of_2(width), "block_count": 16}
    return compiled(rows_kernel, types, constants)


def modulated(
    rows: int,
    width: int,
    size: int,
    *,
    x=torch.bfloat16,
    weight=torch.bfloat16,
    conditions=torch.bfloat16,
    affine=False,
    modulated=False,
    gated=False,
    activation="",
    precise=False,
) -> Compiled:
    """With a norm if it is `affine` or `modulated`, and `gated` with a residual in the dtype of `conditions`."""
    types = {"x_ptr": NAMES[x], **dict.fromkeys(("weight_ptr", "bias_ptr"), NAMES[weight])}
    product = torch.float32 if precise else weight
    types |= {"out_ptr": NAMES[conditions if gated else product], "eps": "fp32", "added": "fp32"}
    types |= dict.fromkeys(("rows", "size", "tokens", "shared", "scale_stride", "shift_stride", "gate_stride"), "i32")
    types |= dict.fromkeys(("norm_weight_ptr", "norm_bias_ptr") if affine else (), NAMES[weight])
    types |= dict.fromkeys(("scale_ptr", "shift_ptr") if modulated else (), NAMES[conditions])
    types |= dict.fromkeys(("residual_ptr", "gate_ptr") if gated else (), NAMES[conditions])
    constants = {"width": width, "norm": affine or modulated, "activation": activation, "dtype": TRITON[product]}
    return compiled(modulated_kernel, types, constants | tiles(rows, width, size, x, product, 3 if modulated else 1))


def modulated_norm(
    width: int, *, x=torch.bfloat16, conditions=torch.bfloat16, residual: torch.dtype | None = None
) -> Compiled:
    """With a `residual`, of the sum before it."""
    types = {"x_ptr": NAMES[x], **dict.fromkeys(("scale_ptr", "shift_ptr"), NAMES[conditions]), "out_ptr": "*bf16"}
    types |= dict.fromkeys(("tokens", "scale_stride", "shift_stride"), "i32") | {"eps": "fp32", "added": "fp32"}
    if residual is not None:
        types |= dict.fromkeys(("residual_ptr", "sum_ptr"), NAMES[residual]) | {"gate_ptr": NAMES[conditions]}
        types |= dict.fromkeys(("gated", "gate_stride"), "i32")
    return compiled(modulated_norm_kernel, types, {"width": width, "block": triton.next_power_of_2(width)}, NORM_WARPS)


def modulations(rows: int, width: int, sizes: Sequence[int], dtype=torch.float32) -> Compiled:
    types: dict[str, Any] = dict.fromkeys(("x_ptr", "out_ptr"), NAMES[dtype])
    types |= dict.fromkeys(("weights", "biases"), (NAMES[dtype],) * len(sizes))
    types |= {"scales": ()} | dict.fromkeys(("rows", "size", "whole_size"), "i32")
    return compiled(modulations_kernel, types, {"width": width} | tiles(rows, width, sizes[0], dtype, dtype))


def head_norms(heads: int, key_heads: int, head_dim: int, *, unit=False) -> Compiled:
    """Of one length and not turned, `unit`, or with gains."""
    types = dict.fromkeys(("states_ptr", "query_ptr", "keys_ptr", "values_ptr"), "*bf16")
    names = ("log_gain_ptr",) if unit else ("query_gain_ptr", "key_gain_ptr", "past_keys_ptr", "past_values_ptr")
    types |= dict.fromkeys(names, "*bf16") | ({} if unit else {"table_ptr": "*fp32"})
    types |= dict.fromkeys(("tokens", "rotated", "first", "copied", "places", "row_stride", "head_stride"), "i32")
    constants = {"heads": heads, "key_heads": key_heads, "head_dim": head_dim, "block_dim": head_dim}
    types |= {"length": "fp32", "eps": "fp32"}
    return compiled(head_norms_kernel, types, constants | {"block_heads": HEADS})


def modulated_kernels(counts: Sequence[int] = (16, 32, TILE_ROWS)) -> Iterator[tuple[str, Compiled]]:
    """Those of VAR-d30, Infinity-2B, InfinityStar-8B and the denoising head of MAR-B for these numbers of rows."""
    yield "VAR norm", modulated_norm(1920)
    yield "Infinity norm", modulated_norm(2048, x=torch.float32, conditions=torch.float32)
    yield "VAR sum and norm", modulated_norm(1920, residual=torch.bfloat16)
    yield "Infinity sum and norm", modulated_norm(2048, conditions=torch.float32, residual=torch.float32)
    yield "VAR heads", head_norms(30, 30, 64, unit=True)
    yield "VAR attention", attention(30, 64, unit=True, turns=False)
    yield "Infinity attention", attention(16, 128, unit=True)
    yield "Infinity text", attention(16, 128, text=True)
    yield "InfinityStar heads", head_norms(32, 8, 128)
    of_head = {"x": torch.float32, "weight": torch.float32, "conditions": torch.float32}
    of_infinity = {"x": torch.float32, "conditions": torch.float32, "modulated": True}
    for rows in counts:
        yield f"VAR qkv, {rows} rows", modulated(rows, 1920, 5760, modulated=True)
        yield f"VAR out, {rows} rows", modulated(rows, 1920, 1920, gated=True)
        yield f"VAR fc1, {rows} rows", modulated(rows, 1920, 7680, modulated=True, activation="gelu_tanh")
        yield f"VAR head in float32, {rows} rows", modulated(rows, 1920, 4096, modulated=True, precise=True)
        yield f"Infinity head in float32, {rows} rows", modulated(rows, 2048, 64, **of_infinity, precise=True)
        yield f"Infinity qkv, {rows} rows", modulated(rows, 2048, 6144, **of_infinity)
        yield f"Infinity fc2, {rows} rows", modulated(rows, 8192, 2048, conditions=torch.float32, gated=True)
        yield (
            f"MAR fc1, {rows} rows",
            modulated(rows, 1024, 1024, **of_head, affine=True, modulated=True, activation="silu"),
        )
        yield f"MAR fc2, {rows} rows", modulated(rows, 1024, 1024, **of_head, gated=True)
        yield f"RAR-B fc1, {rows} rows", modulated(rows, 768, 3072, affine=True, modulated=True, activation="gelu")
        yield f"MAR modulations, {rows} rows", modulations(rows, 1024, (3072,) * 6 + (2048,))


def language_kernels(counts: Sequence[int] = (LEAST_ROWS, 32, TILE_ROWS)) -> Iterator[tuple[str, Compiled]]:
    """Those of language models that the others do not have, of the widths of Emu3, MammothModa2, Emu3.5 and GLM-Image,
    for these numbers of rows."""
    yield "rows", opened_rows(4096)
    yield "GLM-Image added norm", norm_and_add(4096)
    yield "Emu3 attention", attention(32, 128, key_heads=8, ended=True)
    yield "many rows, Emu3 attention", attention(32, 128, key_heads=8, rotates=True, ended=True)
    yield "Chameleon attention", attention(32, 128, normed=True, ended=True)
    yield "RAR-B attention", attention(16, 48, normed=True, turns=False)
    yield "Emu3.5 attention", attention(64, 128, key_heads=8, normed=True, ended=True)
    for rows in counts:
        yield f"Emu3 qkv, {rows} rows", qkv(rows, 4096, 32, 128, key_heads=8, halves=True)
        yield f"MammothModa2 qkv, {rows} rows", qkv(rows, 3584, 28, 128, key_heads=4, biased=True, halves=True)
        yield f"Chameleon qkv, {rows} rows", qkv(rows, 4096, 32, 128, halves=True)
        yield f"Janus head, {rows} rows", linear(rows, 4096, 4096, norm=True, head=True)
        yield f"Emu3.5 gate and up, {rows} rows", linear(rows, 5120, 25600, norm=True, gated=True)


def kernels(
    counts: Sequence[int] = (LEAST_ROWS, 32, TILE_ROWS), narrow: Sequence[str] = ("i8", "fp8e4nv")
) -> Iterator[tuple[str, Compiled]]:
    """Those of LlamaGen-XL for these numbers of rows, and with the weights of 8 bits `narrow`."""
    width, inner, codes, heads, head_dim = 1280, 3584, 16384, 20, 64
    yield "embedding", embedding(width)
    yield "RMS norm", gained(width)
    for width_of_head in (head_dim, 128):
        yield f"attention, {width_of_head} channels", attention(heads, width_of_head)
        yield f"attention, {width_of_head} channels, given mask", attention(heads, width_of_head, told=True)
        yield f"many rows, attention, {width_of_head} channels", attention(heads, width_of_head, rotates=True)
        given = attention(heads, width_of_head, told=True, rotates=True)
        yield f"many rows, attention, {width_of_head} channels, given mask", given
    yield "many rows, key heads", keys(heads, head_dim)
    yield "many rows, gate", gate()
    for rows in counts:
        yield f"qkv, {rows} rows", qkv(rows, width, heads, head_dim)
        yield f"out, {rows} rows", linear(rows, width, width, residual=True)
        yield f"gate and up, {rows} rows", linear(rows, width, inner, norm=True, gated=True)
        yield f"down, {rows} rows", linear(rows, inner, width, residual=True)
        yield f"head, {rows} rows", linear(rows, width, codes, norm=True)
    for weight in narrow:
        yield f"gate and up, {weight}", linear(LEAST_ROWS, width, inner, norm=True, gated=True, weight=weight)
        yield f"down, {weight}", linear(LEAST_ROWS, inner, width, residual=True, weight=weight)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    columns = ("kernel", *(name.replace("_", " ") for name in Compiled._fields))
    print("| " + " | ".join(columns) + " |\n|---|" + "---:|" * (len(columns) - 1))
    for name, result in (*kernels(), *language_kernels(), *modulated_kernels()):
        print("| " + " | ".join(map(str, (name, *result))) + " |", flush=True)


if __name__ == "__main__":
    main()
