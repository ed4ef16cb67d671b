"""Text to token ids and back, one token at a time where it has to be shown as it comes."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tokenizers import decoders

from subten.checkpoints.json_files import read_json_object
from subten.errors import CheckpointError, ParameterError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from subten.checkpoints.checkpoint import Checkpoint

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_UTF8 = 4
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(256 + place): byte for place, byte in enumerate(_OTHERS)},
}
"""How byte-level vocabularies spell bytes: as themselves where that is visible, else as letters from U+0100 on."""


class Tokenizer:
    """A model's tokenizer, its chat template and its ending tokens.

    Args:
        backend: the tokenizer of `transformers`.
        eos_token_ids: ids that end a sequence, beside the backend's own `eos_token_id`.
    """

    def __init__(self, backend: PreTrainedTokenizerBase, eos_token_ids: Iterable[int] = ()) -> None:
        self.backend = backend
        own = () if backend.eos_token_id is None else (int(backend.eos_token_id),)
        self.eos_token_ids = frozenset((*own, *eos_token_ids))
        self._special = frozenset(i for i, token in backend.added_tokens_decoder.items() if token.special)
        self._byte_fallback = self._translates_byte_tokens()
        self.is_silent = lru_cache(maxsize=None)(self._is_silent)
        self.is_byte = lru_cache(maxsize=None)(self._is_byte)
        # A byte-level vocabulary spells a space as a letter.
        self._byte_level = "Ġ" in "".join(backend.convert_ids_to_tokens(self.encode(" a", add_special_tokens=False)))
        decoder = getattr(getattr(backend, "backend_tokenizer", None), "decoder", None)
        self.joins_bytes = isinstance(decoder, decoders.ByteLevel)
        """Whether a text is nothing but the bytes of its tokens, one after the other."""
        self.token_bytes = lru_cache(maxsize=None)(self._bytes_of)
        """The bytes of UTF-8 that a token stands for, which may be a part of a character."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """The tokenizer of a checkpoint; every ending token its configuration files name ends a sequence."""
        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        generation = folder / "generation_config.json"
        configs = [checkpoint.config, read_json_object(generation) if generation.is_file() else {}]
        return cls(checkpoint.tokenizer(), [i for config in configs for i in _eos_token_ids(config)])

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works for this model."""
        return bool(self.backend.chat_template)

    @property
    def bos_prefix(self) -> tuple[int, ...]:
        """What `encode` puts in front of every text: the beginning-of-sequence token, or nothing."""
        bos = self.backend.bos_token_id
        return (bos,) if bos is not None and self.encode("")[:1] == [bos] else ()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens the model wants around it unless told otherwise.

        Raises:
            ParameterError: the text holds surrogates, which stand for no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ParameterError(
                f"the text is not valid Unicode: {text[error.start]!r} at character {error.start} stands for none, "
                "as bytes do that are not UTF-8"
            ) from error
        # verbose=False: transformers would warn of texts that are longer than the model's context.
        encoded = self.backend(text, add_special_tokens=add_special_tokens, verbose=False)
        return [int(i) for i in encoded["input_ids"]]

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation up to the point where the model answers.

        Args:
            messages: dicts with `role` and `content`.

        Raises:
            ParameterError: the model has no chat template, or the template refuses the conversation, or as `encode`.
        """
        return self.encode(self.chat_text(messages), add_special_tokens=False)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
    ) -> str:
        """A conversation as the model reads it, up to the point where it answers. Control tokens are spelled out:
        `encode` it without adding any.

        Args:
            messages: dicts with `role` and what the template takes beside it, `content` above all.
            tools: definitions of functions, for templates that show them to the model.
            template: a Jinja template to use instead of the model's own.

        Raises:
            ParameterError: there is no chat template, or it refuses the conversation.
        """
        if not self.has_chat_template and template is None:
            raise ParameterError("the model has no chat template; give it a plain prompt instead of a chat")
        try:
            text: str = self.backend.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # A template is code, and what it makes of a conversation anybody's guess.
            raise ParameterError(f"the model's chat template refuses the conversation: {error}") from error
        return text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`, exactly as the tokenizer spells it; bytes that are no UTF-8 become U+FFFD."""
        text: str = self.backend.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.backend.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._is_byte(token_id):
            return bytes([int(token[3:5], 16)])
        if self._byte_level and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return str(token).replace(_WORD_START, " ").encode()

    def _translates_byte_tokens(self) -> bool:
        token_id = self.backend.convert_tokens_to_ids("<0x41>")
        known = token_id is not None and self.backend.convert_ids_to_tokens(token_id) == "<0x41>"
        return known and self.decode([token_id]) == "A"

    def _is_silent(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the decoder passes over the token: special, or outside the vocabulary."""
        if token_id in self._special:
            return skip_special_tokens
        return self.backend.convert_ids_to_tokens(token_id) is None

    def _is_byte(self, token_id: int) -> bool:
        """Whether the token stands for one byte of a character that the vocabulary lacks (byte fallback)."""
        if not self._byte_fallback or token_id in self._special:
            return False
        return _BYTE_TOKEN.fullmatch(self.backend.convert_ids_to_tokens(token_id)) is not None


def _eos_token_ids(config: Mapping[str, Any]) -> list[int]:
    """`eos_token_id` of a configuration: absent, one id, or a list of them."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise CheckpointError(f"eos_token_id is {value!r} in the model's configuration; it must be one id or a list")
    return ids


class DecodeStream:
    """Incremental detokenisation: the pieces, joined, are what `Tokenizer.decode` makes of all tokens at once.

    No piece shows a part of a character, and a token costs the decoding of at most five tokens, however long
    the sequence. It rests on two properties of decoders. First, of the text so far only a U+FFFD at its very
    end can still change: it may be the beginning of a character. Everything before is final, because an
    unfinished UTF-8 sequence becomes a single U+FFFD. Second, UTF-8 synchronises itself: decoding from any
    point, 4 bytes later the characters are the right ones. So the last 4 tokens, a byte or more each, are
    context enough for what follows them. The exception are byte-fallback tokens: a run of them that is no
    valid UTF-8 becomes one U+FFFD per byte, so a run is held back until it ends.

    `tokenizers.decoders.DecodeStream` does not do here: it has no end, so it loses an unfinished tail, raises
    on an invalid byte-fallback run, and takes quadratic time on long runs of invalid bytes.

    Args:
        tokenizer: whose text it is.
        context: the tokens before the first one, such as the prompt: decoders that drop a leading space drop
            it only where the text really begins.
        skip_special_tokens: leave out control tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.joins_bytes else None
        """Where a text is the bytes of its tokens, this is all it takes, at a twentieth of the time."""
        self._shown = ""
        """What the window's tokens have contributed to the pieces so far; always a prefix of their text."""
        for token_id in context[-2 * _LONGEST_UTF8 :]:
            self.push(token_id)
        if self._utf8 is None:
            self.finish()

    def push(self, token_id: int) -> str:
        """Take one token; the text that is now certain to follow the pieces so far, often empty or one word."""
        if self._tokenizer.is_silent(token_id, self._skip_special_tokens):
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        text = self._decode()
        piece = self._advance(text.removesuffix(_REPLACEMENT))
        self._window = self._window[-_LONGEST_UTF8:]
        self._shown = self._decode().removesuffix(_REPLACEMENT)
        return piece

    def finish(self) -> str:
        """The rest, where the sequence ended within a character; to be called once, after the last token."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return self._advance(self._decode())

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)

    def _advance(self, text: str) -> str:
        piece, self._shown = text[len(self._shown) :], text
        return piece
