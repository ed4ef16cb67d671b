"""What the package promises: exported names exist, and every error code is documented."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import subten
from subten import errors

ROOT = Path(__file__).parents[2]
ERRORS = [
    c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.SubtenError) and c.__doc__
]


@pytest.mark.parametrize("name", subten.__all__)
def test_exported_name_exists(name: str) -> None:
    assert getattr(subten, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        subten.nothing  # noqa: B018


def test_error_codes_are_unique() -> None:
    codes = [error.code for error in ERRORS]
    assert len(set(codes)) == len(codes)
    assert all(error.exit_code == 2 for error in ERRORS)


def test_every_error_code_is_documented_and_no_other() -> None:
    documented = re.findall(
        r"^\| `(\w+)` \|", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(documented) == sorted(error.code for error in ERRORS if error is not errors.SubtenError)


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, subten, subten.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
