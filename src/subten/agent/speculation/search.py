"""The search: rounds of candidates that grow side by side and are pruned as soon as can be.

One task of the event loop per branch. Whatever happens to a branch is its own: it ends with a reason, and what it
held (its part of a KV cache, its connection, its sandbox) is free before the run ends, however that comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import subten
from subten.agent.policy import Policy
from subten.agent.sandbox import Changes
from subten.agent.speculation import events
from subten.agent.speculation.branch import Ask, Branch, Grower, PruneError, Source
from subten.agent.speculation.check import Check, Score
from subten.agent.speculation.options import Options
from subten.agent.speculation.prompt import feedback
from subten.agent.speculation.proposer import Candidate, Message, Proposer
from subten.agent.speculation.pruning import Standing, best, dominated, halved, shares
from subten.agent.speculation.recorder import Recorder
from subten.agent.speculation.tree import Tree
from subten.errors import ProposerError, SubtenError

log = logging.getLogger(__name__)

_GIVEN_UP = "the run was given up"
_WORDS = {
    "policy": "stopped by the policy",
    "failure": "failed",
    "timeout": "out of time",
    "dominated": "dominated",
    "halving": "not continued",
    "stopped": "given up",
}


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        winner: the branch whose changes passed the check in a fresh sandbox; None where none did.
        changes: the winner's.
        reason: one sentence.
        tree: all branches.
    """

    winner: int | None
    changes: Changes | None
    reason: str
    tree: Tree


class Search:
    """Searches for a plan that passes a check.

    Args:
        proposer: of plans.
        source: of clones; a pool, which outlives the run.
        check: what success is.
        policy: what plans may do. Its paths are those in a sandbox, where the workspace is /workspace.
        task: for the log.
        options: how to search.
        ask: asks a person about what the policy says `ask` to; without it such plans do not run.
        listen: called in the event loop with every event.
    """

    def __init__(
        self,
        proposer: Proposer,
        source: Source,
        check: Check,
        *,
        policy: Policy | None = None,
        task: str = "",
        options: Options | None = None,
        ask: Ask | None = None,
        listen: Callable[[events.Event], None] | None = None,
    ) -> None:
        self._proposer = proposer
        self._source = source
        self._check = check
        self._check_name = getattr(check, "__name__", None) or str(check)
        self._policy = policy or Policy()
        self._task = task
        self._options = options or Options()
        self._ask = ask
        self._listen = listen or _nobody

    async def run(self, messages: Sequence[Message]) -> Outcome:
        """Search once. Cancelling it releases everything first.

        Args:
            messages: the conversation that the proposer is to answer.

        Raises:
            SubtenError: nothing could be proposed, or an event could not be recorded.
        """
        options = self._options
        recorder = Recorder(self._listen)
        grower = Grower(self._source, self._check, self._policy, options, self._ask, recorder)
        run = _Run(self._proposer, grower, recorder, options, self._check_name)
        recorder.emit(
            events.RunStarted,
            version=events.VERSION,
            subten=subten.__version__,
            task=self._task,
            check=self._check_name,
            proposer=self._proposer.name,
            branches=options.branches,
            rounds=options.rounds,
            seed=options.seed,
            token_seconds=options.token_seconds,
        )
        winner: Branch | None = None
        reason = _GIVEN_UP
        try:
            winner = await run.rounds(messages)
            reason = _summary(recorder.tree)
        except SubtenError as error:
            reason = str(error)
            raise
        finally:
            await run.release_all(winner)
            number = None if winner is None else winner.number
            recorder.emit(events.RunEnded, winner=number, reason=reason)
        if recorder.failure is not None:
            raise recorder.failure
        return Outcome(number, None if winner is None else winner.changes, reason, recorder.tree)


class _Run:
    """The rounds of one run."""

    def __init__(
        self, proposer: Proposer, grower: Grower, recorder: Recorder, options: Options, check_name: str
    ) -> None:
        self._proposer = proposer
        self._grower = grower
        self._recorder = recorder
        self._options = options
        self._check_name = check_name
        self._branches: list[Branch] = []
        self._why_stopped: tuple[str, str, int | None] = ("stopped", _GIVEN_UP, None)

    async def rounds(self, messages: Sequence[Message]) -> Branch | None:
        """All of them; the winner."""
        parents: list[Branch] = []
        for number in range(self._options.rounds):
            self._recorder.emit(events.RoundStarted, round=number)
            branches = await self._propose(number, parents, messages)
            await self._grow_all(branches)
            if passed := [branch for branch in branches if branch.passed]:
                return self._choose(passed)
            failures = [branch.failure for branch in branches]
            if all(isinstance(failure, ProposerError) for failure in failures):
                # All of them asked the same one: it is down, or refuses.
                raise ProposerError(str(failures[0]))
            parents = await self._survivors([*parents, *branches], number + 1)
        return None

    async def release_all(self, winner: Branch | None) -> None:
        """What is left of the run ends here."""
        for branch in self._branches:
            if not branch.pruned and branch is not winner:
                self._prune(branch, *self._why_stopped)
            await self._grower.release(branch)

    async def _propose(self, number: int, parents: Sequence[Branch], messages: Sequence[Message]) -> list[Branch]:
        """The branches of a round, on their way."""
        begun: list[Branch] = []
        roots: Sequence[Branch | None] = parents or [None]
        for parent, count in zip(roots, shares(len(roots), self._options.branches), strict=True):
            conversation = [*messages]
            if parent is not None:
                assert parent.score is not None
                conversation = [*parent.messages, *feedback(parent.script, self._check_name, parent.score)]
            for candidate in await self._ask_for(conversation, count):
                branch = Branch(len(self._branches), conversation, parent, candidate)
                self._branches.append(branch)
                begun.append(branch)
                above = None if parent is None else parent.number
                self._recorder.emit(events.BranchStarted, branch=branch.number, parent=above, round=number)
        return begun

    async def _ask_for(self, conversation: Sequence[Message], count: int) -> Sequence[Candidate]:
        longest, name = self._options.proposal_seconds, self._proposer.name
        try:
            async with asyncio.timeout(longest):
                seed = self._options.seed + len(self._branches)
                candidates = await self._proposer.propose(conversation, count, seed)
        except TimeoutError as error:
            raise ProposerError(f"{name} did not begin to answer within {longest:g} s") from error
        if not candidates:
            raise ProposerError(f"{name} began no answer")
        return candidates

    async def _grow_all(self, branches: Sequence[Branch]) -> None:
        """Until all have ended, or one has passed and that is enough."""
        pending = {asyncio.create_task(self._grow(branch)) for branch in branches}
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if self._recorder.failure is not None:
                    raise self._recorder.failure
                passed = [branch for branch in branches if branch.passed]
                if passed and self._options.first_wins:
                    (first,) = self._best(passed, 1)
                    reason = f"#{first.number} has passed, and this one would come later"
                    self._why_stopped = ("dominated", reason, first.number)
                    return
        finally:
            for task in pending:
                task.cancel()
            if pending:
                await asyncio.wait(pending)

    async def _grow(self, branch: Branch) -> None:
        """Bring a branch to its end: it has passed, has a score, or is pruned and holds nothing."""
        try:
            await self._grower.grow(branch)
        except PruneError as prune:
            self._prune(branch, prune.cause, prune.reason)
        except asyncio.CancelledError:
            self._prune(branch, *self._why_stopped)
        except Exception as error:
            # A proposer's, a sandbox's or a check's: the other branches go on.
            branch.failure = error
            log.info("branch %d failed", branch.number, exc_info=error)
            told = str(error) if isinstance(error, SubtenError) else f"{type(error).__name__}: {error}"
            self._prune(branch, "failure", told)
        finally:
            if branch.pruned:
                await self._grower.release(branch)

    def _choose(self, passed: Sequence[Branch]) -> Branch:
        (winner,) = self._best(passed, 1)
        for branch in self._branches:
            if branch is not winner and not branch.pruned:
                self._prune(branch, "dominated", f"#{winner.number} passes the check", winner.number)
        changes = winner.changes
        assert changes is not None
        self._recorder.emit(
            events.Won,
            branch=winner.number,
            changed=tuple(change.path for change in changes.changed),
            refused=tuple(f"{refusal.path}: {refusal.reason}" for refusal in changes.refused),
            diff=changes.diff(),
        )
        return winner

    async def _survivors(self, branches: Sequence[Branch], rounds: int) -> list[Branch]:
        """Those that the next round continues. The others are pruned and released."""
        alive = [branch for branch in branches if not branch.pruned]
        if rounds == self._options.rounds or not self._options.repair:
            for branch in alive:
                self._prune(branch, "failure", _failed_check(branch.score))
        else:
            for number, by in dominated(self._standings(alive)).items():
                reason = f"#{by} is as good or better at a lower cost"
                self._prune(self._branches[number], "dominated", reason, by)
            alive = [branch for branch in alive if not branch.pruned]
            kept = self._best(alive, halved(self._options.branches, rounds))
            for branch in alive:
                if branch not in kept:
                    self._prune(branch, "halving", f"round {rounds + 1} continues the best {len(kept)}")
            alive = kept
        for branch in branches:
            if branch.pruned:
                await self._grower.release(branch)
        return [branch for branch in alive if not branch.pruned]

    def _best(self, branches: Sequence[Branch], keep: int) -> list[Branch]:
        return [self._branches[number] for number in best(self._standings(branches), keep)]

    def _standings(self, branches: Sequence[Branch]) -> list[Standing]:
        cost = self._recorder.tree.cost
        return [Standing(b.number, b.score.value if b.score else 0.0, cost(b.number)) for b in branches]

    def _prune(self, branch: Branch, cause: str, reason: str, by: int | None = None) -> None:
        branch.pruned, branch.passed = True, False
        self._recorder.emit(events.Pruned, branch=branch.number, cause=cause, reason=reason, by=by)


def _nobody(event: events.Event) -> None:
    """Listens to nothing."""


def _failed_check(score: Score | None) -> str:
    if score is None or score.tests is None:
        return "the check failed"
    return f"the check failed: {score.passed_tests} of {score.tests} tests passed"


def _summary(tree: Tree) -> str:
    if tree.won is not None:
        return f"#{tree.won.branch} passes the check"
    parts = []
    for cause in events.CAUSES:
        reasons = [node.pruned.reason for node in tree.nodes.values() if node.pruned and node.pruned.cause == cause]
        if reasons:
            parts.append(f"{len(reasons)} {_WORDS[cause]} ({reasons[0]})")
    return f"no plan passed the check: {'; '.join(parts)}"
