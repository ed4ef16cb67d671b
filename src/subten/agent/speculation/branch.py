"""One branch from its first token to its score: read and judged while it streams, judged whole, run, checked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from subten.agent.policy import Decision, Policy, StreamingPolicy, Verdict, judge
from subten.agent.sandbox import Changes, Clone, Result
from subten.agent.speculation import events
from subten.agent.speculation.check import ENVIRONMENT, Check, Score, ending
from subten.agent.speculation.cpu import cpu_seconds
from subten.agent.speculation.options import Options
from subten.agent.speculation.plan import MAX_CHARACTERS, PlanReader
from subten.agent.speculation.proposer import Candidate, Message
from subten.agent.speculation.recorder import Recorder
from subten.agent.speculation.threads import in_thread
from subten.agent.speculation.workspace import FOLDER, protected_change, replant

log = logging.getLogger(__name__)

T = TypeVar("T")

Ask = Callable[[str, Decision], bool]
"""Asks a person whether a plan may run; called in a thread, one call at a time."""

_PLAN_FILE = "subten-plan.sh"
_END_SECONDS = 15.0
"""How long a call into a sandbox may take to notice that the sandbox was ended."""


class Source(Protocol):
    """Where clones come from: a `Pool`."""

    def take(self) -> Clone:
        """A clone that is the caller's.

        Raises:
            SandboxError: there is none to be had.
        """


@dataclass(eq=False)
class Branch:
    """What a branch has and holds. What is known about it is in the tree."""

    number: int
    messages: Sequence[Message]
    parent: Branch | None
    candidate: Candidate
    script: str = ""
    clone: Clone | None = None
    changes: Changes | None = None
    score: Score | None = None
    passed: bool = False
    pruned: bool = False
    failure: Exception | None = None
    cpu_seconds: float | None = None
    released: bool = False


class PruneError(Exception):
    """A branch ends here: its cause, one of `events.CAUSES`, and one sentence."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause
        self.reason = reason


class Grower:
    """Brings branches to a score, several at a time.

    Args:
        source: of clones.
        check: of success.
        policy: of plans.
        options: of the run.
        ask: a person; None where there is none.
        recorder: of events.
    """

    def __init__(
        self, source: Source, check: Check, policy: Policy, options: Options, ask: Ask | None, recorder: Recorder
    ) -> None:
        self._source = source
        self._check = check
        self._policy = policy
        self._options = options
        self._ask = ask
        self._recorder = recorder
        self._slots = asyncio.Semaphore(options.parallel or options.branches)
        self._asking = asyncio.Lock()

    async def grow(self, branch: Branch) -> None:
        """Until it has a score, or has passed.

        Raises:
            PruneError: it ends before.
        """
        await self._read(branch)
        await self._judge(branch)
        async with self._slots:
            changes = await self._run(branch)
            if await self._passes(branch):
                await self._confirm(branch, changes)

    async def release(self, branch: Branch) -> None:
        """Free all that it holds, fork and clone together. Twice is once."""
        if branch.released:
            return
        branch.released = True
        clone = branch.clone
        try:
            if clone is not None:
                _end(branch, clone)
        finally:
            try:
                await branch.candidate.release()
            except Exception as error:
                log.warning("branch %d: its proposer could not stop: %s", branch.number, error)
            self._recorder.emit(
                events.Released,
                branch=branch.number,
                clone=None if clone is None else clone.name,
                cpu_seconds=branch.cpu_seconds,
            )

    # --- before anything runs -------------------------------------------------------------------------------------

    async def _read(self, branch: Branch) -> None:
        """Take the plan as it streams, to its end or its first denial."""
        options = self._options
        reader, policy = PlanReader(), StreamingPolicy(self._policy, FOLDER)
        tokens = 0
        try:
            async with asyncio.timeout(options.proposal_seconds):
                async for piece in branch.candidate:
                    tokens += piece.tokens
                    self._recorder.emit(events.AnswerGrew, branch=branch.number, text=piece.text, tokens=piece.tokens)
                    self._push(branch, policy, reader.push(piece.text))
                    if reader.done:
                        break
                    if tokens >= options.max_tokens:
                        raise PruneError("failure", f"the plan has not ended after {tokens} tokens")
        except TimeoutError:
            raise PruneError("timeout", f"the plan has not ended within {options.proposal_seconds:g} s") from None
        self._push(branch, policy, reader.finish())
        # Nothing more is wanted of it: a round that continues this plan has a conversation of its own.
        await branch.candidate.release()
        if not reader.begun:
            raise PruneError("failure", "the answer holds no plan, which is a block that begins with ```bash")
        if not reader.done:
            raise PruneError("failure", "the answer ends inside its plan")
        if not reader.script.strip():
            raise PruneError("failure", "the plan is empty")
        branch.script = reader.script

    def _push(self, branch: Branch, policy: StreamingPolicy, text: str) -> None:
        if len(policy.text) + len(text) > MAX_CHARACTERS:
            raise PruneError("failure", f"the plan has more than {MAX_CHARACTERS} characters")
        decision = policy.push(text) if text and self._options.stream_policy else None
        if decision is not None:
            self._recorder.judged(branch.number, "stream", decision)
            raise PruneError("policy", decision.reason)

    async def _judge(self, branch: Branch) -> None:
        """The whole plan, from its beginning, by itself: that is what counts before it runs."""
        decision = await in_thread(lambda: judge(self._policy, branch.script, FOLDER))
        self._recorder.judged(branch.number, "whole", decision)
        if decision.verdict is Verdict.DENY:
            raise PruneError("policy", decision.reason)
        if decision.verdict is Verdict.ALLOW:
            return
        ask = self._ask
        if ask is None:
            raise PruneError("policy", f"a person would have to be asked: {decision.reason}")
        async with self._asking:
            approved = await in_thread(lambda: ask(branch.script, decision))
        self._recorder.emit(events.Asked, branch=branch.number, approved=approved)
        if not approved:
            raise PruneError("policy", f"a person said no: {decision.reason}")

    # --- in sandboxes ---------------------------------------------------------------------------------------------

    async def _run(self, branch: Branch) -> Changes:
        """Run the plan in a clone of the branch's own; what it changed."""
        inherited = None if branch.parent is None else branch.parent.clone
        clone = await self._taken(branch, self._source.take if inherited is None else inherited.branch)
        self._recorder.emit(events.PlanStarted, branch=branch.number, clone=clone.name, tier=clone.tier)
        result = await self._in(branch, clone, lambda: self._execute(clone, branch.script))
        self._recorder.emit(
            events.PlanRan,
            branch=branch.number,
            exit_code=result.exit_code,
            timed_out=result.timed_out,
            seconds=result.seconds,
            output=ending((result.stdout + result.stderr).decode(errors="replace")),
        )
        if result.timed_out:
            raise PruneError("timeout", f"the plan ran for more than {self._options.plan_seconds:g} s")
        if result.exit_code != 0:
            said = result.stderr.decode(errors="replace").strip().splitlines()
            reason = f"a command of the plan failed with exit code {result.exit_code}"
            raise PruneError("failure", f"{reason}: {said[-1]}" if said else reason)
        # Before the check, which may leave files of its own behind.
        changes = branch.changes = await self._in(branch, clone, clone.changes)
        found = protected_change(changes, self._policy.protect_paths)
        if found is not None:
            path, guarded = found
            reason = f"the plan has changed {path}, which is protected by {guarded}"
            decision = Decision(Verdict.DENY, f"protect_paths: {guarded}", (0, len(branch.script)), reason)
            self._recorder.judged(branch.number, "files", decision)
            raise PruneError("policy", reason)
        return changes

    async def _passes(self, branch: Branch) -> bool:
        clone = branch.clone
        assert clone is not None
        score = branch.score = await self._in(branch, clone, lambda: self._check(clone))
        self._recorder.checked(branch.number, score, confirms=False)
        if score.timed_out:
            raise PruneError("timeout", "the check did not end in its time")
        return score.passed

    async def _confirm(self, branch: Branch, changes: Changes) -> None:
        """The check once more where nothing but the changed files is: what the plan left running, or put elsewhere in
        its sandbox, does not count, and what is handed over has been seen to pass."""
        fresh = await self._taken(None, self._source.take)
        try:
            await self._in(branch, fresh, lambda: replant(changes, fresh))
            score = await self._in(branch, fresh, lambda: self._check(fresh))
        finally:
            _end(branch, fresh)
        self._recorder.checked(branch.number, score, confirms=True)
        if not score.passed:
            raise PruneError("failure", "the check does not pass on the changed files alone")
        branch.passed = True

    def _execute(self, clone: Clone, script: str) -> Result:
        clone.put({_PLAN_FILE: script.encode("utf-8", "surrogateescape")}, folder="/tmp")
        plan = ["bash", "-e", f"/tmp/{_PLAN_FILE}"]
        return clone.exec(plan, timeout=self._options.plan_seconds, env=ENVIRONMENT)

    async def _taken(self, branch: Branch | None, take: Callable[[], Clone]) -> Clone:
        """A clone; the branch's, where one is named. One that comes after the branch was given up is ended."""
        future = in_thread(take)
        try:
            clone = await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            if future.exception() is None:
                future.result().kill()
            raise
        if branch is not None:
            branch.clone = clone
        return clone

    async def _in(self, branch: Branch, clone: Clone, work: Callable[[], T]) -> T:
        """What a call into a clone returns. Giving it up ends the clone, and with it the call."""
        future = in_thread(work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            _end(branch, clone)
            await asyncio.wait([future], timeout=_END_SECONDS)
            if future.done():
                future.exception()
            raise


def _end(branch: Branch, clone: Clone) -> None:
    """End a clone that a branch has used, and note what it cost."""
    used = cpu_seconds(clone) if clone.alive else None
    clone.kill()
    if used is not None:
        branch.cpu_seconds = round((branch.cpu_seconds or 0.0) + used, 3)
