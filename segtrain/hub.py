"""The Hugging Face hub, asked once whether it answers.

Its library repeats a failed request for half a minute. That suits a connection that breaks; a machine without network
should hear of it at once. So one request comes first, and where nothing answers the library only reads its cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_session

from segtrain.errors import reason

PATIENCE = 5.0  # seconds for the first answer


@contextmanager
def hub() -> Iterator[str]:
    """A block that may fetch from the hub. Yields why it can't be reached, or nothing: then only the cache is read."""
    why = _unreachable()
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or bool(why)
    try:
        yield why
    finally:
        constants.HF_HUB_OFFLINE = before


def advice(name: str, reason: str, *, dataset: bool = False) -> str:
    """What to say where `name` isn't a local path, isn't in the cache and can't be fetched.

    A data set that `hf download` keeps in its cache isn't found there without network, one in a directory is.
    """
    if dataset:
        name = f"--repo-type dataset {name} --local-dir DIR"
    return (
        f"it isn't in the hub's cache, and the hub can't be reached ({reason}); give a local path, or fetch it once "
        f"where there is network (`hf download {name}`)"
    )


def _unreachable() -> str:
    """Why the hub doesn't answer; nothing where it does, whatever it says."""
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception as error:  # the HTTP library is the hub library's choice, and so are its errors
        return reason(error)
    return ""
