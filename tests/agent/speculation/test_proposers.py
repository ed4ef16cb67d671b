"""Proposers: scripts, a model in this process, and servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.server.serving import serving

from subten.agent.policy import Policy
from subten.agent.speculation import Options, Piece, ScriptedProposer, Search
from subten.agent.speculation.endpoint import EndpointProposer
from subten.agent.speculation.local import EngineProposer
from subten.agent.speculation.plan import fenced
from subten.agent.speculation.scripted import tokens
from subten.engine import LLM, AsyncEngine, LoadedModel, SamplingParams, load_model
from subten.errors import ContextLengthError, ParameterError, ProposerError
from support.speculation import Farm, check
from support.stepping import few_steps
from support.tiny_model import save_tiny_model

MESSAGES = [{"role": "user", "content": "Repair it."}]


WAIT = 60.0


async def answer(candidate: Any) -> str:
    return "".join([piece.text async for piece in candidate])


# --- scripted ---------------------------------------------------------------------------------------------------


def first_answers(proposer: ScriptedProposer, counts: list[int]) -> list[str]:
    async def ask() -> list[str]:
        given = [candidate for count in counts for candidate in await proposer.propose(MESSAGES, count, 0)]
        return [await answer(candidate) for candidate in given]

    return asyncio.run(ask())


def test_answers_in_turn() -> None:
    assert first_answers(ScriptedProposer(["a b", "c"]), [3]) == ["a b", "c", "a b"]


def test_drawn_answers_depend_on_the_seed_and_their_number_alone() -> None:
    def drawn(seed: int, counts: list[int]) -> list[str]:
        return first_answers(ScriptedProposer(["a", "b", "c"], weights=[1, 2, 0], seed=seed), counts)

    assert drawn(1, [12]) == drawn(1, [1, 3, 8])
    assert drawn(1, [12]) != drawn(2, [12])
    assert set(drawn(1, [50])) == {"a", "b"}


def test_tokens_come_at_their_rate_and_stop_when_released() -> None:
    async def ask() -> float:
        loop = asyncio.get_running_loop()
        (slow,) = await ScriptedProposer(["one two three four"], seconds_per_token=0.01).propose(MESSAGES, 1, 0)
        began = loop.time()
        pieces = [piece async for piece in slow]
        took = loop.time() - began
        assert pieces == [Piece(token) for token in tokens("one two three four")]
        assert took >= 0.01 * len(pieces)
        await slow.release()
        assert [piece async for piece in slow] == []
        return took

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("answers", "weights"), [([], None), (["a"], [1, 2]), (["a", "b"], [0, 0]), (["a", "b"], [2, -1])]
)
def test_bad_scripts(answers: list[str], weights: list[float] | None) -> None:
    with pytest.raises(ParameterError):
        ScriptedProposer(answers, weights=weights)


# --- a model in this process ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_tiny_model(tmp_path_factory.mktemp("model") / "tiny"), dtype="float64")


def with_engine(model: LoadedModel, use: Callable[[AsyncEngine], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    """What `use` returns; behind it nothing is left in the cache."""
    llm = LLM(model, kv="kv2-plain", max_context=600, max_batch=4, sinks=4, recent=8, prefix_cache=False, **options)

    async def run() -> Any:
        async with AsyncEngine(llm) as engine:
            result = await use(engine)
            async with asyncio.timeout(WAIT):
                while (stats := await engine.stats()).running:
                    await asyncio.sleep(0.005)
            assert stats.available_pages == stats.pages
            return result

    result = asyncio.run(run())
    llm.check_integrity()
    return result


PARAMS = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)


def test_a_model_answers_several_times_and_repeatably(model: LoadedModel) -> None:
    async def ask(engine: AsyncEngine) -> list[str]:
        candidates = await EngineProposer(engine, PARAMS, "tiny").propose(MESSAGES, 3, 7)
        answers = await asyncio.gather(*(answer(candidate) for candidate in candidates))
        for candidate in candidates:
            await candidate.release()
            await candidate.release()
        return answers

    answers = with_engine(model, ask)
    assert len(set(answers)) == 3
    assert all(text.startswith("```bash\n") and len(text) > 12 for text in answers)
    assert with_engine(model, ask) == answers


def test_tokens_are_counted_and_the_opening_is_none(model: LoadedModel) -> None:
    async def ask(engine: AsyncEngine) -> list[Piece]:
        (candidate,) = await EngineProposer(engine, PARAMS, "tiny").propose(MESSAGES, 1, 7)
        return [piece async for piece in candidate]

    pieces = with_engine(model, ask)
    assert pieces[0] == Piece("```bash\n", 0)
    assert sum(piece.tokens for piece in pieces) == PARAMS.max_tokens


def test_candidates_share_the_pages_of_their_prompt(model: LoadedModel) -> None:
    long = [{"role": "user", "content": "x" * 400}]

    async def held(engine: AsyncEngine, count: int) -> int:
        with few_steps(engine._llm.loop, 20):
            candidates = await EngineProposer(engine, PARAMS, "tiny").propose(long, count, 7)
            for candidate in candidates:
                async for piece in candidate:
                    if piece.tokens:
                        break
            stats = await engine.stats()
            for candidate in candidates:
                await candidate.release()
            return stats.pages - stats.available_pages

    alone = with_engine(model, lambda engine: held(engine, 1))
    together = with_engine(model, lambda engine: held(engine, 4))
    assert alone >= 4
    # Each fork writes to a copy of the last page.
    assert together <= alone + 2 * 3


def test_a_candidate_that_is_given_up_frees_its_pages_and_the_others_go_on(model: LoadedModel) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=150, ignore_eos=True)

    async def ask(engine: AsyncEngine) -> list[str]:
        with few_steps(engine._llm.loop, 50):
            first, second, third = await EngineProposer(engine, params, "tiny").propose(MESSAGES, 3, 7)
            reading = asyncio.create_task(answer(second))
            async for piece in first:
                if piece.tokens:
                    break
            held = (await engine.stats()).pages - (await engine.stats()).available_pages
            await first.release()
            await third.release()
            async with asyncio.timeout(WAIT):
                while (await engine.stats()).running > 1:
                    await asyncio.sleep(0.002)
            assert not reading.done()
            stats = await engine.stats()
            assert stats.pages - stats.available_pages <= held
        text = await reading
        await second.release()
        return text

    assert len(with_engine(model, ask)) > 50


def test_a_run_with_a_model_leaves_nothing(model: LoadedModel) -> None:
    """The model is random: its plans are no plans. What counts is that every branch ends and is released."""

    async def ask(engine: AsyncEngine) -> Any:
        farm = Farm()
        run = Search(EngineProposer(engine, PARAMS, "tiny"), farm, check, policy=Policy(), options=Options(rounds=2))
        outcome = await run.run(MESSAGES)
        assert all(clone.kills for clone in farm.clones)
        return outcome

    outcome = with_engine(model, ask)
    assert len(outcome.tree.nodes) == 8
    assert all(node.released and node.pruned is not None for node in outcome.tree.nodes.values())
    assert all(node.tokens for node in outcome.tree.nodes.values())


def test_a_run_that_is_cancelled_frees_its_forks(model: LoadedModel) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=500, ignore_eos=True)

    async def ask(engine: AsyncEngine) -> None:
        run = Search(EngineProposer(engine, params, "tiny"), Farm(), check)
        with few_steps(engine._llm.loop, 50):
            task = asyncio.create_task(run.run(MESSAGES))
            while not (await engine.stats()).running:
                await asyncio.sleep(0.002)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with_engine(model, ask)


def test_a_conversation_that_is_too_long(model: LoadedModel) -> None:
    async def ask(engine: AsyncEngine) -> None:
        with pytest.raises(ContextLengthError):
            await EngineProposer(engine, PARAMS, "tiny").propose([{"role": "user", "content": "x" * 700}], 2, 0)

    with_engine(model, ask)


# --- servers ----------------------------------------------------------------------------------------------------


class Stub:
    """A server that says what a test wants, and remembers what it was asked."""

    def __init__(self, *lines: str, status: str = "200 OK", hang: bool = False, cut: bool = False) -> None:
        self.lines, self.status, self.hang, self.cut = lines, status, hang, cut
        self.requests: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.gone = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")
        )
        self.heads.append(head)
        self.requests.append(json.loads(await reader.readexactly(length)))
        body = "".join(f"{line}\n\n" for line in self.lines).encode()
        more = len(body) + (1000 if self.hang or self.cut else 0)
        writer.write(f"HTTP/1.1 {self.status}\r\nContent-Length: {more}\r\n\r\n".encode() + body)
        await writer.drain()
        if self.hang:
            await reader.read()
            self.gone.set()
        writer.close()


@contextlib.asynccontextmanager
async def stub(server: Stub, **options: Any) -> AsyncIterator[EndpointProposer]:
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with listening, EndpointProposer(f"http://127.0.0.1:{port}/v1/", "m", **options) as proposer:
        yield proposer


def said(text: str) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})


def test_a_stream_is_read_and_the_request_is_what_servers_expect() -> None:
    async def ask() -> None:
        role = 'data: {"choices": [{"delta": {"role": "assistant", "content": null}}]}'
        usage = 'data: {"choices": [], "usage": {"completion_tokens": 2}}'
        server = Stub(": hello", role, said("```bash\n"), said("ls\n```"), usage, "data: [DONE]")
        async with stub(server, key="secret", max_tokens=9, temperature=0.5) as proposer:
            candidates = await proposer.propose(MESSAGES, 2, 5)
            texts = [[piece async for piece in candidate] for candidate in candidates]
            assert texts == [[Piece("```bash\n"), Piece("ls\n```")]] * 2
            for candidate in candidates:
                await candidate.release()
                await candidate.release()
        first, second = server.requests
        assert first == {
            "model": "m",
            "max_tokens": 9,
            "temperature": 0.5,
            "stream": True,
            "messages": MESSAGES,
            "seed": 5,
        }
        assert second == {**first, "seed": 6}
        assert server.heads[0].startswith("POST /v1/chat/completions ")
        assert "authorization: bearer secret" in server.heads[0].lower()

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (
            lambda: Stub('{"error": "no such model"}', status="404 Not Found"),
            "answered with status 404: .*no such model",
        ),
        (lambda: Stub(said("a")), "broke off before the end"),
        (lambda: Stub(said("a"), cut=True), "broke off: "),
        (lambda: Stub('data: {"error": {"message": "out of memory"}}'), "reports: out of memory"),
        (lambda: Stub("data: {"), "an event that is not valid JSON"),
        (lambda: Stub(said("a"), hang=True), "broke off: ReadTimeout"),
    ],
)
def test_servers_that_fail(server: Callable[[], Stub], words: str) -> None:
    async def ask() -> None:
        failing = server()
        async with stub(failing, silence=0.3 if failing.hang else WAIT) as proposer:
            (candidate,) = await proposer.propose(MESSAGES, 1, 0)
            with pytest.raises(ProposerError, match=words):
                await answer(candidate)
            await candidate.release()

    asyncio.run(ask())


def test_a_server_that_is_not_there() -> None:
    async def ask() -> None:
        farm = Farm()
        async with EndpointProposer("http://127.0.0.1:9/v1", "m") as proposer:
            await Search(proposer, farm, check).run(MESSAGES)

    with pytest.raises(ProposerError, match=r"http://127.0.0.1:9/v1/chat/completions can't be reached"):
        asyncio.run(ask())


def test_a_denied_plan_closes_its_connection() -> None:
    async def ask() -> None:
        server = Stub(said("```bash\n"), said("rm -rf /workspace/tests \n"), said("more"), hang=True)
        async with stub(server, silence=WAIT) as proposer:
            policy = Policy(protect_paths=["/workspace/tests"])
            run = Search(proposer, Farm(), check, policy=policy, options=Options(branches=1))
            outcome = await run.run(MESSAGES)
            assert outcome.tree.nodes[0].judged.stage == "stream"
            async with asyncio.timeout(WAIT / 2):  # Before it would be for the silence.
                await server.gone.wait()

    asyncio.run(ask())


@pytest.mark.parametrize(
    "url", ["localhost:8000", "file:///etc/passwd", "", "http://", "http://h:99999/v1", "http://h:p"]
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(ParameterError, match="must be a URL"):
        EndpointProposer(url, "m")


@pytest.mark.parametrize("key", ["", "two words", "two\nlines", "schl\u00fcssel"])
def test_keys_that_can_not_be_sent(key: str) -> None:
    with pytest.raises(ParameterError, match="one line of plain ASCII") as caught:
        EndpointProposer("http://127.0.0.1:9/v1", "m", key=key)
    assert not key or key not in str(caught.value)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_bad_temperatures(temperature: float) -> None:
    with pytest.raises(ParameterError, match="temperature is"):
        EndpointProposer("http://127.0.0.1:9/v1", "m", temperature=temperature)


def test_our_own_server(model: LoadedModel) -> None:
    llm = LLM(model, kv="kv2-plain", max_context=600, max_batch=4, sinks=4, recent=8)

    async def ask(url: str, name: str) -> list[str]:
        async with EndpointProposer(f"{url}/v1", name, max_tokens=16) as proposer:
            candidates = await proposer.propose(MESSAGES, 3, 3)
            return list(await asyncio.gather(*(answer(candidate) for candidate in candidates)))

    with serving(llm) as live:
        answers = asyncio.run(ask(live.url, live.name))
        live.assert_idle()
    assert len(set(answers)) == 3


def test_a_scripted_proposer_is_enough_for_a_run(tmp_path: Path) -> None:
    outcome = asyncio.run(Search(ScriptedProposer([fenced("fix\n")]), Farm(), check).run(MESSAGES))
    assert outcome.winner is not None
