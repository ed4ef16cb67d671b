"""Times the policy engine and prints JSON: python tools/time_policy.py > benchmarks/results/agent_policy.json"""

from __future__ import annotations

import json
import platform
import re
import statistics
import time

from subten.agent.policy import Policy, StreamingPolicy, judge

POLICY = Policy(protect_paths=["/w/v"])
CWD = "/srv/repo"
COMMANDS = {
    "chain of 200 characters": (
        "git add -A && git commit -m 'what has changed, and why it had to be done today' && git log --oneline "
        "-n 5 | cat && grep -rn 'TODO' src tests docs | sort -u | head -n 20 > /tmp/todo.txt && wc -l /tmp/todo.txt"
    ),
    "loop of 200 characters": (
        "cd /tmp/build && make -j4 2>&1 | tail -n 20; for f in a b c; do echo \"$f\" | grep -v 'x y' > "
        "/tmp/out; done; X=/tmp/q; rm -rf \"$X/old\" && cp -r src/app $X/ ; sed -n '1,5p' README.md | tee /tmp/head"
    ),
    "short": "rm -rf build dist",
}
ROUNDS = 400


def timed(work: object) -> float:
    """Seconds of this thread's processor time, so that other programs do not count."""
    begin = time.thread_time()
    assert callable(work)
    work()
    return time.thread_time() - begin


def streamed(command: str) -> list[float]:
    """Seconds for each token; a token is a word with the blank before it, or one other character."""
    stream = StreamingPolicy(POLICY, CWD)
    return [timed(lambda token=token: stream.push(token)) for token in re.findall(r" ?\w+|\s|[^\w\s]", command)]


def main() -> None:
    """Print one object."""
    rows = []
    for name, command in COMMANDS.items():
        judge(POLICY, command, CWD)
        whole = [timed(lambda command=command: judge(POLICY, command, CWD)) for _ in range(ROUNDS)]
        tokens = [seconds for _ in range(ROUNDS // 10) for seconds in streamed(command)]
        rows.append(
            {
                "command": name,
                "characters": len(command),
                "verdict": judge(POLICY, command, CWD).verdict.word,
                "decision_ms_median": round(statistics.median(whole) * 1e3, 3),
                "decision_ms_p99": round(statistics.quantiles(whole, n=100)[98] * 1e3, 3),
                "token_ms_median": round(statistics.median(tokens) * 1e3, 4),
                "token_ms_mean": round(statistics.fmean(tokens) * 1e3, 4),
                "token_ms_p99": round(statistics.quantiles(tokens, n=100)[98] * 1e3, 3),
            }
        )
    print(json.dumps({"processor": platform.machine(), "python": platform.python_version(), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
