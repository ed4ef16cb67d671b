"""Stand-ins for sandboxes and models that do what a script says, and remember what became of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from subten.agent.sandbox import Change, Changes, Clone, Entry, Limits, Result
from subten.agent.speculation import Piece, Score
from subten.agent.speculation.plan import fenced
from subten.errors import SandboxError

OLD, NEW = Entry("file", 0o644, b"old\n"), Entry("file", 0o644, b"new\n")


class FakeClone(Clone):
    """Runs plans of a few words: `fix`, `break`, `hang`, `fail`, `die`, `silent-die`; a check looks at `fixed`."""

    def __init__(self, farm: Farm, name: str, *, fixed: bool = False) -> None:
        # What the real one needs is not there.
        self.farm = farm
        self.name = name
        self.tier = "fake"
        self.limits = Limits()
        self.fixed = fixed
        self.kills = 0
        self._script = ""
        self._dead = threading.Event()
        farm.clones.append(self)

    def put(self, files: Any, folder: str = "/workspace") -> None:
        self._require_alive()
        if folder == "/tmp":
            (self._script,) = (content.decode() for content in files.values())
        else:
            self.fixed = any(content == NEW.content for content in files.values())

    def exec(self, command: Any, *, timeout: float = 60.0, **_: Any) -> Result:
        self._require_alive()
        if isinstance(command, str) or command[0] != "bash":
            return self._result(0)
        self.farm.executed.append(self._script)
        for line in self._script.splitlines():
            match line.split("#")[0].strip():
                case "fix":
                    self.fixed = True
                case "fail":
                    return self._result(3)
                case "hang":
                    if self._hangs(timeout):
                        raise SandboxError(f"the clone {self.name} was ended while it was at work")
                    return self._result(-9, timed_out=True)
                case "die":
                    self.kill()
                    raise SandboxError(f"the clone {self.name} was ended: its guest does not answer")
        return self._result(0)

    def changes(self) -> Changes:
        self._require_alive()
        path = "tests/test.py" if "touch-tests" in self._script else "main.py"
        return Changes((Change(path, OLD, NEW if self.fixed else Entry("file", 0o644, b"other\n")),))

    def branch(self) -> FakeClone:
        self._require_alive()
        if self.farm.breaks():
            raise SandboxError("a branch could not be started")
        return FakeClone(self.farm, f"{self.name}+", fixed=self.fixed)

    def refresh(self) -> None:
        """Nothing to refresh."""

    @property
    def process_id(self) -> int:
        return 1 << 30  # nobody's

    @property
    def alive(self) -> bool:
        return not self.kills

    def kill(self) -> None:
        self.kills += 1
        self._dead.set()

    def _end(self) -> None:
        """See kill."""

    def _require_alive(self) -> None:
        if self.kills:
            raise SandboxError(f"the clone {self.name} was ended")

    def _hangs(self, seconds: float) -> bool:
        """Whether it was ended before the time was over, or before the farm let it go."""
        deadline = time.monotonic() + seconds
        while not self._dead.wait(0.005):
            if time.monotonic() > deadline or self.farm.go.is_set():
                return False
        return True

    def _result(self, exit_code: int, *, timed_out: bool = False) -> Result:
        return Result(exit_code, b"", b"", 0, timed_out, 0.01, self.tier)


class Farm:
    """Where fake clones come from. Some of the calls fail, by their number.

    Attributes:
        go: ends the time of all that hangs.
    """

    def __init__(self, failing: Sequence[int] = ()) -> None:
        self.go = threading.Event()
        self.clones: list[FakeClone] = []
        self.executed: list[str] = []
        self._failing = set(failing)
        self._calls = 0
        self._lock = threading.Lock()

    def take(self) -> FakeClone:
        if self.breaks():
            raise SandboxError("a sandbox could not be started")
        return FakeClone(self, f"clone-{len(self.clones)}")

    def breaks(self) -> bool:
        with self._lock:
            self._calls += 1
            return self._calls - 1 in self._failing


def check(clone: FakeClone) -> Score:
    """Passes where the plan was to `fix`; the rest is worth something too."""
    clone._require_alive()
    if "bad-check" in clone._script:
        raise ValueError("the check has a bug")
    return Score(clone.fixed, 1.0 if clone.fixed else len(clone._script) % 5 / 10, seconds=0.01)


class FakeProposer:
    """Gives out answers in turn: plans, or words for what a proposer may do instead."""

    name = "fake"

    def __init__(self, plans: Sequence[str]) -> None:
        self.plans = list(plans)
        self.candidates: list[FakeCandidate] = []
        self.conversations: list[list[Any]] = []

    async def propose(self, messages: Any, count: int, seed: int) -> list[FakeCandidate]:
        self.conversations += [list(messages)] * count
        new = [FakeCandidate(self.plans[(len(self.candidates) + i) % len(self.plans)]) for i in range(count)]
        self.candidates += new
        return new


class FakeCandidate:
    def __init__(self, plan: str) -> None:
        self.plan = plan
        self.read = 0
        self.releases = 0

    async def __aiter__(self) -> AsyncIterator[Piece]:
        text = {"no-plan": "I don't know.\n", "cut-off": "```bash\nfix\n"}.get(self.plan, fenced(self.plan))
        size = max(3, len(text) // 500)
        for start in range(0, len(text), size):
            await asyncio.sleep(0)
            self.read += 1
            if self.plan.startswith("raise") and self.read > 2:
                raise RuntimeError("the proposer has a bug")
            if self.plan.startswith("silent") and self.read > 2:
                await asyncio.Event().wait()
            yield Piece(text[start : start + size])

    async def release(self) -> None:
        self.releases += 1
        if self.plan.endswith("stuck-release"):
            raise RuntimeError("the proposer can't stop")
