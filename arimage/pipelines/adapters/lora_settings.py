"""The schema of what the header of an adapter's file, or the adapter_config.json next to it, says of the weights."""

import re
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ...settings.schema import COMPLETE, Caption, Count, Flag, Positive, Text, check


# What peft's initialisations take out of the base weights, which such an adapter then adds to: those that peft can
# convert to adapters of the base itself, and the one that it cannot.
_OF_A_RESIDUAL, _OF_QUANTISED = ("pissa", "olora", "corda", "lora_ga"), "loftq"
# Initialisations that leave the base as it is.
_OF_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")
# A name of layers, whole or its end, with at most two wildcards: longer expressions of a file could take forever.
_LAYERS = re.compile(r"\^?(?:[\w-]|\\?\.|\\-|\.\*)+\$?")

# Of training, and of loading by peft itself.
OF_TRAINING = frozenset(
    "lora_dropout target_modules exclude_modules layers_to_transform layers_pattern fan_in_fan_out inference_mode "
    "task_type auto_mapping peft_version base_model_name_or_path revision megatron_core qalora_group_size "
    "loftq_config eva_config corda_config lora_ga_config runtime_config".split()
)


def _check_initialisation(value: bool | str) -> bool | str:
    kind = str(value).lower()
    if kind.startswith(_OF_A_RESIDUAL):
        raise ValueError(
            f"it is {value!r}, so the adapter was trained on base weights from which a part was taken out: convert it "
            "by save_pretrained(..., path_initial_model_for_weight_conversion=...) of peft"
        )
    if kind == _OF_QUANTISED:
        raise ValueError(
            f"it is {value!r}, so the adapter belongs to a base that LoftQ quantised: train it on the model"
        )
    if isinstance(value, str) and kind not in _OF_THE_BASE:
        raise ValueError(f"it is {value!r}: give true, false, {', '.join(_OF_THE_BASE)}")
    return value


def _check_layers(text: str) -> str:
    if len(text) > 300 or text.count("*") > 2 or not _LAYERS.fullmatch(text):
        raise ValueError(
            f"{text[:50]!r} is not the name of layers, with at most two wildcards .*: write the names out"
        )
    return text


def _check_lora(text: str | None) -> str | None:
    if text not in (None, "LORA"):
        raise ValueError(f"it is of an adapter of the type {text}: give a LORA")
    return text


Pattern = Annotated[str, AfterValidator(_check_layers)]


class PeftSettings(BaseModel):
    """The settings of peft's `LoraConfig` that say what an adapter computes. Those that say how it was trained are
    not read, nor `target_modules`, since the keys of the weights name the layers. All others, of this and later
    versions of peft, must be off."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    peft_type: Annotated[str | None, AfterValidator(_check_lora)] = None
    lora_alpha: Positive
    r: Count
    rank_pattern: Annotated[dict[Pattern, Count] | None, Field(max_length=10_000)] = None
    alpha_pattern: Annotated[dict[Pattern, Positive] | None, Field(max_length=10_000)] = None
    use_rslora: Flag = False
    use_dora: Flag | None = None
    lora_bias: Flag | None = None
    init_lora_weights: Annotated[Flag | Text, AfterValidator(_check_initialisation)] = True

    bias: str = "none"

    @model_validator(mode="after")
    def _check_the_rest(self) -> "PeftSettings":
        if self.bias != "none":
            raise ValueError(f"bias is {self.bias[:50]!r}, which trains biases of the model: give an adapter without")
        for name, value in (self.model_extra or {}).items():
            if value and name not in OF_TRAINING:
                raise ValueError(
                    f"{name} is {str(value)[:50]!r}, and such adapters are not supported: train one without"
                )
        return self

    def rank_of(self, layer: str) -> int:
        return next((it for names, it in self._ranks if names.match(layer)), self.r)

    def alpha_of(self, layer: str) -> float:
        return next((it for names, it in self._alphas if names.match(layer)), self.lora_alpha)

    @cached_property
    def _ranks(self) -> list[tuple[re.Pattern[str], int]]:
        return [(_compiled(text), it) for text, it in (self.rank_pattern or {}).items()]

    @cached_property
    def _alphas(self) -> list[tuple[re.Pattern[str], float]]:
        return [(_compiled(text), it) for text, it in (self.alpha_pattern or {}).items()]


def _compiled(text: str) -> re.Pattern[str]:
    """Matches the layers with this name, or whose name ends in it, as in peft."""
    return re.compile(rf"(.*\.)?({text})$")


class About(BaseModel):
    """What adapters of this library say of themselves."""

    model_config = COMPLETE | {"strict": True}

    base: str | None = None
    captions: list[Caption] = []


def check_settings(settings: dict[str, Any], source: str) -> PeftSettings | None:
    """The settings of an adapter; None if its file has none."""
    return check(PeftSettings, settings, source) if settings else None
