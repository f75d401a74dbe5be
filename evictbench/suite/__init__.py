"""What a suite is: its tasks, its protocol, its data."""

from evictbench.suite.spec import GREEDY, PreparedSuite, Protocol, Question, Sampling, Suite, SuiteRequest

__all__ = ["GREEDY", "PreparedSuite", "Protocol", "Question", "Sampling", "Suite", "SuiteRequest"]
