"""`arimage generate`: pictures that say how they were made, and `--from`, which makes them again."""

import json
from pathlib import Path

import pytest
from adapters import adapter
from families import EVERY, condition_of, one_of_each_kind, seeded
from PIL import Image
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.emu35 import tiny as tiny_emu35
from pipelines.llamagen import tiny as tiny_llamagen
from safetensors.torch import save_file

from arimage import __version__
from arimage.cli.made import notes_of
from arimage.media import metadata
from arimage.media.files import read_metadata


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    pipe = tiny_llamagen.text_pipeline()
    pipe.save_pretrained(folder / "text")
    save_file(adapter(pipe), folder / "style.safetensors")
    tiny_llamagen.class_pipeline().save_pretrained(folder / "class")
    tiny_cosmos.pipeline("text").save_pretrained(folder / "film")
    return folder


@pytest.fixture
def generate(run, models):
    """Run the command next to the models; returns the files that it wrote and what it said."""

    def generate(*arguments):
        for path in models.iterdir():
            if not Path(path.name).exists():
                Path(path.name).symlink_to(path)
        code, out, err = run("generate", *arguments, "--device", "cpu")
        assert code == 0, err
        return [Path(line) for line in out.splitlines()], err

    return generate


def found_in(path):
    return read_metadata("x", Path(path)).model_dump(exclude_defaults=True)


# Settings that are not the model's.
OTHERS = ["--temperature", 0.7, "--top-k", 9, "--top-p", 0.9, "--min-p", 0.01, "--guidance-scale", 3.0]


@pytest.mark.every(3)
@pytest.mark.parametrize("given", [[], [*OTHERS, "--decoding", "sjd:window=8", "--dtype", "bfloat16"], ["-n", 2]])
def test_every_picture_of_a_call_is_made_again_byte_for_byte(generate, given):
    made, _ = generate("a red heart", "tree", "--model", "./text", "--seed", 7, "-n", 2, "--out", "all", *given)
    assert [path.name.rpartition("-")[0] for path in made] == ["a-red-heart"] * 2 + ["tree"] * 2
    for path in made:
        assert found_in(path)["seed"] == int(path.stem.rpartition("-")[2])
        (again,), _ = generate("--from", path, "--out", "again")
        assert (again.name, again.read_bytes()) == (path.name, path.read_bytes())


def test_a_picture_is_made_alone_by_the_seed_in_its_name(generate):
    made, _ = generate("a red heart", "tree", "--model", "./text", "--seed", 7, "-n", 2, "--dtype", "float32")
    for path in made:
        prompt, _, seed = path.stem.rpartition("-")
        options = ["--model", "./text", "--seed", seed, "--dtype", "float32", "--out", "alone.png"]
        generate(prompt.replace("-", " "), *options)
        assert Image.open("alone.png").tobytes() == Image.open(path).tobytes()


def test_a_folder_with_a_sheet_which_is_made_again_too(generate, refused):
    made, err = generate("tree", "--model", "./text", "-n", 3, "--batch-size", 2, "--out", "all", "--sheet")
    assert made[-1] == Path("all/sheet.png") and len(made) == 4 and err.startswith("3 images")
    assert found_in(made[-1]) | {"count": 3, "batch_size": 2, "seed": 0} == found_in(made[-1])
    (again,), _ = generate("--from", made[-1], "--out", "again.png")
    assert again.read_bytes() == made[-1].read_bytes()
    more, _ = generate("tree", "fir", "--model", "./text", "--out", "all", "--sheet")
    assert more[-1] == Path("all/sheet-2.png")
    assert "--sheet" in refused("generate", "tree", "--model", "./text", "--sheet", "--out", "x.png")


@pytest.mark.parametrize(
    "given, conditions",
    [
        (["a red heart", "tree", "fir", "--model", "./text"], {"prompts": ["a red heart", "tree", "fir"]}),
        (["--class-label", 3, "--class-label", 0, "--model", "./class"], {"class_labels": [3, 0]}),
    ],
)
def test_a_sheet_of_several_prompts_is_made_again(generate, given, conditions):
    (sheet,), _ = generate(*given, "-n", 2, "--seed", 7, "--batch-size", 3, "--temperature", 0.7, "--out", "sheet.png")
    (several,) = conditions.values()
    assert (conditions | {"count": 2 * len(several), "seed": 7, "batch_size": 3}).items() <= found_in(sheet).items()
    (again,), _ = generate("--from", sheet, "--out", "again.png")
    assert again.read_bytes() == sheet.read_bytes()
    # Other prompts in their place have as many images each.
    made, _ = generate(
        "--from", sheet, *(["fir"] if "prompts" in conditions else ["--class-label", 1]), "--out", "all"
    )
    assert len(made) == 2 and found_in(made[0])["temperature"] == 0.7


def test_a_sheet_of_more_prompts_than_a_file_holds_has_no_metadata(generate, refused):
    (sheet,), _ = generate("fir " * 2400, *["tree " * 1900] * 6, "--model", "./text", "--out", "sheet.png")
    assert Image.open(sheet).info == {}
    assert "does not say how it was made" in refused("generate", "--from", sheet)


def test_other_options_replace_the_settings_of_the_picture(generate):
    (path,), _ = generate(
        "tree", "--model", "./text", "--temperature", 0.7, "--seed", 3, "--lora", "style.safetensors"
    )
    expected = {"lora": ["style.safetensors:1"], "temperature": 0.7, "seed": 3, "prompt": "tree"}
    assert expected.items() <= found_in(path).items()
    (other,), _ = generate("--from", path, "a red heart", "--temperature", 2, "--out", "x.png")
    changed = {"temperature": 2.0, "prompt": "a red heart"}
    assert found_in(other) == found_in(path) | changed
    # The picture itself stays.
    (second,), _ = generate("--from", path, "--temperature", 2)
    assert second == path.with_stem(f"{path.stem}-2")
    # Another model has its own settings, and takes the prompt and the seed.
    for options in (["--from", path, "--model", "./class"], ["--model", "./class", "--from", path]):
        (classes,), _ = generate(*options, "--class-label", 3)
        found = found_in(classes)
        assert (found["class_label"], found["seed"], found["temperature"]) == (3, 3, 1.0)
        assert not {"prompt", "lora"} & found.keys()


def test_no_metadata_leaves_nothing_in_the_files(generate, refused):
    (path,), _ = generate("tree", "--model", "./text", "--no-metadata")
    assert Image.open(path).info == {}
    assert f"--from is {path}, which does not say how it was made" in refused("generate", "--from", path)


def test_a_film_is_made_again_from_the_picture_that_it_began_with(generate, refused):
    Image.new("RGB", (64, 48), "red").save("first.png")
    (path,), _ = generate("a red heart", "--model", "./film", "--image", "first.png", "--num-frames", 9)
    assert found_in(path)["made_from"] == ["image"] and found_in(path)["num_frames"] == 9
    assert "--image" in refused("generate", "--from", path)
    (again,), _ = generate("--from", path, "--image", "first.png", "--out", "again")
    assert again.read_bytes() == path.read_bytes()


def test_names_of_users_stay_out_of_pictures(generate, models):
    (path,), _ = generate("tree", "--model", models / "text", "--lora", f"{models}/style.safetensors:0.5")
    assert str(models) not in path.read_bytes().decode("latin-1")
    assert found_in(path)["model"] == "text" and found_in(path)["lora"] == ["style.safetensors:0.5"]


def test_an_edit_without_references_has_the_guidance_of_all_calls(generate):
    pipe = tiny_emu35.pipeline()
    pipe.save_pretrained("reader")
    Image.new("RGB", pipe.image_sizes[0][::-1], "grey").save("photo.png")
    Image.new("L", pipe.image_sizes[0][::-1], "white").save("mask.png")
    inputs = ["--image", "photo.png", "--mask-image", "mask.png"]
    guidance = [pipe.reference_guidance_scale, pipe.generation_config["guidance_scale"]]
    made = [generate("x", "--model", "./reader", *inputs[:count], "--out", f"{count}.png")[0][0] for count in (2, 4)]
    assert [found_in(path)["guidance_scale"] for path in made] == guidance and guidance[0] != guidance[1]
    (again,), _ = generate("--from", made[1], *inputs, "--out", "again.png")
    assert again.read_bytes() == made[1].read_bytes()


def test_a_picture_of_another_version_says_so(generate, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "__version__", "0.0.7")
        (path,), err = generate("tree", "--model", "./text")
    assert "0.0.7" in generate("--from", path)[1] and __version__ not in err


@pytest.mark.parametrize("name", one_of_each_kind(EVERY))
def test_settings_of_every_kind_of_model_are_taken_back(name, tmp_path):
    pipe = EVERY[name]()
    given = condition_of(pipe)
    out = pipe(**given, generator=seeded(5), output_type="pil")
    names = (*pipe.generation_config, "order", "negative_prompt")
    settings = {name: None for name in names if name in metadata.Metadata.model_fields}
    settings |= {"model": name, "lora": None, "made_from": None}
    (text,), _ = notes_of(pipe, settings, [{}], out[0], out.seeds, False)
    taken = json.loads(text) | {"version": "x"}
    again = pipe(
        **given,
        **{name: taken[name] for name in taken if pipe.abilities.accepts(name) and name != "num_frames"},
        **({"height": taken["height"], "width": taken["width"]} if name not in ("cosmos", "cosmos-text") else {}),
        generator=seeded(taken["seed"]),
    )
    first = (again[0][0], out[0][0]) if not pipe.abilities.generates_video else (again[0][0][0], out[0][0][0])
    assert first[0].tobytes() == first[1].tobytes()
    assert metadata.from_text(name, text).seed == 5
