"""Loading the tokenizer or processor in a folder, whole or not at all."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from diffusers import SchedulerMixin
from diffusers.schedulers.scheduling_utils import SCHEDULER_CONFIG_NAME
from pydantic import BaseModel, Field, model_validator
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, ProcessorMixin

from ..settings.schema import Count, Flag, Number, Positive, check, read_object
from .weight_files import one_line


class Schedule(BaseModel):
    """Settings of schedulers that their constructors take, and that fail where images are generated."""

    num_train_timesteps: Count = 1000
    shift: Positive = 1.0
    base_shift: Number | None = None
    max_shift: Number | None = None
    base_image_seq_len: Count | None = None
    max_image_seq_len: Count | None = None
    shift_terminal: Annotated[float, Field(strict=True, gt=0, lt=1)] | None = None
    use_dynamic_shifting: Flag = False
    invert_sigmas: Flag = False
    time_shift_type: Literal["exponential", "linear"] = "exponential"

    @model_validator(mode="after")
    def _are_apart(self) -> Self:
        if self.base_image_seq_len is not None and self.base_image_seq_len == self.max_image_seq_len:
            raise ValueError("base_image_seq_len and max_image_seq_len are equal")
        return self


# A text that no template holds.
TEXT = "a quokka on a unicycle"


def check_tokenizer_files(folder: Path, kind: type) -> None:
    """Raise a `ValueError` if a folder lacks a file of its tokenizer: transformers makes another one of the rest."""
    needed = ["tokenizer_config.json"]
    if issubclass(kind, PreTrainedTokenizerFast | ProcessorMixin) and not any(folder.glob("*.model")):
        needed.append("tokenizer.json")
    for name in needed:
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing, without which texts have other tokens: get all files again")


def load_from_files(kind: Any, folder: Path) -> Any:
    """`kind.from_pretrained(folder)` of a tokenizer, processor or scheduler.

    Raises:
        ValueError: if a file is missing or damaged, or does not fit the class.
    """
    if issubclass(kind, PreTrainedTokenizerBase | ProcessorMixin):
        check_tokenizer_files(folder, kind)
    if issubclass(kind, SchedulerMixin) and (path := folder / SCHEDULER_CONFIG_NAME).is_file():
        check(Schedule, read_object(path), path)
    try:
        part = kind.from_pretrained(folder, local_files_only=True)
        # Some settings are of use only when a text is read.
        if isinstance(part, PreTrainedTokenizerBase):
            part("a")
        if isinstance(part, ProcessorMixin) or getattr(part, "chat_template", None):
            _check_template(part)
    except ImportError as error:
        raise ValueError(f"{folder} needs a package that is not installed: {one_line(error)}") from error
    # The libraries raise exceptions of any class, and Rust's panics are not even an Exception.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        files = ", ".join(sorted(file.name for file in folder.iterdir()))
        raise ValueError(
            f"{folder} ({files}) does not describe a {kind.__name__} ({type(error).__name__}: {one_line(error)}): "
            "get its files again, or save the pipeline again"
        ) from error
    return part


def _check_template(part: Any) -> None:
    """Refuse a chat template that cannot be rendered, or leaves the text out."""
    # Templates take the content of a turn as a text, in parts, or as both.
    contents = TEXT, [{"type": "text", "text": TEXT}]
    errors = []
    for content in contents:
        try:
            rendered = part.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        except Exception as error:
            errors.append(error)
        else:
            if TEXT in rendered:
                return
    raise errors[-1] if errors else ValueError("the chat template leaves out the text of a turn")
