"""The families of models: one folder of `pipelines/` each, which holds a `family.py`. No heavy imports."""

from importlib import import_module
from pathlib import Path

from .convert.paths import CheckpointError
from .pipelines.family import Converter, Family


FOLDERS = sorted(path.parent.name for path in (Path(__file__).parent / "pipelines").glob("*/family.py"))
FAMILIES: dict[str, Family] = {
    name: import_module(f".pipelines.{name}.family", __package__).FAMILY for name in FOLDERS
}


def _modules(names: str) -> dict[str, str]:
    return {
        name: f"pipelines.{folder}.{module}"
        for folder, family in FAMILIES.items()
        for name, module in getattr(family, names).items()
    }


# By the name of a class, its module within arimage; by the name of a converter, its module and itself.
PIPELINES = _modules("pipelines")
EXPORTS = PIPELINES | _modules("exports")
CONVERTERS: dict[str, tuple[str, Converter]] = {
    converter.name: (f"pipelines.{folder}.{converter.module}", converter)
    for folder, family in FAMILIES.items()
    for converter in family.converters
}


def family_of(pipeline: str) -> Family:
    """The family of a pipeline class."""
    return next(family for family in FAMILIES.values() if pipeline in family.pipelines)


def converters_of(folder: Path, model_type: object) -> list[tuple[Family, Converter]]:
    """The converters that take a published folder, with their families.

    Args:
        folder: its tensors are named in it, for families that share a model type.
        model_type: what its config.json says.

    Raises:
        CheckpointError: if the names of the tensors are needed and cannot be read.
    """
    kinds = [(family, kind) for family in FAMILIES.values() for kind in family.model_types if kind.name == model_type]
    if any(kind.tensor for _, kind in kinds):
        from .convert.folder import tensor_names

        names = tuple(tensor_names(folder))
        marked = [each for each in kinds if each[1].tensor and any(n.endswith(each[1].tensor) for n in names)]
        kinds = marked or [each for each in kinds if not each[1].tensor]
    return [(family, CONVERTERS[kind.converter][1]) for family, kind in kinds]


def check_converter(name: str, folder: Path, model_type: str) -> None:
    """Check that the converter of this name takes a published folder.

    Raises:
        CheckpointError: if that of another family takes it.
    """
    (family, converter), *_ = converters_of(folder, model_type)
    if converter.name != name:
        raise CheckpointError(
            f"{folder} holds {family.title}, which is another family: convert it with `{converter.command}` "
            f"({converter.function})"
        )
