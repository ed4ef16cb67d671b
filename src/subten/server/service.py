"""What a server is, apart from HTTP: an engine, its limits and figures, and the answers under way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from subten.engine import LLM, AsyncEngine, SamplingParams, Tokenizer
from subten.errors import EngineStoppedError, SubtenError
from subten.kernels.compilations import count_compilations
from subten.server.answers import Answers
from subten.server.api_errors import ApiError, from_subten, shutting_down
from subten.server.conversations import Conversations
from subten.server.limits import Capacity
from subten.server.metrics import Metrics
from subten.server.settings import ServerSettings
from subten.server.structured import Grammars

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_LONG_TOKEN = 16
"""Characters that a token of a text has at most on the average, four times the usual."""
_LAST_WORDS_SECONDS = 1.0
"""For streams that have been ended to send their error, before connections are closed."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it."""

    token_ids: tuple[int, ...]
    text: str


class Service:
    """Serves one model.

    Args:
        llm: the model with its cache; it belongs to the service from then on.
        settings: of the server.
    """

    def __init__(self, llm: LLM, settings: ServerSettings) -> None:
        self.settings = settings
        self.started = int(time.time())
        self.model_name = settings.served_model_name or llm.model.name
        self.max_context = llm.max_context
        self.kv_format = llm.kv.name
        self.vocab_size = llm.model.spec.vocab_size
        self.tokenizer = llm.tokenizer
        llm.generate("warm", SamplingParams(max_tokens=2, seed=0, ignore_eos=True))
        self.metrics = Metrics(self.model_name, count_compilations(llm.model.device))
        self.engine = AsyncEngine(llm)
        self.capacity = Capacity(llm.max_batch + settings.max_queue)
        self.conversations = Conversations(2 * (llm.sessions or llm.max_batch), llm.session_ttl)
        self.grammars = Grammars(llm.tokenizer, self.vocab_size, settings)

    def check_model(self, name: str) -> None:
        """
        Raises:
            ApiError: 404, another model is asked for.
        """
        if name != self.model_name:
            raise ApiError(
                404,
                f"there is no model '{name[:100]}' here; this server has '{self.model_name}'",
                code="model_not_found",
                param="model",
            )

    def check_length(self, tokenizer: Tokenizer, text: str, param: str) -> None:
        """Refuse a text that is far too long by its beginning: all others would wait while the rest is tokenised.

        Raises:
            ApiError: 400, its beginning alone does not fit; with the numbers.
        """
        head = text[: _LONG_TOKEN * self.max_context]
        if len(head) == len(text):
            return
        tokens = len(tokenizer.encode(head, add_special_tokens=False))
        if tokens > 2 * self.max_context:  # Not by a few, which where it is cut may make of a single one.
            raise _too_long(f"more than {tokens}", "", self.max_context, param)

    def room(self, prompt_tokens: int, max_tokens: int | None, default: int | None = None) -> int:
        """Tokens that an answer may have.

        Args:
            prompt_tokens: of the prompt.
            max_tokens: that were asked for, or None.
            default: what None means: so many, or as many as fit.

        Raises:
            ApiError: 400, prompt and answer do not fit; with the numbers.
        """
        left = self.max_context - prompt_tokens
        wanted = min(left, default or left) if max_tokens is None else max_tokens
        if left < 1 or wanted > left:
            asked = "" if max_tokens is None else f" and {max_tokens} are asked for"
            param = "messages" if default is None else "prompt"
            raise _too_long(str(prompt_tokens), asked, self.max_context, param)
        return wanted

    async def answer(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Answers:
        """Begin to answer; whoever gets the answers closes them.

        Raises:
            ApiError: they can't be given now, or not at all.
        """
        place = self.capacity.enter(sum(own.n for own in params))
        texts = [prompt.text for prompt in prompts] if self.settings.log_prompts else None
        answers = Answers(self.metrics, place, [len(prompt.token_ids) for prompt in prompts], params, texts)
        try:
            for prompt, own in zip(prompts, params, strict=True):
                answers.add(await self.engine.submit(prompt.token_ids, own))
        except BaseException as error:
            answers.close()
            if isinstance(error, SubtenError):
                raise from_subten(error) from error
            raise
        return answers

    async def exposition(self) -> bytes:
        """The metrics, as text."""
        stats = None
        with suppress(EngineStoppedError):
            stats = await self.engine.stats()
        return self.metrics.exposition(stats)

    async def drain(self) -> None:
        """Take nothing new, let what is under way go on for a while, and end what then is left."""
        self.capacity.close(shutting_down())
        log.info("draining", extra={"answers": self.capacity.taken})
        await self._until_idle(self.settings.drain_seconds)
        await self.close()

    async def close(self) -> None:
        """End everything; answers that are under way end with an error. Twice is once."""
        self.capacity.close(shutting_down())
        await self.engine.close()
        await self.grammars.close()
        await self._until_idle(_LAST_WORDS_SECONDS)

    async def _until_idle(self, seconds: float) -> None:
        """Wait until no answer is under way, but no longer than so many seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.capacity.taken and loop.time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)


def _too_long(tokens: str, asked: str, context: int, param: str) -> ApiError:
    return ApiError(
        400,
        f"the prompt has {tokens} tokens{asked}, where the context of this server holds {context} in all; shorten "
        f"the prompt{' or the answer' if asked else ''}",
        code="context_length_exceeded",
        param=param,
    )
