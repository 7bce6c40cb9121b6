"""An allow-list of variables that may be shown, and the removal of secrets from other text, such as errors."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

SHOWN = (
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "MKL_NUM_THREADS",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "RLCORE_DEBUG",
    "RLCORE_DEVICE",
    "RLCORE_DISABLE_PLUGINS",
    "RLCORE_LOG_LEVEL",
    "RLCORE_PROBE_TIMEOUT_S",
    "RLCORE_SIMULATED",
    "RLCORE_STRICT_PLUGINS",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TRITON_INTERPRET",
)
"""The only variables whose values are reported, beside those of allocators and of visible devices."""

_SECRET_NAME = re.compile(r"token|secret|passw|key|credential|auth|proxy|cookie|session|dsn|url", re.IGNORECASE)
_CREDENTIALS_IN_URL = re.compile(r"(\w[\w+.-]*://)[^\s/@]+@")
_SHORTEST = 6  # characters; a shorter value occurs in ordinary words


def shown_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in SHOWN if name in environ}


def without_secrets(text: str, environ: Mapping[str, str]) -> str:
    """Return ``text`` without credentials in URLs and without values of variables that are named like secrets."""
    for name, value in environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST:
            text = text.replace(value, f"<{name}>")
    return _CREDENTIALS_IN_URL.sub(r"\1<credentials>@", text)


def _clean(folder: Path, environ: Mapping[str, str]) -> None:
    for path in sorted(folder.rglob("*")):
        try:
            text = path.read_text() if path.is_file() else ""
        except UnicodeDecodeError:  # a picture
            continue
        if (shown := without_secrets(text, environ)) != text:
            path.write_text(shown)


if __name__ == "__main__":  # python -m rlcore.doctor.secrets FOLDER: take them out of the files in it
    _clean(Path(sys.argv[1]), os.environ)
