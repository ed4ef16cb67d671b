"""Compiles formats that nobody knows the cost of; whoever started the process ends it when it takes too long.

Lines in: the tokenizer's description, then formats. Lines out: one when it is ready, then a JSON object for each
format: `bytes` of the compiled grammar, or `error`. The argument is how much memory it may take for them.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import xgrammar


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
            _say({"bytes": compiler.compile_structural_tag(line).memory_size_bytes})
        except Exception as error:
            _say({"error": str(error)})


def _say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
