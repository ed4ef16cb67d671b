"""Judges one command whose words are expanded: rules, what the program does to protected paths, the default."""

from __future__ import annotations

from subten.agent.policy.decision import Decision, Verdict
from subten.agent.policy.paths import Reach, absolute, followed, normalised, reach
from subten.agent.policy.policy import Policy
from subten.agent.policy.programs.catalog import find_program
from subten.agent.policy.programs.effects import Act, Call, Effects, Link, ShellText, Touch, basename
from subten.agent.policy.programs.interpreters import SHELLS
from subten.agent.policy.rules import STANDARD_FOLDERS, Match, shown
from subten.agent.policy.shell.state import State
from subten.agent.policy.symbols import ANY, FIELDS, is_known, is_unknown, visible

OPAQUE = "opaque"
_NOTHING = Effects()


class CommandJudge:
    """Collects decisions; the strictest stays, and of equally strict ones the first."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.strictest: Decision | None = None
        self.span = (0, 0)
        self.only_certain = False
        """Whether only a denial counts that nothing to come can take back."""
        self._has_rules = bool(policy.rules)

    def decide(self, verdict: Verdict, rule: str, reason: str) -> None:
        """Take note of a decision on what is at `span`."""
        if self.only_certain and (verdict is not Verdict.DENY or rule == OPAQUE):
            return
        if self.strictest is None or verdict > self.strictest.verdict:
            self.strictest = Decision(verdict, rule, self.span, reason)

    def opaque(self, reason: str) -> None:
        """Something can't be known before it runs."""
        self.decide(self.policy.opaque, OPAQUE, reason)

    def unknown_command(self, arguments: list[str]) -> None:
        """A command whose name is not known."""
        self.opaque(f"which command `{shown(arguments)}` runs is not known")

    # Rules

    def check_builtin(self, arguments: list[str], state: State, *, complete: bool) -> None:
        """Builtins of the shell need no rule that allows them."""
        if self._has_rules:
            self._apply_rules(arguments, state, complete=complete, default=False)

    def _apply_rules(self, arguments: list[str], state: State, *, complete: bool, default: bool) -> bool:
        """Whether a rule allows the command by name."""
        allowed = matched = False
        for rule in self.policy.rules:
            found = rule.match(arguments, state.cwd, complete=complete)
            if found is Match.NO:
                continue
            matched = matched or found is Match.YES
            if rule.verdict is Verdict.ALLOW:
                allowed = True
            elif found is Match.MAYBE:
                self.opaque(f"`{shown(arguments)}` may be what the rule `{rule.name}` is about")
            if found is Match.YES and self._matters(rule.verdict):
                reason = rule.reason or f"a rule says {rule.verdict.word} for `{shown(arguments)}`"
                self.decide(rule.verdict, rule.name, reason)
        if default and complete and not matched and self._matters(self.policy.default):
            self.decide(self.policy.default, "default", f"no rule is about `{shown(arguments)}`")
        return allowed

    def _matters(self, verdict: Verdict) -> bool:
        """Whether a decision would be stricter than what is known; its reason needs no words otherwise."""
        return self.strictest is None or verdict > self.strictest.verdict

    # Programs

    def judge_program(
        self, arguments: list[str], state: State, *, stdin: str | None, piped: bool, complete: bool
    ) -> Effects:
        """Judge a program and give back what else it runs and prints."""
        path = arguments[0]
        name = basename(path)
        program = find_program(name)
        wraps = program is not None and program.wraps
        allowed = self._apply_rules(arguments, state, complete=complete, default=not wraps)
        if not _is_plain_name(path):
            self.opaque(f"the command name `{_escaped(path)}` holds characters that look like others or like none")
        if "/" in path and path.rpartition("/")[0] not in STANDARD_FOLDERS:
            if not allowed:
                self.opaque(f"`{shown(arguments[:1])}` is a file whose content this policy does not read")
            state.wrote = True
        if name in SHELLS:
            return self._shell(
                name, arguments[1:], stdin, piped=piped, complete=complete, allowed=allowed, state=state
            )
        if program is None:
            self._judge_unlisted(arguments, state, allowed=allowed)
            state.wrote = True
            return _NOTHING
        if not program.described:
            self._judge_unlisted(arguments, state, allowed=allowed)
        if not complete and not program.monotone:
            return _NOTHING
        effects = program.describe(Call(name, arguments[1:], stdin, state.wrote, complete))
        for reason in effects.opaque:
            self.opaque(reason)
        if not allowed:
            for reason in effects.code:
                self.opaque(reason)
        if effects.touches:
            for touch in effects.touches:
                state.wrote = state.wrote or touch.act not in (Act.REMOVE, Act.CHANGE)
                self._judge_touch(touch, state)
        for link in effects.links:
            for cwd in state.cwd:
                self._remember(link, state, cwd)
        return effects

    def _judge_unlisted(self, arguments: list[str], state: State, *, allowed: bool) -> None:
        """A program that is not described: by name it is the default's affair, but not what it may do to protected
        paths."""
        if allowed:
            return
        if any(is_unknown(argument) for argument in arguments):
            self.opaque(f"`{shown(arguments)}` gets arguments that are not known")
        for protected in self.policy.protect_paths:
            for cwd in state.cwd:
                if reach(followed(normalised(cwd), state.links), protected) is Reach.WITHIN:
                    self.opaque(f"what `{shown(arguments)}` does inside of {protected} is not known")
            for argument in arguments[1:]:
                if _mentions(argument, protected, state):
                    self.opaque(f"what `{shown(arguments)}` does to {protected} is not known")

    # Shells

    def _shell(
        self,
        name: str,
        arguments: list[str],
        stdin: str | None,
        *,
        piped: bool,
        complete: bool,
        allowed: bool,
        state: State,
    ) -> Effects:
        effects = Effects()
        position = 0
        command_string = reads_input = False
        while position < len(arguments) and arguments[position][:1] in ("-", "+") and len(arguments[position]) > 1:
            option = arguments[position]
            position += 1
            if option == "--":
                break
            if option in ("--rcfile", "--init-file"):
                self.opaque(f"{name} {option} runs a file")
                position += 1
            elif option.startswith("--"):
                if option in ("--version", "--help"):
                    return effects
            else:
                command_string = command_string or "c" in option[1:]
                reads_input = reads_input or "s" in option[1:]
                if option[-1] in "oO":
                    position += 1
        rest = arguments[position:]
        if any(is_unknown(argument) for argument in arguments[:position]):
            self.opaque(f"{name} gets options that are not known")
        if command_string:
            if not rest:
                return effects
            if is_unknown(rest[0]):
                self.opaque(f"{name} -c runs shell text that is not known")
                return effects
            parameters = (*rest[1:], *(() if complete else (FIELDS,)))
            effects.scripts.append(ShellText(rest[0], parameters))
        elif not complete:
            return effects
        elif rest and not reads_input:
            if not allowed:
                self.opaque(f"`{name} {visible(rest[0])}` runs a file whose content this policy does not read")
        elif stdin is not None and is_known(stdin):
            effects.scripts.append(ShellText(stdin, None))
        else:
            self.opaque(
                f"{name} runs what it reads from a pipe, which is not known"
                if piped
                else f"{name} runs whatever comes on its input"
            )
        if name not in ("sh", "bash", "dash", "ash", "ksh", "mksh", "rbash", "zsh"):
            self.opaque(f"{name} is a shell whose language this policy does not read")
        if state.wrote and any("l" in a or "i" in a for a in arguments[:position] if a[:1] == "-" and a[:2] != "--"):
            self.opaque(f"{name} reads its start files, and this script has written files")
        return effects

    # Paths

    def judge_write(self, act: Act, path: str, state: State, *, complete: bool) -> None:
        """A redirection. Rules know it as the command `> PATH`."""
        if self._has_rules or self.policy.default is not Verdict.ALLOW:
            for cwd in state.cwd:
                self._apply_rules([">", absolute(path, cwd)], state, complete=complete, default=True)
        self._judge_touch(Touch(act, path), state)

    def _judge_touch(self, touch: Touch, state: State) -> None:
        cwds = state.cwd if not touch.path.startswith("/") else state.cwd[:1]
        for protected in self.policy.protect_paths:
            found = max(self._reach(touch, protected, state, cwd) for cwd in cwds)
            if found is Reach.NO or (found is Reach.ABOVE and not touch.tree):
                continue
            path = visible(touch.path)
            if found is Reach.MAYBE:
                self.opaque(f"a command {touch.act.value} `{path}`, which may be {protected} or below it")
            elif touch.act in (Act.APPEND, Act.CHANGE):
                self.opaque(f"a command {touch.act.value} `{path}`, which is protected by {protected}")
            else:
                where = "a folder above" if found is Reach.ABOVE else "at or below"
                self.decide(
                    Verdict.DENY,
                    f"protect_paths: {protected}",
                    f"a command {touch.act.value} `{path}`, which is {where} {protected}",
                )

    def _reach(self, touch: Touch, protected: str, state: State, cwd: str) -> Reach:
        path = absolute(touch.path, cwd)
        found = reach(path, protected)
        if not state.links or touch.path == "":
            return Reach.NO if touch.path == "" else found
        if ".." in touch.path.split("/"):
            # Behind a link it leads elsewhere than the text says.
            found = max(found, Reach.MAYBE)
        if touch.act in (Act.REMOVE, Act.MOVE) and not touch.path.endswith(("/", "/.", "/..")):
            # A link that is deleted or moved is not followed itself.
            parent, _, last = path.rpartition("/")
            target = f"{followed(parent or '/', state.links).rstrip('/')}/{last}"
        else:
            target = followed(path, state.links)
        return max(found, reach(normalised(target), protected))

    def _remember(self, link: Link, state: State, cwd: str) -> None:
        """A link, or a file under a new name, leads back to what it was made of."""
        path = absolute(link.path, cwd)
        if link.symbolic and not link.target.startswith("/"):
            target = absolute(link.target, path.rpartition("/")[0] or "/")
            # For a moved file the name is relative to the working directory instead: take what is protected.
            other = absolute(link.target, cwd)
            if any(reach(other, protected) is not Reach.NO for protected in self.policy.protect_paths):
                target = other
        else:
            target = absolute(link.target, cwd)
        if path == target or not self.policy.protect_paths:
            return
        if not is_known(path) or not is_known(target):
            if any(reach(target, protected) is not Reach.NO for protected in self.policy.protect_paths):
                state.links[path if is_known(path) else ANY] = ANY
            return
        state.links[path] = target


def _mentions(argument: str, protected: str, state: State) -> bool:
    """Whether an argument, or the value of an option, is a protected path, below it, or above it."""
    if protected in argument:
        return True
    for piece in {argument, argument.partition("=")[2]}:
        if piece and not piece.startswith("-"):
            for cwd in state.cwd:
                if reach(followed(absolute(piece, cwd), state.links), protected) >= Reach.ABOVE:
                    return True
    return False


def _is_plain_name(path: str) -> bool:
    return path.isascii() and path.isprintable() and " " not in path


def _escaped(path: str) -> str:
    return path.encode("ascii", "backslashreplace").decode("ascii")
