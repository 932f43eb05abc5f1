"""What surprised us in libraries, docs/libraries.md. Where arimage is right either way, a change is a warning."""

import gc
import re
import subprocess
import sys
import threading
import time
import warnings
from io import BytesIO

import numpy as np
import pytest
import torch
from pages import ROOT
from PIL import Image, ImageDraw
from torch import nn

from arimage.app.server.state import RETRY_SECONDS
from arimage.decoding import Sampling
from arimage.media.files import read_video
from arimage.media.writing import write_video


PAGE = ROOT / "docs" / "libraries.md"


class LibraryChanged(UserWarning):
    """A row of docs/libraries.md no longer holds."""


def still(holds: bool, row: str) -> None:
    if not holds:
        message = f"docs/libraries.md says {row!r}, which the installed version no longer does"
        warnings.warn(message, LibraryChanged, stacklevel=2)


def test_every_row_has_its_check():
    rows = re.findall(r"`(test_\w+)` *\|$", PAGE.read_text(), re.M)
    assert len(rows) == len(set(rows))
    assert set(rows) == {name for name in globals() if name.startswith("test_")} - {"test_every_row_has_its_check"}


# Generate


def test_log_softmax_of_bfloat16():
    logits = torch.randn(8, 16_384, generator=torch.Generator().manual_seed(0)).mul(3).bfloat16()
    error = (logits.log_softmax(-1).double().exp().sum(-1) - 1).abs().max()
    exact = (logits.log_softmax(-1, dtype=torch.float32).double().exp().sum(-1) - 1).abs().max()
    assert exact < 1e-4
    still(error > 3e-3, "its log-probabilities of bfloat16 share an error")
    ours = Sampling().probabilities(logits[None, :, None], torch.zeros(8, 1, dtype=torch.long))
    assert (ours.double().sum(-1) - 1).abs().max() < 1e-4


def test_sort_of_equal_values():
    order = torch.zeros(16_384).argsort()
    assert torch.equal(torch.zeros(16_384).argsort(stable=True), torch.arange(16_384))
    still(not torch.equal(order, torch.arange(16_384)), "equal values are not in the order of their indices")


def test_uniform_numbers_of_bfloat16():
    zeros = (torch.rand(2**20, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)) == 0).float().mean()
    still(1 / 600 < zeros < 1 / 430, "1 of 512 numbers is 0")


def test_float8_beyond_its_range():
    beyond = torch.tensor([500.0, float("inf")])
    assert beyond.to(torch.float8_e5m2).float()[1] == float("inf")
    still(beyond.to(torch.float8_e4m3fn).float().tolist() == [448, 448], "float8_e4m3fn saturates")


@pytest.mark.slow
def test_inductor_keeps_precision_of_fused_operations():
    def chain(x, gate):
        return nn.functional.silu(gate) * x + x * 0.3

    x, gate = torch.randn(2, 64, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    different = (torch.compile(chain)(x, gate) != chain(x, gate)).float().mean()
    still(different > 0.1, "compiled bfloat16 differs from eager")
    torch._dynamo.reset()
    with torch._inductor.config.patch(emulate_precision_casts=True):
        still(torch.equal(torch.compile(chain)(x, gate), chain(x, gate)), "emulate_precision_casts gives eager bits")


@pytest.mark.slow
def test_frozen_inductor_reads_new_biases():
    layer = nn.Linear(64, 64).eval().requires_grad_(False)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    old = layer.weight.clone()
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        compiled = torch.compile(layer)
        compiled(x)
        layer.weight.add_(1)
        layer.bias.add_(1)
        mixture = compiled(x)
    still(torch.allclose(mixture, nn.functional.linear(x, old, layer.bias), atol=1e-4), "old weights, new biases")


def _language_model(**settings):
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaModel(LlamaConfig(vocab_size=32, **sizes, **settings)).eval()


def test_rotary_frequencies_in_bfloat16():
    model = _language_model()
    before = model.rotary_emb.inv_freq.clone()
    after = model.to(torch.bfloat16).rotary_emb.inv_freq
    still(after.dtype == torch.bfloat16 and bool((after != before).any()), "the cast rounds rotary frequencies")


def test_boolean_masks_of_eager_attention():
    torch.manual_seed(0)
    model = _language_model()
    tokens = torch.arange(6)[None]
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    logits = {}
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        logits[name] = model(tokens, attention_mask=mask).last_hidden_state.detach()
    still(not torch.allclose(logits["sdpa"], logits["eager"], atol=1e-3), "eager attention adds boolean masks")


def test_arrays_of_the_image_processor():
    from diffusers.image_processor import VaeImageProcessor

    stripes = np.tile(np.repeat(np.array([0, 255], np.uint8), 3), 16)[None, :, None].repeat(96, 0).repeat(3, 2)
    processor = VaeImageProcessor(resample="lanczos")
    image = processor.preprocess(Image.fromarray(stripes), 48, 48)
    array = processor.preprocess(stripes[None] / np.float32(255), 48, 48)
    still((image - array).abs().mean() > 0.1, "arrays are resized by the nearest pixel")


def test_group_norm_in_channels_last():
    images = torch.randn(1, 4, 2048, 2048, generator=torch.Generator().manual_seed(0)) + 3
    exact = nn.functional.group_norm(images.double(), 1)
    plain = (nn.functional.group_norm(images, 1) - exact).abs().max()
    coarse = (nn.functional.group_norm(images.to(memory_format=torch.channels_last), 1) - exact).abs().max()
    still(coarse > 20 * plain, "group norm in channels_last is coarse")


def _tied():
    from diffusers import ConfigMixin, ModelMixin

    class Tied(ModelMixin, ConfigMixin):
        config_name = "config.json"

        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x):
            return self.last(self.first(x))

    torch.manual_seed(0)
    return Tied().requires_grad_(False)


def _offloaded(model, folder):
    from diffusers.hooks import apply_group_offloading

    devices = torch.device("cpu"), torch.device("cpu")
    apply_group_offloading(model, *devices, offload_type="leaf_level", offload_to_disk_path=str(folder))
    return model(torch.ones(1, 8))


def test_tied_weights_offloaded_to_disk(tmp_path):
    right = _tied()(torch.ones(1, 8))
    still(not torch.equal(_offloaded(_tied(), tmp_path), right), "tied weights are lost on disk")


def test_folder_of_weights_offloaded_to_disk(tmp_path):
    first, second = (nn.Sequential(nn.Linear(8, 8)).requires_grad_(False) for _ in range(2))
    expected = second(torch.ones(1, 8)), first(torch.ones(1, 8))
    _offloaded(first, tmp_path)
    found = _offloaded(second, tmp_path)
    still(not torch.equal(found, expected[0]) and torch.equal(found, expected[1]), "a folder keeps the first weights")


INTERPRETED = """
import torch, triton, triton.language as tl

@triton.jit
def cast(source, target, size: tl.constexpr):
    places = tl.arange(0, size)
    tl.store(target + places, tl.load(source + places))

for dtype in (torch.bfloat16, torch.float8_e4m3fn):
    source = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    target = torch.empty(1024, dtype=dtype)
    cast[1,](source, target, 1024)
    print((target.float() != source.to(dtype).float()).float().mean().item())
"""


def test_casts_of_the_triton_interpreter(tmp_path):
    pytest.importorskip("triton")
    script = tmp_path / "cast.py"
    script.write_text(INTERPRETED)
    environment = {"TRITON_INTERPRET": "1", "PATH": ""}
    ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    bfloat16, float8 = map(float, ran.stdout.split())
    still(bfloat16 > 0.3 and float8 > 0.005, "the interpreter truncates bfloat16")


# Train


def test_resuming_in_mid_epoch(tmp_path):
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    def loader():
        set_seed(0)
        accelerator = Accelerator(cpu=True)
        return accelerator, accelerator.prepare(torch.utils.data.DataLoader(list(range(12)), 2, shuffle=True))

    accelerator, data = loader()
    read = []
    for batch in data:
        read += batch.tolist()
        if len(read) == 6:
            accelerator.save_state(str(tmp_path))
    accelerator, data = loader()
    accelerator.load_state(str(tmp_path))
    rest = [row for batch in accelerator.skip_first_batches(data, 3) for row in batch.tolist()]
    still(sorted(read[:6] + rest) != list(range(12)), "a resumed epoch repeats rows")


def test_unwrapping_in_mixed_precision():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    layer = nn.Linear(64, 64)
    x = torch.randn(8, 64)
    exact = layer(x)
    prepared = accelerator.prepare(layer)
    assert not torch.equal(prepared(x), exact)
    accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    still(torch.equal(prepared(x), exact), "unwrapping ends mixed precision")


def test_weights_changed_under_autocast():
    layer = nn.Linear(8, 8)
    x = torch.ones(1, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        layer.weight.add_(1)
        still(torch.equal(layer(x), before), "an autocast block computes with old weights")


def test_second_moment_of_bfloat16():
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight], lr=1e-6, foreach=False)
    for size, steps in ((1.0, 1500), (0.01, 1500)):
        weight.grad = torch.full_like(weight, size)
        for _ in range(steps):
            optimizer.step()
    exact = (1 - 0.999**1500) * 0.999**1500 + 1e-4 * (1 - 0.999**1500)
    still(optimizer.state[weight]["exp_avg_sq"].item() > 2 * exact, "the second moment of bfloat16 never falls")


def test_gradient_of_a_frequent_token():
    table = nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16))
    nn.functional.embedding(torch.zeros(10_000, dtype=torch.long), table).sum().backward()
    still(table.grad[0, 0] == 256, "a row's gradient stops at 256")


def test_reading_the_state_of_an_optimizer():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    get_optimizer_state_dict(layer, optimizer)
    still(bool(optimizer.state), "reading the optimiser's state makes a step")


def test_order_with_persistent_workers():
    orders = []
    for persistent in (False, True):
        generator = torch.Generator().manual_seed(0)
        options = {"shuffle": True, "generator": generator, "num_workers": 1, "persistent_workers": persistent}
        loader = torch.utils.data.DataLoader(list(range(16)), 16, **options)
        orders.append([next(iter(loader)).tolist() for _ in range(2)])
    assert orders[0][0] == orders[1][0]
    still(orders[0][1] != orders[1][1], "persistent workers change the second epoch")


def test_resumed_shuffle_buffer():
    from datasets import Dataset

    def stream():
        return Dataset.from_dict({"row": list(range(64))}).to_iterable_dataset().shuffle(seed=0, buffer_size=16)

    rows = stream()
    read = []
    for example in rows:
        read.append(example["row"])
        if len(read) == 20:
            state = rows.state_dict()
            break
    resumed = stream()
    resumed.load_state_dict(state)
    rest = [example["row"] for example in resumed]
    still(sorted(read + rest) != list(range(64)), "a resumed shuffle buffer repeats and loses rows")


def test_images_that_were_changed_in_place(tmp_path):
    from datasets import Dataset, Features
    from datasets import Image as ImageColumn

    Image.new("RGB", (8, 8)).save(tmp_path / "black.png")
    image = Image.open(tmp_path / "black.png")
    ImageDraw.Draw(image).rectangle((0, 0, 8, 8), "white")
    stored = Dataset.from_dict({"image": [image]}, features=Features({"image": ImageColumn()}))[0]["image"]
    still(stored.getpixel((4, 4)) == (0, 0, 0), "an image that was changed in place is stored as its file")


def test_parquet_files_of_paths(tmp_path):
    import pyarrow.parquet
    from datasets import Dataset, Features
    from datasets import Image as ImageColumn

    Image.new("RGB", (8, 8)).save(tmp_path / "black.png")
    rows = Dataset.from_dict({"image": [str(tmp_path / "black.png")]}, features=Features({"image": ImageColumn()}))
    rows.to_parquet(tmp_path / "rows.parquet")
    (image,) = pyarrow.parquet.read_table(tmp_path / "rows.parquet")["image"].to_pylist()
    still(image["bytes"] is None, "to_parquet writes paths")


def test_seed_of_webdataset(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for row in range(32):
            tar.addfile(tarfile.TarInfo(f"{row}.txt"), BytesIO())
    rows = webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).shuffle(32, seed=0)
    first, second = ([row["__key__"] for row in rows] for _ in range(2))
    still(first == second, "a seed gives every epoch the same order")


# Store


def test_merging_a_small_adapter_into_bfloat16():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    network = nn.ModuleDict({"layer": nn.Linear(256, 256, bias=False)}).bfloat16()
    before = network["layer"].weight.detach().double().clone()
    model = get_peft_model(network, LoraConfig(r=4, target_modules=["layer"]))
    layer = model.base_model.model["layer"]
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_()
        wanted = layer.get_delta_weight("default").double()
        layer.lora_B["default"].weight.mul_(5e-4 * before.norm() / wanted.norm())
        wanted = layer.get_delta_weight("default").double()
    change = model.merge_and_unload()["layer"].weight.double() - before
    still((change * wanted).sum() / wanted.square().sum() < 0.6, "a small adapter is weaker once merged")


def test_saving_in_shards_next_to_one_file(tmp_path):
    from transformers import LlamaModel

    model = _language_model()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        model.embed_tokens.weight.fill_(7)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    loaded = LlamaModel.from_pretrained(tmp_path)
    still(bool((loaded.embed_tokens.weight != 7).any()), "the old file is loaded")


def test_weights_that_a_file_lacks(tmp_path):
    from diffusers import AutoencoderKL
    from safetensors.torch import load_file, save_file

    model = AutoencoderKL(block_out_channels=(4,), norm_num_groups=1)
    model.save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    del weights["quant_conv.weight"]
    save_file(weights, path)
    loaded = AutoencoderKL.from_pretrained(tmp_path)
    still(loaded.quant_conv.weight.is_meta, "a weight that the file lacks is no error")


def test_transposed_arrays_of_safetensors(tmp_path):
    from safetensors.numpy import load_file, save_file

    array = np.arange(6.0).reshape(2, 3).T
    save_file({"weight": array}, tmp_path / "a.safetensors")
    still(not np.array_equal(load_file(tmp_path / "a.safetensors")["weight"], array), "views lose their order")


def test_animated_webp_with_transparent_ground():
    frames = []
    for left in (0, 4, 8):
        frames.append(Image.new("RGBA", (16, 16)))
        ImageDraw.Draw(frames[-1]).rectangle((left, 4, left + 3, 7), (255, 0, 0, 255))
    file = BytesIO()
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    still(Image.open(file).mode == "RGB", "an animated WebP of opaque rectangles loses its transparency")


# Evaluate


def test_bicubic_resizing_between_passes():
    levels = np.random.default_rng(0).integers(0, 2, (64, 64), np.uint8) * 255
    image = Image.fromarray(levels)
    eight = np.asarray(image.resize((40, 40), Image.Resampling.BICUBIC), np.float32)
    exact = np.asarray(image.convert("F").resize((40, 40), Image.Resampling.BICUBIC)).clip(0, 255)
    still(np.abs(eight - exact).max() > 10, "8-bit images are clipped between two passes")


def _encoded(frames, folder, *options):
    import imageio_ffmpeg

    path = str(folder / "clip.mp4")
    size = frames.shape[2], frames.shape[1]
    writer = imageio_ffmpeg.write_frames(path, size, fps=10, codec="libx264", output_params=list(options))
    writer.send(None)
    for frame in frames:
        writer.send(np.ascontiguousarray(frame))
    writer.close()
    return path


def test_yuv420p_read_back(tmp_path):
    import imageio_ffmpeg

    colours = np.random.default_rng(0).integers(30, 220, (4, 8, 8, 3), np.uint8)
    frames = colours.repeat(16, 1).repeat(16, 2)
    reader = imageio_ffmpeg.read_frames(_encoded(frames, tmp_path, "-crf", "0"))
    next(reader)
    read = np.stack([np.frombuffer(frame, np.uint8).reshape(frames.shape[1:]) for frame in reader])
    still((read.astype(int) - frames).mean() < -0.6, "an .mp4 comes back darker")
    write_video([Image.fromarray(frame) for frame in frames], tmp_path / "ours.mp4", 10)
    ours = np.stack([np.asarray(frame) for frame in read_video("--video", tmp_path / "ours.mp4")])
    assert abs((ours.astype(int) - frames).mean()) < 0.4


def test_rate_of_a_variable_clip(tmp_path):
    import imageio_ffmpeg

    frames = np.zeros((20, 32, 32, 3), np.uint8)
    path = _encoded(
        frames, tmp_path, "-vf", "settb=1/30,setpts=N+5*floor(N/4)", "-fps_mode", "vfr", "-enc_time_base", "1/30"
    )
    reader = imageio_ffmpeg.read_frames(path)
    rate = next(reader)["fps"]
    number, seconds = sum(1 for _ in reader), imageio_ffmpeg.count_frames_and_secs(path)[1]
    still(number / rate > 1.5 * seconds, "frames come at another rate than stated")


# Serve


def _client(answer):
    import httpx
    from openai import OpenAI

    return OpenAI(
        api_key="-", base_url="http://server", http_client=httpx.Client(transport=httpx.MockTransport(answer))
    )


@pytest.mark.parametrize(("seconds", "waits"), [(str(RETRY_SECONDS), [RETRY_SECONDS]), ("120", [120]), ("121", [])])
def test_retry_after_of_the_openai_client(monkeypatch, seconds, waits):
    import httpx
    from openai import OpenAIError

    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    with pytest.raises(OpenAIError):
        client = _client(lambda request: httpx.Response(503, headers={"Retry-After": seconds}))
        client.with_options(max_retries=1).images.generate(prompt="a", model="b")
    still(waited == waits, "it waits for Retry-After, up to 120 seconds")


def test_error_events_of_the_openai_client():
    import httpx

    event = 'event: error\ndata: {"type": "error", "message": "no memory"}\n\n'
    headers = {"Content-Type": "text/event-stream"}
    client = _client(lambda request: httpx.Response(200, headers=headers, text=event))
    events = list(client.images.generate(prompt="a", model="b", stream=True))
    still([each.type for each in events] == ["error"], "an error event without an error field is an image event")


def test_stream_of_a_client_that_left():
    import anyio
    from starlette.responses import StreamingResponse

    ended = threading.Event()

    def stream():
        try:
            while True:
                yield b"row"
        finally:
            ended.set()

    async def leave():
        sent = 0

        async def send(message):
            nonlocal sent
            sent += 1

        async def receive():
            while sent < 3:
                await anyio.sleep(0)
            return {"type": "http.disconnect"}

        scope = {"type": "http", "asgi": {"spec_version": "2.0"}, "method": "GET", "headers": []}
        await StreamingResponse(stream())(scope, receive, send)

    gc.disable()
    try:
        anyio.run(leave)
        early = ended.is_set()
    finally:
        gc.enable()
    gc.collect()
    assert ended.is_set()
    still(not early, "a sync stream ends when the garbage collector runs")
