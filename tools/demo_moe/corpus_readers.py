"""From the files of a package to plain paragraphs.

Each reader takes the bytes of one file and returns its documents. A document is a list of paragraphs in reading
order; a
paragraph is running text on one line, or several lines where the lines matter (code, verse). Readers undo the format
only. What is worth keeping is decided in ``corpus_cleaning``.
"""

from __future__ import annotations

import gzip
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from lxml import etree
from lxml import html as lxml_html

Document = list[str]
Reader = Callable[[bytes], list[Document]]

_BLANK_LINES = re.compile(r"\n[ \t]*\n")
_SPACES = re.compile(r"\s+")


def decode(data: bytes) -> str:
    """Undo gzip where present, then UTF-8, or Latin-1 for the few old files that are not UTF-8."""
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def join_lines(text: str) -> str:
    """One paragraph of hard-wrapped lines as one line."""
    return _SPACES.sub(" ", text).strip()


def split_paragraphs(text: str) -> Document:
    """Paragraphs at blank lines; a paragraph whose lines are all indented by four or more keeps its lines."""
    paragraphs = []
    for block in _BLANK_LINES.split(text.expandtabs(8)):
        lines = [line.rstrip() for line in block.split("\n") if line.strip()]
        if not lines:
            continue
        indent = min(len(line) - len(line.lstrip()) for line in lines)
        if indent >= 4 and len(lines) > 1:
            paragraphs.append("\n".join(line[indent:] for line in lines))
        else:
            paragraphs.append(join_lines(" ".join(lines)))
    return paragraphs


# --- markup
# -----------------------------------------------------------------------------------------------------------

_DROPPED = """
script style head nav header footer aside form button select noscript svg math iframe object audio video
img figure legal info screeninfo bookinfo articleinfo appendixinfo indexterm remark screenshot
mediaobject inlinemediaobject media links credit desc title-abbrev toc annotation revhistory copyright
legalnotice keywordset
"""
_DROPPED_TAGS = frozenset(_DROPPED.split())
_BLOCK = """
html body div section article main p li dt dd h1 h2 h3 h4 h5 h6 table tbody thead tr ul ol dl blockquote
center hr details summary fieldset caption td th para simpara formalpara title subtitle listitem term
varlistentry itemizedlist orderedlist variablelist sect1 sect2 sect3 sect4 chapter appendix book note
tip warning caution important page item steps list terms comment synopsis entry row informaltable
example step procedure substeps
"""
_BLOCK_TAGS = frozenset(_BLOCK.split())
_LINE_TAGS = frozenset(["pre", "programlisting", "screen", "code-block", "literallayout", "code_"])
_NAVIGATION = re.compile(
    r"\b(nav|navbar|navigation|navheader|navfooter|navheading|sidebar|sphinxsidebar|toc|toctree|related|header|footer|menu|"
    r"breadcrumbs?|headerlink|search|langbox|copyright|versionnav|tocset|navsettop|navsetbottom|refcontent|editsection|"
    r"printfooter|catlinks|siteSub|contents|toplang|bottomlang|linenos|linenumber|prompt-hidden|copybtn|skip-link|source|"
    r"source_link|SpeedReadingLink|editlink|buttons|mobile-nav-chapters|nav-wrapper|menu-bar)\b"
)


def html(data: bytes) -> list[Document]:
    """An HTML page: its headings, paragraphs, list items, table rows and preformatted blocks, without navigation."""
    text = decode(data)
    if not text.strip():
        return []
    text = re.sub(r"^\s*<\?xml[^>]*\?>", "", text)
    try:
        root = lxml_html.document_fromstring(text)
    except (etree.ParserError, ValueError):
        return []
    for path in (".//main", ".//*[@role='main']", ".//*[@id='content']", ".//*[@class='maincolumn']"):
        found = root.find(path)
        if found is not None and len(found.text_content()) > 400:
            root = found
            break
    return [_blocks(root)]


def markup(data: bytes) -> list[Document]:
    """A DocBook or Mallard file. Entities that only the book's other files define are dropped."""
    text = re.sub(r"<!DOCTYPE[^\[>]*(\[.*?\]\s*)?>", "", decode(data), count=1, flags=re.S)
    text = re.sub(r"&(?!(?:amp|lt|gt|quot|apos|#\d+|#x[0-9a-fA-F]+);)[\w.-]+;", "", text)
    parser = etree.XMLParser(recover=True, resolve_entities=False, no_network=True, huge_tree=True)
    root = etree.fromstring(text.encode("utf-8"), parser)
    return [] if root is None else [_blocks(root)]


def _blocks(root: etree._Element) -> Document:
    out: Document = []
    pending: list[str] = []

    def flush() -> None:
        paragraph = join_lines("".join(pending))
        pending.clear()
        if paragraph:
            out.append(paragraph)

    def walk(element: etree._Element) -> None:
        tag = element.tag
        if not isinstance(tag, str):  # a comment or a processing instruction
            return
        tag = tag.rsplit("}", 1)[-1].lower()
        if tag in _DROPPED_TAGS:
            return
        label = f"{element.get('class') or ''} {element.get('id') or ''}"
        if label != " " and _NAVIGATION.search(label) and tag not in ("body", "html", "main"):
            return
        if tag in _LINE_TAGS or (tag == "code" and element.get("mime")):
            flush()
            lines = "".join(element.itertext()).expandtabs(8).strip("\n")
            if lines.strip():
                out.append("\n".join(line.rstrip() for line in lines.split("\n")))
            return
        block = tag in _BLOCK_TAGS
        if block and not (tag in ("td", "th", "entry") and pending):
            flush()
        elif tag in ("td", "th", "entry"):
            pending.append(" | ")
        elif tag == "br":
            pending.append(" ")
        if element.text:
            pending.append(element.text)
        for child in element:
            walk(child)
            if child.tail:
                pending.append(child.tail)
        if block and tag not in ("td", "th", "entry"):
            flush()

    walk(root)
    flush()
    return out


# --- documentation formats
# ----------------------------------------------------------------------------------------------


def plain(data: bytes) -> list[Document]:
    """Plain text with blank lines between its paragraphs."""
    return [split_paragraphs(decode(data).replace("\f", "\n\n"))]


def markdown(data: bytes) -> list[Document]:
    """Markdown, without link targets, comments and HTML tags."""
    text = re.sub(r"<!--.*?-->", "", decode(data), flags=re.S)
    text = re.sub(r"^\[[^\]]+\]:.*$", "", text, flags=re.M)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\[([^\]]*)\]\[[^\]]*\]", r"\1", text)
    text = re.sub(r"</?[a-zA-Z][^>]*>", "", text)
    out: Document = []
    for index, part in enumerate(re.split(r"^```.*$", text, flags=re.M)):
        if index % 2:
            out.append(part.strip("\n"))
        else:
            out.extend(split_paragraphs(re.sub(r"^#+\s*(.*)$", r"\n\1\n", part, flags=re.M)))
    return [out]


def rst(data: bytes) -> list[Document]:
    """reStructuredText: roles, directives, targets and underlines removed."""
    text = decode(data)
    text = re.sub(
        r"^\.\. (SPDX|include|toctree|_|image|figure|contents|index|only|highlight).*$", "", text, flags=re.M
    )
    text = re.sub(r"^\s*:[a-zA-Z-]+:( .*)?$", "", text, flags=re.M)
    text = re.sub(r"^([=\-~^\"'#*+.`_:])\1{2,}\s*$", "\n", text, flags=re.M)
    text = re.sub(r":[a-z:]+:`~?!?([^`<]*?)(\s*<[^`>]*>)?`", r"\1", text)
    text = re.sub(r"`([^`<]*?)\s*<[^`>]*>`_+", r"\1", text)
    text = re.sub(r"``([^`]*)``", r"\1", text)
    text = re.sub(r"::\s*$", ":", text, flags=re.M)
    text = re.sub(r"^\.\. [a-z-]+:(:.*)?$", "", text, flags=re.M)
    return [split_paragraphs(text)]


def pod(data: bytes) -> list[Document]:
    """Perl's POD."""
    text = re.sub(r"^=(begin|for|encoding|cut|over|back|pod).*$", "", decode(data), flags=re.M)
    text = re.sub(r"^=(head\d|item)\s*", "", text, flags=re.M)
    text = text.replace("E<lt>", "<").replace("E<gt>", ">")
    for _ in range(3):
        text = re.sub(r"[BCFIS]<<+ (.*?) >>+", r"\1", text)
        text = re.sub(r"L<(?:([^|<>]*)\|)?([^<>]*)>", lambda m: m.group(1) or m.group(2), text)
        text = re.sub(r"[BCFISXZ]<([^<>]*)>", r"\1", text)
    return [split_paragraphs(text)]


_ROFF_ESCAPES = {
    r"\-": "-",
    r"\e": "\\",
    r"\&": "",
    r"\(aq": "'",
    r"\(dq": '"',
    r"\(lq": '"',
    r"\(rq": '"',
    r"\(em": "—",
    r"\(en": "\u2013",
    r"\(co": "(c)",
    r"\(bu": "*",
    r"\(ti": "~",
    r"\(ha": "^",
    r"\(mu": "x",
    r"\ ": " ",
    r"\~": " ",
    r"\|": "",
    r"\^": "",
    r"\,": "",
    r"\/": "",
    r"\%": "",
    r"\:": "",
    r"\c": "",
}
_ROFF_ESCAPE = re.compile(
    r"\\f(\[[^\]]*\]|\(..|.)|\\s[-+]?\d|\\m\[[^\]]*\]|\\\*\[[^\]]*\]|\\\*\(..|\\\(..|\\\[[^\]]*\]|\\."
)


def man(data: bytes) -> list[Document]:
    """A manual page in roff's man macros. Pages that only point at another page give nothing."""
    out: Document = []
    pending: list[str] = []
    verbatim: list[str] | None = None

    def plain_text(line: str) -> str:
        return _ROFF_ESCAPE.sub(lambda m: _ROFF_ESCAPES.get(m.group(0), ""), line)

    def flush() -> None:
        if pending:
            out.append(join_lines(" ".join(pending)))
            pending.clear()

    for line in decode(data).split("\n"):
        if line.startswith(('.\\"', "'\\\"")):
            continue
        if line.startswith(".so "):
            return []
        macro = re.match(r"[.']\s*([A-Za-z]+)\s*(.*)", line)
        if macro is None:
            if verbatim is not None:
                verbatim.append(plain_text(line))
            elif line.strip():
                pending.append(plain_text(line))
            else:
                flush()
            continue
        name, rest = macro.groups()
        words = [a or b for a, b in re.findall(r'"((?:[^"]|"")*)"|(\S+)', rest)]
        if name in ("nf", "EX"):
            flush()
            verbatim = []
        elif name in ("fi", "EE"):
            if verbatim:
                out.append("\n".join(line.rstrip() for line in verbatim).strip("\n"))
            verbatim = None
        elif name in ("B", "I", "SM", "SB"):
            (pending if verbatim is None else verbatim).append(plain_text(" ".join(words)))
        elif name in ("BR", "RB", "IR", "RI", "BI", "IB"):
            (pending if verbatim is None else verbatim).append(plain_text("".join(words)))
        elif name in ("SH", "SS"):
            flush()
            if words:
                out.append(plain_text(" ".join(words)))
        elif name in ("TP", "PP", "P", "LP", "sp", "HP", "TQ"):
            flush()
        elif name == "IP":
            flush()
            if words:
                pending.append(plain_text(words[0]))
    flush()
    return [out]


def info(data: bytes) -> list[Document]:
    """An Info file: one document per node, without menus and node headers."""
    documents = []
    for node in decode(data).split("\x1f")[1:]:
        body = node.split("\n", 2)[-1]
        if not node.lstrip("\n").startswith("File:"):
            continue
        body = re.sub(r"^\* Menu:.*", "", body, flags=re.S | re.M)
        body = re.sub(r"^[*=\-.]{3,}$", "\n", body, flags=re.M)
        body = re.sub(r"\*[Nn]ote ([^:]*)::?", r"\1", body)
        documents.append(split_paragraphs(body))
    return documents


def source(data: bytes) -> list[Document]:
    """A program: blank lines separate its paragraphs, lines are kept."""
    text = decode(data).expandtabs(4)
    blocks = re.split(r"\n(?:[ \t]*\n)+", text)
    return [["\n".join(line.rstrip() for line in block.strip("\n").split("\n")) for block in blocks]]


# --- dictionaries
# -------------------------------------------------------------------------------------------------------


def gcide(data: bytes) -> list[Document]:
    """The Collaborative International Dictionary: entries without pronunciation marks and source tags."""
    text = decode(data)
    text = re.sub(r"^\s*\[(1913 Webster|PJC|WordNet[^\]]*|Webster[^\]]*|[^\]]{2,24})\]\s*$", "", text, flags=re.M)
    text = re.sub(r" \\[^\\\n]*\\", "", text)
    text = re.sub(r"\{([^}]*)\}", r"\1", text)
    text = re.sub(r"\[[^\]]*\]", "", text)
    # Derived forms in running text keep their stress marks: Con`sti*tu"tion*al"i*ty.
    text = re.sub(r"\b\w+[*`\"|][\w*`\"|]*\w", _without_stress, text)
    return _entry_batches(split_paragraphs(re.sub(r"^ {3,}", "", text, flags=re.M)))


def _without_stress(match: re.Match[str]) -> str:
    word = match.group(0)
    return re.sub(r"[*`\"|]", "", word) if "*" in word else word


def dictd(data: bytes) -> list[Document]:
    """A dictd dictionary: headword lines flush left, definitions indented."""
    text = re.sub(r"\{([^}]*)\}", r"\1", decode(data))
    text = re.sub(r"^\s*\((19|20)\d\d-\d\d-\d\d\)\s*$", "", text, flags=re.M)
    text = re.sub(r"^\s*\[Jargon File\]\s*$", "", text, flags=re.M)
    return _entry_batches(split_paragraphs(re.sub(r"^ {1,6}", "", text, flags=re.M)))


def _entry_batches(paragraphs: Document, size: int = 40) -> list[Document]:
    return [paragraphs[i : i + size] for i in range(0, len(paragraphs), size)]


_WORDNET_KINDS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}


def wordnet(data: bytes) -> list[Document]:
    """WordNet's glosses as dictionary entries: "foray, raid (noun): a sudden short attack."."""
    entries = []
    for line in decode(data).split("\n"):
        if line.startswith("  ") or "|" not in line:
            continue
        fields, gloss = line.split("|", 1)
        parts = fields.split()
        count = int(parts[3], 16)
        words = [re.sub(r"\(.*\)", "", parts[4 + 2 * i]).replace("_", " ") for i in range(count)]
        entries.append(f"{', '.join(words)} ({_WORDNET_KINDS[parts[2]]}): {gloss.strip()}.")
    return _entry_batches(entries)


# --- books and collections
# ------------------------------------------------------------------------------------------------


def brown(data: bytes) -> list[Document]:
    """A file of the tagged Brown corpus, as running text."""
    paragraphs = []
    for block in _BLANK_LINES.split(decode(data)):
        words = [item.rsplit("/", 1)[0] for item in block.split() if "/" in item]
        if words:
            paragraphs.append(detokenise(" ".join(words)))
    return [[" ".join(paragraphs[i : i + 4]) for i in range(0, len(paragraphs), 4)]]


def detokenise(text: str) -> str:
    """Undo the spacing of a tokenised corpus."""
    text = text.replace("``", '"').replace("''", '"')
    text = re.sub(r'"\s+([^"]*?)\s+"', r'"\1"', text)
    text = re.sub(r"\s+([.,;:?!)\]%])", r"\1", text)
    text = re.sub(r"([(\[$])\s+", r"\1", text)
    text = re.sub(r"([;?!])\1+", r"\1", text)
    return join_lines(re.sub(r"\s+('(?:s|re|ve|ll|d|m|t)\b|n't\b)", r"\1", text))


def sword(data: bytes) -> list[Document]:
    """A SWORD module's compressed text: zlib streams of OSIS, ThML or GBF markup, with padding between them."""
    documents = []
    position = data.find(b"\x78\x9c")
    while position >= 0:
        stream = zlib.decompressobj()
        text = stream.decompress(data[position:]).decode("utf-8", "replace")
        position = data.find(b"\x78\x9c", len(data) - len(stream.unused_data))
        text = re.sub(r"<note\b.*?</note>|<title type=\"x-gloss\".*?</title>|<RF.*?<Rf>", "", text, flags=re.S)
        text = re.sub(r"<(p|br|lb|l|lg|div|chapter|CM|CL|title|/title|/p|/div|milestone)\b[^>]*>", "\n\n", text)
        text = re.sub(r"<[^>]*>", "", text).replace("&amp;", "&").replace("&quot;", '"').replace("\x00", "\n\n")
        verses = [join_lines(p) for p in _BLANK_LINES.split(text) if p.strip()]
        documents.append(_joined_short(verses))
    return documents


def _joined_short(paragraphs: Document, length: int = 400) -> Document:
    """Verse after verse becomes paragraphs of at least ``length`` characters."""
    out: Document = []
    for paragraph in paragraphs:
        if out and len(out[-1]) < length:
            out[-1] = f"{out[-1]} {paragraph}"
        else:
            out.append(paragraph)
    return out


def r_strings(data: bytes) -> list[Document]:
    """The character vectors of R's lazy-load database: serialised objects, each a length, then a zlib stream."""
    documents = []
    position = 0
    while position + 4 < len(data):
        stream = zlib.decompressobj()
        block = stream.decompress(data[position + 4 :])
        lines = [chars.decode("utf-8", "replace") for chars in _r_chars(block)]
        documents.append(split_paragraphs("\n".join(lines)))
        position = len(data) - len(stream.unused_data)
    return documents


def _r_chars(block: bytes) -> Iterator[bytes]:
    # A CHARSXP: flags (big-endian, low byte 9), length, bytes. An empty line is a string of length 0.
    for match in re.finditer(rb"\x00[\x04\x00][\x00-\xff]\x09([\x00-\xff]{4})", block):
        length = struct.unpack(">I", match.group(1))[0]
        if length < 2000:
            yield block[match.end() : match.end() + length]


def fortunes(data: bytes) -> list[Document]:
    """A fortune file: quotations between lines of a single per cent sign."""
    quotes = [split_paragraphs(q) for q in re.split(r"^%\s*$", decode(data), flags=re.M)]
    return [[p for quote in quotes[i : i + 30] for p in quote] for i in range(0, len(quotes), 30)]


def wml(data: bytes) -> list[Document]:
    """The translatable strings of a Battle for Wesnoth scenario: narration and dialogue."""
    strings = [
        re.sub(r"<[^>]*>", "", s.replace('""', '"')).replace("\n", " ")
        for s in re.findall(r'(?:story|message|description|speaker_message)\s*=\s*_\s*"((?:[^"]|"")*)"', decode(data))
    ]
    return [[join_lines(re.sub(r"^[a-z ]+\^", "", s)) for s in strings]]


def endless_sky(data: bytes) -> list[Document]:
    """The conversations, news and descriptions of Endless Sky, where no place holder is left in them."""
    strings = [join_lines(s) for s in re.findall(r"`([^`]*)`", decode(data))]
    return [[s for s in strings if len(s) > 60 and "<" not in s]]


def gettext_strings(data: bytes) -> list[Document]:
    """Long strings marked for translation with _("...")."""
    strings = [
        join_lines(s.replace("\\\n", "").replace("\\n", " ").replace('\\"', '"'))
        for s in re.findall(r'_\("((?:[^"\\]|\\.|\\\n)*)"\)', decode(data), flags=re.S)
    ]
    return [[s for s in (re.sub(r"^\?[a-z]+:", "", s) for s in strings) if len(s) > 60]]


def freeorion(data: bytes) -> list[Document]:
    """FreeOrion's string table: the descriptions in triple quotes."""
    blocks = re.findall(r"'''(.*?)'''", decode(data), flags=re.S)
    out: Document = []
    for block in blocks:
        text = re.sub(r"<[^>]*>|\[\[(?:[a-z]+ )?[A-Z_0-9]+\]\]", "", block)
        out.extend(p for p in split_paragraphs(re.sub(r"\n", "\n\n", text)) if "%" not in p and "[[" not in p)
    return [out]


def crawl(data: bytes) -> list[Document]:
    """The descriptions of Dungeon Crawl Stone Soup: blocks between lines of %%%%."""
    out: Document = []
    for block in decode(data).split("%%%%"):
        out.extend(p for p in split_paragraphs(block) if not re.search(r"[@{}]|^\w+:|^#", p))
    return [out]


def factbook(data: bytes) -> list[Document]:
    """One country of The World Factbook: its running text, section by section."""
    out: Document = []

    def walk(name: str, node: object) -> None:
        if not isinstance(node, dict):
            return
        text = node.get("text")
        if isinstance(text, str) and len(text) > 30:
            clean = re.sub(r"<br\s*/?>|</?p>", "\n", text)
            clean = re.sub(r"<[^>]*>|&nbsp;", " ", clean)
            lines = [join_lines(line) for line in clean.split("\n") if line.strip()]
            if lines and name:
                lines[0] = f"{name}: {lines[0]}"
            out.extend(lines)
        for key, child in node.items():
            walk(key, child)

    walk("", json.loads(decode(data)))
    return [out]


def descriptions(data: bytes) -> list[Document]:
    """A Translation-en index of a Debian archive: one paragraph list per package description."""
    entries: list[Document] = []
    for stanza in decode(data).split("\n\n"):
        match = re.search(r"^Package: (\S+)\n(?:.*\n)*?Description-en: (.*)\n((?: .*\n?)*)", stanza + "\n")
        if match is None:
            continue
        name, title, body = match.groups()
        body = re.sub(r"^ \.$", "", body, flags=re.M)
        paragraphs = split_paragraphs(re.sub(r"^ ", "", body, flags=re.M))
        entries.append([f"{name}: {title}", *paragraphs])
    return [[p for entry in entries[i : i + 20] for p in entry] for i in range(0, len(entries), 20)]


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        reader.__name__: reader
        for reader in (
            brown,
            crawl,
            descriptions,
            dictd,
            endless_sky,
            factbook,
            fortunes,
            freeorion,
            gcide,
            gettext_strings,
            html,
            info,
            man,
            markdown,
            markup,
            plain,
            pod,
            r_strings,
            rst,
            source,
            sword,
            wml,
            wordnet,
        )
    }
)
