"""The names of the classes that the published class-conditional models were trained on."""

from torchvision.models import ResNet18_Weights


def class_names(num_classes: int) -> dict[int, str] | None:
    """The names of the thousand classes of ImageNet-1k by their ids; None for any other number of classes."""
    names = ResNet18_Weights.DEFAULT.meta["categories"]
    return dict(enumerate(names)) if num_classes == len(names) else None
