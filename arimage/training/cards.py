"""The model cards of what was trained: a README.md with the metadata that the Hugging Face Hub reads."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from ..eval.runs.files import write_whole
from ..pipelines.base import ARPipeline
from ..pipelines.saving.saved_folder import CARD
from ..published.registry import PUBLISHED
from ..settings.installed import installed_models


# Licences that the Hub knows by a name of its own.
KNOWN = {"MIT": "mit", "Apache-2.0": "apache-2.0"}
SHEET = "samples.png"
ADAPTER = """---
{metadata}
---

# {name}

A LoRA adapter for {base}, trained by arimage{prompt}.

```python
from arimage import AutoPipeline

pipe = AutoPipeline.from_pretrained({model})
pipe.load_lora_weights({name_quoted})
{call}
```
"""


def from_base(base: str) -> dict[str, str]:
    """What metadata say of the model that a training began with, a name or a folder: the model, and its licence if it
    is known."""
    for entry in PUBLISHED:
        if base in (entry.name, entry.repository):
            known = KNOWN.get(entry.licence)
            licence = {"license": known} if known else {"license": "other", "license_name": entry.licence}
            return {"base_model": entry.repository, **licence}
    folder = installed_models().get(base, Path(base))
    name = folder.resolve().name if folder.is_dir() else base
    found: dict[str, str] = {"base_model": name}
    if (folder / CARD).is_file():
        data = ModelCard((folder / CARD).read_text(encoding="utf-8"), ignore_metadata_errors=True).data
        found |= {key: data.get(key) for key in ("license", "license_name") if data.get(key)}
    return found


def data_name(data: str) -> str:
    """What metadata call a data set: the id of one of the Hub, or the last part of a path."""
    return data if data.count("/") == 1 and not Path(data).exists() else Path(data).name


@dataclass(frozen=True)
class Samples:
    """A sheet of samples, a file that need not exist yet, and what they are of."""

    sheet: Path
    prompts: Sequence[str]


def write_adapter_card(
    pipe: ARPipeline,
    folder: Path,
    base: str,
    prompt: str | None,
    data: str | None = None,
    samples: Samples | None = None,
) -> None:
    """Write the card of an adapter into its folder, if that has none, and its samples.

    Args:
        base: name or folder of the model that it was trained for.
        prompt: a caption that it was trained on.
        data: what metadata call its data set, see `data_name`.
    """
    if (folder / CARD).is_file():
        if samples is not None and samples.sheet.is_file():
            _copy(samples.sheet, folder)
        return
    task, call = pipe._card
    tags = ["lora", "template:diffusion-lora", "diffusers", "autoregressive"]
    metadata = ModelCardData(
        **from_base(base),
        library_name="arimage",
        pipeline_tag=task,
        tags=tags,
        instance_prompt=prompt,
        datasets=None if data is None else [data],
    )
    name = folder.resolve().name
    text = ADAPTER.format(
        metadata=metadata.to_yaml(),
        name=name,
        name_quoted=json.dumps(name),
        base=base,
        model=json.dumps(base),
        prompt="" if prompt is None else f" on captions such as {json.dumps(prompt, ensure_ascii=False)}",
        call=call,
    )
    write_whole(folder / CARD, lambda file: file.write_text(text, encoding="utf-8"))
    add_samples(folder, samples)


def add_samples(folder: Path, samples: Samples | None) -> None:
    """Copy a sheet of samples into a folder with a card, which then shows it, also as a widget of the Hub."""
    if samples is None or not samples.sheet.is_file():
        return
    _copy(samples.sheet, folder)
    card = ModelCard((folder / CARD).read_text(encoding="utf-8"))
    shown = ", ".join(samples.prompts)
    card.data["widget"] = [{"text": shown, "output": {"url": SHEET}}]
    card.text += f"\n![Samples]({SHEET})\n\nSamples: {shown}\n"
    write_whole(folder / CARD, lambda file: file.write_text(str(card), encoding="utf-8"))


def _copy(sheet: Path, folder: Path) -> None:
    write_whole(folder / SHEET, lambda file: shutil.copyfile(sheet, file))


def add_metadata(folder: Path, **metadata: object) -> None:
    """Add metadata to the card in the folder of a pipeline."""
    card = ModelCard((folder / CARD).read_text(encoding="utf-8"))
    for name, value in metadata.items():
        card.data[name] = value
    (folder / CARD).write_text(str(card), encoding="utf-8")
