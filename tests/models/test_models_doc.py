from __future__ import annotations

from pathlib import Path

from subten.models import FAMILIES
from subten.models.families import rope
from subten.models.weights import IGNORED_TENSORS

DOC = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def test_the_table_lists_exactly_the_supported_families():
    rows = [line.split("|") for line in DOC.splitlines() if line.startswith("| ") and "`" in line.split("|")[2]]
    listed = {(row[2].strip(" `"), row[3].strip(" `")) for row in rows if row[2].strip() != "`model_type`"}
    assert listed == {(family.model_type, family.architecture) for family in FAMILIES.values()}


def test_the_supported_scalings_and_the_ignored_tensors_are_those_in_the_text():
    assert set(rope.SCALINGS) == {"default", "linear", "llama3", "yarn"}
    assert "`linear`, `llama3` or `yarn`" in " ".join(DOC.split())
    assert IGNORED_TENSORS.search("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert "`*.rotary_emb.inv_freq`" in DOC
