"""Which model: the built-in one, a Hugging Face hub id, or a folder; on which device, in which type.

Knows how to find and load; what a loaded model can do is in `network`.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as hf_logging

from ccviz import embedded
from ccviz.errors import UserError
from ccviz.network import LAYER_KINDS, LanguageModel, layer_kinds

DEVICES = ("auto", "cuda", "mps", "cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUB_SECONDS = 15.0  # how long to wait for the hub's answer on whether a model is there
ROOM_TO_RUN = 0.85  # the share of a device's free memory that weights may fill

# Architectures that are causal language models and still cannot run under a bounded cache of explicit masks.
REFUSED = {
    "bloom": "adds position biases (ALiBi) by place in the cache, which eviction changes",
    "mpt": "adds position biases (ALiBi) by place in the cache, which eviction changes",
    "mamba": "has no key-value cache: it keeps a recurrent state",
    "mamba2": "has no key-value cache: it keeps a recurrent state",
    "falcon_mamba": "has no key-value cache: it keeps a recurrent state",
    "rwkv": "has no key-value cache: it keeps a recurrent state",
    "xlstm": "has no key-value cache: it keeps a recurrent state",
    "recurrent_gemma": "mixes attention with recurrent layers",
    "jamba": "mixes attention with recurrent layers",
    "zamba": "mixes attention with recurrent layers",
    "zamba2": "mixes attention with recurrent layers",
    "bamba": "mixes attention with recurrent layers",
    "falcon_h1": "mixes attention with recurrent layers",
    "reformer": "has no key-value cache of the usual kind",
    "xlnet": "does not read from left to right",
}

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ModelSpec:
    """Which model, where and in which type; as `load_model` takes them."""

    name: str
    device: str = "auto"
    dtype: str = "auto"


def load_model(
    name: str = embedded.NAME,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress = lambda _message: None,
) -> LanguageModel:
    """Load a causal language model and its tokenizer.

    Parameters
    ----------
    name
        ``"smollm2-135m"`` (built in), a Hugging Face hub id, or a folder.
    device
        ``"auto"`` takes CUDA, then MPS, then the CPU; or ``"cuda"``, ``"cuda:1"``, ``"mps"``, ``"cpu"``. A model too
        large for one CUDA device is spread over all of them.
    dtype
        ``"auto"`` takes the checkpoint's own type on accelerators, bfloat16 on CPUs that compute it natively, else
        float32; or ``"float32"``, ``"bfloat16"``, ``"float16"``.
    progress
        Told in one sentence what is happening, whenever that changes.

    Raises
    ------
    UserError
        If the model cannot be found or read, its architecture cannot run under a bounded cache, or the device or type
        is not there. Code that comes with a checkpoint is never run (``trust_remote_code`` stays off).
    """
    if not isinstance(name, str) or not name.strip():
        raise UserError(f"The model is given by name: {embedded.NAME!r}, a hub id such as 'org/name', or a folder.")
    name = name.strip()
    target = choose_device(device)
    place = Place(str(embedded.embedded_model_folder(progress)), True) if name == embedded.NAME else find(name)
    config = _reading(name, lambda: AutoConfig.from_pretrained(place.path, local_files_only=place.here))
    refuse_unsupported(name, config)
    weights = choose_dtype(dtype, target, config)
    progress(f"Loading {name}.")
    tokenizer = _reading(name, lambda: AutoTokenizer.from_pretrained(place.path, local_files_only=place.here))
    model = _load_weights(name, place, config, target, weights)
    model.eval()
    loaded = LanguageModel(model, tokenizer, name, _input_device(model, target), weights)
    loaded.check()
    _ = loaded.entry_bytes  # found by a forward pass, so now, before a run and a page could want the model at once
    return loaded


def choose_device(device: str) -> torch.device:
    """The device that ``device`` names; "auto" prefers CUDA, then MPS, then the CPU.

    Raises
    ------
    UserError
        If it is unknown, or not on this machine.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    kind, colon, index = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind not in DEVICES or (colon and not index.isdecimal()):
        raise UserError(f"device must be one of {', '.join(DEVICES)} (or cuda:0, cuda:1, ...), not {device!r}.")
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there[kind]:
        raise UserError(f"This machine has no {kind} device that torch can use: choose device auto or cpu.")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise UserError(f"This machine has {torch.cuda.device_count()} CUDA devices, numbered from 0, and no {device}.")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device, config: Any) -> torch.dtype:
    """The type of the weights; "auto" as `load_model` says."""
    if dtype == "auto":
        if device.type != "cpu":
            stated = getattr(config, "dtype", None)
            return stated if isinstance(stated, torch.dtype) else torch.float32
        return torch.bfloat16 if cpu_computes_bfloat16() else torch.float32
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(f"dtype must be one of auto, {', '.join(DTYPES)}, not {dtype!r}.")
    return DTYPES[dtype]


def cpu_computes_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 natively; on others bfloat16 is slower than float32."""
    able = torch.cpu.get_capabilities()
    if platform.machine() in ("x86_64", "AMD64"):
        return bool(able.get("avx512_bf16") or able.get("amx_bf16"))
    return bool(able.get("bf16") or able.get("sve_bf16"))


def refuse_unsupported(name: str, config: Any) -> None:
    """Raise `UserError`, with the reason, for an architecture that cannot run under a bounded cache."""
    kind = getattr(config, "model_type", "unknown")
    text = config.get_text_config()
    reason = REFUSED.get(kind)
    if reason is None and getattr(config, "is_encoder_decoder", False):
        reason = "is an encoder with a decoder, not a causal language model"
    elif reason is None and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        reason = "is not a causal language model that transformers can run without foreign code"
    elif reason is None and getattr(text, "alibi", False):
        reason = "adds position biases (ALiBi) by place in the cache, which eviction changes"
    elif reason is None:
        strange = sorted(set(layer_kinds(text)) - LAYER_KINDS)
        if strange:
            reason = f"has layers without a key-value cache ({', '.join(strange)})"
    if reason:
        raise UserError(
            f"{name} is of the architecture {kind!r}, which {reason}; choose a model with plain attention, such as "
            "llama, qwen, mistral, gemma, phi or gpt2."
        )


@dataclass(frozen=True)
class Place:
    """Where a model is read from: a folder's path or a hub id, and whether its files are on this machine."""

    path: str
    here: bool


def find(name: str) -> Place:
    """Find a model by a folder's path or a hub id.

    Raises
    ------
    UserError
        If there is no such folder, it holds no model, the hub has no such id, or cannot be asked.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"The folder {name} holds no model: it has no config.json.")
        return Place(str(path), True)
    looks_like_path = name.startswith((".", "/", "~", os.sep)) or name.count("/") > 1 or "\\" in name
    if looks_like_path or path.exists():
        raise UserError(f"There is no model folder {name}: give a folder with a config.json, or a hub id (org/name).")
    return _find_on_hub(name)


def _find_on_hub(name: str) -> Place:
    """Ask the hub once, shortly: transformers' own readers ask six times a file before they give up."""
    try:
        HfApi().model_info(name, timeout=HUB_SECONDS)
    except HFValidationError:
        raise UserError(f"{name!r} names no model: give {embedded.NAME}, a hub id (org/name), or a folder.") from None
    except Exception as error:  # what the http library of the day raises when nobody answers
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return Place(name, True)
        if isinstance(error, HfHubHTTPError) and getattr(error.response, "status_code", 500) in (401, 403, 404):
            raise UserError(
                f"The model {name} was not found on the hub, or is only for those who log in: check the spelling, "
                "or run `hf auth login`."
            ) from None
        raise UserError(
            f"The model {name} was not found on this machine, and the hub cannot be reached from here: check the "
            f"network, or use a local folder or {embedded.NAME}."
        ) from None
    return Place(name, False)


def _reading(name: str, read: Callable[[], Any]) -> Any:
    """Call one of transformers' readers; its many ways to fail become one sentence each."""
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError, ImportError, SafetensorError) as error:
        raise UserError(_why_unreadable(name, error)) from None


def _why_unreadable(name: str, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return f"{name} needs code that comes with the checkpoint, which ccviz does not run: choose another model."
    if "gated" in text.lower() or "401" in text:
        return f"{name} is only for those who log in and were let in: run `hf auth login`, or choose another model."
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return f"The model {name} cannot be read: {first}"


def _load_weights(name: str, place: Place, config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    spread = {"device_map": "auto"} if device.type == "cuda" and not _fits(config, device, dtype) else {}

    def read() -> Any:
        return AutoModelForCausalLM.from_pretrained(place.path, dtype=dtype, local_files_only=place.here, **spread)

    with _quiet():
        return _reading(name, read) if spread else _reading(name, read).to(device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Transformers draws a bar of its own while it loads; ours is the only one a user should see."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _fits(config: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the weights leave room on one CUDA device, counted without allocating them."""
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(config)
    needed = sum(parameter.numel() for parameter in empty.parameters()) * dtype.itemsize
    free, _total = torch.cuda.mem_get_info(device)
    return bool(needed < ROOM_TO_RUN * free)


def _input_device(model: Any, device: torch.device) -> torch.device:
    """Where token ids go: the embedding's device, which `device_map` may have chosen."""
    weight = model.get_input_embeddings().weight
    return device if weight.device.type == "meta" else weight.device
