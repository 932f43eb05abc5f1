"""The default arguments of calls, which a saved pipeline keeps in generation_config.json."""

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel

from ...decoding import LatentSampling, Sampling
from ...decoding.presets import Decoding, decoding_from_dict
from ...settings.schema import COMPLETE, Count, Number, Text, Whole, check, read_object, with_fields
from ..abilities import Abilities
from ..family import Family


class HasDefaults(Protocol):
    """What `load_defaults` uses of a pipeline."""

    family: ClassVar[Family | None]
    decoding: Decoding
    _own_decoding: Decoding | None
    generation_config: Any
    _saved_defaults: Iterable[str]
    abilities: Abilities

    def sampling(self, **settings: Any) -> Sampling | LatentSampling: ...


class Defaults(BaseModel):
    """The contents of generation_config.json, without the settings of one family. The pipeline decides which settings
    it has, and their ranges."""

    model_config = COMPLETE
    guidance_scale: Number | list[Number] = 1.0
    temperature: Number | list[Number] = 1.0
    top_k: Whole = 0
    top_p: Number = 1.0
    min_p: Number = 0.0
    guided_tokens: Whole | None = None
    guidance_schedule: Text = "linear"
    num_inference_steps: Count = 64
    num_diffusion_steps: Count | list[Count] = 100
    order: Text = "farthest"
    decoding: dict[str, Any] = {}


def load_defaults(pipe: HasDefaults, path: Path) -> None:
    """Load the defaults of a pipeline from generation_config.json."""
    if not path.is_file():
        raise ValueError(f"{path} is missing, which holds the sampling defaults: save the pipeline again")
    defaults = read_object(path)
    if not defaults:
        raise ValueError(f"{path} holds no sampling defaults: save the pipeline again")
    give_defaults(pipe, defaults, path)
    pipe._own_decoding = pipe.decoding


def give_defaults(pipe: HasDefaults, given: dict, where: object) -> None:
    """Give a pipeline the defaults `given`; `where` names the file or the table that holds them."""
    kind = Defaults if pipe.family is None else with_fields(Defaults, pipe.family.defaults)
    defaults = check(kind, given, where).model_dump(exclude_unset=True)
    allowed = {field.name for field in fields(pipe.sampling())} | {"decoding", *pipe._saved_defaults}
    allowed |= pipe.abilities.decoder
    try:
        for name in defaults.keys() - allowed:
            raise ValueError(f"{name} is not a setting of a {type(pipe).__name__}: leave it out")
        decoding = decoding_from_dict(defaults.pop("decoding")) if "decoding" in defaults else pipe.decoding
        for name in defaults.keys() & set(pipe._saved_defaults):
            setattr(pipe, name, defaults.pop(name))
        pipe.sampling(**defaults)
    # Settings of a decoding may be of any type.
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from error
    pipe.generation_config.update(defaults)
    pipe.decoding = decoding
