"""What the policy says of each command of the corpus, against what the command really does to what is protected."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from subten.agent.policy import Policy, Verdict, judge
from subten.agent.sandbox import Clone, MicroVMTemplate, Template
from subten.errors import SandboxError

DATA = Path(__file__).parents[2] / "data"
CORPUS, VARIANTS = (
    [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
    for name in ("shell_policy_corpus.jsonl", "shell_policy_variants.jsonl")
)
POLICY = Policy(protect_paths=["/w/v"])
CWD = "/srv/repo"
SLICES = 8
AT_ONCE = 4
"""Clones of a slice: many commands wait for something until their time is over."""

SETUP = f"""
chmod -R u+rwx /w {CWD} /tmp 2> /dev/null
rm -rf /w {CWD} /tmp/* /tmp/.[!.]*
mkdir -p /w/v/d /w/x {CWD}/build && echo marker > /w/v/marker && echo f > /w/v/f && echo g > /w/v/d/g
echo x > /w/x/f && echo x > {CWD}/README.md && echo x > {CWD}/build/out
"""
# Times and modes don't count, new files don't either.
PROTECTED = {"/w/v/marker": b"marker\n", "/w/v/f": b"f\n", "/w/v/d/g": b"g\n"}


def harmed(clone: Clone, command: str) -> bool | None:
    """Whether what is protected was harmed; None where the command could not be run."""
    if "\0" in command:
        return None
    assert clone.exec(SETUP, cwd="/", timeout=20).ok
    clone.exec(["bash", "-c", command], cwd=CWD, timeout=1)
    try:
        # Without a shell: the command may have deleted it.
        return any(clone.get(path) != content for path, content in PROTECTED.items())
    except SandboxError:
        if not clone.alive:
            raise
        return True


def check(template: Template, cases: Sequence[dict[str, str]]) -> int:
    """Returns how many commands did harm."""
    count = 0
    clone = template.clone()
    for case in cases:
        try:
            harm = harmed(clone, case["command"])
        except (SandboxError, AssertionError):
            # The command before broke more than is put right between two; it gets a new clone.
            clone.kill()
            clone = template.clone()
            harm = harmed(clone, case["command"])
        count += bool(harm)
        if harm:
            verdict = judge(POLICY, case["command"], CWD).verdict
            assert verdict is not Verdict.ALLOW, f"{case['name']}: {case['command']} was allowed and did harm"
    clone.kill()
    return count


@pytest.mark.parametrize("part", range(SLICES))
def test_no_command_that_does_harm_is_allowed(process_template: Template, part: int) -> None:
    cases = [*CORPUS, *VARIANTS][part::SLICES]
    shares = [cases[first::AT_ONCE] for first in range(AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        harmful = sum(threads.map(partial(check, process_template), shares))
    assert harmful > len(cases) // 3


def test_in_a_machine_too(microvm_template: MicroVMTemplate) -> None:
    assert check(microvm_template, CORPUS) > 10
