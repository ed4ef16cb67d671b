"""Commands that try to delete what is protected, in many disguises, and harmless ones that look alike."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from subten.agent.policy import Policy, StreamingPolicy, Verdict, judge

DATA = Path(__file__).parents[1] / "data"
CASES = [
    json.loads(line)
    for name in ("shell_policy_corpus.jsonl", "shell_policy_variants.jsonl")
    for line in (DATA / name).read_text(encoding="utf-8").splitlines()
]
POLICY = Policy(protect_paths=["/w/v"])
CWD = "/srv/repo"
EXPECTED = {"deny": {Verdict.DENY}, "ask-or-deny": {Verdict.ASK, Verdict.DENY}, "allow": {Verdict.ALLOW}}


def test_the_corpus_has_every_kind() -> None:
    counts = Counter(case["expect"] for case in CASES)
    assert set(counts) == set(EXPECTED)
    assert min(counts.values()) > 100


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}-{case['expect']}")
def test_verdict(case: dict[str, str]) -> None:
    decision = judge(POLICY, case["command"], CWD)
    assert decision.verdict in EXPECTED[case["expect"]], decision
    start, end = decision.span
    assert 0 <= start <= end <= len(case["command"])
    assert decision.rule
    assert decision.reason


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}-{case['expect']}")
def test_streaming_agrees(case: dict[str, str]) -> None:
    stream = StreamingPolicy(POLICY, CWD)
    denials = [stream.push(character) for character in case["command"]]
    final = stream.finish()
    assert final.verdict is judge(POLICY, case["command"], CWD).verdict
    if any(denials):
        assert final.verdict is Verdict.DENY


def test_a_denial_comes_before_the_end() -> None:
    stream = StreamingPolicy(POLICY, CWD)
    assert stream.push("cd /w && rm -rf v") is None  # it may go on: `v` is not closed
    decision = stream.push(" ")
    assert decision is not None
    assert (decision.verdict, decision.rule) == (Verdict.DENY, "protect_paths: /w/v")


def test_what_further_words_can_change_is_not_denied_early() -> None:
    stream = StreamingPolicy(POLICY, CWD)
    assert stream.push("cp /tmp/a /w/v/f ") is None
    assert stream.push("/tmp/folder\n") is None
    assert stream.finish().verdict is Verdict.ALLOW


@pytest.mark.parametrize(
    ("command", "cwd", "verdict"),
    [
        ("rm -rf build", None, Verdict.ASK),
        ("rm -rf build", "/w/v", Verdict.DENY),
        ("rm -rf build", "/w", Verdict.ALLOW),
        ("rm -rf *", "/w", Verdict.DENY),
        ("ls", None, Verdict.ALLOW),
    ],
)
def test_working_directory(command: str, cwd: str | None, verdict: Verdict) -> None:
    assert judge(POLICY, command, cwd).verdict is verdict


MIB = 1 << 20


BAD = [
    *(piece * (MIB // len(piece)) for piece in ("a", "true;", "'", "(", "$(", "{", "`", "$", "a|")),
    "x=/" + "a" * 900 + "; rm ${x%%*" + "a*" * 12 + "b}",
    ":(){ :|:& };:",
    "for a in 1 2 3 4 5 6 7 8; do " * 8 + "echo $a;" + " done;" * 8,
    "if true; then " * 20000,
    *("echo 'x", 'echo "x', "echo $(x", "cat <<E\nx", "a\0b", "a\udcffb", "\ue003", "echo )", "fi", ";;"),
    "rm -rf " + "{a," * 5000,
]


@pytest.mark.parametrize("command", BAD, ids=lambda command: ascii(command[:20]))
def test_bad_input_is_never_allowed_silently(command: str) -> None:
    assert judge(POLICY, command, CWD).verdict is not Verdict.ALLOW


def test_a_denial_in_front_of_bad_input_stands() -> None:
    assert judge(POLICY, "rm -rf /w/v\n" + "(" * MIB, CWD).verdict is Verdict.DENY
    assert judge(POLICY, "rm -rf /w/v; echo 'open", CWD).verdict is Verdict.DENY
    assert judge(POLICY, "rm -rf /w/v )", CWD).verdict is Verdict.DENY


def test_opaque_can_be_denied() -> None:
    strict = Policy(protect_paths=["/w/v"], opaque=Verdict.DENY)
    assert judge(strict, "$X", CWD).verdict is Verdict.DENY
    assert judge(strict, "ls", CWD).verdict is Verdict.ALLOW
