"""From messages to the text that the model reads."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from subten.engine import Tokenizer
from subten.server.chat_schema import ChatMessage, ChatRequest

DEFAULT_STOP = ("\nuser:",)
"""Where an answer ends under the default template: a model that has no template of its own need not know that turns
end, and would write the next one too."""


def chat_text(tokenizer: Tokenizer, body: ChatRequest) -> str:
    """The text of a conversation, in the default template's form where the model has none of its own.

    Raises:
        ParameterError: the template refuses the conversation.
    """
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []] if body.calls_tools else None
    messages = [_message(message) for message in body.messages]
    template = None if tokenizer.has_chat_template else _default_template()
    return tokenizer.chat_text(messages, tools=tools, template=template)


@cache
def _default_template() -> str:
    return files("subten.server").joinpath("chat_template.jinja").read_text(encoding="utf-8")


def _message(message: ChatMessage) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": _parsed(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return fields


def _parsed(arguments: str) -> Any:
    """Templates write arguments down themselves; what is no JSON they get as it is."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
