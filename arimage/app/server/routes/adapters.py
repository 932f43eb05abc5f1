"""The routes that load and free adapters while the server runs, with the names and fields that vLLM has."""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi import Request as HTTPRequest
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from ...engine.types import Refused
from ..errors import Problem, error_response
from ..state import AdapterFolder, State, accepting, authorised
from .schemas import body_of, describe_model


router = APIRouter(prefix="/v1", dependencies=[Depends(authorised), Depends(accepting)])


class AdapterFields(BaseModel):
    """What names an adapter."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    lora_name: str = Field(min_length=1, max_length=200)


class LoadedFields(AdapterFields):
    """What loads an adapter; `lora_path` is in the folder of --lora-root."""

    lora_path: str = Field(min_length=1, max_length=4096)

    # Extensions of vLLM's route.
    model: str | None = None
    scale: float = 1.0


def folder_of(state: State) -> AdapterFolder:
    if state.adapters is None:
        message = "adapters are not loaded by requests here: start the server with --lora-root FOLDER"
        raise Problem(error_response(message, 403))
    return state.adapters


Folder = Annotated[AdapterFolder, Depends(folder_of)]


@router.post("/load_lora_adapter", openapi_extra=body_of(**{"application/json": LoadedFields}))
async def load(http: HTTPRequest, state: State, adapters: Folder) -> dict:
    """Load an adapter, which requests then choose as MODEL:NAME, or as NAME if nothing else has that name."""
    with state.bodies.counted(http):
        fields = LoadedFields.model_validate_json(await state.bodies.read_json(http))
    model = state.model_of(fields.model, state.backend.models)
    source = await run_in_threadpool(_inside, adapters.folder, fields.lora_path)
    name = await run_in_threadpool(adapters.engine.load_adapter, model, fields.lora_name, source, fields.scale)
    state.names = {**state.names, name: name} | ({} if fields.lora_name in state.names else {fields.lora_name: name})
    return describe_model(name, name, state.models[name], state.started)


@router.post("/unload_lora_adapter", openapi_extra=body_of(**{"application/json": AdapterFields}))
async def unload(http: HTTPRequest, state: State, adapters: Folder) -> dict:
    """Free an adapter. Requests that wait for it are refused."""
    with state.bodies.counted(http):
        fields = AdapterFields.model_validate_json(await state.bodies.read_json(http))
    name = state.names.get(fields.lora_name, fields.lora_name)
    await run_in_threadpool(adapters.engine.unload_adapter, name)
    state.names = {known: model for known, model in state.names.items() if model != name}
    return {"id": name, "object": "model", "deleted": True}


def _inside(folder: Path, path: str) -> Path:
    """A file or folder within `folder`, also through links.

    Raises:
        Refused: if it is elsewhere, or does not exist.
    """
    try:
        found = (folder / path).resolve()
        inside = found.is_relative_to(folder.resolve()) and found.exists()
    except (OSError, ValueError):
        inside = False
    if not inside:
        raise Refused("lora_path does not exist in the folder of --lora-root: copy the adapter there", "lora_path")
    return found
