"""AIME's grader: a table of gold, response and whether it is right."""

from __future__ import annotations

import pytest

from evictbench.errors import UserError
from evictbench.suites.aime.grade import integer, process_results
from evictbench.suites.aime.problems import gold

CASES = [
    # gold as in a file, response, right
    ("25", r"\boxed{25}", True),
    ("025", r"\boxed{25}", True),  # seven golds of 2024 are written so
    ("70", r"\boxed{070}", True),
    ("070", r"\boxed{70}", True),
    ("0", r"\boxed{000}", True),
    ("336^\\circ", r"\boxed{336}", True),  # as one copy has an answer of 2025
    ("336", r"\boxed{336^\circ}", True),
    ("336", r"\boxed{336^{\circ}}", True),
    ("336", r"\boxed{336°}", True),
    ("336", r"\boxed{336 \text{ degrees}}", True),
    ("4", r"\boxed{3}, or rather \boxed{4}", True),  # the last wins
    ("3", r"\boxed{3}, or rather \boxed{4}", False),
    ("3", r"\boxed{3", False),
    ("3", r"\boxed{", False),
    ("3", r"Then \boxed{3} holds; so \boxed{", True),  # the last that closes
    ("25", "Final answer: 25", False),  # no box, no answer
    ("25", "25", False),
    ("25", "$25$", False),
    ("25", "", False),  # what is left of an unclosed thought
    ("73", r"**73**", False),
    ("73", r"\boxed{**73**}", True),
    ("73", r"**\boxed{73}**", True),
    ("73", r"$$\boxed{73}$$", True),
    ("73", r"\boxed{$73$}", True),
    ("73", r"\boxed{\text{73}}", True),
    ("73", r"\boxed{\mathbf{073}}", True),
    ("73", r"\boxed{73.}", True),
    ("73", r"\boxed{73.0}", True),
    ("73", r"\boxed{73.5}", False),
    ("73", r"\boxed{m + n = 73}", True),
    ("73", r"\boxed{8^2 + 3^2 = 73}", True),
    ("73", r"\boxed{n \neq 73}", False),
    ("73", r"\boxed{n >= 73}", False),
    ("73", r"\boxed{-73}", False),
    ("73", r"\boxed{73\text{ cm}^2}", True),
    ("73", r"\boxed{73 \text{ or } 74}", False),
    ("73", r"\boxed{73, 74}", False),
    ("73", r"\boxed{7 3}", False),
    ("73", r"\boxed{73x}", False),
    ("73", r"\boxed{\frac{146}{2}}", False),  # nothing is computed
    ("32", r"\boxed{2^5}", False),
    ("100", r"\boxed{1{,}00}", False),
    ("336", r"\boxed{3,36}", False),
    ("8", r"\boxed{8} I put it within \boxed{}.", True),
    ("7", r"\boxed{\boxed{7}}", True),
    ("7", r"\boxed{\text{(B)}}", False),
]

BOXES = [
    # the content of the box, the integer that it shows. A third of the reference solutions of 2024 look like the first
    (r"\textbf{(113) }", 113),
    (r"\textbf{(113)}", 113),
    (r"\textbf{ 113 }", 113),
    ("(113)", 113),
    (r"\left(60\right)", 60),
    (r"(\mathbf{60})", 60),
    (r"m + n = (60)", 60),
    (r"\{60\}", None),
    ("(60, 61)", None),
    ("[60, 61]", None),
    ("(60, 61]", None),
    ("(60", None),
    ("(60)(61)", None),
    ("2(30)", None),
    # letters of choices
    (r"\textbf{(A) }60", 60),
    (r"\textbf{(A)}\ 60", 60),
    (r"\text{(A) 60}", 60),
    ("(A) 60", 60),
    (r"\textbf{(A) }61", 61),
    (r"\textbf{(A)}", None),
    (r"\textbf{(A) }x", None),
    # spaces
    (r"60\,", 60),
    (r"60\;", 60),
    (r"\,60\!", 60),
    (r"60\quad", 60),
    ("~60", 60),
    (r"\ 60\ ", 60),
    (r"60\hspace{1em}", 60),
    ("\u00a060\u202f", 60),
    ("6 0", None),
    (r"6\,0", None),
    (r"60\quad 61", None),
    # fonts, colours, sizes
    (r"{\bf 60}", 60),
    (r"{\bf{60}}", 60),
    (r"\bf 60", 60),
    (r"\boldsymbol{60}", 60),
    (r"\bm{60}", 60),
    (r"\mathbf{60}", 60),
    (r"\mathbf 60", 60),
    (r"\mathsf{60}", 60),
    (r"\textsf{60}", 60),
    (r"\texttt{060}", 60),
    (r"\emph{60}", 60),
    (r"\textbf{\textit{60}}", 60),
    (r"\underline{60}", 60),
    (r"\underline{\underline{60}}", 60),
    (r"\color{blue}{60}", 60),
    (r"\color{blue} 60", 60),
    (r"{\color{blue} 60}", 60),
    (r"\textcolor{red}{60}", 60),
    (r"\colorbox{yellow}{60}", 60),
    (r"\color{blue}{61}", 61),
    (r"\color{60}", None),
    (r"\displaystyle 60", 60),
    (r"\Large 60", 60),
    (r"{\Large\bf 60}", 60),
    ("６０", 60),
    (r"\operatorname{60}", 60),
    (r"\phantom{0}60", 60),
    (r"\phantom{60}", None),
    (r"60 \blacksquare", 60),
    (r"60 \tag{1}", 60),
    # frames and punctuation
    (r"\(60\)", 60),
    (r"\[60\]", 60),
    ("$$60$$", 60),
    ("{60}", 60),
    ("{{60}}", 60),
    ('"60"', 60),
    ("60.", 60),
    ("60,", 60),
    ("**60**", 60),
    ("*60*", 60),
    ("6*10", None),
    # moduli
    (r"60 \pmod{1000}", 60),
    (r"60 \bmod 1000", 60),
    (r"60 \mod 1000", 60),
    (r"60 (\text{mod } 1000)", 60),
    (r"60 \text{ (mod 1000)}", 60),
    (r"60 \ (\mathrm{mod}\ 1000)", 60),
    ("60 (mod 1000)", 60),
    ("60 mod 1000", 60),
    (r"N \equiv 60 \pmod{1000}", 60),
    (r"2^{10} \equiv 24 \pmod{1000}", 24),
    (r"1060 \pmod{1000}", None),
    (r"60 \pmod{7}", None),
    (r"-60 \pmod{1000}", None),
    (r"60 \pmod{m}", None),
    # units
    ("809 ways", 809),
    (r"\text{809 ways}", 809),
    (r"\text{809 or 810}", None),
    (r"809 \\\\", 809),
    ("809 triples of integers", 809),
    (r"809\text{ ways}", 809),
    (r"60\ \mathrm{cm}^2", 60),
    (r"60\text{ cm}^{2}", 60),
    (r"60\,\text{cm}^3", 60),
    ("60 cm^2", 60),
    ("60 cm²", 60),
    ("60 square units", 60),
    (r"60 \text{ square units}", 60),
    (r"{60}\text{ minutes}", 60),
    (r"60{\rm\ cm}", 60),
    (r"60\text{ units}^2", 60),
    (r"60^{\circ}", 60),
    (r"60^{ \circ }", 60),
    (r"60\degree", 60),
    ("60 degrees", 60),
    (r"60\%", 60),
    (r"\$60", 60),
    ("60²", None),
    ("60^2", None),
    ("60x", None),
    ("60 x", None),
    ("60 xy", None),
    (r"60\pi", None),
    ("60 pi", None),
    ("60i", None),
    ("60!", None),
    ("60 thousand", None),
    (r"60\text{ thousand}", None),
    (r"60\text{ squared}", None),
    (r"60\sqrt{2}", None),
    (r"\sqrt{60}", None),
    # several, none, uncertain
    ("60 or 61", None),
    (r"60\text{ or }61", None),
    ("60 and 61", None),
    ("60, 61", None),
    ("60; 61", None),
    ("60-61", None),
    ("60 to 61", None),
    (r"60 \pm 1", None),
    (r"\pm 60", None),
    ("60 or more", None),
    (r"60\text{ or more}", None),
    (r"\text{at least } 60", None),
    (r"\text{more than } 60", None),
    (r"\text{not } 60", None),
    ("not 60", None),
    ("about 60", None),
    (r"60\text{ is wrong}", None),
    (r"\approx 60", None),
    (r"\ge 60", None),
    (r"x \ge 60", None),
    (r"x \neq 60", None),
    (r"x \to 60", None),
    ("60?", None),
    ("sixty", None),
    # prose and equations
    ("The answer is 60", 60),
    (r"\text{The answer is } 60", 60),
    (r"\text{The answer is 60}", 60),
    (r"\text{Answer: }60", 60),
    ("Final answer: 60.", 60),
    ("The answer is not 60", None),
    (r"\text{The answer is not } 60", None),
    ("m+n=60", 60),
    ("x=60, y=61", None),
    ("x = 60; y = 60", None),
    ("m+n = 23 + 37 = 60", 60),
    (r"\text{m+n = 60}", 60),
    ("（60）", 60),
    (r"\color{red}60\color{black}", 60),
    (r"m + n = \mathbf{60}", 60),
    (r"m+n = 60\text{ cm}", 60),
    (r"(m,n) = (23,37)", None),
    ("60 = m + n", None),
    (r"23 + 37 = 60", 60),
    ("23 + 37", None),
    (r"x := 60", None),
    # numerals
    ("060", 60),
    ("+60", 60),
    ("-60", -60),
    ("−60", -60),
    ("60.00", 60),
    ("60.5", None),
    ("60,5", None),
    (".60", None),
    ("6.0e1", None),
    (r"6 \times 10^1", None),
    ("1,060", 1060),
    (r"1{,}060", 1060),
    ("1060", 1060),
    ("60_{10}", 60),
    ("60_8", None),
    ("0x60", None),
    (r"\frac{60}{1}", None),
    ("60/1", None),
    (r"\overline{60}", None),
    (r"\text{}", None),
]


@pytest.mark.parametrize(("content", "value"), BOXES)
def test_what_is_in_the_box(content, value):
    assert integer(content) == value


@pytest.mark.parametrize(("answer", "response", "right"), CASES)
def test_table(answer, response, right):
    result = process_results({"answer": gold(answer, "here")}, [response])
    assert result["score"] == float(right)
    if right:
        assert result["answer"] == str(int(answer.removesuffix("^\\circ")))


def test_votes_and_boxes():
    doc = {"answer": 25}
    assert process_results(doc, [r"\boxed{0026}"]) == {"score": 0.0, "boxed": 1.0, "answer": "26"}
    assert process_results(doc, [r"\boxed{x+1}"]) == {"score": 0.0, "boxed": 1.0, "answer": "x+1"}
    assert process_results(doc, ["25"]) == {"score": 0.0, "boxed": 0.0, "answer": ""}
    assert process_results(doc, [r"\boxed{1{,}000}"])["answer"] == "1000"
    assert process_results(doc, [r"\boxed{1,\!000}"])["answer"] == "1000"
    assert process_results(doc, [r"\boxed{1\,000}"])["answer"] == "1000"


def test_digits_beyond_measure_are_no_answer():
    assert integer("9" * 100_000) is None
    assert integer("٢٥") is None


@pytest.mark.parametrize("answer", ["1000", "-1", "2.5", "x", "['70']", ""])
def test_a_gold_that_is_no_integer_of_aime_is_refused(answer):
    with pytest.raises(UserError, match=r"aime24.jsonl: record 3: .*not an integer from 0 to 999"):
        gold(answer, "aime24.jsonl: record 3")
