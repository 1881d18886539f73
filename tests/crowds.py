"""Where the real crowds are, for the tests that read them."""

import os
from pathlib import Path

import pytest


def shared(name: str) -> Path:
    """The crowd folder ``name`` under ``$LFC_DATA``, else ``../shared/data``; skips the test where it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("LFC_DATA", default)) / name
    if not folder.is_dir():
        pytest.skip(f"the crowd {name} is not there; set LFC_DATA to the folder that holds it")
    return folder
