"""Names of the Hugging Face hub, on machines that may not reach it, such as cluster nodes."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)

SECONDS = 10.0


def offline_without_hub(name: str) -> None:
    """Go offline where ``name`` is no path on this machine and the hub cannot be reached.

    The hub's client would try six times, over 48 s, for every file. Offline, what was downloaded
    before is used, and anything else fails at once, in the caller's words.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    local = name.startswith(("/", "~", ".")) or Path(name).exists()
    if local or constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:  # of whichever HTTP library the client is built on
        constants.HF_HUB_OFFLINE = True
        logger.warning(
            "%s cannot be reached (%s): %r can only be what was downloaded before",
            constants.ENDPOINT,
            error,
            name,
        )
