"""docs/server.md has every path, setting, figure and error code, with its default."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from tests.server.serving import Live

from subten.server import settings
from subten.server.metrics import Metrics
from subten.server.settings import ServerSettings

DOCUMENT = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


def test_every_path_is_documented(server: Live) -> None:
    paths = server.app.openapi()["paths"]
    for path, methods in paths.items():
        for method in methods:
            assert f"`{method.upper()} {path}" in DOCUMENT


def test_every_setting_is_documented_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", DOCUMENT, re.MULTILINE))
    for name, field in ServerSettings.model_fields.items():
        default = "none" if field.default in (None, ()) else str(field.default)
        assert rows[name] == default, name


def test_every_code_of_an_error_is_documented() -> None:
    sources = (path.read_text(encoding="utf-8") for path in Path(settings.__file__).parent.glob("*.py"))
    codes = {code for source in sources for code in re.findall(r"""\bcode="(\w+)\"""", source)}
    assert "over_capacity" in codes
    documented = {
        code
        for row in re.findall(r"^\| \d{3}.*? \| (.*?) \|", DOCUMENT, re.MULTILINE)
        for code in re.findall(r"`(\w+)`", row)
    }
    assert codes <= documented


def test_every_figure_is_documented_and_no_other() -> None:
    text = Metrics("m", lambda: 0).exposition(None).decode()
    names = {family.name for family in text_string_to_metric_families(text)}
    names = {name for name in names if name.startswith(("vllm:", "subten:")) and not name.endswith("_created")}
    documented = {name.removesuffix("_total") for name in re.findall(r"`((?:vllm|subten):\w+)`", DOCUMENT)}
    assert documented == {name.removesuffix("_total") for name in names}
