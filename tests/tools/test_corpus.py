from __future__ import annotations

import gzip
import json
import struct
import zlib

import pytest
from tools.demo_moe import corpus_readers as readers
from tools.demo_moe.corpus_cleaning import NGRAM, Cleaner, HeldOut, Tally, is_fit, normalise, split_long, words_of
from tools.demo_moe.corpus_sources import CATEGORIES, SOURCES

SENTENCE = "The river rises in the northern hills and runs for three hundred miles to the sea."


def test_html_keeps_text_and_code_and_drops_navigation():
    page = b"""<html><head><title>T</title><script>var x;</script></head><body><div class="sidebar">Home Next</div>
    <h1>Rivers</h1><p>The river rises
    in the <b>hills</b>.</p><pre>int x;
  return x;</pre><ul><li>one</li><li>two</li></ul><table><tr><td>a</td><td>b</td></tr></table></body></html>"""
    assert readers.html(page) == [
        ["Rivers", "The river rises in the hills.", "int x;\n  return x;", "one", "two", "a | b"]
    ]


def test_man_page():
    page = (
        b".TH LS 1\n.SH NAME\nls \\- list\n.PP\nList \\fIfiles\\fP in the\n"
        b".B current\ndirectory.\n.nf\nls \\-l\n  x\n.fi\n"
    )
    assert readers.man(gzip.compress(page)) == [
        ["NAME", "ls - list", "List files in the current directory.", "ls -l\n  x"]
    ]
    assert readers.man(b".so man1/other.1\n") == []


def test_wordnet_entry():
    line = b"00976953 04 n 02 foray 0 air_raid 0 000 | a sudden attack  \n"
    assert readers.wordnet(line) == [["foray, air raid (noun): a sudden attack."]]


def test_gcide_entry_loses_marks_and_sources():
    text = (
        b'Coagulate \\Co*ag"u*late\\, a. [L. coagulatus.]\n   Con`sti*tu"tion*al; see {Cogent}.\n   [1913 Webster]\n'
    )
    assert readers.gcide(text) == [["Coagulate, a.  Constitutional; see Cogent.".replace("  ", " ")]]


def test_brown_is_detokenised():
    text = b"The/at jury/nn said/vbd ,/, ``/`` no/at ''/'' ./.\n"
    assert readers.brown(text) == [['The jury said, "no".']]


def test_sword_streams_with_padding_between():
    block = zlib.compress(b"<w>In the</w> beginning<note>n</note>.")
    assert readers.sword(block + b"\x00" * 8 + block) == [["In the beginning."], ["In the beginning."]]


def test_r_strings():
    lines = [b"Emma", b"", b"was handsome"]
    chars = b"".join(struct.pack(">II", 0x00040009, len(line)) + line for line in lines)
    assert readers.r_strings(struct.pack(">I", len(chars)) + zlib.compress(chars)) == [["Emma", "was handsome"]]


def test_factbook_sections():
    data = {"Background": {"text": f"<p>{SENTENCE}</p>"}, "Code": {"text": "x"}}
    assert readers.factbook(json.dumps(data).encode()) == [[f"Background: {SENTENCE}"]]


def test_pod_rst_and_markdown_lose_their_signs():
    assert readers.pod(b"=head1 NAME\n\nB<bold> and L<text|perlfunc> E<lt>\n\n=cut\n") == [
        ["NAME", "bold and text <"]
    ]
    assert readers.rst(b"Title\n=====\n\nSee :ref:`the guide <x>` and ``code``::\n") == [
        ["Title", "See the guide and code:"]
    ]
    assert readers.markdown(b"# Title\n\nSee [a](b).\n\n```js\nlet x;\n```\n")[0] == ["Title", "See a.", "let x;"]


def test_addresses_and_odd_characters_go():
    assert normalise("Write to <jane.doe@example.org> \u201cnow\u201d\u200b") == 'Write to  "now"'


@pytest.mark.parametrize(
    ("text", "fit"),
    [
        (SENTENCE, True),
        ("Copyright 2001 by Jane Doe, and others who wrote this text", False),
        ("0x00 0x01 0x02 0x03 0x04 0x05 0x06 0x07 0x08 0x09 0x0a", False),
        ("Это предложение написано по-русски и сюда не годится", False),
        ("x" * 200, False),
    ],
)
def test_fit_paragraphs(text, fit):
    assert is_fit(text, "prose") is fit


def test_long_paragraphs_are_cut_between_sentences():
    parts = split_long(" ".join([SENTENCE] * 60))
    assert len(parts) > 3
    assert all(part.endswith(".") and len(part) < 1500 for part in parts)
    assert " ".join(parts) == " ".join([SENTENCE] * 60)


def test_any_13_words_in_a_row_are_an_overlap_and_12_are_not():
    text = " ".join(f"word{i}" for i in range(100))
    held_out = HeldOut()
    held_out.add(text)
    for start in range(0, 100 - NGRAM):
        run = words_of(text)[start : start + NGRAM]
        for before in range(8):
            padded = ["other"] * before + run + ["more"] * 5
            assert held_out.overlaps(padded)
            assert not held_out.overlaps(["other"] * before + run[:-1] + ["more"] * 5)


def test_cleaner_keeps_each_paragraph_once_and_counts():
    held_out = HeldOut()
    held_out.add("one two three four five six seven eight nine ten eleven twelve thirteen fourteen")
    texts = [f"{SENTENCE} Number {word} of the list." for word in ("one", "two", "three")]
    leak = "He said: one two three four five six seven eight nine ten eleven twelve thirteen."
    tally = Tally()
    cleaner = Cleaner(held_out)
    kept = list(cleaner.clean([[*texts, leak], [texts[0], texts[1].upper()]], "prose", tally))
    assert kept == ["\n\n".join(texts)]
    assert (tally.duplicates, tally.overlaps, tally.documents) == (2, 1, 1)


def test_sources_are_well_formed():
    for source in SOURCES:
        assert source.reader in readers.READERS
        assert source.category in CATEGORIES
        assert source.licence
        assert "anarchism" not in source.package
    assert not any("moby" in source.files for source in SOURCES)
