"""Data sets of every layout, and the cache of their tokens."""

import io
import json
import os
import shutil
import tarfile
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from pipelines.latent_llama import tiny as tiny_latents
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var
from safetensors.torch import load_file, save_file


pytest.importorskip("datasets", reason="the extra `train` is not installed")
from arimage.training.data.row import decode  # noqa: E402
from arimage.training.data.sources import open_source  # noqa: E402
from arimage.training.losses import losses_of  # noqa: E402
from arimage.training.tokens import cache as caches  # noqa: E402
from arimage.training.tokens import rows  # noqa: E402
from arimage.training.tokens.cache import INDEX, TokenCache, encode_tokens, read_index  # noqa: E402
from arimage.training.tokens.views import centre_crop, views_of  # noqa: E402


def picture(number=0, width=24, height=20, mode="RGB"):
    levels = np.random.default_rng(number).integers(0, 256, (height, width, len(mode)), dtype=np.uint8)
    return Image.fromarray(levels, mode)


def encoded(number=0, **changes):
    file = io.BytesIO()
    picture(number, **changes).save(file, "PNG")
    return file.getvalue()


def class_folders(root, names=("ant", "bee", "cow"), count=3):
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for i in range(count):
            picture(10 * number + i).save(root / name / f"{i}.png")
    return root


def rows_of(source):
    return [(np.asarray(decode(where, image)).tobytes(), text) for where, image, text in source.read()]


# Data sets


def test_folders_with_metadata(tmp_path):
    for i in range(2):
        picture(i, mode="RGBA").save(tmp_path / f"{i}.png")
    lines = [{"file_name": f"{i}.png", "text": f" caption {i}\n", "other": "x"} for i in (1, 0)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = open_source(str(tmp_path))
    assert not source.labelled and sorted(text for _, text in rows_of(source)) == ["caption 0", "caption 1"]
    assert {text for _, text in rows_of(open_source(str(tmp_path), caption="other"))} == {"x"}


def parquet(path, numbers, **columns):
    images = [{"bytes": encoded(number), "path": f"{number}.png"} for number in numbers]
    pq.write_table(pa.table({"image": images, **columns}), path)


def test_webdataset_shards(tmp_path):
    for shard in range(2):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for i in range(2):
                for name, data in ((f"{i}.png", encoded(2 * shard + i)), (f"{i}.cls", str(3 * i).encode())):
                    info = tarfile.TarInfo(f"{shard}{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    source = open_source(str(tmp_path))
    found = rows_of(source)
    assert source.labelled and source.classes is None and [text for _, text in found] == ["0", "3", "0", "3"]
    assert [image for image, _ in found] == [picture(i).tobytes() for i in range(4)]


def test_names_of_classes_may_be_given(tmp_path):
    parquet(tmp_path / "a.parquet", [0, 1], species=["bee", "ant"])
    given = {"label": "species", "classes": ["ant", "bee"]}
    assert [text for _, text in rows_of(open_source(str(tmp_path), **given))] == ["1", "0"]
    with pytest.raises(ValueError, match="row 1, has the class 'bee': give a file"):
        rows_of(open_source(str(tmp_path), label="species"))
    with pytest.raises(ValueError, match="row 1, has the class 'bee'"):
        rows_of(open_source(str(tmp_path), label="species", classes=["ant"]))


def test_odd_data_sets_are_refused(tmp_path):
    parquet(tmp_path / "a.parquet", [0], caption=[" "], other=[None])
    (tmp_path / "empty").mkdir()
    picture().save(tmp_path / "one.png")
    data = str(tmp_path / "a.parquet")
    for given, message in (
        (
            {"data": data, "image": "photo"},
            "has the columns image, caption, other: name that of its images with --image",
        ),
        ({"data": data, "label": "class"}, "name that of its labels with --label"),
        ({"data": data, "label": "other", "caption": "caption"}, "caption and label are both given"),
        ({"data": data}, "row 1, has an empty caption"),
        ({"data": data, "caption": "other"}, "row 1, has no other: leave the row out"),
        ({"data": str(tmp_path / "one.png")}, "is not a data set: give a folder"),
        ({"data": str(tmp_path / "empty")}, "has no images: give a folder"),
        ({"data": str(tmp_path / "absent.parquet")}, "names no file"),
    ):
        with pytest.raises(ValueError, match=message):
            rows_of(open_source(**given))
    damaged = class_folders(tmp_path / "damaged")
    (damaged / "ant" / "1.png").write_bytes(encoded()[:60])
    with pytest.raises(ValueError, match="damaged, row 2"):
        rows_of(open_source(str(tmp_path / "damaged")))


# Views


def test_views_are_crops_and_their_mirror_images():
    image = picture(0, 60, 44)
    middle = views_of(image, (16, 16), "centre")
    assert middle.shape == (1, 3, 16, 16) and middle.dtype == torch.uint8
    both = views_of(image, (16, 16), "centre-flip")
    assert torch.equal(both[0], middle[0]) and torch.equal(both[1], middle[0].flip(2))
    ten = views_of(image, (16, 16), "ten-crop")
    larger = torch.from_numpy(np.asarray(centre_crop(image, (17, 17)))).permute(2, 0, 1)
    assert ten.shape == (10, 3, 16, 16) and torch.equal(ten[5:], ten[:5].flip(3))
    assert torch.equal(ten[0], larger[:, :16, :16]) and torch.equal(ten[3], larger[:, 1:, 1:])
    assert centre_crop(picture(0, 5, 3), (16, 16)).size == (16, 16)


# The cache


def encode(pipe, data, out, **settings):
    source = open_source(str(data))
    settings = {"model": "tiny", "shard_size": 4, "batch_size": 3, **settings}
    return encode_tokens(source, pipe, out, **settings)


@pytest.mark.parametrize(
    "make",
    [tiny_llamagen.class_pipeline, lambda: tiny_var.pipeline("class"), tiny_latents.pipeline],
    ids=["llamagen", "var", "latent-llama"],
)
def test_the_tokens_are_those_of_the_views(tmp_path, make):
    pipe, data = make(), class_folders(tmp_path / "data")
    index = encode(pipe, data, tmp_path / "tokens", views="centre-flip")
    cache = TokenCache(tmp_path / "tokens")
    assert len(cache) == 9 and index.num_classes == 3 and index.classes == ["ant", "bee", "cow"] and index.complete
    assert [shard.count for shard in index.shards] == [4, 4, 1]
    losses = losses_of(pipe, "0")
    for image, number in ((0, 0), (5, 12), (8, 22)):
        views = views_of(picture(number), pipe.image_sizes[0], "centre-flip").float() / 127.5 - 1
        with torch.no_grad():
            expected = losses.tokens(views)
        for view in range(2):
            tokens, texts = cache.read([image], [view])
            assert texts == [str(number // 10)] and tokens.shape[1:] == index.shape
            torch.testing.assert_close(tokens[0], expected[view].to(tokens), atol=2e-3, rtol=2e-3)
    assert (tokens.dtype == torch.int64) == (not expected.is_floating_point())


def test_captions_come_back(tmp_path):
    texts = ["a cat", "naïve 東京", "x", "y " * 50, "z"]
    parquet(tmp_path / "a.parquet", range(5), caption=texts)
    pipe = tiny_llamagen.text_pipeline()
    index = encode(pipe, tmp_path / "a.parquet", tmp_path / "tokens", shard_size=3)
    assert not index.labelled and index.num_classes == 0
    _, found = TokenCache(tmp_path / "tokens").read([4, 1, 3, 0, 2], [0] * 5)
    assert found == [texts[i].strip() for i in (4, 1, 3, 0, 2)]


def test_an_interrupted_encoding_goes_on(tmp_path, monkeypatch):
    pipe, data = tiny_llamagen.class_pipeline(), class_folders(tmp_path / "data")
    encode(pipe, data, tmp_path / "whole")
    seen, stopping, plain = [], [True], rows.decode

    def stops(where, image):
        seen.append(where)
        if stopping and ", row 7" in where:
            raise KeyboardInterrupt
        return plain(where, image)

    monkeypatch.setattr(rows, "decode", stops)
    with pytest.raises(KeyboardInterrupt):
        encode(pipe, data, tmp_path / "cut")
    assert not read_index(tmp_path / "cut").complete
    with pytest.raises(ValueError, match="is not finished: run `arimage train tokens` again"):
        TokenCache(tmp_path / "cut")
    seen.clear(), stopping.clear()
    encode(pipe, data, tmp_path / "cut")
    # The first shard was whole.
    assert len(seen) == 5
    assert TokenCache(tmp_path / "cut").digest == TokenCache(tmp_path / "whole").digest
    monkeypatch.setattr(rows, "decode", None)
    assert encode(pipe, data, tmp_path / "cut").complete


def test_a_limit_is_kept(tmp_path):
    pipe, data = tiny_llamagen.class_pipeline(), class_folders(tmp_path / "data")
    encode(pipe, data, tmp_path / "tokens", limit=5)
    assert len(TokenCache(tmp_path / "tokens")) == 5


def test_other_settings_and_damage_are_refused(tmp_path):
    pipe, data, out = tiny_llamagen.class_pipeline(), class_folders(tmp_path / "data"), tmp_path / "tokens"
    encode(pipe, data, out)
    for given, name in (({"views": "ten-crop"}, "views"), ({"size": 32}, "image_size"), ({"model": "b"}, "model")):
        with pytest.raises(ValueError, match=f"says {name} = "):
            encode(pipe, data, out, **given)
    with pytest.raises(ValueError, match="says vq = "):
        encode(tiny_llamagen.class_pipeline(seed=1), data, out)
    shard = out / "tokens-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match="tokens-00001.safetensors is damaged"):
        TokenCache(out)
    index = json.loads((out / INDEX).read_text())
    for changed, message in (
        ({"shape": [0]}, "shape"),
        ({"more": 1}, "more"),
        ({"shards": [{"file": "x"}]}, "shards"),
    ):
        (out / INDEX).write_text(json.dumps(index | changed))
        with pytest.raises(ValueError, match=message):
            TokenCache(out)
    with pytest.raises(ValueError, match=f"has no {INDEX}"):
        TokenCache(tmp_path)


def test_only_shards_that_changed_are_hashed_again(tmp_path, monkeypatch):
    encode(tiny_llamagen.class_pipeline(), class_folders(tmp_path / "data"), tmp_path / "tokens")
    hashed, plain = [], caches._sha256
    monkeypatch.setattr(caches, "_sha256", lambda path: hashed.append(path.name) or plain(path))
    digest = TokenCache(tmp_path / "tokens").digest
    assert len(hashed) == 3 and TokenCache(tmp_path / "tokens").digest == digest and len(hashed) == 3
    os.utime(tmp_path / "tokens" / hashed[1])
    assert TokenCache(tmp_path / "tokens").digest == digest and hashed[3:] == [hashed[1]]
    (tmp_path / "tokens" / hashed[2]).unlink()
    with pytest.raises(ValueError, match="is missing"):
        TokenCache(tmp_path / "tokens")


def test_shards_may_hold_tokens_of_several_types(tmp_path):
    index = encode(tiny_llamagen.class_pipeline(), class_folders(tmp_path / "data"), tmp_path / "tokens")
    before, _ = TokenCache(tmp_path / "tokens").read([0, 5, 8], [0] * 3)
    path = tmp_path / "tokens" / index.shards[1].file
    found = load_file(path)
    save_file(found | {"tokens": found["tokens"].to(torch.int32) + 70_000}, path)
    shards = [replace(shard, sha256=caches._sha256(tmp_path / "tokens" / shard.file)) for shard in index.shards]
    caches.write_json(tmp_path / "tokens" / INDEX, asdict(replace(index, shards=shards)))
    after, texts = TokenCache(tmp_path / "tokens").read([0, 5, 8], [0] * 3)
    before[1] += 70_000
    assert torch.equal(after, before) and texts == ["0", "1", "2"]


# The same data


def texts_of(out):
    cache = TokenCache(out)
    return cache.read(list(range(len(cache))), [0] * len(cache))


def change(data):
    picture(99).save(data / "ant" / "1.png")


def put_first(data):
    picture(99).save(data / "ant" / "00.png")


def rename_class(data):
    (data / "ant").rename(data / "apple")


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "interrupted"])
@pytest.mark.parametrize("mutate", [change, put_first, rename_class])
def test_data_that_changed_are_refused(tmp_path, mutate, finished):
    pipe, data, out = tiny_llamagen.class_pipeline(), class_folders(tmp_path / "data"), tmp_path / "tokens"
    if not finished:
        (data / "cow" / "0.png").write_bytes(b"damaged")
        with pytest.raises(ValueError, match="row 7"):
            encode(pipe, data, out)
        picture(20).save(data / "cow" / "0.png")
    else:
        encode(pipe, data, out)
    before = (out / INDEX).read_bytes()
    mutate(data)
    with pytest.raises(ValueError, match="has changed since it was encoded: its rows 1 to 4|the classes .*apple"):
        encode(pipe, data, out)
    assert (out / INDEX).read_bytes() == before


def test_rows_that_were_added_are_encoded(tmp_path):
    pipe, data, out = tiny_llamagen.class_pipeline(), class_folders(tmp_path / "data"), tmp_path / "tokens"
    encode(pipe, data, out)
    for number in range(3, 6):
        picture(20 + number).save(data / "cow" / f"{number}.png")
    class_folders(data, ["dog"])
    index = encode(pipe, data, out)
    assert index.rows == 15 and index.num_classes == 4 and index.classes == ["ant", "bee", "cow", "dog"]
    encode(pipe, data, tmp_path / "whole")
    (tokens, texts), (expected, all_texts) = texts_of(out), texts_of(tmp_path / "whole")
    assert torch.equal(tokens, expected) and texts == all_texts


def test_shards_that_were_added_are_encoded_if_they_are_the_last(tmp_path):
    pipe, data, out = tiny_llamagen.text_pipeline(), tmp_path / "data", tmp_path / "tokens"
    data.mkdir()
    parquet(data / "1.parquet", range(3), caption=["a", "b", "c"])
    encode(pipe, data, out)
    parquet(data / "2.parquet", range(3, 6), caption=["d", "e", "f"])
    assert encode(pipe, data, out).rows == 6 and texts_of(out)[1] == ["a", "b", "c", "d", "e", "f"]
    parquet(data / "0.parquet", range(6, 9), caption=["g", "h", "i"])
    with pytest.raises(ValueError, match="its rows 1 to 3 are not those"):
        encode(pipe, data, out)


@pytest.mark.parametrize("layout", ["metadata.jsonl", "NAME.txt"])
def test_captions_in_files_that_changed_are_refused(tmp_path, layout):
    pipe, data, out = tiny_llamagen.text_pipeline(), tmp_path / "data", tmp_path / "tokens"
    data.mkdir()

    def caption(texts):
        lines = []
        for number, text in enumerate(texts):
            picture(number).save(data / f"{number}.png")
            lines.append(json.dumps({"file_name": f"{number}.png", "text": text}))
            if layout == "NAME.txt":
                (data / f"{number}.txt").write_text(text)
        if layout == "metadata.jsonl":
            (data / layout).write_text("\n".join(lines))

    caption(["a", "b"])
    encode(pipe, data, out)
    caption(["a", "bee"])
    with pytest.raises(ValueError, match="its rows 1 to 2 are not those"):
        encode(pipe, data, out)


def test_another_revision_of_the_hub_is_compared(tmp_path, monkeypatch):
    pipe, out, data = tiny_llamagen.class_pipeline(), tmp_path / "tokens", str(class_folders(tmp_path / "data"))

    def at(revision, **changes):
        source = replace(open_source(data), files=(), revision=revision, **changes)
        return encode_tokens(source, pipe, out, model="tiny", shard_size=4)

    at("one")
    with monkeypatch.context() as patch:
        # Nothing is read.
        patch.setattr(rows, "content_of", None)
        at("one")
    assert at("two").rows == 9
    every = open_source(data).rows
    with pytest.raises(ValueError, match="its rows 1 to 4 are not those"):
        at("three", rows=lambda start: every(start + 1))


def test_leftovers_of_a_killed_encoding_are_removed(tmp_path):
    pipe, data, out = tiny_llamagen.class_pipeline(), class_folders(tmp_path / "data"), tmp_path / "tokens"
    out.mkdir()
    for name in (".tokens.json.0a.tmp", ".tokens-00000.safetensors.0a.tmp"):
        (out / name).write_bytes(b"cut")
    encode(pipe, data, out)
    assert not list(out.glob(".*.tmp"))


def test_a_copy_of_the_data_is_not_encoded_again(tmp_path, monkeypatch):
    pipe, data, out = tiny_llamagen.class_pipeline(), class_folders(tmp_path / "data"), tmp_path / "tokens"
    encode(pipe, data, out)
    copied = shutil.copytree(data, tmp_path / "copied", copy_function=shutil.copyfile)
    monkeypatch.setattr(rows, "decode", None)
    digest = TokenCache(out).digest
    assert encode(pipe, copied, out).complete and TokenCache(out).digest == digest
    # Neither is read a second time.
    monkeypatch.setattr(rows, "content_of", None)
    assert encode(pipe, copied, out).complete


def test_a_cache_that_does_not_say_which_data_it_holds_is_read_but_not_resumed(tmp_path):
    pipe, data, out = tiny_llamagen.class_pipeline(), class_folders(tmp_path / "data"), tmp_path / "tokens"
    encode(pipe, data, out)
    index = json.loads((out / INDEX).read_text())
    del index["record"]
    (out / INDEX).write_text(json.dumps(index))
    assert len(TokenCache(out)) == 9
    with pytest.raises(ValueError, match="does not say which data were read"):
        encode(pipe, data, out)


@pytest.fixture(scope="module")
def nine(tmp_path_factory):
    """A cache of nine images of three classes."""
    folder = tmp_path_factory.mktemp("nine")
    encode(tiny_llamagen.class_pipeline(), class_folders(folder / "data"), folder / "tokens")
    return folder / "tokens"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shards": []}, "it is complete and has no tokens"),
        ({"shape": []}, "it is complete and has no tokens"),
        ({"shape": [17]}, "holds .* says"),
        ({"shape": [4, 4]}, "holds .* says"),
        ({"norms": []}, "norms is"),
        ({"norms": None}, "norms is"),
        ({"num_classes": 0}, "has 0 classes"),
        ({"num_classes": 2, "classes": None}, "has the class 2"),
        ({"classes": ["ant", "bee"]}, "2 names"),
        ({"classes": ["ant", "bee", "ant"]}, "names the class 'ant' twice"),
        ({"rows": 3}, "more images than"),
        ({"labelled": False}, "it has 3 classes"),
        ({"labelled": False, "num_classes": 0, "classes": None}, "holds .* says"),
        ({"about": {"views": None}}, "views is"),
        ({"about": {"views": "ten-crop"}}, "holds .* says"),
        ({"about": {"image_size": [16]}}, "image_size"),
        ({"about": {"more": 1}}, "more"),
        ({"shards": {"count": 5}}, "holds .* says"),
        ({"shards": {"count": 2**41}, "rows": 2**42}, "holds .* says"),
    ],
)
def test_an_index_that_lies_is_refused(nine, tmp_path, changes, message):
    out = shutil.copytree(nine, tmp_path / "tokens")
    index = json.loads((out / INDEX).read_text())
    if "about" in changes:
        changes = {"about": index["about"] | changes["about"]}
    if isinstance(changes.get("shards"), dict):
        changes = changes | {"shards": [index["shards"][0] | changes["shards"], *index["shards"][1:]]}
        changes["rows"] = changes.get("rows", 100)
    (out / INDEX).write_text(json.dumps(index | changes))
    with pytest.raises(ValueError, match=message):
        TokenCache(out)


# Sizes


def test_no_number_of_rows_is_too_large(nine, tmp_path):
    index, most = json.loads((nine / INDEX).read_text()), 2**40
    shards = [index["shards"][0] | {"count": most}]
    index |= {"rows": most, "num_classes": most, "classes": None, "shards": shards}
    index["about"] |= {"limit": most}
    index["record"]["parts"] = [{"rows": most, "sha256": "x"}]
    (tmp_path / INDEX).write_text(json.dumps(index))
    read = read_index(tmp_path)
    assert read.rows == read.num_classes == read.shards[0].count == most


def test_the_smallest_type_holds_the_tokens():
    for most, kind in ((255, torch.uint8), (256, torch.uint16), (65535, torch.uint16), (65536, torch.int32)):
        assert caches._narrow(torch.tensor([[0, most]], dtype=torch.int32)).dtype == kind


def test_long_names_and_captions_are_read(tmp_path):
    name, pipe = "n" * 100_000, tiny_llamagen.class_pipeline()
    parquet(tmp_path / "a.parquet", [0, 1], label=[0, 1])
    source = open_source(str(tmp_path / "a.parquet"), classes=[name, "short"])
    encode_tokens(source, pipe, tmp_path / "classes", model="tiny")
    assert TokenCache(tmp_path / "classes").index.classes == [name, "short"]
    parquet(tmp_path / "b.parquet", [0], caption=[name])
    encode(tiny_llamagen.text_pipeline(), tmp_path / "b.parquet", tmp_path / "captions")
    assert texts_of(tmp_path / "captions")[1] == [name]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data_set(tmp_path, monkeypatch):
    import psutil

    names = ["a", "b", "c"]
    for shard in range(20):
        parquet(
            tmp_path / f"{shard:02d}.parquet", range(1000 * shard, 1000 * shard + 1000), species=names * 333 + ["a"]
        )
    pipe, sizes = tiny_llamagen.class_pipeline(), []
    plain = caches.save_file

    def measured(tensors, path):
        sizes.append(psutil.Process().memory_info().rss)
        plain(tensors, path)

    monkeypatch.setattr(caches, "save_file", measured)
    source = open_source(str(tmp_path), label="species", classes=names)
    settings = {"model": "tiny", "size": 16, "shard_size": 1000, "batch_size": 250}
    index = encode_tokens(source, pipe, tmp_path / "tokens", **settings)
    assert sum(shard.count for shard in index.shards) == 20_000 and len(sizes) == 20
    print(f"{sizes[1] / 2**20:.0f} MB after 2,000 images, {sizes[-1] / 2**20:.0f} after 20,000")
    assert max(sizes[2:]) < sizes[1] + 64 * 2**20
    cache = TokenCache(tmp_path / "tokens")
    before = psutil.Process().memory_info().rss
    for first in range(0, 20_000, 500):
        cache.read(list(range(first, first + 500)), [0] * 500)
    assert psutil.Process().memory_info().rss < before + 64 * 2**20
