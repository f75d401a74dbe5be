"""An executor that does jobs in this process, and a watcher that remembers."""

import dataclasses

from evictbench.sweep.job import Worker


@dataclasses.dataclass
class InProcess:
    """Does jobs in this process, one after another; `before` is called with each."""

    before: object = lambda job: None
    jobs: list = dataclasses.field(default_factory=list)
    worker: Worker = dataclasses.field(default_factory=Worker)

    def run(self, jobs):
        for job in jobs:
            self.jobs.append(job)
            yield job, None
            self.before(job)
            yield job, self.worker.do(job)
            yield None


@dataclasses.dataclass
class Watcher:
    warnings: list = dataclasses.field(default_factory=list)
    shown: int = 0
    titles: list = dataclasses.field(default_factory=list)

    def warn(self, sentence):
        self.warnings.append(sentence)

    def show(self, progress):
        self.shown += 1

    def ended(self, cell):
        self.titles.append(cell.title)
