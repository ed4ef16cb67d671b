"""Several plans at once: proposed, judged while they stream, run in sandboxes, scored. See docs/agent/speculation.md.

The parts that need a model or httpx are imported where they are: `local` and `endpoint`.
"""

from subten.agent.speculation.check import Check, CommandCheck, Score
from subten.agent.speculation.log import EventLog, read_log, replay
from subten.agent.speculation.options import Options
from subten.agent.speculation.prompt import conversation
from subten.agent.speculation.proposer import Candidate, Message, Piece, Proposer
from subten.agent.speculation.scripted import ScriptedProposer
from subten.agent.speculation.search import Outcome, Search
from subten.agent.speculation.tree import Node, Tree, after, fold
from subten.agent.speculation.view import describe, one_line, render

__all__ = [
    "Candidate",
    "Check",
    "CommandCheck",
    "EventLog",
    "Message",
    "Node",
    "Options",
    "Outcome",
    "Piece",
    "Proposer",
    "Score",
    "ScriptedProposer",
    "Search",
    "Tree",
    "after",
    "conversation",
    "describe",
    "fold",
    "one_line",
    "read_log",
    "render",
    "replay",
]
