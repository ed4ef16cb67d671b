"""Judges shell code before it runs, also while it is being written. No torch, and nothing is executed."""

from __future__ import annotations

from subten.agent.policy.decision import Decision, Verdict
from subten.agent.policy.judge import judge
from subten.agent.policy.policy import Policy
from subten.agent.policy.policy_file import load_policy
from subten.agent.policy.streaming import StreamingPolicy

__all__ = ["Decision", "Policy", "StreamingPolicy", "Verdict", "judge", "load_policy"]
