"""From prompts and parameters to requests: everything that a caller can get wrong is found here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from subten.engine.guard import guarding
from subten.engine.request import Request
from subten.engine.sampling import SamplingParams, choice_seed, request_seed
from subten.engine.tokenizer import Tokenizer
from subten.errors import ContextLengthError, ParameterError

Prompt = str | Sequence[int]


class Intake:
    """Makes requests. Several threads may share one.

    Args:
        tokenizer: of the model.
        vocab_size: of the model.
        max_context: tokens that a sequence may have.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._arrivals = count()

    def requests(self, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """The `params.n` answers to a prompt; those behind the first are the first one's branches.

        Raises:
            ContextLengthError: the prompt is as long as the context or longer.
            ParameterError: an empty prompt, one that is neither a text nor token ids, or a token id outside the
                vocabulary.
        """
        _check_params(params)
        token_ids = tuple(self.checked(self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt))
        seed = request_seed(params)
        answers = [self._request(token_ids, params, choice_seed(seed, index), index) for index in range(params.n)]
        answers[0].branches = answers[1:]
        return answers

    def branches(self, parent: Request, params: Sequence[SamplingParams]) -> list[Request]:
        """Continuations of a request from where it is now: each with its own parameters, and the parent's tokens as
        its prompt.

        Raises:
            ContextLengthError: the parent has filled the context.
            ParameterError: a token id outside the vocabulary, more than one answer per branch, or a wish for
                log-probabilities of the prompt, which a branch does not compute.
            GuardError: a guard can't be made.
        """
        for own in params:
            _check_params(own)
            if own.n != 1:
                raise ParameterError(f"n is {own.n} for a branch; a fork takes parameters of one answer per branch")
            if own.prompt_logprobs is not None:
                raise ParameterError("prompt_logprobs are asked for a branch, which does not compute its prompt")
        token_ids = parent.prompt + tuple(parent.output)
        children = [self._request(token_ids, own, request_seed(own), index) for index, own in enumerate(params)]
        for child in children:
            if parent.guard is not None and child.params.guard is parent.params.guard:
                with guarding():
                    child.guard = parent.guard.fork()
        return children

    def checked(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The same tokens.

        Raises:
            ParameterError: there are none, or one is no token id, or outside the vocabulary.
        """
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, bytes):
            raise ParameterError(
                f"the prompt is a {type(token_ids).__name__}; it must be a text or a list of token ids"
            )
        if not token_ids:
            raise ParameterError("the prompt has no tokens; give it some text")
        self._check_vocabulary(token_ids)
        return token_ids

    def _request(self, token_ids: tuple[int, ...], params: SamplingParams, seed: int, index: int) -> Request:
        if len(token_ids) >= self._max_context:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens and the context {self._max_context}, which must hold the "
                "answer too; shorten the prompt"
            )
        self._check_vocabulary(params.stop_token_ids)
        self._check_vocabulary([token_id for token_id, _ in params.logit_bias])
        max_length = min(self._max_context, len(token_ids) + params.max_tokens)
        return Request(token_ids, params, self._tokenizer, max_length, seed, next(self._arrivals), index)

    def _check_vocabulary(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not isinstance(token_id, int):
                raise ParameterError(f"{token_id!r} is no token id; token ids are whole numbers (int)")
            if not 0 <= token_id < self._vocab_size:
                raise ParameterError(f"token id {token_id} is outside the model's vocabulary of {self._vocab_size}")


def _check_params(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise ParameterError(f"params is a {type(params).__name__}; it must be SamplingParams")


def forked_params(parent: Request, n: int) -> list[SamplingParams]:
    """Parameters of `n` continuations of a request where none are given: its own, with other seeds.

    Raises:
        ParameterError: `n` is not positive.
    """
    if n < 1:
        raise ParameterError(f"n is {n}; a fork makes 1 continuation or more")
    own = replace(parent.params, n=1, prompt_logprobs=None)
    return [replace(own, seed=choice_seed(parent.seed, index)) for index in range(1, n + 1)]
