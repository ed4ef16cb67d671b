"""What a request for a chat may say."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from subten.server.schema import GenerationRequest

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class TextPart(BaseModel):
    """A part of a message. Pictures and sound are not taken."""

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    """What an earlier answer called; `arguments` is JSON as text."""

    name: str
    arguments: str


class EarlierCall(BaseModel):
    """A call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """A message. Unknown fields are left out, as clients send back whole answers of servers of all kinds."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """All text of the message."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionDefinition(BaseModel):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object."""
    strict: bool | None = None
    """Taken; arguments always obey the schema."""


class Tool(BaseModel):
    """A tool."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(BaseModel):
    """A function by name."""

    name: str


class NamedTool(BaseModel):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(BaseModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchema(BaseModel):
    """A schema by name."""

    name: Name
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    """Taken; answers always obey the schema."""


class JsonSchemaFormat(BaseModel):
    """JSON of a given form."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(GenerationRequest):
    """A conversation to answer."""

    model_config = ConfigDict(extra="forbid")

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longest answer; by default what the context leaves."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    @property
    def longest_answer(self) -> int | None:
        """Tokens, or None for what fits."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"
