"""From a model's name (a local folder, the built-in model, a Hugging Face id) to a folder with its files.

Owns: the names, fetching and converting with progress, the cache folder and its locking. Does not own:
reading the folder (specbridge.checkpoint) or the conversion itself (specbridge.builtin).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.resources
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specbridge import builtin
from specbridge.checkpoint import Checkpoint
from specbridge.errors import ConfigError
from specbridge.settings import Settings, load

log = logging.getLogger(__name__)

BUILTIN = {model.name: model for model in (builtin.SMOLLM2,)}
DEFAULT_TARGET = builtin.SMOLLM2.name
AUTO = "auto"

_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
# What serving needs; pickled weights and other frameworks' files stay away.
_WANTED = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt", "*.model")
_UNWANTED = ("consolidated*", "original/*", "onnx/*", "*/*.safetensors")


class CacheSettings(Settings):
    """Where converted models are kept."""

    cache_dir: str = ""
    """Folder for converted models; empty: the user's cache folder."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A built-in name and the folder it is (or would be) converted to."""

    name: str
    folder: Path
    ready: bool


def cache_dir() -> Path:
    """The folder for converted models: SPECBRIDGE_CACHE_DIR, else the platform's user cache."""
    chosen = load(CacheSettings).cache_dir
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("specbridge"))


def resolve_target(name: str, *, progress: bool = False) -> Path:
    """The folder of the target model `name`, fetched or converted first if need be.

    progress: show bars on stderr. Raises ConfigError saying what to install, fetch or correct.
    """
    return _resolve(name, "--target", progress=progress)


def resolve_draft(name: str, target_name: str, *, flag: str = "--draft", progress: bool = False) -> Path:
    """The folder of the drafter `name`; "auto" is the packaged drafter of a built-in target.

    flag: the option that `name` was given by, for messages. Raises ConfigError if there is none for this
    target.
    """
    if name == AUTO:
        folder = packaged_drafter(target_name)
        if folder is None:
            raise ConfigError(
                f"no drafter comes with target {target_name!r}: name one with --draft (a folder or a Hugging "
                "Face id), or serve without with --no-draft"
            )
        return folder
    if (folder := packaged_drafter(name)) is not None and not Path(name).is_dir():
        return folder
    return _resolve(name, flag, progress=progress)


def resolve_config(name: str, flag: str) -> Path:
    """The config.json (or its folder) of a model that is run without its weights; nothing is fetched.

    Raises ConfigError if there is none. flag: the option that `name` was given by, for messages.
    """
    place = Path(name).expanduser()
    if place.is_file() or (place / "config.json").is_file():
        return place.resolve()
    found = "is a folder without config.json" if place.is_dir() else "is no file or folder here"
    raise ConfigError(
        f"{flag} {name!r} {found}; with --load-format dummy give a Hugging Face config.json, or a folder "
        "that holds one (benchmarks/configs has some)"
    )


def config_name(place: Path) -> str:
    """What to call a model without weights: the folder of its configuration."""
    return f"{place.parent.name if place.is_file() else place.name}-dummy"


def packaged_drafter(target_name: str) -> Path | None:
    """The drafter shipped for a target (its built-in name, or the folder it was converted to), if any."""
    for name, model in BUILTIN.items():
        if target_name == name or Path(target_name).name == model.folder_name:
            # By package name only: specbridge must not import a service.
            folder = Path(str(importlib.resources.files("draft_service"))) / "checkpoints" / name
            return folder if (folder / "config.json").is_file() else None
    return None


def cached() -> list[CachedModel]:
    """The built-in models and whether they are converted already."""
    return [
        CachedModel(name, folder := builtin_folder(model), _usable(folder)) for name, model in BUILTIN.items()
    ]


def find(name: str) -> Path:
    """The folder of a model that needs no fetching or converting. Raises ConfigError if it does."""
    if name in BUILTIN and not Path(name).is_dir():
        folder = builtin_folder(BUILTIN[name])
        if not _usable(folder):
            raise ConfigError(f"{name!r} is not converted yet; run `specbridge model fetch {name}`")
        return folder
    return _resolve(name, "the name", progress=False, offline=True)


def builtin_folder(model: builtin.BuiltinModel) -> Path:
    return cache_dir() / "models" / model.folder_name


def convert_builtin(name: str, *, progress: bool = False, force: bool = False) -> Path:
    """Convert a built-in model into the cache unless it is there (`force`: even then); returns its folder.

    Safe against others doing the same at the same time. Raises ConfigError.
    """
    if name not in BUILTIN:
        raise ConfigError(f"no built-in model is called {name!r}; there is {', '.join(sorted(BUILTIN))}")
    model = BUILTIN[name]
    folder = builtin_folder(model)
    if _usable(folder) and not force:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f".{folder.name}.lock"):
            if _usable(folder) and not force:
                return folder  # another process was faster
            work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            try:
                # A folder of its own: mkdtemp's is closed to other users, a model need not be.
                made = work / "model"
                made.mkdir()
                with _bars(progress) as report:
                    builtin.convert(model, made, report)
                if folder.exists():
                    folder.rename(work / "old")
                made.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write {folder}: {error}; set SPECBRIDGE_CACHE_DIR to another place"
        ) from error
    return folder


def _resolve(name: str, flag: str, *, progress: bool, offline: bool = False) -> Path:
    if not name:
        raise ConfigError(f"{flag} is empty: give a folder, a Hugging Face id or {', '.join(BUILTIN)}")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if name in BUILTIN:
        return convert_builtin(name, progress=progress)
    match = _HUB_ID.fullmatch(name)
    if match and not name.startswith((".", "/", "~")):
        return _from_hub(match["id"], match["revision"], flag, progress=progress, offline=offline)
    raise ConfigError(
        f"{flag} {name!r} is not a folder here, not a built-in model ({', '.join(BUILTIN)}) "
        "and not a Hugging Face id (owner/name)"
    )


def _from_hub(model_id: str, revision: str | None, flag: str, *, progress: bool, offline: bool) -> Path:
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress:
        disable_progress_bars()
    advice = f"check the name, or download it elsewhere and give {flag} its folder"
    try:
        folder = huggingface_hub.snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
            local_files_only=offline,
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{flag} {model_id!r} is gated: accept its terms on the hub and set HF_TOKEN to a token of yours"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{flag} {model_id!r} is not on the hub (or private, without HF_TOKEN set); {advice}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{flag} {model_id!r} has no revision {revision!r} on the hub") from error
    except errors.LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{flag} {model_id!r} is not in the local cache and the hub can't be reached; {advice}"
        ) from error
    except (OSError, ValueError, errors.HfHubHTTPError) as error:
        raise ConfigError(f"{flag} {model_id!r} could not be fetched: {error}; {advice}") from error
    Checkpoint(folder).close()  # an interrupted download is named here, not deep inside a service
    return Path(folder)


def _usable(folder: Path) -> bool:
    if not folder.exists():
        return False
    try:
        Checkpoint(folder).close()
    except ConfigError as error:
        log.warning("the cached model is damaged and is converted again: %s", error)
        return False
    return (folder / "tokenizer.json").is_file() and (folder / "specbridge.json").is_file()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an advisory lock; the kernel drops it if this process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _bars(show: bool) -> Iterator[builtin.Progress]:
    """Progress bars on stderr, one per kind of work; silent if not wanted."""
    if not show:
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    tasks: dict[str, TaskID] = {}
    with Progress(console=Console(stderr=True)) as bars:

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(f"{what} the built-in model", total=total)
            bars.update(tasks[what], completed=done)

        yield report
