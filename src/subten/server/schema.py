"""Requests and answers of the OpenAI API, as far as both endpoints share them."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from subten.engine import SamplingParams
from subten.errors import ParameterError

Stop = str | Annotated[list[str], Field(max_length=16)]


class StreamOptions(BaseModel):
    """How a stream is sent."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    """Send a last chunk with the token counts."""


class GenerationRequest(BaseModel):
    """What a request for a text may say. A field that is not known is refused, so that none is ignored in silence."""

    model_config = ConfigDict(extra="forbid")

    model: str
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    """Not OpenAI's: keep the k most probable tokens; 0 and -1 keep all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Not OpenAI's: keep tokens this probable relative to the best."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Not OpenAI's: ending tokens and stop strings count only after so many tokens."""
    ignore_eos: bool | None = None
    """Not OpenAI's: go on past the model's end-of-sequence tokens."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Taken, and not used."""
    metadata: dict[str, str] | None = None
    """Taken, and not used."""
    store: bool | None = None
    """Taken; nothing is stored."""

    @model_validator(mode="before")
    @classmethod
    def _is_unicode(cls, fields: Any) -> Any:
        """JSON can spell halves of characters (``"\\ud800"``), which are no text."""
        if not isinstance(fields, dict):
            return fields
        try:
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a text has half of a surrogate pair ({error.object[error.start]!a})") from error
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        return fields

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int, **more: Any) -> SamplingParams:
        """The engine's parameters; fields that were not given have OpenAI's defaults.

        Raises:
            ParameterError: one is outside its range, or the options contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options is given without stream; set stream to true")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            seed=self.seed,
            n=self.n or 1,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop=(*stop, *more.pop("stop", ())),
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((_token_id(key), bias) for key, bias in (self.logit_bias or {}).items()),
            **more,
        )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 12):
        raise ParameterError(f"logit_bias has the key '{key[:40]}'; keys must be token ids, such as \"42\"")
    return int(key)


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int
    """Tokens that were in the cache and were not computed again."""


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
