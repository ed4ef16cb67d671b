"""A denial while a command is being written holds for every way in which it may go on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from subten.agent.policy import Policy, StreamingPolicy, Verdict, judge

POLICY = Policy(protect_paths=["/w/v"])
CWD = "/srv/repo"

WORDS = [
    "rm",
    "rm -rf /w/v",
    "rm -rf",
    "/w/v",
    "/w",
    "v",
    "/tmp/q",
    "/w/v/f",
    "mv",
    "cp",
    "dd of=/w/v/f",
    "tee",
    "ln -sf",
    "sed -i s/a/b/",
    "truncate -s0",
    "find",
    "-delete",
    "-exec",
    "{}",
    "\\;",
    "+",
    "echo",
    "cat",
    "ls",
    "cd /w",
    "cd",
    "X=/w/v",
    "$X",
    "${X}",
    '"$X"',
    "$1",
    "set --",
    "eval",
    "bash -c",
    "sh",
    "'rm -rf /w/v'",
    '"rm -rf $X"',
    "xargs",
    "env",
    "nice",
    "timeout 5",
    "sudo",
    "command",
    "exec",
    "trap",
    "EXIT",
    "git -C /w/v",
    "clean -fd",
    "reset --hard",
    "-t",
    "-n",
    "--",
    "-rf",
    "../w",
    "*",
    "/w/*",
    "/w/?",
    "tar xf a -C",
    "rsync -a --delete",
    "python3 -c x",
    "alias",
    "f()",
    "f",
    "function g",
    "if",
    "then",
    "else",
    "fi",
    "while",
    "do",
    "done",
    "for i in",
    "case x in",
    "esac",
    "x)",
    "true",
    "false",
    "!",
    "time",
    "local",
    "return",
    "break",
    "exit",
]
GLUE = [
    " ",
    " ",
    " ",
    " ",
    "\n",
    ";",
    "; ",
    " && ",
    " || ",
    " | ",
    " & ",
    "|",
    ">",
    " > ",
    ">>",
    " 2>&1 ",
    "(",
    ")",
    " { ",
    " }",
    "$(",
    "`",
    '"',
    "'",
    "\\",
    "\\\n",
    " #",
    "<<E\n",
    "\nE\n",
    "<<'E' ",
    "<(",
    "${",
    "}",
    "[[ ",
    " ]]",
    "((",
    "))",
    ";;",
    "\t",
    "=",
    "\r",
    "",
]
PIECES = st.lists(st.one_of(st.sampled_from(WORDS), st.sampled_from(GLUE)), max_size=14)
BEGINNINGS = st.one_of(
    PIECES,
    st.tuples(
        PIECES,
        st.sampled_from(["rm -rf /w/v", "X=/w/v; rm -rf $X", "mv /w/v", "> /w/v/f", "find /w/v -delete"]),
        st.sampled_from([" ", ";", "\n", " -x", "&& "]),
        PIECES,
    ).map(lambda t: [*t[0], t[1], t[2], *t[3]]),
)


def first_denial(tokens: list[str], policy: Policy = POLICY) -> int | None:
    """The number of tokens after which the stream is denied."""
    stream = StreamingPolicy(policy, CWD)
    for count, token in enumerate(tokens, start=1):
        if stream.push(token) is not None:
            return count
    return None


@settings(max_examples=300)
@given(BEGINNINGS, PIECES)
def test_early_denial_means_final_denial_of_every_extension(beginning: list[str], extension: list[str]) -> None:
    count = first_denial(beginning)
    if count is not None:
        prefix = "".join(beginning[:count])
        for end in range(len(extension) + 1):
            text = prefix + "".join(extension[:end])
            assert judge(POLICY, text, CWD).verdict is Verdict.DENY, text


@settings(max_examples=150)
@given(PIECES)
def test_the_whole_text_is_judged_the_same_however_it_comes(tokens: list[str]) -> None:
    text = "".join(tokens)
    stream = StreamingPolicy(POLICY, CWD)
    for character in text:
        stream.push(character)
    assert stream.finish().verdict is judge(POLICY, text, CWD).verdict


@settings(max_examples=200)
@given(st.text(max_size=60))
def test_no_text_breaks_it(text: str) -> None:
    first_denial(list(text))
    judge(POLICY, text, CWD)
