"""Answers of a given form: from JSON schemas and tool definitions to guards of the engine, by way of xgrammar.

A schema comes from a client, and compiling one can take any time and any memory. So it is compiled twice: first in a
process of its own, which is ended when it takes too long (grammar_probe.py), and then, known to be harmless, in a
thread here. The event loop waits for neither.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subten.engine import Tokenizer
from subten.engine.guard import GuardMaker, TokenGuard
from subten.errors import ExtraMissingError
from subten.server.api_errors import ApiError
from subten.server.settings import ServerSettings

if TYPE_CHECKING:
    import xgrammar

_KEPT = 64
"""Compiled grammars that are kept for the next request with the same schema."""
_START_SECONDS = 60.0
_WAIT_SECONDS = 10.0
_ENDED_BY_OTHERS = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
"""Exit codes; a process that runs out of the memory it may have ends by itself, or aborts."""
_CONTROL = {True: re.compile(rb"[\x00-\x09\x0b-\x1f]"), False: re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")}
_PREFIX = re.compile(r"^\[[\d:]+\] \S+: (?:Error: )?")


class GrammarGuard:
    """A guard that follows a grammar."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask = torch.empty((1, -(-vocab_size // 32)), dtype=torch.int32)

    def allowed(self) -> Tensor | None:
        """See `TokenGuard`."""
        # The same memory for every token: what it holds is used before the next one is asked for.
        return self._mask[0] if self._matcher.fill_next_token_bitmask(self._mask) else None

    def accept(self, token_id: int) -> None:
        """See `TokenGuard`."""
        accepted = self._matcher.accept_token(token_id)
        assert accepted, "a token that the grammar forbids has been sampled"

    @property
    def finished(self) -> bool:
        """See `TokenGuard`."""
        return bool(self._matcher.is_terminated())

    def fork(self) -> TokenGuard:
        """See `TokenGuard`."""
        return GrammarGuard(self._matcher.fork(), self._vocab_size)


class Grammars:
    """Compiles formats, one at a time, and keeps the latest.

    Args:
        tokenizer: of the model.
        vocab_size: of the model.
        settings: the limits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, settings: ServerSettings) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._settings = settings
        self._compiled: OrderedDict[str, xgrammar.CompiledGrammar] = OrderedDict()
        self._one_at_a_time = asyncio.Lock()
        self._infos: dict[bool, xgrammar.TokenizerInfo] = {}
        self._probe: asyncio.Task[asyncio.subprocess.Process] | None = None

    @property
    def available(self) -> bool:
        """Whether xgrammar is installed."""
        try:
            import xgrammar  # noqa: F401
        except ImportError:
            return False
        return True

    async def start(self) -> None:
        """Start the process that the first schema will need, without waiting for it."""
        if self.available and self._probe is None:
            self._probe = asyncio.create_task(self._start_probe())

    async def close(self) -> None:
        """End the process, and wait until it has ended: its pipes belong to the event loop."""
        probe, self._probe = self._probe, None
        if probe is None:
            return
        probe.cancel()
        (process,) = await asyncio.gather(probe, return_exceptions=True)
        if isinstance(process, asyncio.subprocess.Process):
            await _end(process)

    async def guard(self, form: dict[str, Any], param: str) -> GuardMaker:
        """What makes guards for answers of a form.

        Args:
            form: a format of xgrammar's structural tags.
            param: the field of the request that it comes from.

        Raises:
            ApiError: it is too large, takes too long, or is no form.
            ExtraMissingError: xgrammar is not installed.
        """
        if not self.available:
            raise ExtraMissingError("structured answers need xgrammar; install subten[structured]")
        import xgrammar

        compiled = await self._compile(form, param)
        size = self._vocab_size
        return lambda: GrammarGuard(xgrammar.GrammarMatcher(compiled), size)

    async def _compile(self, form: dict[str, Any], param: str) -> xgrammar.CompiledGrammar:
        try:
            text = json.dumps({"type": "structural_tag", "format": form})
        except (RecursionError, ValueError) as error:
            raise _bad("is nested too deeply", param) from error
        if len(text) > self._settings.schema_bytes:
            raise _bad(f"has {len(text)} bytes; this server takes {self._settings.schema_bytes}", param)
        if text in self._compiled:
            self._compiled.move_to_end(text)
            return self._compiled[text]
        try:
            await asyncio.wait_for(self._one_at_a_time.acquire(), _WAIT_SECONDS)
        except TimeoutError as error:
            raise ApiError(
                429,
                "too many schemas are waiting to be compiled; come back in 10 s",
                kind="rate_limit_error",
                code="over_capacity",
                headers={"Retry-After": "10"},
            ) from error
        try:
            if text not in self._compiled:
                await self._try(text, param)
                self._compiled[text] = await asyncio.to_thread(self._compile_here, text, form["type"])
                while len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
            return self._compiled[text]
        finally:
            self._one_at_a_time.release()

    def _compile_here(self, text: str, kind: str) -> xgrammar.CompiledGrammar:
        import xgrammar

        info = self._tokenizer_info(kind == "json_schema")
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False).compile_structural_tag(text)

    async def _try(self, text: str, param: str) -> None:
        """Compile in the other process; once more in a new one, where something else ends it, such as a kernel that
        is short of memory.

        Raises:
            ApiError: that fails, or takes more time or memory than it may.
        """
        answer = await self._ask(text, param) or await self._ask(text, param)
        if answer is None:
            raise ApiError(
                503,
                "the process that tries schemas was ended twice by something else; is the machine short of memory?",
                kind="server_error",
                code="schema_process",
                headers={"Retry-After": "10"},
            )
        result = json.loads(answer)
        if "error" in result:
            raise _bad(f"is not supported: {_PREFIX.sub('', result['error']).strip()[:300]}", param)
        # What of a tool's schema is left out makes arguments that may be wrong; a form that is promised must hold.
        if result["ignored"] and param == "response_format":
            raise _bad(f"is not supported: {result['ignored'][:300]}", param)
        if result["bytes"] > self._settings.grammar_bytes:
            raise _bad(
                f"compiles to {result['bytes']} bytes; this server takes {self._settings.grammar_bytes}", param
            )

    async def _ask(self, text: str, param: str) -> bytes | None:
        """The line that the other process answers; None where something else has ended it.

        Raises:
            ApiError: it takes more time or memory than it may.
        """
        await self.start()
        assert self._probe is not None, "a probe is being started"
        try:
            process = await asyncio.shield(self._probe)
        except Exception:
            await self.close()  # It has not started; the next one may.
            raise
        assert process.stdin is not None
        assert process.stdout is not None
        answered = False
        try:
            if process.returncode is not None:
                return None
            process.stdin.write(text.encode() + b"\n")
            answer = await asyncio.wait_for(process.stdout.readline(), self._settings.schema_seconds)
            answered = bool(answer)
            if not answered and await process.wait() in _ENDED_BY_OTHERS:
                return None
        except TimeoutError as error:
            raise _bad(
                f"takes more than {self._settings.schema_seconds:g} s to compile; simplify it", param
            ) from error
        finally:
            if not answered:  # Late, dead, or nobody waits any more: the next one gets a new process.
                await self.close()
                await self.start()
        if not answered:
            raise _bad("takes more memory to compile than this server gives it; simplify it", param)
        return answer

    async def _start_probe(self) -> asyncio.subprocess.Process:
        info = await asyncio.to_thread(self._tokenizer_info, False)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "subten.server.grammar_probe", str(8 * self._settings.grammar_bytes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(info.serialize_json().encode() + b"\n")
            await asyncio.wait_for(process.stdout.readline(), _START_SECONDS)
        except BaseException:
            await _end(process)
            raise
        return process

    def _tokenizer_info(self, json_alone: bool) -> xgrammar.TokenizerInfo:
        """The vocabulary as exact bytes, instead of a guess at the tokenizer's kind.

        What has no bytes is never a part of an answer: control tokens, and control characters, which xgrammar lets
        into strings of limited length. Free text may have tabs and line ends; where the answer is JSON alone, line
        ends may stand between its parts.
        """
        if json_alone not in self._infos:
            import xgrammar

            special, bad = frozenset(self._tokenizer.backend.all_special_ids), _CONTROL[json_alone]
            spelled = [b"" if i in special else self._tokenizer.token_bytes(i) for i in range(self._vocab_size)]
            self._infos[json_alone] = xgrammar.TokenizerInfo(
                [b"" if bad.search(own) else own for own in spelled],
                vocab_size=self._vocab_size,
                stop_token_ids=sorted(self._tokenizer.eos_token_ids),
            )
        return self._infos[json_alone]


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    assert process.stdin is not None
    process.stdin.close()
    await process.communicate()


def _bad(what: str, param: str) -> ApiError:
    return ApiError(400, f"{param} {what}", code="invalid_schema", param=param)
