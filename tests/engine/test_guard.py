"""Guards, penalties and the time to live of snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from tests.engine.serving import save_model

from subten.engine import LLM, AsyncEngine, LoadedModel, SamplingParams, load_model
from subten.engine.guard import allowed_tokens
from subten.engine.sampling import SampleRow, sample
from subten.errors import EngineStoppedError, GuardError, ParameterError
from subten.formats import PageLayout, get_format
from subten.kvcache import CacheBooks

VOCAB = 258


@dataclass
class Spells:
    """Lets one text of token ids pass, and nothing else."""

    word: tuple[int, ...]
    accepted: list[int] = field(default_factory=list)

    def allowed(self) -> torch.Tensor | None:
        mask = torch.zeros(-(-VOCAB // 32), dtype=torch.int32)
        token = self.word[len(self.accepted)]
        mask[token // 32] = torch.tensor(1 << token % 32, dtype=torch.int64).to(torch.int32)
        return mask

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    @property
    def finished(self) -> bool:
        return len(self.accepted) == len(self.word)

    def fork(self) -> Spells:
        return Spells(self.word, list(self.accepted))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    sizes = {"head_dim": 32, "num_hidden_layers": 1, "max_position_embeddings": 512}
    return load_model(save_model(tmp_path_factory.mktemp("model"), **sizes), dtype="float64")


@pytest.fixture
def llm(model: LoadedModel) -> LLM:
    return LLM(model, kv="kv2-plain", max_context=200, max_batch=4, sinks=4, recent=8)


def test_masks_are_bits() -> None:
    masks = torch.tensor([[0b101, -(1 << 31)], [-1, -1]], dtype=torch.int32)
    allowed = allowed_tokens(masks, 70)
    assert allowed[0].nonzero().flatten().tolist() == [0, 2, 63]
    assert allowed[1].tolist() == [True] * 64 + [False] * 6


WORD = (31, 32, 63, 64, 255, 33)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_an_answer_is_what_its_guard_allows_and_ends_with_it(llm: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1, n=2, guard=lambda: Spells(WORD), max_tokens=50)
    free = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    alone = llm.generate("abc", free)[0]
    *guarded, other = llm.generate(["abc", "abc"], [params, free])
    assert [answer.token_ids for answer in guarded] == [WORD, WORD]
    assert {answer.finish_reason for answer in guarded} == {"stop"}
    assert other.token_ids == alone.token_ids


def test_a_bias_can_not_overrule_a_guard(llm: LLM) -> None:
    params = SamplingParams(temperature=0, guard=lambda: Spells(WORD), logit_bias={7: 100, 31: -100})
    assert llm.generate("abc", params)[0].token_ids == WORD


def test_a_fork_goes_on_where_the_guard_is(llm: LLM) -> None:
    import asyncio

    async def use() -> list:
        async with AsyncEngine(llm) as engine:
            params = SamplingParams(temperature=0, guard=lambda: Spells(WORD))
            generation = await engine.submit("abc", params)
            await anext(generation)
            forks = await generation.fork(2)
            return [(await fork.completions())[0] for fork in forks]

    for answer in asyncio.run(use()):
        assert (*answer.prompt_token_ids[3:], *answer.token_ids) == WORD


@dataclass
class Fails:
    """Fails at its third token, in one of several ways."""

    way: str
    seen: int = 0

    def allowed(self) -> torch.Tensor | None:
        self.seen += 1
        if self.seen == 3 and self.way == "allowed":
            raise ValueError("no idea")
        nothing, unknown = torch.zeros(9, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
        unknown[8] = 1 << 30  # Behind the vocabulary's end.
        return {"nothing": nothing, "unknown": unknown}.get(self.way) if self.seen == 3 else None

    def accept(self, token_id: int) -> None:
        if self.seen == 3 and self.way == "accept":
            raise ValueError("no idea")

    @property
    def finished(self) -> bool:
        if self.seen == 3 and self.way == "finished":
            raise ValueError("no idea")
        return False

    def fork(self) -> Fails:
        return Fails(self.way, self.seen)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize(
    ("way", "words", "tokens"),
    [
        ("allowed", "no idea", 2),
        ("nothing", "can't go on", 2),
        ("unknown", "can't go on", 2),
        ("accept", "no idea", 3),
        ("finished", "no idea", 3),
    ],
)
def test_an_answer_whose_guard_fails_fails_alone(
    llm: LLM, temperature: float, way: str, words: str, tokens: int
) -> None:
    params = SamplingParams(temperature=temperature, seed=1, guard=lambda: Fails(way), max_tokens=9, ignore_eos=True)
    free = SamplingParams(temperature=temperature, seed=1, logprobs=0, max_tokens=9, ignore_eos=True)
    bad, other = llm.generate(["abc", "abc"], [params, free])
    assert (bad.finish_reason, len(bad.token_ids)) == ("error", tokens)
    assert isinstance(bad.error, GuardError)
    assert words in str(bad.stop_reason)
    assert bad.token_ids == other.token_ids[:tokens]
    assert (other.finish_reason, len(other.token_ids)) == ("length", 9)
    assert llm.stats().available_pages == llm.stats().pages


def test_a_guard_that_can_not_be_made(llm: LLM) -> None:
    with pytest.raises(GuardError, match="division by zero"):
        llm.generate("abc", SamplingParams(guard=lambda: 1 / 0))  # type: ignore[arg-type, return-value]


def test_a_guard_says_where_the_end_is() -> None:
    with pytest.raises(ParameterError, match="min_tokens is 2; it must be 0 where a form or a guard"):
        SamplingParams(guard=lambda: Spells(WORD), min_tokens=2)


def test_penalties_lower_what_the_answer_has() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.5]])
    params = SamplingParams(temperature=0, presence_penalty=0.05, frequency_penalty=0.1)

    def token(counts: dict[int, int]) -> int:
        return int(sample(logits, [SampleRow(params, 0, 0, counts=counts)]))

    assert token({}) == 0
    assert token({0: 0, 1: 1}) == 0
    assert token({0: 1}) == 1
    assert token({0: 1, 1: 1}) == 0
    assert token({0: 5, 1: 5}) == 2
    assert logits.tolist() == [pytest.approx([1.0, 0.9, 0.5])]


def test_penalties_count_the_answer_and_not_the_prompt(llm: LLM) -> None:
    plain = llm.generate("aaaa", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, presence_penalty=2, frequency_penalty=2)
    spread = llm.generate("aaaa", params)[0]
    assert spread.token_ids[0] == plain.token_ids[0]
    assert len(set(spread.token_ids)) > len(set(plain.token_ids))


@pytest.mark.parametrize("value", [-2.1, 3, float("nan"), "1"])
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_out_of_range(name: str, value: object) -> None:
    with pytest.raises(ParameterError, match=name):
        SamplingParams(**{name: value})


def test_snapshots_that_nobody_takes_up_are_dropped_in_time() -> None:
    now = 0.0
    books = CacheBooks(
        PageLayout(get_format("kv2-plain", sinks=4, recent=8), 64), 20, 6, snapshot_ttl=10.0, clock=lambda: now
    )
    for tokens in ([1] * 80, [2] * 80):
        sequence = books.open(tokens).sequence
        books.append(sequence, tokens)
        books.snapshot(sequence)
        books.free(sequence)
    now = 6.0
    hit = books.open([1] * 81)
    assert hit.length == 80  # Taken up, and so kept for another ten seconds.
    books.free(hit.sequence)
    now = 12.0
    assert books.open([2] * 81).length == 0
    assert books.snapshots == 1
    now = 16.0
    books.expire()
    assert books.snapshots == 0
    books.check_integrity()


def test_room_for_sessions(model: LoadedModel) -> None:
    sizes = {"kv": "kv2-plain", "max_context": 200, "max_batch": 1, "sinks": 4, "recent": 8}

    def kept(**options: object) -> int:
        llm = LLM(model, **sizes, **options)  # type: ignore[arg-type]
        for number in range(9):
            llm.generate([number] * 70, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        return llm.stats().snapshots

    assert (kept(), kept(sessions=0)) == (1, 0)
    assert kept(sessions=3) >= 2 * 3
    for options in ({"sessions": -1}, {"session_ttl": 0.0}):
        with pytest.raises(ParameterError):
            LLM(model, **sizes, **options)  # type: ignore[arg-type]


def test_a_closed_engine_says_so(llm: LLM) -> None:
    import asyncio

    async def use() -> None:
        engine = AsyncEngine(llm)
        assert await engine.with_tokenizer(lambda tokenizer: tokenizer.decode([64, 65])) == "ab"
        await engine.close()
        for work in (engine.stats(), engine.submit("abc"), engine.with_tokenizer(len)):  # type: ignore[arg-type]
            with pytest.raises(EngineStoppedError, match="closed"):
                await work

    asyncio.run(use())


def test_bytes_of_tokens(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    text = "häßlich 😀\n\tend"
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text)) == text.encode()
