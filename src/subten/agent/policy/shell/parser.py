"""A bash parser that works from left to right and never takes anything back.

That is what makes judging a stream sound: the statements that it returns for a text are the first ones of every
continuation of that text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from subten.agent.policy.shell.escapes import unescape
from subten.agent.policy.shell.tree import (
    Arithmetic,
    Assignment,
    Case,
    Command,
    Coprocess,
    For,
    Function,
    Group,
    Heredoc,
    If,
    Item,
    Loop,
    Parameter,
    Part,
    Pipeline,
    ProcessSubstitution,
    Redirect,
    Script,
    Simple,
    Substitution,
    Test,
    Text,
    Word,
)

MAX_DEPTH = 40

_PLAIN_WORD = re.compile(r"[A-Za-z0-9_@%+:,./^-]+(?<!@)(?=[ \t\n;&|<>()])")
_PLAIN_ARGUMENT = re.compile(r"[A-Za-z_@%+:,./^-][A-Za-z0-9_@%+:,./^-]*(?<!@)(?=[ \t\n;&|<>)])")
"""A plain word in a simple command that is neither the number of a redirection nor the name of a function."""
_UNQUOTED = re.compile(r"[^ \t\n;&|<>()'\"\\$`]+")
_DOUBLE_QUOTED = re.compile(r'[^"\\$`]+')
_HEREDOC_TEXT = re.compile(r"[^\\$`]+")
_BLANKS = re.compile(r"(?:[ \t]|\\\n)+")
_BLANK_BEGINS = frozenset(" \t\\#")
_RESERVED = re.compile(r"(?:[a-z]+|[{}!]|\[\[)(?=[ \t\n;&|<>()]|$)")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[|\+?=)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-]")
_REDIRECT = re.compile(r"([0-9]+|\{[A-Za-z_][A-Za-z0-9_]*\})?(&>>|&>|<<<|<<-|<<|<>|<&|>>|>\||>&|<(?!\()|>(?!\())")
_OPERATOR = re.compile(r":[-=+?]|[-=+?]|##?|%%?|/[/#%]?|\^\^?|,,?|~~?|:|@")
_REDIRECT_BEGINS = frozenset("0123456789{&<>")
_METACHARACTERS = frozenset(" \t\n;&|<>()")
_OPENING = frozenset(("if", "while", "until", "for", "case", "select", "{", "[[", "function", "time", "!", "coproc"))
_CLOSING = frozenset(("then", "do", "done", "elif", "else", "fi", "esac", "}", "in"))
_RESERVED_BEGINS = frozenset(word[0] for word in _OPENING | _CLOSING)


class IncompleteError(Exception):
    """The text ends inside a construct. `awaited` is a string without which it can't be closed."""

    def __init__(self, awaited: str) -> None:
        super().__init__(awaited)
        self.awaited = awaited


class ShellSyntaxError(Exception):
    """No continuation of the text up to `position` is valid, as far as this parser knows."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.position = position


class Parser:
    """Reads statements from `text`, one group at a time.

    Args:
        final: the end of the text ends a command; otherwise more text may follow.
        base: character offset of `text` within the judged text, for spans.
        fixed_span: the span that everything gets, for text that does not stand in the judged text as it is.
    """

    def __init__(
        self, text: str, position: int = 0, *, final: bool = True, depth: int = 0, fixed: int | None = None
    ) -> None:
        self.text = text
        self.position = position
        self.final = final
        self.depth = depth
        self.fixed = fixed
        self.pending: list[Heredoc] = []
        self.starts: list[int] = []
        """Where simple commands, or their first words, begin."""
        self.regions: list[tuple[int, int]] = []
        """Stretches that are read by a parser of their own: between backticks, and here-documents."""
        self._heads: list[tuple[list[Assignment], list[Word | Assignment], list[Redirect], int]] = []
        self._recording = True
        self._has_arrays = "=(" in text
        if depth > MAX_DEPTH:
            raise ShellSyntaxError("it nests too deeply to be judged", position)

    def open_commands(self) -> list[Simple]:
        """After an error: the commands of the first pipeline of the statement, with the words that are closed."""
        return [
            Simple(tuple(assignments), tuple(words), tuple(redirects), self._at(start), self._at(self.position))
            for assignments, words, redirects, start in self._heads
        ]

    def next_statements(self) -> tuple[Item, ...]:
        """The next statement at top level, or those of one line where a here-document joins them; () at the end."""
        self.starts.clear()
        self.regions.clear()
        self._heads.clear()
        self._skip_separators(())
        if self._at_end():
            return ()
        self._recording = True
        items = [self._item(top=True)]
        self._recording = False
        while self.pending:
            self._skip_blanks()
            if self._at_end():
                if self.pending:
                    raise IncompleteError(self.pending[0].delimiter)
                break
            if self._peek() == "\n":
                self._newline()
            else:
                items.append(self._item(top=True))
        return tuple(items)

    def script(self) -> Script:
        """All that is left of the text."""
        items: list[Item] = []
        while found := self.next_statements():
            items += found
        return Script(tuple(items))

    def here_document(self) -> Word:
        """The text as the body of a here-document whose delimiter is not quoted."""
        start = self.position
        parts = self._quoted_parts(lambda: self.position >= len(self.text), _HEREDOC_TEXT, "$`\\\n")
        return self._word(parts, start)

    # Characters

    def _at(self, position: int) -> int:
        return position if self.fixed is None else self.fixed

    def _word(self, parts: list[Part], start: int) -> Word:
        return Word(tuple(parts), self._at(start), self._at(self.position))

    def _peek(self, ahead: int = 0) -> str:
        position = self.position + ahead
        return self.text[position : position + 1]

    def _at_end(self) -> bool:
        return self.position >= len(self.text)

    def _fail(self, reason: str) -> ShellSyntaxError:
        return ShellSyntaxError(reason, self.position)

    def _starts(self, prefix: str) -> bool:
        """Whether the text goes on with `prefix`; asks for more text where that is still open."""
        if self.text.startswith(prefix, self.position):
            return True
        rest = len(self.text) - self.position
        if not self.final and rest < len(prefix) and self.text.endswith(prefix[:rest]):
            raise IncompleteError("")
        return False

    def _skip_blanks(self) -> None:
        following = self.text[self.position : self.position + 2]
        if following[:1] not in _BLANK_BEGINS:
            return
        if following[0] == " " and following[1:] not in _BLANK_BEGINS:
            # One blank, as nearly always.
            self.position += 1
            return
        match = _BLANKS.match(self.text, self.position)
        if match:
            self.position = match.end()
        if self._peek() == "#" and (self.position == 0 or self.text[self.position - 1] in _METACHARACTERS):
            end = self.text.find("\n", self.position)
            if end < 0:
                if not self.final:
                    raise IncompleteError("\n")
                end = len(self.text)
            self.position = end

    def _newline(self) -> None:
        self.position += 1
        waiting, self.pending = self.pending, []
        for heredoc in waiting:
            self._read_heredoc(heredoc)

    def _read_heredoc(self, heredoc: Heredoc) -> None:
        start = self.position
        lines: list[str] = []
        while True:
            end = self.text.find("\n", self.position)
            last = end < 0
            line = self.text[self.position :] if last else self.text[self.position : end]
            if heredoc.strip_tabs:
                line = line.lstrip("\t")
            if line == heredoc.delimiter and (not last or self.final):
                self.position = len(self.text) if last else end + 1
                break
            if last:
                raise IncompleteError(heredoc.delimiter)
            lines.append(line + "\n")
            self.position = end + 1
        body = "".join(lines)
        self.regions.append((start, self.position))
        if heredoc.quoted:
            heredoc.body = Word((Text(body, True),), self._at(start), self._at(self.position))
        else:
            heredoc.body = Parser(body, depth=self.depth + 1, fixed=self._at(start)).here_document()

    def _skip_linebreaks(self) -> None:
        while True:
            self._skip_blanks()
            if self._peek() != "\n":
                return
            self._newline()

    def _skip_separators(self, terminators: tuple[str, ...]) -> None:
        self._skip_linebreaks()
        if self._at_end() and not self.final and terminators:
            raise IncompleteError(terminators[0])

    # Lists

    def _list(self, *terminators: str) -> Script:
        """Statements up to one of the reserved words or characters, which is left in place."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self._fail("it nests too deeply to be judged")
        items: list[Item] = []
        while True:
            self._skip_separators(terminators)
            if self._at_end():
                raise IncompleteError(terminators[0])
            if self._terminated(terminators):
                break
            items.append(self._item(top=False))
        self.depth -= 1
        return Script(tuple(items))

    def _terminated(self, terminators: tuple[str, ...]) -> bool:
        for word in terminators:
            if word in (")", ";;"):
                if self.text.startswith(word, self.position) or (
                    word == ";;" and (self.text.startswith(";&", self.position))
                ):
                    return True
            elif self._reserved() == word:
                return True
        return False

    def _reserved(self) -> str:
        """The reserved word at this place, or nothing."""
        if self._peek() not in _RESERVED_BEGINS:
            return ""
        match = _RESERVED.match(self.text, self.position)
        if not match:
            return ""
        word = match.group()
        if word not in _OPENING and word not in _CLOSING:
            return ""
        if match.end() == len(self.text) and not self.final:
            raise IncompleteError("")
        return word

    def _item(self, *, top: bool) -> Item:
        pipeline = self._pipeline(top=top)
        self._skip_blanks()
        if self._at_end():
            if not self.final:
                raise IncompleteError("")
            return Item(pipeline, "")
        character = self._peek()
        if character == "\n":
            self._newline()
            return Item(pipeline, ";")
        if character == "&":
            if self._starts("&&"):
                return self._joined(pipeline, "&&", top)
            self.position += 1
            return Item(pipeline, "&")
        if character == "|" and self._starts("||"):
            return self._joined(pipeline, "||", top)
        if character == ";":
            if self._starts(";;") or self._starts(";&"):
                if top:
                    raise self._fail("`;;` stands outside of a case")
                return Item(pipeline, ";")
            self.position += 1
            return Item(pipeline, ";")
        if character == ")" and not top:
            return Item(pipeline, ";")
        raise self._fail(f"`{character}` is not expected here")

    def _joined(self, pipeline: Pipeline, operator: str, top: bool) -> Item:
        self.position += 2
        self._skip_linebreaks()
        if self._at_end() and (self.final or not top):
            raise IncompleteError("")
        return Item(pipeline, operator)

    def _pipeline(self, *, top: bool) -> Pipeline:
        start = self.position
        negated = False
        while True:
            word = self._reserved()
            if word == "!":
                negated = not negated
            elif word != "time":
                break
            self.position += len(word)
            self._skip_blanks()
            if word == "time":
                # The other parser takes it for a command.
                self.starts.append(start)
                for option in ("-p", "--"):
                    if self._starts(option) and self._peek(2) in _METACHARACTERS:
                        self.position += 2
                        self._skip_blanks()
        commands = [self._command(top=top)]
        while True:
            self._skip_blanks()
            if self._peek() != "|" or self._starts("||"):
                break
            self.position += 1
            if self._starts("&"):
                self.position += 1
            self._skip_linebreaks()
            if self._at_end():
                raise IncompleteError("")
            commands.append(self._command(top=top))
        return Pipeline(tuple(commands), negated, self._at(start), self._at(self.position))

    # Commands

    def _command(self, *, top: bool) -> Command:
        word = self._reserved()
        if not word:
            if self._peek() == "(":
                return self._parenthesis()
            return self._simple(top=top)
        if word in _CLOSING and word != "in":
            raise self._fail(f"`{word}` is not expected here")
        if word == "[[":
            return self._test()
        if word == "in":
            return self._simple(top=top)
        start = self.position
        self.position += len(word)
        match word:
            case "{":
                script = self._list("}")
                self.position += 1
                return Group(script, False, self._redirects())
            case "if":
                return self._if()
            case "while" | "until":
                condition = self._list("do")
                return Loop(condition, None, self._do_group(), self._redirects())
            case "for" | "select":
                return self._for()
            case "case":
                return self._case()
            case "function":
                return self._function_keyword()
            case "coproc":
                return self._coprocess()
        self.position = start
        raise self._fail(f"`{word}` is not expected here")

    def _parenthesis(self) -> Command:
        start = self.position
        if self._starts("(("):
            pending = list(self.pending)
            try:
                self.position += 2
                expression = self._arithmetic()
            except ShellSyntaxError:
                self.position = start
                self.pending = pending
            else:
                return Test((expression,), True, self._redirects())
        self.position += 1
        script = self._list(")")
        self.position += 1
        return Group(script, True, self._redirects())

    def _expect(self, word: str) -> None:
        self._skip_linebreaks()
        if self._at_end():
            raise IncompleteError(word)
        if self._reserved() != word:
            raise self._fail(f"`{word}` is expected here")
        self.position += len(word)

    def _do_group(self) -> Script:
        self._skip_linebreaks()
        if self._reserved() == "{":
            self.position += 1
            body = self._list("}")
            self.position += 1
            return body
        self._expect("do")
        body = self._list("done")
        self.position += 4
        return body

    def _if(self) -> Command:
        branches: list[tuple[Script, Script]] = []
        otherwise: Script | None = None
        while True:
            condition = self._list("then")
            self.position += 4
            body = self._list("fi", "elif", "else")
            branches.append((condition, body))
            word = self._reserved()
            self.position += len(word)
            if word == "else":
                otherwise = self._list("fi")
                self.position += 2
            if word != "elif":
                return If(tuple(branches), otherwise, self._redirects())

    def _for(self) -> Command:
        self._skip_blanks()
        if self._starts("(("):
            self.position += 2
            head = self._arithmetic()
            self._skip_blanks()
            if self._peek() == ";":
                self.position += 1
            return Loop(None, head, self._do_group(), self._redirects())
        match = _NAME.match(self.text, self.position)
        if not match:
            if self._at_end():
                raise IncompleteError("")
            raise self._fail("a name is expected behind `for`")
        self.position = match.end()
        self._skip_linebreaks()
        words: list[Word] | None = None
        if self._reserved() == "in":
            self.position += 2
            words = []
            while True:
                self._skip_blanks()
                if self._at_end():
                    raise IncompleteError("do")
                if self._peek() in ";\n":
                    break
                words.append(self._read_word())
        if self._peek() == ";":
            self.position += 1
        body = self._do_group()
        return For(match.group(), None if words is None else tuple(words), body, self._redirects())

    def _case(self) -> Command:
        self._skip_blanks()
        subject = self._read_word()
        self._expect("in")
        items: list[tuple[tuple[Word, ...], Script]] = []
        while True:
            self._skip_linebreaks()
            if self._at_end():
                raise IncompleteError("esac")
            if self._reserved() == "esac":
                self.position += 4
                return Case(subject, tuple(items), self._redirects())
            if self._peek() == "(":
                self.position += 1
            patterns: list[Word] = []
            while True:
                self._skip_blanks()
                patterns.append(self._read_word())
                self._skip_blanks()
                if self._at_end():
                    raise IncompleteError("esac")
                if self._peek() != "|":
                    break
                self.position += 1
            if self._peek() != ")":
                raise self._fail("`)` is expected behind a pattern")
            self.position += 1
            body = self._list(";;", "esac")
            items.append((tuple(patterns), body))
            if self._peek() == ";":
                self.position += 3 if self.text.startswith(";;&", self.position) else 2

    def _function_keyword(self) -> Command:
        self._skip_blanks()
        name = self._literal(self._read_word())
        self._skip_blanks()
        if self._peek() == "(":
            self._parentheses()
        return self._function_body(name)

    def _parentheses(self) -> None:
        self.position += 1
        self._skip_blanks()
        if self._at_end():
            raise IncompleteError(")")
        if self._peek() != ")":
            raise self._fail("`)` is expected here")
        self.position += 1

    def _function_body(self, name: str) -> Command:
        self._skip_linebreaks()
        if self._at_end():
            raise IncompleteError("}")
        body = self._command(top=False)
        if isinstance(body, Simple):
            raise self._fail("a function's body must be a compound command")
        return Function(name, body, ())

    def _coprocess(self) -> Command:
        self._skip_blanks()
        match = _NAME.match(self.text, self.position)
        start = self.position
        if match and not self._reserved():
            self.position = match.end()
            self._skip_blanks()
            if self._peek() not in "{(" and not self._reserved():
                self.position = start
        return Coprocess(self._command(top=False), ())

    def _literal(self, word: Word) -> str:
        if not all(isinstance(part, Text) for part in word.parts):
            raise self._fail("a name is expected here")
        return "".join(part.text for part in word.parts if isinstance(part, Text))

    def _test(self) -> Command:
        self.position += 2
        words: list[Word] = []
        arithmetic = False
        regular_expression = False
        while True:
            self._skip_linebreaks()
            if self._at_end():
                raise IncompleteError("]]")
            if self._starts("]]") and (self.position + 2 >= len(self.text) or self._peek(2) in _METACHARACTERS):
                if self.position + 2 >= len(self.text) and not self.final:
                    raise IncompleteError("")
                self.position += 2
                return Test(tuple(words), arithmetic, self._redirects())
            character = self._peek()
            if character in "()&|<>" and not regular_expression:
                self.position += 1
                continue
            if character == ";":
                raise self._fail("`;` is not expected inside `[[`")
            word = self._read_word(metacharacters="()|<>&;" if regular_expression else "")
            text = word.parts[0].text if len(word.parts) == 1 and isinstance(word.parts[0], Text) else ""
            regular_expression = text == "=~"
            arithmetic = arithmetic or text in ("-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-v")
            words.append(word)

    def _simple(self, *, top: bool) -> Command:
        start = self.position
        assignments: list[Assignment] = []
        words: list[Word | Assignment] = []
        redirects: list[Redirect] = []
        end = start
        self.starts.append(start)
        if top and self._recording:
            self._heads.append((assignments, words, redirects, start))
        while True:
            self._skip_blanks()
            match = _PLAIN_ARGUMENT.match(self.text, self.position)
            if match:
                # What most words are: no redirection, no assignment, nothing to be read inside of it.
                if not words:
                    self.starts.append(self.position)
                words.append(self._plain_word(match))
                end = self.position
                continue
            character = self._peek()
            if not character or character in "\n;|)":
                break
            if character == "&" and self._peek(1) != ">":
                if not self._peek(1) and not self.final:
                    raise IncompleteError("")
                break
            redirect = self._redirect()
            if redirect:
                redirects.append(redirect)
                end = self.position
                continue
            if character == "(":
                if len(words) == 1 and not assignments and isinstance(words[0], Word):
                    name = self._literal(words[0])
                    self._parentheses()
                    return self._function_body(name)
                raise self._fail("`(` is not expected here")
            if character in "<>" and self._peek(1) != "(":
                raise self._fail(f"`{character}` is not expected here")
            if not words:
                self.starts.append(self.position)
            assignment = self._assignment(arrays_only=bool(words))
            if assignment and not words:
                assignments.append(assignment)
            elif assignment:
                words.append(assignment)
            else:
                words.append(self._read_word())
            end = self.position
        if not (assignments or words or redirects):
            if self._at_end():
                raise IncompleteError("")
            raise self._fail(f"`{self._peek()}` is not expected here")
        return Simple(tuple(assignments), tuple(words), tuple(redirects), self._at(start), self._at(end))

    def _assignment(self, *, arrays_only: bool) -> Assignment | None:
        if arrays_only and not self._has_arrays:
            return None
        start = self.position
        match = _ASSIGNMENT.match(self.text, start)
        if not match:
            return None
        name, mark = match.groups()
        self.position = match.end()
        subscript: Word | None = None
        if mark == "[":
            if arrays_only:
                self.position = start
                return None
            begin = self.position
            parts = self._quoted_parts(lambda: self._peek() == "]", re.compile(r"[^\]\"\\$`']+"), '$`"\\]\n')
            subscript = self._word(parts, begin)
            self.position += 1
            operator = re.compile(r"\+?=").match(self.text, self.position)
            if not operator:
                if self._at_end() and not self.final:
                    raise IncompleteError("")
                self.position = start
                return None
            mark = operator.group()
            self.position = operator.end()
        if self._peek() == "(":
            return self._array(name, mark == "+=", start)
        if arrays_only:
            self.position = start
            return None
        value = None
        if (self._peek() and self._peek() not in _METACHARACTERS) or (self._peek() in "<>" and self._peek(1) == "("):
            value = self._read_word()
        return Assignment(name, subscript, mark == "+=", value, None, self._at(start), self._at(self.position))

    def _array(self, name: str, append: bool, start: int) -> Assignment:
        self.position += 1
        items: list[Word] = []
        while True:
            self._skip_linebreaks()
            if self._at_end():
                raise IncompleteError(")")
            if self._peek() == ")":
                self.position += 1
                break
            items.append(self._read_word())
        return Assignment(name, None, append, None, tuple(items), self._at(start), self._at(self.position))

    def _redirects(self) -> tuple[Redirect, ...]:
        found: list[Redirect] = []
        while True:
            self._skip_blanks()
            redirect = self._redirect()
            if not redirect:
                return tuple(found)
            found.append(redirect)

    def _redirect(self) -> Redirect | None:
        if self._peek() not in _REDIRECT_BEGINS:
            return None
        match = _REDIRECT.match(self.text, self.position)
        if not match:
            return None
        if match.end() == len(self.text):
            raise IncompleteError("")
        descriptor, operator = match.groups()
        self.position = match.end()
        self._skip_blanks()
        if self._at_end():
            raise IncompleteError("")
        word = self._read_word()
        if operator in ("<<", "<<-"):
            quoted = any(isinstance(part, Text) and part.quoted for part in word.parts)
            heredoc = Heredoc(self._literal(word), quoted=quoted, strip_tabs=operator == "<<-")
            self.pending.append(heredoc)
            return Redirect("<<", None, heredoc, descriptor or "")
        return Redirect(operator, word, None, descriptor or "")

    # Words

    def _read_word(self, metacharacters: str = "") -> Word:
        """One word; `metacharacters` lists those that are ordinary here (inside a regular expression)."""
        start = self.position
        match = _PLAIN_WORD.match(self.text, start)
        if match and not metacharacters:
            return self._plain_word(match)
        parts: list[Part] = []
        while not self._at_end():
            character = self._peek()
            if character in _METACHARACTERS:
                if character in "<>" and self._peek(1) == "(":
                    self.position += 2
                    script = self._list(")")
                    self.position += 1
                    parts.append(ProcessSubstitution(script, character == ">"))
                    continue
                if character == "(" and parts and self._extended_pattern(parts):
                    continue
                if character not in metacharacters:
                    break
                self.position += 1
                parts.append(Text(character, False))
            elif character == "'":
                parts.append(self._single_quoted())
            elif character == '"':
                self.position += 1
                inner = self._quoted_parts(lambda: self._peek() == '"', _DOUBLE_QUOTED, '$`"\\\n')
                self.position += 1
                parts += inner or [Text("", True)]
            elif character == "\\":
                if self.position + 1 >= len(self.text):
                    if not self.final:
                        raise IncompleteError("")
                    parts.append(Text("\\", True))
                    self.position += 1
                elif self._peek(1) == "\n":
                    self.position += 2
                else:
                    parts.append(Text(self._peek(1), True))
                    self.position += 2
            elif character == "$":
                parts.append(self._dollar(quoted=False))
            elif character == "`":
                parts.append(self._backticks(quoted=False))
            else:
                found = _UNQUOTED.match(self.text, self.position)
                assert found is not None  # every other character begins such a run
                self.position = found.end()
                parts.append(Text(found.group(), False))
        if self._at_end() and not self.final:
            raise IncompleteError("")
        if self.position == start:
            raise self._fail(f"`{self._peek()}` is not expected here" if self._peek() else "a word is missing")
        return self._word(parts, start)

    def _plain_word(self, match: re.Match[str]) -> Word:
        start, self.position = match.span()
        return Word((Text(match.group(), False),), self._at(start), self._at(self.position))

    def _extended_pattern(self, parts: list[Part]) -> bool:
        """`@(a|b)` and its kin, kept as raw text: expansion treats it as a pattern that may match anything."""
        last = parts[-1]
        if not (isinstance(last, Text) and not last.quoted and last.text and last.text[-1] in "?*+@!"):
            return False
        depth = 0
        while True:
            if self._at_end():
                raise IncompleteError(")")
            character = self._peek()
            if character in "'\"`$\\\n;&<>":
                raise self._fail("a pattern with quotes or expansions inside its parentheses can't be judged")
            self.position += 1
            parts.append(Text(character, False))
            depth += (character == "(") - (character == ")")
            if depth == 0:
                return True

    def _single_quoted(self) -> Text:
        end = self.text.find("'", self.position + 1)
        if end < 0:
            raise IncompleteError("'")
        text = self.text[self.position + 1 : end]
        self.position = end + 1
        return Text(text, True)

    def _quoted_parts(self, closed: Callable[[], bool], plain: re.Pattern[str], escapable: str) -> list[Part]:
        """Parts up to what `closed` recognises (left in place), under the rules of double quotes."""
        parts: list[Part] = []
        while not closed():
            if self._at_end():
                raise IncompleteError("")
            match = plain.match(self.text, self.position)
            if match:
                self.position = match.end()
                parts.append(Text(match.group(), True))
                continue
            character = self._peek()
            if character == "\\":
                following = self._peek(1)
                if following == "\n":
                    self.position += 2
                    continue
                if not following and not self.final:
                    raise IncompleteError("")
                taken = following if following and following in escapable else "\\" + following
                parts.append(Text(taken, True))
                self.position += 1 + len(following)
            elif character == "$":
                parts.append(self._dollar(quoted=True))
            elif character == "`":
                parts.append(self._backticks(quoted=True))
            else:
                parts.append(Text(character, True))
                self.position += 1
        return parts

    def _dollar(self, *, quoted: bool) -> Part:
        following = self._peek(1)
        if not following and not self.final:
            raise IncompleteError("")
        if following == "(":
            if not self._peek(2) and not self.final:
                raise IncompleteError(")")
            if self._peek(2) == "(":
                start = self.position
                try:
                    self.position += 3
                    return Arithmetic(self._arithmetic(), quoted)
                except ShellSyntaxError:
                    self.position = start
            self.position += 2
            pending, self.pending = self.pending, []
            script = self._list(")")
            if self.pending:
                raise self._fail("a here-document must end inside of the substitution that begins it")
            self.pending = pending
            self.position += 1
            return Substitution(script, quoted)
        if following == "{":
            self.position += 2
            return self._braced(quoted=quoted)
        if following == "[":
            raise self._fail("`$[` is an outdated form of arithmetic; write `$((...))`")
        if following == "'" and not quoted:
            return self._ansi_quoted()
        if following == '"' and not quoted:
            self.position += 1
            return Text("", True)
        match = _PARAMETER.match(self.text, self.position + 1)
        if not match:
            self.position += 1
            return Text("$", True)
        name = match.group()
        if name.isdigit():
            name = name[0]
        self.position += 1 + len(name)
        if self._at_end() and not self.final:
            raise IncompleteError("")
        return Parameter(name, quoted)

    def _ansi_quoted(self) -> Text:
        position = self.position + 2
        while True:
            end = self.text.find("'", position)
            if end < 0:
                raise IncompleteError("'")
            backslashes = 0
            while self.text[end - 1 - backslashes] == "\\" and end - 1 - backslashes > self.position + 1:
                backslashes += 1
            if backslashes % 2 == 0:
                break
            position = end + 1
        text = self.text[self.position + 2 : end]
        self.position = end + 1
        # A NUL ends the string, as in bash.
        return Text(unescape(text).partition("\0")[0], True)

    def _backticks(self, *, quoted: bool) -> Part:
        start = self.position
        position = start + 1
        taken: list[str] = []
        while True:
            if position >= len(self.text):
                raise IncompleteError("`")
            character = self.text[position]
            if character == "`":
                break
            if character == "\\" and position + 1 < len(self.text):
                following = self.text[position + 1]
                special = following in "$`\\" or (quoted and following == '"')
                taken.append(following if special else character + following)
                position += 2
            else:
                taken.append(character)
                position += 1
        self.position = position + 1
        self.regions.append((start, position))
        inner = Parser("".join(taken), depth=self.depth + 1, fixed=self._at(start))
        try:
            return Substitution(inner.script(), quoted)
        except IncompleteError as error:
            raise ShellSyntaxError("a command between backticks is not complete", start) from error

    def _arithmetic(self) -> Word:
        """An expression up to `))`, which is taken too."""
        start = self.position
        depth = 0

        def closed() -> bool:
            nonlocal depth
            character = self._peek()
            if character == "(":
                depth += 1
            elif character == ")":
                if depth == 0:
                    return True
                depth -= 1
            return False

        parts = self._quoted_parts(closed, re.compile(r"[^()\"\\$`]+"), '$`"\\\n')
        word = self._word(parts, start)
        if not self._starts("))"):
            raise self._fail("`))` is expected here")
        self.position += 2
        return word

    def _braced(self, *, quoted: bool) -> Part:
        if not self._peek():
            raise IncompleteError("}")
        indirect = length = False
        if self._peek() == "!" and self._peek(1) not in ("}", ""):
            indirect = True
            self.position += 1
        elif self._peek() == "#" and self._peek(1) not in ("}", "", "-", "+", ":", "#", "%", "/"):
            length = True
            self.position += 1
        match = _PARAMETER.match(self.text, self.position)
        if not match:
            if len(self.text) - self.position < 2:
                raise IncompleteError("}")
            raise self._fail("a name is expected behind `${`")
        name = match.group()
        self.position = match.end()
        subscript: Word | None = None
        if self._peek() == "[":
            self.position += 1
            begin = self.position
            parts = self._quoted_parts(lambda: self._peek() == "]", re.compile(r"[^\]\"\\$`]+"), '$`"\\]\n')
            subscript = self._word(parts, begin)
            self.position += 1
        operator = ""
        argument: Word | None = None
        if self._peek() != "}":
            if indirect and self._peek() in ("*", "@") and self._peek(1) == "}":
                operator = "prefix"
                self.position += 1
            else:
                found = _OPERATOR.match(self.text, self.position)
                if not found:
                    if self._at_end():
                        raise IncompleteError("}")
                    raise self._fail(f"`{self._peek()}` is not expected inside `${{`")
                operator = found.group()
                self.position = found.end()
                argument = self._brace_argument(quoted=quoted)
        if self._at_end():
            raise IncompleteError("}")
        self.position += 1
        return Parameter(name, quoted, subscript, operator, argument, length, indirect)

    def _brace_argument(self, *, quoted: bool) -> Word:
        """What follows an operator inside `${`, up to the closing brace, which is left in place."""
        start = self.position
        parts: list[Part] = []
        plain = re.compile(r"[^}'\"\\$`<>]+")
        while True:
            if self._at_end():
                raise IncompleteError("}")
            character = self._peek()
            if character == "}":
                return self._word(parts, start)
            match = plain.match(self.text, self.position)
            if match:
                self.position = match.end()
                parts.append(Text(match.group(), quoted))
            elif character == "'" and not quoted:
                parts.append(self._single_quoted())
            elif character == '"':
                self.position += 1
                parts += self._quoted_parts(lambda: self._peek() == '"', _DOUBLE_QUOTED, '$`"\\\n')
                self.position += 1
            elif character == "\\":
                if self._peek(1) != "\n":
                    parts.append(Text(self._peek(1), True))
                self.position += 2
            elif character == "$":
                parts.append(self._dollar(quoted=quoted))
            elif character == "`":
                parts.append(self._backticks(quoted=quoted))
            elif character in "<>" and self._peek(1) == "(" and not quoted:
                self.position += 2
                script = self._list(")")
                self.position += 1
                parts.append(ProcessSubstitution(script, character == ">"))
            else:
                parts.append(Text(character, True))
                self.position += 1
