"""Compiles formats that nobody knows the cost of; whoever started the process ends it when it takes too long.

Lines in: the tokenizer's description, then formats. Lines out: one when it is ready, then a JSON object for each
format: `bytes` of the compiled grammar, and what of the format it leaves out (`ignored`, or null), or `error`. The
argument is how much memory it may take for them.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import tempfile
from pathlib import Path

import xgrammar

_STDERR = 2
_WARNING = re.compile(rb"Warning: (.*)")


def main() -> None:
    """Answer until the input ends."""
    info = xgrammar.TokenizerInfo.deserialize_json(sys.stdin.readline())
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    _say({"ready": True})
    for line in sys.stdin:
        try:
            _say(_compiled(compiler, line))
        except Exception as error:
            if isinstance(error, MemoryError) or "bad_alloc" in str(error):
                return  # Who waits for an answer knows what it means that there is none.
            _say({"error": str(error)})


def _compiled(compiler: xgrammar.GrammarCompiler, form: str) -> dict[str, object]:
    """What xgrammar leaves out of a format it tells nobody but the standard error output."""
    stderr = os.dup(_STDERR)
    with tempfile.TemporaryFile() as told:
        os.dup2(told.fileno(), _STDERR)
        try:
            size = compiler.compile_structural_tag(form).memory_size_bytes
        finally:
            os.dup2(stderr, _STDERR)
            os.close(stderr)
        told.seek(0)
        warning = _WARNING.search(told.read())
    return {"bytes": size, "ignored": warning and warning[1].decode(errors="replace")}


def _say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
