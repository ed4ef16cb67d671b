"""Policy files, rules of other agents, conditions; and what is wrong in them, with the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from subten.agent.policy import Policy, Verdict, judge, load_policy
from subten.errors import PolicyError

CWD = "/srv/repo"


def policy(tmp_path: Path, text: str) -> Policy:
    path = tmp_path / "policy.yaml"
    path.write_text(text, encoding="utf-8")
    return load_policy(path)


FILE = """
rules:
  - deny: git push --force *
    reason: history is shared
    match: git push --force origin
    not_match: [git push origin]
  - ask: [Bash(git push *), "curl:*"]
  - allow: [git *, "ls *", "echo *", "> /tmp/*", "python3 tools/check.py"]
  - deny: npm publish
  - ask: kubectl *
    when: argv.exists(a, a == "delete")
default: deny
"""


@pytest.mark.parametrize(
    ("command", "verdict", "rule"),
    [
        ("git status", Verdict.ALLOW, "allow: git *"),
        ("git", Verdict.ALLOW, "allow: git *"),
        ("gitk", Verdict.DENY, "default"),
        ("git push origin", Verdict.ASK, "ask: Bash(git push *)"),
        ("git push --force origin", Verdict.DENY, "deny: git push --force *"),
        ("g''it push --force origin", Verdict.DENY, "deny: git push --force *"),
        ("/usr/bin/git push --force", Verdict.DENY, "deny: git push --force *"),
        ("env A=1 git push --force", Verdict.DENY, "deny: git push --force *"),
        ("echo $(git push --force x)", Verdict.DENY, "deny: git push --force *"),
        ("git status && npm publish", Verdict.DENY, "deny: npm publish"),
        ("git push $X", Verdict.ASK, "opaque"),
        ("git status $X", Verdict.ASK, "opaque"),
        ("echo $X", Verdict.ALLOW, "allow: echo *"),
        ("timeout 5 ls", Verdict.ALLOW, "allow: ls *"),
        ("timeout 5 make", Verdict.DENY, "default"),
        ("curl http://x", Verdict.ASK, "ask: curl:*"),
        ("echo a > /tmp/b", Verdict.ALLOW, "allow: > /tmp/*"),
        ("echo a > /etc/b", Verdict.DENY, "default"),
        ("echo a > /tmp/../etc/b", Verdict.DENY, "default"),
        ("cd /tmp && ls", Verdict.ALLOW, "allow: ls *"),
        ("python3 tools/check.py", Verdict.ALLOW, "allow: python3 tools/check.py"),
        ("'python3 tools/check.py'", Verdict.DENY, "default"),
        ("/tmp/git status", Verdict.DENY, "default"),
    ],
)
def test_the_strictest_rule_decides(tmp_path: Path, command: str, verdict: Verdict, rule: str) -> None:
    decision = judge(policy(tmp_path, FILE), command, CWD)
    assert decision.verdict is verdict, decision
    assert decision.rule == rule


def test_reason_and_span(tmp_path: Path) -> None:
    command = "ls; git push --force origin"
    decision = judge(policy(tmp_path, FILE), command, CWD)
    assert decision.reason == "history is shared"
    assert command[slice(*decision.span)] == "git push --force origin"
    assert decision.as_json() == {
        "decision": "deny",
        "rule": "deny: git push --force *",
        "span": [4, 27],
        "reason": "history is shared",
    }


def test_condition(tmp_path: Path) -> None:
    rules = policy(tmp_path, 'rules:\n  - deny: "kubectl *"\n    when: argv.exists(a, a == "delete")\n')
    assert judge(rules, "kubectl delete pod x", CWD).verdict is Verdict.DENY
    assert judge(rules, "kubectl delete $X", CWD).verdict is Verdict.ASK
    plain = policy(tmp_path, 'rules:\n  - deny: "mytool *"\n    when: cwd == "/srv"\n')
    assert judge(plain, "mytool x", "/srv").verdict is Verdict.DENY
    assert judge(plain, "mytool x", "/tmp").verdict is Verdict.ALLOW


def test_settings_of_claude_code(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(
        '{"permissions": {"allow": ["Bash(npm run test:*)", "Read(*)"], "deny": ["Bash(rm *)"], "ask": ["Bash"]}}',
        encoding="utf-8",
    )
    rules = policy(tmp_path, "rules:\n  - import: settings.json\n")
    assert len(rules.rules) == 3
    assert judge(rules, "rm x", CWD).verdict is Verdict.DENY
    assert judge(rules, "ls", CWD).verdict is Verdict.ASK


PREFIX_RULES = """\
prefix_rule(
    pattern = ["git", ["push", "fetch"]],
    decision = "prompt",
    match = ["git push origin", ["git", "fetch"]],
    not_match = [
        "git status",
        "git commit",
    ],
)
prefix_rule(pattern = ["rm"], decision = "forbidden", justification = "use trash")
"""


def test_rules_of_codex(tmp_path: Path) -> None:
    (tmp_path / "default.rules").write_text(PREFIX_RULES, encoding="utf-8")
    rules = policy(tmp_path, "rules:\n  - import: default.rules\n")
    assert judge(rules, "git fetch --all", CWD).verdict is Verdict.ASK
    assert judge(rules, "git status", CWD).verdict is Verdict.ALLOW
    decision = judge(rules, "sudo rm x", CWD)
    assert (decision.verdict, decision.reason) == (Verdict.DENY, "use trash")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"git commit"', '"git push x"', r"default\.rules:7: .* matches 'git push x'"),
        ('"git push origin"', '"git pull"', r"default\.rules:4: .* does not match its example 'git pull'"),
        ('"prompt"', '"maybe"', r"default\.rules:1: decision is 'maybe'"),
        ('["rm"]', "[rm]", r"default\.rules:10: `pattern` must be written out"),
        ('["rm"]', "[]", r"default\.rules:10: pattern must be a list"),
        ("prefix_rule(pattern", "other(pattern", r"default\.rules:10: only prefix_rule"),
        ("justification", "because", r"default\.rules:10: prefix_rule takes"),
        ('"git commit"', '"git \'commit"', r"default\.rules:7: .* unbalanced quotes"),
        (")\nprefix", "\nprefix", r"default\.rules:\d+: not a file of prefix_rule"),
    ],
)
def test_a_wrong_rule_file_is_refused_with_the_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in PREFIX_RULES
    (tmp_path / "default.rules").write_text(PREFIX_RULES.replace(old, new), encoding="utf-8")
    with pytest.raises(PolicyError, match=message):
        policy(tmp_path, "rules:\n  - import: default.rules\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules:\n  - deny: rm *\n    match: ls\n", r"policy\.yaml:2: `rm \*` does not match its example 'ls'"),
        ("rules:\n  - deny: rm *\n    not_match: rm x\n", r"policy\.yaml:2: `rm \*` matches 'rm x'"),
        ("rules:\n  - deny: rm *\n    allow: ls\n", r"policy\.yaml:2: a rule has exactly one"),
        ("rules:\n  - refuse: rm *\n", r"policy\.yaml:2: `refuse` is no key"),
        ("rules:\n  - deny: Read(*)\n", r"policy\.yaml:2: 'Read\(\*\)' is no rule about commands"),
        ("rules:\n  - deny: a\n    when: argv[\n", r"policy\.yaml:2: `when: argv\[` is not a CEL expression"),
        ("rules:\n  - deny: a\n    when: user == 'x'\n", r"policy\.yaml:2: .* uses user"),
        ("rules:\n  - import: nothing.rules\n", r"nothing\.rules can't be read"),
        ("rules:\n  - import: x.txt\n", r"policy\.yaml:2: 'x\.txt' can't be imported"),
        ("rules: rm\n", r"rules must be a list"),
        ("rules: [rm]\n", r"the rule 'rm' must begin with"),
        ("default: maybe\n", r"default is 'maybe'"),
        ("opaque: allow\n", r"opaque is 'allow'"),
        ("protect_paths: [data]\n", r"protect_paths has 'data'; a protected path must be absolute"),
        ("protect_paths: /data\n", r"protect_paths must be a list"),
        ("protected: [/data]\n", r"`protected` is no key of a policy"),
        ("default: ask\ndefault: allow\n", r"policy\.yaml:2: `default` is there twice"),
        ("rules: [\n", r"policy\.yaml:2: not valid YAML"),
        ("- a\n", r"a policy has the keys"),
        ("\0", r"not valid YAML"),
    ],
)
def test_a_wrong_policy_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        policy(tmp_path, text)


def test_an_unreadable_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="can't be read"):
        load_policy(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"default: \xff\n")
    with pytest.raises(PolicyError, match="not UTF-8"):
        load_policy(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    "text", ["", "\n", "# deny: rm *\n", "---\n", "{}\n", "rules:\n#  - deny: rm *\n", "rules: []\n"]
)
def test_a_policy_that_says_nothing_is_refused(tmp_path: Path, text: str) -> None:
    """Most likely it is another file than was meant, or a part of one."""
    with pytest.raises(
        PolicyError, match=r"policy\.yaml: the policy says nothing, .*`default: allow` where that is meant"
    ):
        policy(tmp_path, text)


def test_without_rules_what_is_known_is_allowed(tmp_path: Path) -> None:
    for empty in (policy(tmp_path, "default: allow\n"), Policy()):
        assert judge(empty, "rm -rf x", CWD).verdict is Verdict.ALLOW
        assert judge(empty, "$X", CWD).verdict is Verdict.ASK
