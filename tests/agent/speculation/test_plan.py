"""Plans in answers: where they begin and end, however the answer is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subten.agent.speculation.plan import PlanReader, fenced


def read(pieces: list[str]) -> PlanReader:
    reader = PlanReader()
    given_out = "".join([*(reader.push(piece) for piece in pieces), reader.finish()])
    assert given_out == reader.script
    return reader


@pytest.mark.parametrize(
    ("answer", "script"),
    [
        ("```bash\nls\n```", "ls\n"),
        ("I will look.\n\n```sh\nls\n\n```\nThat is all.\n```bash\nrm x\n```\n", "ls\n\n"),
        ("```bash\r\nls\r\n```\r\n", "ls\r\n"),
        ("```python\nprint()\n```\n```bash\nls\n```\n", "ls\n"),
        ("````bash\ncat > a.md <<'E'\n```\ncode\n```\nE\n````\n", "cat > a.md <<'E'\n```\ncode\n```\nE\n"),
        ("```bash\necho ```\n```\n", "echo ```\n"),
        ("```bash\n```bash\n```\n", "```bash\n"),
        ("  ```shell  \nls\n  ```  \n", "ls\n"),
        ("```bash\n```\n", ""),
    ],
)
def test_the_first_block_is_the_plan(answer: str, script: str) -> None:
    for pieces in ([answer], list(answer)):
        reader = read(pieces)
        assert (reader.script, reader.begun, reader.done) == (script, True, True)


@pytest.mark.parametrize("answer", ["", "ls\n", "```\nls\n```\n", "`bash\nls\n`\n", "x ```bash\nls\n```\n"])
def test_answers_without_a_plan(answer: str) -> None:
    reader = read(list(answer))
    assert not reader.begun
    assert not reader.script


@pytest.mark.parametrize("answer", ["```bash\nls\n", "```bash\nls\n``", "```bash\nls", "````bash\nls\n```\n"])
def test_a_plan_that_is_cut_off_is_not_done(answer: str) -> None:
    reader = read(list(answer))
    assert reader.begun
    assert not reader.done


SIGNS = st.text(st.sampled_from("`\n \r\tbash x~"), max_size=40)


@given(SIGNS, st.lists(st.integers(0, 60)))
def test_how_an_answer_is_cut_does_not_matter(answer: str, cuts: list[int]) -> None:
    answer = f"prose\n```bash\n{answer}\n```\nmore"
    places = sorted({min(cut, len(answer)) for cut in cuts} | {0, len(answer)})
    pieces = [answer[begin:end] for begin, end in pairwise(places)]
    one, other = read(pieces), read([answer])
    assert (one.script, one.done) == (other.script, other.done)


@given(SIGNS)
def test_a_fenced_plan_is_read_back(script: str) -> None:
    reader = read(list(f"Here:\n{fenced(script)}Done."))
    assert reader.done
    assert reader.script == (script if script.endswith("\n") or not script else f"{script}\n")
