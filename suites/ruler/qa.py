"""Questions about documents among other documents: qa_1 (SQuAD) and qa_2 (HotpotQA)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice

from .fit import Draft, Meter, Prompt
from .qa_data import Corpus, Question
from .seeds import Draws, shuffled
from .tasks import DOCUMENT, QA

_LONGEST_TOKEN = 8  # characters that a token has on average at most: more text than that surely fills a context
_PATIENCE = 20  # documents too long for what is left that are passed over before a context counts as full
_BLOCK = 100  # questions or documents looked at at a time
LEAST_FROM = 500  # the least length is that at which most of the first 500 questions fit
LEAST_SHARE = 0.9


class QuestionTask:
    """Makes the drafts of one QA task. `sample` is the number of a question of the corpus."""

    def __init__(self, corpus: Corpus, meter: Meter, room: int):
        self.corpus = corpus
        self.room = room
        self._meter = meter
        self._tokens: dict[int, int] = {}
        self._frame = meter.prompts([_prompt(Question("", ("",), ()), [])])[0]

    def draft(self, sample: int, draws: Draws) -> Draft:
        """The question's own documents, then others of the same article, then any, all in random order."""
        question = self.corpus.questions[sample]
        known = {*question.documents, *question.related}
        everything = shuffled(draws("strangers"), range(len(self.corpus.documents)))
        strangers = (number for number in everything if number not in known)
        others = chain(shuffled(draws("related"), question.related), strangers)
        return _Draft(question, self._filling(question, others), self, draws)

    def questions_that_fit(self, wanted: int, first: int | None = None) -> list[int]:
        """The first `wanted` questions whose own documents leave room, in the corpus's order.

        first: look no further than that many questions.
        """
        fitting: list[int] = []
        limit = min(len(self.corpus.questions), first or len(self.corpus.questions))
        for start in range(0, limit, _BLOCK):
            block = range(start, min(start + _BLOCK, limit))
            counts = self._meter.prompts([self.alone(number) for number in block])
            fitting += [number for number, count in zip(block, counts, strict=True) if count <= self.room]
            if len(fitting) >= wanted:
                break
        return fitting[:wanted]

    def least_room(self) -> int:
        """Tokens that nine in ten of the first questions need with their own documents alone."""
        first = range(min(LEAST_FROM, len(self.corpus.questions)))
        counts = sorted(self._meter.prompts([self.alone(number) for number in first]))
        return counts[min(len(counts) - 1, int(LEAST_SHARE * len(counts)))]

    def alone(self, number: int) -> Prompt:
        """A question with its own documents only."""
        question = self.corpus.questions[number]
        return _prompt(question, [self.corpus.documents[i] for i in question.documents])

    def fills(self) -> bool:
        """Whether all documents together are enough for the context."""
        chars = list(accumulate(len(text) for text in self.corpus.documents))
        if chars[-1] > _LONGEST_TOKEN * self.room:
            return True
        return sum(self.tokens(range(len(chars)))) >= self.room

    def tokens(self, documents: Sequence[int]) -> list[int]:
        """Tokens of each document with its heading; counted once."""
        if new := [i for i in documents if i not in self._tokens]:
            texts = [DOCUMENT.format(number=100, text=self.corpus.documents[i]) + "\n\n" for i in new]
            self._tokens.update(zip(new, self._meter.texts(texts), strict=True))
        return [self._tokens[i] for i in documents]

    def _filling(self, question: Question, others: Iterator[int]) -> list[int]:
        """The question's documents, then others in their order, but for those too long for what is left."""
        chosen = list(question.documents)
        free = self.room - self._frame - self._meter.texts([question.text])[0] - sum(self.tokens(chosen))
        passed = 0
        while block := list(islice(others, _BLOCK)):
            for number, tokens in zip(block, self.tokens(block), strict=True):
                if tokens <= free:
                    chosen.append(number)
                    free -= tokens
                elif (passed := passed + 1) == _PATIENCE:
                    return chosen
        return chosen


class _Draft:
    """A unit is a document; the first ones are the question's own."""

    def __init__(self, question: Question, documents: list[int], task: QuestionTask, draws: Draws):
        self.least = len(question.documents)
        self.most = len(documents)
        self._question = question
        self._documents = documents
        self._texts = task.corpus.documents
        self._totals = [0, *accumulate(task.tokens(documents))]
        rng = draws("document order")
        self._order = {number: rng.random() for number in documents}

    def cost(self, units: int) -> float:
        return self._totals[units]

    def render(self, units: int) -> Prompt:
        shown = sorted(self._documents[:units], key=self._order.__getitem__)
        return _prompt(self._question, [self._texts[number] for number in shown])


def _prompt(question: Question, texts: Sequence[str]) -> Prompt:
    documents = [DOCUMENT.format(number=i, text=text) for i, text in enumerate(texts, start=1)]
    return Prompt(
        context=QA.before + "\n\n".join(documents) + QA.gap,
        question=QA.question.format(query=question.text),
        gen_prefix=QA.answer,
        outputs=question.answers,
    )
